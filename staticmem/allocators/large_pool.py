"""What the replays of a band serve: requests of more than 1 MiB, which the allocator's large pool serves.

The two pools share nothing, and the large one decides: reserved memory swings by whole activations there, by segments
of 2 MiB in the small pool. Most requests are small, so leaving the small pool as it is predicted makes a replay several
times as fast. The small pool splits every block, so what is allocated in it is the same in every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add

from staticmem.allocators.driver import Layout, ascending
from staticmem.allocators.peaks import Outline, Peaks, joined, serve
from staticmem.allocators.replay import STEPS, Process
from staticmem.allocators.settings import SMALL_SIZE


class LargePool:
    """The calls of a process for what may be larger than 1 MiB in some replay; the rest is as in `nominal`.

    Attributes:
        ids: the process's ids of these allocations, which are numbered anew here.
    """

    def __init__(self, process: Process, nominal: Outline, growth: float) -> None:
        """`growth` is the largest factor of sizes that any replay asks for."""
        numbers: dict[int, int] = {}
        for id, nbytes in enumerate(process.sizes):
            most = max([nbytes, *(known[id][1] for known in (process.bounds, process.strays) if id in known)])
            if most * growth > SMALL_SIZE:
                numbers[id] = len(numbers)
        self.ids = tuple(numbers)
        # Between two of these calls the small pool has its own: the most that is allocated in it after each of them
        calls: list[int] = []
        beside: list[int] = []
        blocks = nominal.blocks
        small = most = 0
        last = next((mark.event for mark in process.marks if mark.step == STEPS), -1)
        steady = None
        for index, call in enumerate(process.calls):
            if index == last:
                steady = len(calls)
            number = numbers.get(call if call >= 0 else ~call)
            if number is not None:
                beside.append(most)
                calls.append(number if call >= 0 else ~number)
                most = small
            elif call >= 0:
                small += blocks[call]
                most = max(most, small)
            else:
                small -= blocks[~call]
        beside.append(most)
        self._beside, self._small = beside, nominal.small
        self._all = calls, joined(calls, len(self.ids))
        before = calls[:steady]
        self._before_last = before, joined(before, len(self.ids))

    def peaks(self, sizes: Sequence[int], layout: Layout = ascending, *, whole: bool = True) -> Peaks:
        """The peaks with `sizes[n]` bytes for the allocation `ids[n]`, both pools together.

        `whole` False leaves the last of three steps out.
        """
        calls, served = self._all if whole else self._before_last
        found = serve(served, sizes, layout)
        blocks = found.blocks
        curve = accumulate([blocks[call] if call >= 0 else -blocks[~call] for call in calls], initial=0)
        # what is small here and may be large elsewhere opens small segments of its own, which are predicted already
        return Peaks(max(map(add, curve, self._beside)), found.peaks.reserved - found.small + self._small)
