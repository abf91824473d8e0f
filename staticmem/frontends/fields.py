"""Typed access to untrusted JSON: what is not of the expected type is a `TypeError` that names what stands there.

JSON has no schema of its own, and Python's conversions are lenient: `int("7")`, `int(1.5)`, `tuple("abc")`, `True + 1`.
A file that needs them is damaged, and would end in an error far from its cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_INTEGER = 2**63 - 1  # what an int64 of the schema holds
MALFORMED = (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)
"""What code that trusts the schema raises where a file breaks it."""


def _wrong(expected: str, value: Any) -> TypeError:
    shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return TypeError(f"{expected}: {shown[:80]} stands there")


def integer(value: Any) -> int:
    """An int64; `true` is none."""
    if type(value) is not int:
        raise _wrong("an integer", value)
    if abs(value) > MAX_INTEGER:
        raise _wrong("an integer of 64 bits", value)
    return value


def size(value: Any) -> int:
    """A number of elements."""
    if integer(value) < 0:
        raise _wrong("a size", value)
    return int(value)


def number(value: Any) -> float:
    """A float; torch.export writes what JSON cannot as "Infinity", "-Infinity" and "NaN"."""
    if isinstance(value, str) and value in ("Infinity", "-Infinity", "NaN"):
        return float(value)
    if type(value) not in (int, float):
        raise _wrong("a number", value)
    return float(value)


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong("true or false", value)
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong("a text", value)
    return value


def items(value: Any) -> Sequence[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        raise _wrong("a list", value)
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise _wrong("an object", value)
    return value


def only(value: Any) -> tuple[str, Any]:
    """The one entry of a union: `{"as_int": 7}`."""
    if not isinstance(value, dict) or len(value) != 1:
        raise _wrong("a union of one entry", value)
    return next(iter(value.items()))
