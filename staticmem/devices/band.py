"""Bytes that are known only within bounds."""

from __future__ import annotations

from typing import NamedTuple


class Band(NamedTuple):
    """Bytes: at least, expected, at most."""

    low: int
    expected: int
    high: int

    def plus(self, other: Band) -> Band:
        return Band(self.low + other.low, self.expected + other.expected, self.high + other.high)

    def minus(self, other: Band) -> Band:
        """What is left of a sum when one of its parts is taken away."""
        return Band(self.low - other.low, self.expected - other.expected, self.high - other.high)


def exactly(nbytes: int) -> Band:
    return Band(nbytes, nbytes, nbytes)


NOTHING = exactly(0)
