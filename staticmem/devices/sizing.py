"""Whether a step fits: the bytes that it needs against the usable bytes of a card. And whether
PyTorch runs it there (`architectures.standing`)."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

from staticmem.devices.architectures import RUNS, Standing
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
    CANNOT_RUN = "cannot run it"  # whatever its memory


@record(frozen=True)
class Verdict:
    """Whether a step runs on a card: the one answer that every verb gives.

    Attributes:
        memory: whether its memory is enough, without what else may stand in the way.
        needed: bytes on the device. Of a step that does not fit: what it takes where nothing limits it.
        cached: it fits only because the allocator gives cached memory back.
        least: of a step that does not fit, the least usable memory of a card that holds it; None: not looked for.
        standing: whether PyTorch runs the step on the card at all.
    """

    memory: Fit
    needed: Band
    usable: int
    cached: bool = False
    least: int | None = None
    standing: Standing = RUNS

    @property
    def fit(self) -> Fit:
        return Fit.CANNOT_RUN if self.standing.obstacle else self.memory

    @property
    def headroom(self) -> int:
        """What is left of the usable memory at the expected need; negative: what is missing."""
        return self.usable - (self.needed.expected if self.least is None else self.least)

    @property
    def missing(self) -> int:
        """Bytes that a card would have to have more to hold it; 0 where the memory is enough."""
        return max(-self.headroom, 0)

    @property
    def why(self) -> str:
        """Why it cannot run, or is tight: a clause; empty where it fits, or `missing` says it."""
        if self.standing.obstacle or self.memory is not Fit.TIGHT:
            return self.standing.obstacle
        if self.cached:
            return "PyTorch must free cached memory"
        if self.needed.high >= self.usable:
            return "the upper estimate is the whole card"
        return f"the upper estimate is above {100 * TIGHT:.0f} % of the card"

    @property
    def said(self) -> dict[str, Any]:
        """What reports say of it, by the names of their fields."""
        stands, memory = self.standing, {"missing_bytes": self.missing, "least_usable_bytes": self.least}
        why = {"why": self.why, "obstacle": stands.obstacle, "condition": stands.condition}
        return {"fit": self.fit.value, "headroom_bytes": max(self.headroom, 0), **memory, **why}

    def widened(self, less: int, more: int) -> Verdict:
        """With a need that may be so much lower, and higher: what fits may be tight then."""
        again = verdict(self.needed.widened(less, more), self.usable, tight=self.cached, standing=self.standing)
        return replace(again, least=self.least)


def verdict(needed: Band, usable: int, tight: bool = False, standing: Standing = RUNS) -> Verdict:
    """Whether a step runs on a card, and its need fits into usable memory.

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
    if needed.expected > usable:
        return Verdict(Fit.DOES_NOT_FIT, needed, usable, standing=standing)
    memory = Fit.FITS if needed.high <= usable * TIGHT and not tight else Fit.TIGHT
    return Verdict(memory, needed.at_most(usable), usable, tight, standing=standing)
