"""Whether a step fits: the bytes that it needs against the usable bytes of a card. Numbers only."""

from __future__ import annotations

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
    """`headroom` is what is left of the usable memory at the expected need; negative: what is missing."""

    fit: Fit
    needed: Band
    usable: int
    headroom: int

    @property
    def missing(self) -> int:
        """Bytes by which it does not fit at the expected need; 0 where it does."""
        return max(-self.headroom, 0)

    def widened(self, less: int, more: int) -> Verdict:
        """With a need that may be so much lower, and higher: what fits may be tight then."""
        return verdict(self.needed.widened(less, more), self.usable, tight=self.fit is Fit.TIGHT)


def verdict(needed: Band, usable: int, tight: bool = False) -> Verdict:
    """Whether a need fits into usable memory.

    Fits: the whole band is within 95 % of it. Does not fit: the expected need is more than there is. Else tight. What a
    step needs that does not fail is never more than there is, so its band ends there.

    Args:
        needed: bytes on the device: reserved, context and libraries. Expected is the replay on the card's memory.
        usable: bytes that CUDA gives on the card.
        tight: it fits only because the allocator gives cached memory back.
    """
    if usable <= 0:
        raise ValueError(f"usable memory of {usable} bytes")
    if not needed.low <= needed.expected <= needed.high:
        raise ValueError(f"{needed} is not a band")
    headroom = usable - needed.expected
    if headroom < 0:
        return Verdict(Fit.DOES_NOT_FIT, needed, usable, headroom)
    fit = Fit.FITS if needed.high <= usable * TIGHT and not tight else Fit.TIGHT
    return Verdict(fit, needed.at_most(usable), usable, headroom)
