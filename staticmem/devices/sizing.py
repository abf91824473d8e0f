"""Whether a step fits: the bytes that it needs against the usable bytes of a card. Numbers only."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from staticmem.ir.record import record
from staticmem.units import Band

# Above this share of the usable memory the allocator begins to give back cached segments and convolutions take smaller
# plans, and other processes (a desktop, monitoring) may have the rest: the prediction is less certain there.
TIGHT = 0.95


class Fit(str, Enum):
    """A verdict."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"


@record(frozen=True)
class Verdict:
    """`headroom` is what is left of the usable memory at the expected need; negative: what is missing.

    `least` is the least headroom of the band. `share` is the expected need as a share of what is usable.
    """

    fit: Fit
    needed: Band
    usable: int
    headroom: int
    least: int
    share: float

    @property
    def missing(self) -> int:
        """Bytes by which it does not fit at the expected need; 0 where it does."""
        return max(-self.headroom, 0)

    def widened(self, less: int, more: int) -> Verdict:
        """With a need that may be so much lower, and higher: what fits may be tight then."""
        low, expected, high = self.needed
        needed = Band(low - less, expected, high + more)
        tight = self.fit is Fit.FITS and needed.high > self.usable * TIGHT
        return replace(self, fit=Fit.TIGHT if tight else self.fit, needed=needed, least=self.usable - needed.high)


def verdict(needed: Band, usable: int, floor: int | None = None) -> Verdict:
    """Whether a need fits into usable memory.

    Fits: the whole band is within 95 % of it. Does not fit: the expected need is more than there is. Else tight.

    Args:
        needed: bytes on the device: reserved, context and libraries.
        usable: bytes that CUDA gives on the card.
        floor: bytes without which it cannot run (allocated and the context), if known. Where the expected need is above
            `usable` and the floor is not, it is tight: the allocator gives cached segments back and tries again.
    """
    if usable <= 0:
        raise ValueError(f"usable memory of {usable} bytes")
    if not needed.low <= needed.expected <= needed.high:
        raise ValueError(f"{needed} is not a band")
    if needed.expected > usable and (floor is None or floor > usable):
        fit = Fit.DOES_NOT_FIT
    elif needed.high <= usable * TIGHT:
        fit = Fit.FITS
    else:
        fit = Fit.TIGHT
    return Verdict(fit, needed, usable, usable - needed.expected, usable - needed.high, needed.expected / usable)
