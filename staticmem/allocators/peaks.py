"""The peaks of a replay and nothing else: `simulate` without its record, for the many replays that a band needs.

It serves PyTorch's default settings on one stream with as much memory as is asked for, which is what a band asks. A
test holds it to `cuda_caching.simulate`, which has the sources of the allocator's rules.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

from staticmem.allocators.driver import Layout, ascending
from staticmem.allocators.settings import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    SMALL_BUFFER,
    SMALL_SIZE,
)


class Peaks(NamedTuple):
    """Bytes of blocks in use, and of segments, each at its highest."""

    allocated: int
    reserved: int


class Served(NamedTuple):
    """`peaks`, the bytes of `small` segments among those reserved, the size of each id's block (0: empty), and the ids
    whose allocations opened the last segment and first took what is allocated to its peak (-1: there is none)."""

    peaks: Peaks
    small: int
    blocks: list[int]
    opened: int
    highest: int


class Outline(NamedTuple):
    """What a `Replay` says of its peaks: bytes, and the indices of the calls that first reach them; with the size of
    each id's block, and the bytes of the small pool's segments."""

    peak_allocated: int
    peak_allocated_at: int
    peak_reserved: int
    peak_reserved_at: int
    blocks: list[int]
    small: int


def joined(calls: Sequence[int], count: int) -> list[int]:
    """`calls` in which an allocation that is released at once is one call: its id plus `count`, the number of ids."""
    found: list[int] = []
    last = -1
    for call in calls:
        if call < 0 and found and ~call == last:
            found[-1] = last + count
            last = -1
        else:
            found.append(call)
            last = call
    return found


def outline(calls: Sequence[int], sizes: Sequence[int]) -> Outline:
    """The outline of `simulate` for calls without `joined` pairs."""
    (allocated, reserved), small, blocks, opened, highest = serve(joined(calls, len(sizes)), sizes)
    at, opened_at = (calls.index(id) if id >= 0 else 0 for id in (highest, opened))
    return Outline(allocated, at, reserved, opened_at, blocks, small)


def peaks(calls: Sequence[int], sizes: Sequence[int], layout: Layout = ascending) -> Peaks:
    """The peaks of `serve`."""
    return serve(calls, sizes, layout).peaks


def serve(
    calls: Sequence[int],
    sizes: Sequence[int],
    layout: Layout = ascending,
    beside: Sequence[int] | None = None,
    first: int = 0,
    pairs: bool = True,
) -> Served:
    """Serves `calls` with PyTorch's default settings.

    Args:
        calls: an id below `len(sizes)` is an allocation of `sizes[id]` bytes, `~id` its release; a larger one both at
            once (`joined`). Ids are used once, and what is released is alive.
        beside: for each call the most bytes that are allocated elsewhere from then until the next; `first`: the most
            before the first of them. They count for the peak of what is allocated.
        pairs: whether `blocks` has the joined ids too.
    """
    count = len(sizes)
    rounded = [(nbytes + MIN_BLOCK - 1) & -MIN_BLOCK for nbytes in sizes]
    # Free blocks of a pool are (size, address, block). A block is a list, because making one is a third of the work:
    # its address and size, its neighbours in the segment, whether it is free, its pool.
    small: list[tuple[int, int, Any]] = []
    large: list[tuple[int, int, Any]] = []
    live: list[Any] = [None] * count
    blocks = [0] * count
    allocated = reserved = number = offset = small_segments = 0
    peak = first
    opened = highest = -1
    for call, extra in zip(calls, repeat(0) if beside is None else beside, strict=False):
        if call < 0:
            block = live[~call]
            if block is None:  # an empty tensor
                if allocated + extra > peak:
                    peak = allocated + extra
                continue
            address, size, before, behind, _, pool = block
            allocated -= size
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
            if allocated + extra > peak:
                peak = allocated + extra
            continue
        passing = call >= count
        id = call - count if passing else call
        size = rounded[id]
        if not size:
            if allocated + extra > peak:
                peak = allocated + extra
            continue
        pool = small if size <= SMALL_SIZE else large
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
        splits = rest > SMALL_SIZE or (rest and pool is small)
        if passing:  # what is split off is merged again: the pool stays as it is
            if not splits:
                size = whole
            blocks[id] = size
            if allocated + size + extra > peak:
                peak, highest = allocated + size + extra, id
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
        if allocated + extra > peak:
            peak, highest = allocated + extra, call
    # Blocks know their neighbours and their pool: without an end to that the cycle search of Python has to find them.
    small.clear()
    large.clear()
    for block in live:
        if block is not None:
            block[2] = block[3] = None
    return Served(Peaks(peak, reserved), small_segments * SMALL_BUFFER, blocks, opened, highest)
