"""The peaks of a replay and nothing else: `simulate` without its record, for the many replays that a band needs.

It serves PyTorch's default settings with as much memory as is asked for, which is what a band asks. A
test holds it to `cuda_caching.simulate`, which has the sources of the allocator's rules.

It is a second writing of that algorithm because a report needs eleven replays: three steps of ResNet-50 take 8.2 ms
there, where blocks are objects and every event is recorded, 4.0 ms here, and 0.6 ms without the small pool.

The two pools share nothing, and the large one decides: reserved memory swings by whole activations there, by segments
of 2 MiB in the small pool. Most requests are small, so a replay that leaves the small pool as it is predicted
(`LargePool`) is several times as fast again. The small pool splits every block, so what is allocated in it is the same
in every replay.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any, NamedTuple

from staticmem.allocators.process import STEPS, Process
from staticmem.allocators.settings import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    SMALL_BUFFER,
    SMALL_SIZE,
    UNLIMITED,
    Layout,
    ascending,
)

NO_STREAMS: Mapping[int, int] = MappingProxyType({})


class Peaks(NamedTuple):
    """Bytes of blocks in use, and of segments, each at its highest."""

    allocated: int
    reserved: int


class Served(NamedTuple):
    """`peaks`, the bytes of `small` segments among those reserved, the size of each id's block (0: empty), and the ids
    whose allocations opened the last segment and first took what is allocated to its peak (-1: there is none).

    `rounding` is what blocks are larger than requests where allocated memory peaks."""

    peaks: Peaks
    small: int
    rounding: int
    blocks: list[int]
    opened: int
    highest: int


class Outline(NamedTuple):
    """What a `Replay` says of its peaks: bytes, and the indices of the calls that first reach them; with the size of
    each id's block, the bytes of the small pool's segments, and `rounding` as in `Served`."""

    peak_allocated: int
    peak_allocated_at: int
    peak_reserved: int
    peak_reserved_at: int
    blocks: list[int]
    small: int
    rounding: int


def joined(calls: Sequence[int], count: int) -> list[int]:
    """`calls` in which an allocation that is released at once is one call: its id plus `count`, the number of ids."""
    kept: list[int] = []
    last = -1
    for call in calls:
        if call < 0 and kept and ~call == last:
            kept[-1] = last + count
            last = -1
        else:
            kept.append(call)
            last = call
    return kept


def outline(calls: Sequence[int], sizes: Sequence[int], streams: Mapping[int, int] = NO_STREAMS) -> Outline:
    """The outline of `simulate` for calls without `joined` pairs; `streams` as in `Process`."""
    served = serve(joined(calls, len(sizes)), sizes, streams=streams)
    (allocated, reserved), small, rounding, blocks, opened, highest = served
    at = calls.index(highest) if highest >= 0 else 0
    opened_at = calls.index(opened) if opened >= 0 else 0
    return Outline(allocated, at, reserved, opened_at, blocks, small, rounding)


def serve(
    calls: Sequence[int],
    sizes: Sequence[int],
    layout: Layout = ascending,
    beside: Sequence[int] | None = None,
    first: int = 0,
    pairs: bool = True,
    streams: Mapping[int, int] = NO_STREAMS,
) -> Served:
    """Serves `calls` with PyTorch's default settings.

    Args:
        calls: an id below `len(sizes)` is an allocation of `sizes[id]` bytes, `~id` its release; a larger one both at
            once (`joined`). Ids are used once, and what is released is alive.
        beside: for each call the most bytes that are allocated elsewhere from then until the next; `first`: the most
            before the first of them. They count for the peak of what is allocated.
        pairs: whether `blocks` has the joined ids too.
        streams: of ids that the default stream does not allocate; each has pools of its own.
    """
    count = len(sizes)
    rounded = [(nbytes + MIN_BLOCK - 1) & -MIN_BLOCK for nbytes in sizes]
    # Free blocks of a pool are (size, address, block). A block is a list, because making one is a third of the work:
    # its address and size, its neighbours in the segment, whether it is free, its pool.
    small: list[tuple[int, int, Any]] = []
    large: list[tuple[int, int, Any]] = []
    default = small, large
    others: dict[int, tuple[list[Any], list[Any]]] = {stream: ([], []) for stream in set(streams.values())}
    live: list[Any] = [None] * count
    blocks = [0] * count
    allocated = reserved = number = offset = small_segments = unused = rounding = 0
    peak = first
    opened = highest = -1
    for call, extra in zip(calls, repeat(0) if beside is None else beside, strict=False):
        if call < 0:
            block = live[~call]
            if block is None:  # an empty tensor
                if allocated + extra > peak:
                    peak, rounding = allocated + extra, unused
                continue
            allocated -= block[1]
            unused -= block[1] - rounded[~call]
            _free(block)
            if allocated + extra > peak:
                peak, rounding = allocated + extra, unused
            continue
        passing = call >= count
        id = call - count if passing else call
        size = rounded[id]
        if not size:
            if allocated + extra > peak:
                peak, rounding = allocated + extra, unused
            continue
        pools = others[streams[id]] if id in streams else default
        pool = pools[size > SMALL_SIZE]
        if passing and not pairs and allocated + size + extra + SMALL_SIZE <= peak and pool and pool[-1][0] >= size:
            continue  # it fits, and a block is larger than what is asked for by SMALL_SIZE at most
        at = bisect_left(pool, (size,))
        if at < len(pool):
            whole, address, block = pool[at]
            if not passing:
                del pool[at]
        else:
            if size <= SMALL_SIZE:
                whole = SMALL_BUFFER
                small_segments += 1
            elif size < MIN_LARGE_ALLOC:
                whole = LARGE_SEGMENT
            else:
                whole = -(-size // ROUND_LARGE) * ROUND_LARGE
            address = layout(number, offset, whole)
            opened = id
            number += 1
            offset += whole
            reserved += whole
            block = [address, whole, None, None, True, pool]
            if passing:
                insort(pool, (whole, address, block))
        rest = whole - size
        splits = rest > SMALL_SIZE or (rest and size <= SMALL_SIZE)
        if passing:  # what is split off is merged again: the pool stays as it is
            if not splits:
                size = whole
            blocks[id] = size
            if allocated + size + extra > peak:
                peak, highest = allocated + size + extra, id
                rounding = unused + size - rounded[id]
            continue
        if splits:
            before = block[2]
            taken = [address, size, before, block, False, pool]
            if before is not None:
                before[3] = taken
            block[0], block[1], block[2] = address + size, rest, taken
            insort(pool, (rest, address + size, block))
            block = taken
        else:
            size = whole
            block[4] = False
        live[call] = block
        blocks[call] = size
        allocated += size
        unused += size - rounded[call]
        if allocated + extra > peak:
            peak, highest, rounding = allocated + extra, call, unused
    # Blocks know their neighbours and their pool: without an end to that the cycle search of Python has to find them.
    for pool in (small, large, *chain(*others.values())):
        pool.clear()
    for block in live:
        if block is not None:
            block[2] = block[3] = None
    return Served(Peaks(peak, reserved), small_segments * SMALL_BUFFER, rounding, blocks, opened, highest)


def _free(block: list[Any]) -> None:
    """Joins a block with its free neighbours, and puts it into its pool (`DeviceCachingAllocator::free_block`)."""
    address, size, before, behind, _, pool = block
    if before is not None and before[4]:
        address = before[0]
        del pool[bisect_left(pool, (before[1], address))]
        size += before[1]
        before = before[2]
        block[0], block[2] = address, before
        if before is not None:
            before[3] = block
    if behind is not None and behind[4]:
        del pool[bisect_left(pool, (behind[1], behind[0]))]
        size += behind[1]
        behind = behind[3]
        block[3] = behind
        if behind is not None:
            behind[2] = block
    block[1], block[4] = size, True
    insort(pool, (size, address, block))


class Heap:
    """Segments as `serve` has them, for two thirds of its time: a search asks for nothing else, and a long run is
    served stretch by stretch.

    Attributes:
        large, small: bytes of segments of the two pools.
        allocated, peak: bytes of blocks in use, and the most of them since `peak` was last set. Calls that are `joined`
            are not among them.
    """

    def __init__(
        self, sizes: Sequence[int], layout: Layout = ascending, streams: Mapping[int, int] = NO_STREAMS
    ) -> None:
        """`sizes`: whole blocks of 512 bytes."""
        self.sizes, self.layout, self.streams = sizes, layout, streams
        self.large = self.small = self.allocated = self.peak = self._number = 0
        self.live: list[Any] = [None] * len(sizes)
        self.pools: tuple[list[Any], list[Any]] = ([], [])
        self.others: dict[int, tuple[list[Any], list[Any]]] = {stream: ([], []) for stream in set(streams.values())}

    def serve(self, calls: Sequence[int], most: int = UNLIMITED) -> None:
        """Serves calls, which are as in the function `serve`, until large segments have more than `most`."""
        sizes, layout, streams, others, live = self.sizes, self.layout, self.streams, self.others, self.live
        count, (small, large), of_small, number = len(sizes), self.pools, self.small, self._number
        offset, allocated, peak = self.large + of_small, self.allocated, self.peak
        for call in calls:
            if call < 0:
                block = live[~call]
                if block is None:  # an empty tensor
                    continue
                allocated -= block[1]
                _free(block)
                continue
            id = call - count if call >= count else call
            size = sizes[id]
            pool = small if size <= SMALL_SIZE else large
            if streams and id in streams:
                pool = others[streams[id]][size > SMALL_SIZE]
            if pool and pool[-1][0] >= size:
                if call >= count or not size:  # what is split off is merged again
                    continue
                whole, address, block = pool.pop(bisect_left(pool, (size,)))
            elif size:
                if size <= SMALL_SIZE:
                    whole = SMALL_BUFFER
                    of_small += whole
                else:
                    whole = LARGE_SEGMENT if size < MIN_LARGE_ALLOC else -(-size // ROUND_LARGE) * ROUND_LARGE
                address = layout(number, offset, whole)
                number += 1
                offset += whole
                if offset - of_small > most:
                    break
                block = [address, whole, None, None, True, pool]
                if call >= count:
                    insort(pool, (whole, address, block))
                    continue
            else:
                continue
            rest = whole - size
            if rest > SMALL_SIZE or (rest and size <= SMALL_SIZE):
                before = block[2]
                live[call] = taken = [address, size, before, block, False, pool]
                if before is not None:
                    before[3] = taken
                block[0], block[1], block[2] = address + size, rest, taken
                insort(pool, (rest, address + size, block))
                allocated += size
            else:
                block[4] = False
                live[call] = block
                allocated += whole
            if allocated > peak:
                peak = allocated
        self.large, self.small, self._number = offset - of_small, of_small, number
        self.allocated, self.peak = allocated, peak


def reserve(
    calls: Sequence[int],
    sizes: Sequence[int],
    layout: Layout = ascending,
    most: int = UNLIMITED,
    streams: Mapping[int, int] = NO_STREAMS,
) -> tuple[int, int]:
    """Bytes of large segments, and of small ones (`Heap`); `sizes` are whole blocks of 512 bytes."""
    heap = Heap(sizes, layout, streams)
    heap.serve(calls, most)
    for block in heap.live:  # as in `serve`: what a pool has knows it
        if block is not None:
            block[2] = block[3] = block[5] = None
    for pool in (*heap.pools, *chain(*heap.others.values())):
        pool.clear()
    return heap.large, heap.small


# -- the large pool alone --------------------------------------------------------------------------------------------


class LargePool:
    """The calls of a process for what may be larger than 1 MiB in some replay; the rest is as in `nominal`.

    Attributes:
        ids: the process's ids of these allocations, which are numbered anew here: those before the last of three
            steps, which is left out.
    """

    def __init__(self, process: Process, nominal: Outline | None, ids: tuple[int, ...]) -> None:
        """`ids` are the `large_ids`. Without a nominal replay the peaks are of the large pool alone."""
        end = len(process.calls)
        last = end if process.whole else next((mark.event for mark in process.marks if mark.step == STEPS), end)
        self.ids = ids
        numbers = [-1] * len(process.sizes)
        for number, id in enumerate(self.ids):
            numbers[id] = number
        blocks = [0] * len(process.sizes) if nominal is None else nominal.blocks
        self._calls = _joined(*_calls(process.calls[:last], numbers, blocks), len(self.ids))
        self._streams = {numbers[id]: stream for id, stream in process.streams.items() if numbers[id] >= 0}
        self._small = 0 if nominal is None else nominal.small

    def reserve(self, sizes: Sequence[int], layout: Layout, most: int) -> int:
        """Bytes of large segments, as `reserve` has them."""
        return reserve(self._calls[0], sizes, layout, most, self._streams)[0]

    def peaks_and_rounding(self, sizes: Sequence[int], layout: Layout = ascending) -> tuple[Peaks, int]:
        """The peaks with `sizes[n]` bytes for the allocation `ids[n]`, both pools together, and what blocks are larger
        than requests at the peak of allocated memory."""
        calls, beside, before = self._calls
        served = serve(calls, sizes, layout, beside, before, pairs=False, streams=self._streams)
        # what is small here and may be large elsewhere opens small segments of its own, which are predicted already
        both = Peaks(served.peaks.allocated, served.peaks.reserved - served.small + self._small)
        return both, served.rounding


def large_ids(process: Process, growth: float) -> tuple[int, ...]:
    """The ids of a `LargePool`; `growth` is the largest factor of sizes that any replay asks for."""
    starts = process.origins.starts
    repeats = len(starts) > STEPS and not process.whole
    count = starts[STEPS] if repeats else len(process.sizes)  # before the last of three steps
    most = list(process.sizes[:count])
    for bands in (process.bounds, process.strays):
        for id, (_, high) in bands.items():
            if id < count and high > most[id]:
                most[id] = high
    least = int(SMALL_SIZE / growth)
    return tuple([id for id, nbytes in enumerate(most) if nbytes > least and nbytes * growth > SMALL_SIZE])


def _calls(calls: Sequence[int], numbers: Sequence[int], blocks: Sequence[int]) -> tuple[list[int], list[int]]:
    """The calls for ids with a number, and the most bytes that the others have before the first of these calls and
    behind each of them."""
    kept: list[int] = []
    beside: list[int] = []
    small = most = 0
    for call in calls:
        id = call if call >= 0 else ~call
        number = numbers[id]
        if number >= 0:
            beside.append(most)
            kept.append(number if call >= 0 else ~number)
            most = small
        elif call >= 0:
            small += blocks[id]
            if small > most:
                most = small
        else:
            small -= blocks[id]
    beside.append(most)
    return kept, beside


def _joined(calls: Sequence[int], beside: Sequence[int], count: int) -> tuple[list[int], list[int], int]:
    """`joined` calls, the most that is allocated in the small pool from each of them to the next, and before the first.

    What is beside a release that is joined is beside the last call that is not: what is allocated is the same after
    both.
    """
    kept: list[int] = []
    levels: list[int] = []
    before, last = beside[0], -1
    base = outer = -1  # the last entry that is no pair, and the one before it
    for call, level in zip(calls, beside[1:], strict=False):
        if call < 0 and ~call == last:
            kept[-1] = last + count
            last, base = -1, outer
            if base < 0:
                before = max(before, level)
            else:
                levels[base] = max(levels[base], level)
            continue
        outer, base = base, len(kept)
        kept.append(call)
        levels.append(level)
        last = call
    return kept, levels, before
