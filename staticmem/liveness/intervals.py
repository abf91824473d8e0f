"""Liveness of a step: a buffer lives from its allocation to the release of its last owner.

A step is a graph with these edges: kernel -> buffer that it allocates, buffer -> owner that holds it over [start, end).
The end of an interval is the largest `end` among a buffer's edges, so one pass over the edges gives all of them
(docs/adr/0004).

Time is the trace's tick: one allocation or one release each. `live[t]` is what is alive after the event of tick t, so a
buffer is alive at t where born <= t < died.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from staticmem.eager.reasons import Reason
from staticmem.eager.trace import OPEN, Buffer, Hold, Trace, round_up
from staticmem.errors import UsageError
from staticmem.ir.record import record

if TYPE_CHECKING:
    import numpy as np


PEAK, WHOLE = "peak", "whole"  # words for a moment, beside the names of phases: the step's peak, and all of the step
LARGE = 1 << 17  # holds, or buffers, of a trace that is worth the import of NumPy (`arrays`)


@record(frozen=True, slots=True)
class PhasePeak:
    """The most that is alive in a phase: `nbytes` bytes, first reached at `tick`; `buffer` is the allocation that
    reached it, or None where the phase never has more than it starts with."""

    phase: str
    start: int
    end: int
    nbytes: int
    tick: int
    buffer: int | None


class Lifetimes:
    """Intervals of a trace's buffers in ticks, and the curve of live bytes. Sizes are rounded up to 512 bytes.

    `born[i]` and `died[i]` belong to `trace.buffers[i]`; a buffer that is never released has `died[i] == ticks`.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ticks = trace.ticks
        rounded = {nbytes: round_up(nbytes) for nbytes in set(trace.buffers.nbytes)}  # one object for equal sizes
        self.sizes = [rounded[nbytes] for nbytes in trace.buffers.nbytes]
        self.born = trace.buffers.born
        self.died = _releases(trace)
        self.live = _levels(self.sizes, self.born, self.died, self.ticks)
        self.peak_bytes = max(self.live)
        self.peak_tick = self.live.index(self.peak_bytes)

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Ticks and live bytes as NumPy arrays (int64), for plots and sweeps."""
        import numpy as np

        return np.arange(len(self.live)), np.asarray(self.live, dtype=np.int64)

    # -- one moment ----------------------------------------------------------------------------------------------

    def alive(self, tick: int) -> list[Buffer]:
        """The buffers that are alive at `tick`, in order of allocation."""
        return self.trace.buffers.pick(self.alive_ids(tick))

    def alive_ids(self, tick: int) -> list[int]:
        """Their indices in `trace.buffers`."""
        return _alive(self.born, self.died, tick)

    def by_category(self, tick: int) -> dict[str, int]:
        """Bytes alive at `tick` in each category that occurs."""
        total: dict[str, int] = {}
        categories, sizes = self.trace.buffers.categories, self.sizes
        for id in self.alive_ids(tick):
            category = categories[id]
            total[category] = total.get(category, 0) + sizes[id]
        return total

    def holds(self, tick: int, among: Iterable[int] | None = None) -> Mapping[int, list[Hold]]:
        """The holds of each buffer at `tick`, or of each of `among`. A buffer without an entry is a temporary of the
        running kernel."""
        holders: dict[int, list[Hold]] = {}
        holds = self.trace.holds
        open_now: Iterable[int] = _alive(holds.starts, holds.ends, tick)
        if among is not None:
            wanted = frozenset(among)
            open_now = [index for index in open_now if holds.buffers[index] in wanted]
        for index in open_now:
            holders.setdefault(holds.buffers[index], []).append(holds[index])
        return holders

    def allocation_at(self, tick: int) -> int | None:
        """The buffer that is allocated at `tick`, if the event is an allocation."""
        index = bisect_left(self.born, tick)  # buffers are in order of birth
        return index if index < len(self.born) and self.born[index] == tick else None

    # -- phases --------------------------------------------------------------------------------------------------

    @cached_property
    def phases(self) -> Mapping[str, PhasePeak]:
        """The peak of each phase. What is alive when a phase begins belongs to it."""
        starts = [*self.trace.phases, ("", self.ticks)]
        return {name: self._phase(name, start, end) for (name, start), (_, end) in pairwise(starts)}

    def _phase(self, name: str, start: int, end: int) -> PhasePeak:
        level = self.level_before(start)
        highest = max(self.live[start:end], default=0)
        if highest <= level:
            return PhasePeak(name, start, end, level, max(start - 1, 0), None)
        tick = self.live.index(highest, start, end)
        return PhasePeak(name, start, end, highest, tick, self.allocation_at(tick))

    def tick_of(self, at: int | str) -> int:
        """The tick of a moment: "peak", the name of a phase for its peak, or the tick itself.

        Raises:
            UsageError: the step has no such phase or tick (SM291).
        """
        if at == PEAK:
            return self.peak_tick
        if isinstance(at, str) and at in self.phases:
            return self.phases[at].tick
        if isinstance(at, int) and not isinstance(at, bool) and 0 <= at < self.ticks:
            return at
        why = f"Moments are {', '.join([PEAK, *self.phases])}, and ticks from 0 to {self.ticks - 1}."
        raise UsageError(f"the step has no moment '{at}'", why, "Name one of them.", "SM291")

    def level_before(self, tick: int) -> int:
        """Bytes alive when `tick` begins."""
        return self.live[tick - 1] if 0 < tick <= len(self.live) else 0


def _alive(born: array[int], died: array[int], tick: int) -> list[int]:
    """The indices of the intervals [born, died) that contain `tick`."""
    if len(born) >= LARGE:
        from staticmem.liveness import arrays

        return arrays.alive(born, died, tick)
    return [id for id, (start, end) in enumerate(zip(born, died, strict=True)) if start <= tick < end]


def _levels(sizes: Sequence[int], born: array[int], died: array[int], ticks: int) -> array[int]:
    """Bytes alive after each tick."""
    if len(born) >= LARGE:
        from staticmem.liveness import arrays

        return arrays.levels(sizes, born, died, ticks)
    delta = [0] * max(ticks, 1)
    for size, start, end in zip(sizes, born, died, strict=True):
        delta[start] += size
        if end < ticks:
            delta[end] -= size
    return array("q", accumulate(delta))


def _releases(trace: Trace) -> array[int]:
    """The tick of each buffer's last release; `trace.ticks` where an owner never releases it.

    A buffer without owners ends with the scope of its kernel, as the engine recorded (`died`).
    """
    forever, holds, buffers = trace.ticks, trace.holds, trace.buffers
    if len(holds) >= LARGE:
        from staticmem.liveness import arrays

        return arrays.releases(holds, buffers, forever)
    last = [-1] * len(buffers)
    for buffer, end in zip(holds.buffers, holds.ends, strict=True):
        if end > last[buffer]:
            last[buffer] = end
    return array(
        "I", [min(recorded if end < 0 else end, forever) for end, recorded in zip(last, buffers.died, strict=True)]
    )


def added_by_held_outputs(lifetimes: Lifetimes) -> int:
    """Bytes by which the peak would be lower if nothing held the outputs once the loss is computed."""
    trace = lifetimes.trace
    holds = trace.holds
    until = {buffer: 0 for buffer, kind in zip(holds.buffers, holds.kinds, strict=True) if kind is Reason.OUTPUTS}
    if not until:
        return 0
    for buffer, kind, end in zip(holds.buffers, holds.kinds, holds.ends, strict=True):
        if kind is not Reason.OUTPUTS and buffer in until:
            until[buffer] = max(until[buffer], lifetimes.ticks if end == OPEN else end)
    for before in tuple(until):
        for buffer in trace.replaced_by.get(before, ()):  # what the outputs' history has saved goes with them
            until.setdefault(buffer, trace.marks["forward_end"])
    changes = {0: 0, lifetimes.ticks: 0}
    for buffer, end in until.items():
        start, stop = max(end, lifetimes.born[buffer]), lifetimes.died[buffer]
        if start < stop:
            changes[start] = changes.get(start, 0) + lifetimes.sizes[buffer]
            changes[stop] = changes.get(stop, 0) - lifetimes.sizes[buffer]
    peak = added = 0
    for start, stop in pairwise(sorted(changes)):
        added += changes[start]
        peak = max(peak, max(lifetimes.live[start:stop]) - added)
    return lifetimes.peak_bytes - peak
