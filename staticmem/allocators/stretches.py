"""Memory of a process at the stops between its stretches: what a run of many steps is asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from staticmem.allocators.peaks import Heap
from staticmem.allocators.process import Process
from staticmem.allocators.result import Replay
from staticmem.allocators.settings import MIN_BLOCK, Layout, ascending
from staticmem.eager.trace import round_up


@dataclass(frozen=True)
class Stretches:
    """Bytes of allocated and of reserved memory: `at` each of the `stops`, which count calls and begin with 0, and the
    `peaks` of the stretch that begins there, its beginning included."""

    stops: Sequence[int]
    at: Sequence[tuple[int, int]]
    peaks: Sequence[tuple[int, int]]

    @classmethod
    def serve(
        cls, process: Process, stops: Sequence[int], sizes: Sequence[int] | None = None, layout: Layout = ascending
    ) -> Stretches:
        """With PyTorch's default settings and as much memory as is asked for, where reserved memory never falls.
        `sizes` are other ones than those of the process."""
        rounded = [round_up(nbytes, MIN_BLOCK) for nbytes in (process.sizes if sizes is None else sizes)]
        heap = Heap(rounded, layout, process.streams)
        at, peaks = [(0, 0)], []
        for start, end in pairwise(stops):
            heap.peak = heap.allocated
            heap.serve(process.calls[start:end])
            reserved = heap.large + heap.small
            at.append((heap.allocated, reserved))
            peaks.append((heap.peak, reserved))
        return cls(stops, at, peaks)

    @classmethod
    def of(cls, replay: Replay, stops: Sequence[int]) -> Stretches:
        """Those of a whole replay."""
        allocated, reserved = replay._allocated, replay._reserved
        at = [(allocated[stop - 1], reserved[stop - 1]) if stop else (0, 0) for stop in stops]
        peaks = []
        for (start, end), (allocated_before, reserved_before) in zip(pairwise(stops), at, strict=False):
            most_allocated, most_reserved = replay.peak_between(start, end)
            peaks.append((max(allocated_before, most_allocated), max(reserved_before, most_reserved)))
        return cls(stops, at, peaks)

    @property
    def reserved(self) -> int:
        """The peak of reserved memory."""
        return max((reserved for _, reserved in self.peaks), default=0)

    def between(self, start: int, end: int) -> tuple[int, int]:
        """The most bytes of both from one stop to another, what is there at the first included."""
        first, last = bisect_left(self.stops, start), bisect_left(self.stops, end)
        both = self.at[first], *self.peaks[first:last]
        return max(allocated for allocated, _ in both), max(reserved for _, reserved in both)

    def at_stop(self, stop: int) -> tuple[int, int]:
        return self.at[bisect_left(self.stops, stop)]
