"""Values of flags: text to what the analysis takes, with errors that name the flag and show an example."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from staticmem.errors import UsageError, did_you_mean
from staticmem.scenario.options import Option

# kinds of options whose flags are checked at once: what a text is not, and the code of the error
ERRORS = {
    "whole": ("a size", "SM110"),
    "resolution": ("a resolution", "SM110"),
    "dims": ("NAME=N", "SM110"),
    "segments": ("a number of segments", "SM160"),
}


def read_by(one: Option) -> Callable[[str], Any]:
    """Reads the text of a flag as the kind of the option does."""

    def convert(text: str) -> Any:
        # kinds and documents are loaded where there is a value to read
        from staticmem.documents import DocumentError, of_plain
        from staticmem.scenario.kinds import kind_of, plain

        noun, code = ERRORS[one.kind]
        try:
            value = plain(one.kind, text)
            if one.kind == "dims" and "" in value:
                raise DocumentError("", "It gives an open dimension of the model a size.", "Example: --dim seq=128")
            return kind_of(one).read(of_plain(value, one.flag, one.flag))
        except DocumentError as error:
            hint = error.hint.replace("Example: ", f"Example: {one.flag} ") if one.kind != "dims" else error.hint
            raise UsageError(f"{one.flag} '{text}' is not {noun}", error.why, hint, code) from None

    return convert


def positive(flag: str) -> Callable[[str], int]:
    """A whole number of at least 1."""
    return read_by(Option(flag, None, "", kind="whole", flag=flag))


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


def one_of(flag: str, known: Collection[str]) -> Callable[[str], str]:
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
