"""Values of flags: text to what the analysis takes, with errors that name the flag and show an example."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from staticmem.errors import UsageError, did_you_mean


def positive(flag: str) -> Callable[[str], int]:
    """A whole number of at least 1."""

    def convert(text: str) -> int:
        number = _integer(text)
        if number is None or number < 1:
            raise UsageError(
                f"{flag} '{text}' is not a size", "It is a whole number of at least 1.", f"Example: {flag} 32", "SM110"
            )
        return number

    return convert


def byte_size(flag: str) -> Callable[[str], int]:
    """An amount of memory: `64MiB`, `1.5GB`, `4096`."""

    def convert(text: str) -> int:
        from staticmem.units import parse_bytes

        size = parse_bytes(text)
        if size is None:
            raise UsageError(
                f"{flag} '{text}' is not an amount of memory",
                "It is a number with a unit: B, KiB, MiB, GiB (powers of 1024), kB, MB, GB (of 1000).",
                f"Example: {flag} 64MiB",
                code="SM110",
            )
        return size

    return convert


def increase(flag: str) -> Callable[[str], Callable[[int], int]]:
    """`512MiB`, or `5%` of what was there: gives the bytes of growth that are allowed."""

    def convert(text: str) -> Callable[[int], int]:
        if text.endswith("%"):
            number = text[:-1].strip()
            if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", number, re.ASCII):
                return lambda base: int(base * float(number) / 100)
            raise UsageError(
                f"{flag} '{text}' is not a percentage", "It is a number of at least 0.", f"Example: {flag} 5%", "SM110"
            )
        size = byte_size(flag)(text)
        return lambda _: size

    return convert


def resolution(text: str) -> tuple[int, int]:
    """`224` or `480x640` (height x width)."""
    parts = text.lower().split("x")
    sizes = [_integer(part) for part in parts]
    if len(sizes) == 1:
        sizes = sizes * 2
    height, width = sizes if len(sizes) == 2 else (None, None)
    if height is None or width is None or height < 1 or width < 1:
        raise UsageError(
            f"--resolution '{text}' is not a resolution",
            "It is one number, or height x width.",
            "Examples: --resolution 224, --resolution 480x640",
            code="SM110",
        )
    return height, width


def segments(text: str) -> int | str:
    """A number of segments, or `sqrt`."""
    number = _integer(text)
    if text.lower() == "sqrt":
        return "sqrt"
    if number is None or number < 1:
        raise UsageError(
            f"--checkpoint-segments '{text}' is not a number of segments",
            "It is a whole number of at least 1, or sqrt.",
            "Example: --checkpoint-segments sqrt",
            code="SM160",
        )
    return number


def dimension(text: str) -> tuple[str, int]:
    """`seq=128`: the name of an open dimension and its size."""
    name, equals, size = text.rpartition("=")
    number = _integer(size)
    if not equals or not name or number is None or number < 1:
        raise UsageError(
            f"--dim '{text}' is not NAME=N",
            "It gives an open dimension of the model a size of at least 1.",
            "Example: --dim seq=128",
            code="SM110",
        )
    return name.strip(), number


def one_of(flag: str, known: Sequence[str]) -> Callable[[str], str]:
    """One of some words."""

    def convert(text: str) -> str:
        if text not in known:
            raise UsageError(
                f"unknown {flag.lstrip('-')} '{text}'",
                f"{flag} is one of {', '.join(known)}.",
                did_you_mean(text, known),
                code="SM134",
            )
        return text

    return convert


def _integer(text: str) -> int | None:
    """ASCII digits only, and few of them: `int` takes underscores, other alphabets and any length."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else None
