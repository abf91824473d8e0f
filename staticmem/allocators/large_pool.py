"""What the replays of a band serve: requests of more than 1 MiB, which the allocator's large pool serves.

The two pools share nothing, and the large one decides: reserved memory swings by whole activations there, by segments
of 2 MiB in the small pool. Most requests are small, so leaving the small pool as it is predicted makes a replay several
times as fast. The small pool splits every block, so what is allocated in it is the same in every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from staticmem.allocators.driver import Layout, ascending
from staticmem.allocators.peaks import Outline, Peaks, serve
from staticmem.allocators.process import Process
from staticmem.allocators.replay import STEPS
from staticmem.allocators.settings import SMALL_SIZE


class Calls(NamedTuple):
    """Calls for `serve` (`peaks.joined`), with the most that is allocated in the small pool from each of them to the
    next, and `before` the first."""

    calls: list[int]
    beside: list[int]
    before: int


class LargePool:
    """The calls of a process for what may be larger than 1 MiB in some replay; the rest is as in `nominal`.

    Attributes:
        ids: the process's ids of these allocations, which are numbered anew here: those before the last of three
            steps, which is left out.
    """

    def __init__(self, process: Process, nominal: Outline, growth: float) -> None:
        """`growth` is the largest factor of sizes that any replay asks for."""
        last = next((mark.event for mark in process.marks if mark.step == STEPS), len(process.calls))
        starts = process.origins.starts
        count = starts[STEPS] if len(starts) > STEPS else len(process.sizes)
        most = list(process.sizes[:count])
        for known in (process.bounds, process.strays):
            for id, (_, high) in known.items():
                if id < count and high > most[id]:
                    most[id] = high
        least = int(SMALL_SIZE / growth)
        self.ids = tuple([id for id, nbytes in enumerate(most) if nbytes > least and nbytes * growth > SMALL_SIZE])
        numbers = [-1] * count
        for number, id in enumerate(self.ids):
            numbers[id] = number
        self._calls = _joined(*_calls(process.calls[:last], numbers, nominal.blocks), len(self.ids))
        self._small = nominal.small

    def peaks(self, sizes: Sequence[int], layout: Layout = ascending) -> Peaks:
        """The peaks with `sizes[n]` bytes for the allocation `ids[n]`, both pools together."""
        calls, beside, before = self._calls
        found = serve(calls, sizes, layout, beside, before, pairs=False)
        # what is small here and may be large elsewhere opens small segments of its own, which are predicted already
        return Peaks(found.peaks.allocated, found.peaks.reserved - found.small + self._small)


def _calls(calls: Sequence[int], numbers: Sequence[int], blocks: Sequence[int]) -> tuple[list[int], list[int]]:
    """The calls for ids with a number, and the most bytes that the others have before the first of these calls and
    behind each of them."""
    found: list[int] = []
    beside: list[int] = []
    small = most = 0
    for call in calls:
        if call >= 0:
            number = numbers[call]
            if number >= 0:
                beside.append(most)
                found.append(number)
                most = small
                continue
            small += blocks[call]
            if small > most:
                most = small
        else:
            number = numbers[~call]
            if number >= 0:
                beside.append(most)
                found.append(~number)
                most = small
                continue
            small -= blocks[~call]
    beside.append(most)
    return found, beside


def _joined(calls: Sequence[int], beside: Sequence[int], count: int) -> Calls:
    """`peaks.joined`. What is beside a release that is joined is beside the last call that is not: what is allocated is
    the same after both."""
    found: list[int] = []
    levels: list[int] = []
    before, last = beside[0], -1
    base = outer = -1  # the last entry that is no pair, and the one before it
    for call, level in zip(calls, beside[1:], strict=False):
        if call < 0 and ~call == last:
            found[-1] = last + count
            last, base = -1, outer
            if base < 0:
                before = max(before, level)
            else:
                levels[base] = max(levels[base], level)
            continue
        outer, base = base, len(found)
        found.append(call)
        levels.append(level)
        last = call
    return Calls(found, levels, before)
