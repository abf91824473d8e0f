"""Bytes: as text and back, and as a band where they are known only within bounds. GiB = 2**30 bytes; GB = 10**9."""

from __future__ import annotations

import re
from math import floor, hypot
from typing import NamedTuple

KIB, MIB, GIB = 2**10, 2**20, 2**30

_BINARY = ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_NEXT_UNIT = 0.9995  # of a unit and more is written as 1.00 of it, not as 1,000 or 1,024 of the smaller one
_DECIMAL = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def format_bytes(n: int, units: str = "binary", digits: int | None = None) -> str:
    """`n` bytes as text, e.g. `2.88 GiB` (binary) or `3.09 GB` (decimal); `bytes` gives the plain integer.

    Three digits are written, or `digits` of them after the point.
    """
    if units == "bytes":
        return f"{n:,} B"
    sign, n = ("-", -n) if n < 0 else ("", n)
    for factor, name in _DECIMAL if units == "decimal" else _BINARY:
        if n >= _NEXT_UNIT * factor:
            return f"{sign}{three_digits(n / factor, digits)} {name}"
    return f"{sign}{n} B"


def three_digits(value: float, places: int | None = None) -> str:
    """`1.23`, `12.3`, `123`, `1,234`; or with so many places after the point. A half is rounded up."""
    if places is None:
        places = (value < 9.995) + (value < 99.95)
    return f"{floor(value * 10**places + 0.5) / 10**places:,.{places}f}"


def format_count(n: int) -> str:
    """A count in the way people name model sizes: 25.6 M, 1.24 B."""
    for factor, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= factor:
            return f"{three_digits(n / factor)} {name}"
    return str(n)


_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?i?b?)", re.ASCII | re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int | None:
    """`64MiB`, `1.5 GB` or `4096` as bytes; None for what is no size. GiB = 2**30, GB = 10**9."""
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match[2].lower().removesuffix("b")) if match else None
    if match is None or factor is None:
        return None
    whole, _, fraction = match[1].partition(".")
    return int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


LEAST_LIMIT = MIB  # a number without a unit below it is no number of bytes: somebody left the unit out


def parse_limit(value: str | int) -> int | None:
    """A limit of memory, `40 GiB` or a number of bytes; None for what is no size, and for `40`, which lacks a unit."""
    size = parse_bytes(value) if isinstance(value, str) else value
    bare = isinstance(value, int) or value.strip().replace(".", "", 1).isdigit()
    return None if size is None or (bare and 0 < size < LEAST_LIMIT) else size


class Band(NamedTuple):
    """Bytes: at least, expected, at most."""

    low: int
    expected: int
    high: int

    def plus(self, other: Band) -> Band:
        return Band(self.low + other.low, self.expected + other.expected, self.high + other.high)

    def plus_unrelated(self, other: Band) -> Band:
        """The sum of two that are uncertain for unrelated reasons, so that both are seldom off by all of it, and to the
        same side: distances from what is expected add as squares (propagation of independent errors)."""
        low = hypot(self.expected - self.low, other.expected - other.low)
        high = hypot(self.high - self.expected, other.high - other.expected)
        expected = self.expected + other.expected
        return Band(expected - round(low), expected, expected + round(high))

    def minus(self, other: Band) -> Band:
        """What is left of a sum when one of its parts is taken away."""
        return Band(self.low - other.low, self.expected - other.expected, self.high - other.high)

    def widened(self, less: int, more: int) -> Band:
        return Band(self.low - less, self.expected, self.high + more)

    def around(self, expected: int) -> Band:
        """The band with another expected value, which it is widened to."""
        return Band(min(self.low, expected), expected, max(self.high, expected))

    def reaching(self, nbytes: int) -> Band:
        """The band widened to a value; what is expected stays."""
        return Band(min(self.low, nbytes), self.expected, max(self.high, nbytes))

    def at_most(self, most: int) -> Band:
        """No end above `most`, nor the expected value."""
        return Band(min(self.low, most), min(self.expected, most), min(self.high, most))


def exactly(nbytes: int) -> Band:
    return Band(nbytes, nbytes, nbytes)


NOTHING = exactly(0)
