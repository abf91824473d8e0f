"""PyTorch's CUDA caching allocator, replayed over a sequence of allocations and releases.

Source: c10/cuda/CUDACachingAllocator.cpp of pytorch, class DeviceCachingAllocator; the functions here carry the names
of its methods. The private pool of CUDA graphs (`PrivatePool`) is a stream of its own, GRAPH_POOL, whose segments stay
when cached memory goes back: recorded graphs have their addresses. Not simulated: events of other streams
(`record_stream`), and the `FreeMemoryCallback`s that nothing registers in a plain process.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Mapping, Sequence

from staticmem.allocators import segments
from staticmem.allocators.process import EMPTY_CACHE, GRAPH_POOL, RELEASE, Event, Fallbacks
from staticmem.allocators.result import OutOfMemory, Replay
from staticmem.allocators.segments import Block, Driver, Pool
from staticmem.allocators.settings import (
    DEFAULTS,
    MIN_BLOCK,
    SMALL_BUFFER,
    SMALL_SIZE,
    UNLIMITED,
    Layout,
    Settings,
    ascending,
)

NO_FALLBACKS: Mapping[int, Fallbacks] = {}
NONE = Fallbacks(())


def simulate(
    events: Iterable[Event],
    settings: Settings = DEFAULTS,
    capacity: int | None = None,
    *,
    total: int | None = None,
    fallbacks: Mapping[int, Fallbacks] = NO_FALLBACKS,
    layout: Layout = ascending,
) -> Replay:
    """Serves the events in their order.

    Args:
        capacity: bytes that the driver can hand out to this process (the device less context and other processes);
            None: as much as is asked for.
        total: bytes of the whole device, which `per_process_memory_fraction` is a fraction of; default `capacity`.
        fallbacks: for the id of an allocation, sizes to try if it fails, as a convolution takes its next plan where
            one's workspace does not fit. PyTorch keeps the plan that ran for all convolutions of the same sizes
            (aten/src/ATen/native/cudnn/Conv_v8.cpp, `benchmark_cache`).
        layout: where the driver puts segments.

    Returns:
        The replay. It ends at the first allocation that fails (`Replay.oom`).

    Raises:
        ValueError: an id is allocated while it lives, or released while it does not.
    """
    return _Allocator(settings, capacity, total, layout).run(events, fallbacks)


class _Allocator:
    def __init__(self, settings: Settings, capacity: int | None, total: int | None, layout: Layout) -> None:
        self.settings = settings
        self.driver = Driver(capacity, total, layout)
        self.small = Pool(small=True)
        self.large = Pool(small=False)
        self.retries = self.returned = 0
        self.limit: int | None = None  # allowed_memory_maximum
        if settings.per_process_memory_fraction < 1 and self.driver.total is not None:
            self.limit = int(settings.per_process_memory_fraction * self.driver.total)
        self.collects = self.limit is not None and settings.garbage_collection_threshold > 0

    def run(self, events: Iterable[Event], fallbacks: Mapping[int, Fallbacks]) -> Replay:
        """The hot loop: what a free block serves is done here, the rest in methods."""
        settings, small_pool, large_pool, driver = self.settings, self.small, self.large, self.driver
        plain = settings.rounds_plainly
        simple = not settings.expandable_segments and settings.max_split_size == UNLIMITED and not self.collects
        live: dict[int, Block | None] = {}
        peak_allocated = peak_reserved = peak_allocated_at = peak_reserved_at = 0
        rows: list[list[int]] = []
        allocated_line, reserved_line = array("q"), array("q")
        took_less: list[tuple[int, int]] = []
        kept: dict[Hashable, int] = {}  # of plans: what their last request took
        allocated = 0
        for time, (key, nbytes, stream) in enumerate(events):
            if kept and nbytes > 0 and key in fallbacks and fallbacks[key].plan in kept:
                nbytes = kept[fallbacks[key].plan]
                took_less.append((key, nbytes))
            if nbytes == RELEASE:
                if key not in live:
                    raise ValueError(f"event {time} releases {key}, which is not alive")
                block = live.pop(key)
                if block is not None:
                    allocated -= block.size
                    rows[block.placement][-1] = time
                    free_block(block)
            elif nbytes == EMPTY_CACHE:
                driver.time = time
                self.release_cached_blocks()
            elif key in live:
                raise ValueError(f"event {time} allocates {key}, which is alive")
            elif nbytes == 0:
                live[key] = None  # an empty tensor has no storage: allocate(0) does not reach the allocator
            else:
                size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK if plain else settings.round_size(nbytes)
                pool = small_pool if size <= SMALL_SIZE else large_pool
                if simple:  # get_free_block: the smallest that fits, of equals the one at the lowest address
                    free = pool.of(stream)
                    at = bisect_left(free, (size,))
                    block = free.pop(at)[2] if at < len(free) else None
                else:
                    block = self.get_free_block(pool, size, stream)
                if block is None:
                    driver.time = time
                    wanted = nbytes
                    sizes, plan = fallbacks.get(key, NONE)
                    block, nbytes, size = self.miss(nbytes, size, stream, sizes)
                    if driver.reserved > peak_reserved:
                        peak_reserved, peak_reserved_at = driver.reserved, time
                    if nbytes != wanted:
                        took_less.append((key, nbytes))
                        if plan is not None:
                            kept[plan] = nbytes
                if block is not None:
                    block = self.alloc_found_block(block, size)
                    block.placement = len(rows)
                    rows.append([key, block.address, block.size, nbytes, stream, time, -1])
                    allocated += block.size
                    if allocated > peak_allocated:
                        peak_allocated, peak_allocated_at = allocated, time
                elif nbytes:
                    oom = self.out_of_memory(key, nbytes, size, allocated)
                    break
                live[key] = block
            allocated_line.append(allocated)
            reserved_line.append(driver.reserved)
        else:
            oom = None
        peaks = peak_allocated, peak_allocated_at, peak_reserved, peak_reserved_at
        history, smaller = tuple(driver.history), tuple(took_less)
        return Replay(*peaks, self.retries, self.returned, oom, history, smaller, allocated_line, reserved_line, rows)

    # -- serving a request ---------------------------------------------------------------------------------------

    def pool_of(self, size: int) -> Pool:
        return self.small if size <= SMALL_SIZE else self.large

    def get_free_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """The best fitting free block, taken out of the pool; None where there is none, or none that is allowed."""
        if self.collects and stream != GRAPH_POOL:  # `get_free_blocks_call_count`, of which a private pool has its own
            pool.searches += 1
        free = pool.of(stream)
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        if self.settings.expandable_segments:
            at = segments.best_fit(free, at)
        block = free[at][2]
        max_split = self.settings.max_split_size
        if size < max_split <= block.size:
            return None  # an oversize block serves no small request
        if size >= max_split and block.size >= size + self.settings.max_non_split_rounding_size:
            return None
        del free[at]
        return block

    def miss(self, nbytes: int, size: int, stream: int, smaller: Sequence[int]) -> tuple[Block | None, int, int]:
        """A block from the driver, else one for the first of the smaller sizes that fits; bytes asked and rounded.

        Zero bytes without a block: the caller does without.
        """
        block = self.new_block(self.pool_of(size), size, stream)
        for other in smaller if block is None else ():
            nbytes = other
            if nbytes == 0:
                return None, 0, 0
            size = self.settings.round_size(nbytes)
            pool = self.pool_of(size)
            block = self.get_free_block(pool, size, stream) or self.new_block(pool, size, stream)
            if block is not None:
                break
        return block, nbytes, size

    def new_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Memory from the driver; before it gives up, what is cached goes back to it (the second half of `malloc`)."""
        if self.collects:
            self.garbage_collect_cached_blocks()
        block = self.alloc_block(pool, size, stream)
        reserved = self.driver.reserved
        if block is None and self.release_available_cached_blocks(pool, size, stream):
            self.returned += reserved - self.driver.reserved
            block = self.alloc_block(pool, size, stream)
        if block is None:
            reserved = self.driver.reserved
            self.release_cached_blocks()
            self.returned += reserved - self.driver.reserved
            self.retries += 1
            block = self.alloc_block(pool, size, stream)
        return block

    def alloc_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A new segment for a rounded request, or more of an expandable one; None where the driver has no more."""
        nbytes = self.settings.allocation_size(size)
        if self.limit is not None and self.driver.reserved + nbytes > self.limit:
            return None
        if self.settings.expandable_segments:
            page = SMALL_BUFFER if pool.small else self.settings.large_segment_size
            return segments.try_allocate(self.driver, pool, size, stream, page)
        if not self.driver.take(nbytes):
            return None
        block = Block(self.driver.address(nbytes), nbytes, stream, pool)
        self.driver.record("segment_alloc", block.address, nbytes, block)
        return block

    def alloc_found_block(self, block: Block, size: int) -> Block:
        """Hands out a block, of which a remainder that is large enough goes back to the pool (`should_split`)."""
        remaining = block.size - size
        pool = block.pool
        if remaining < MIN_BLOCK or not (
            pool.small
            or self.settings.expandable_segments
            or (remaining > SMALL_SIZE and size < self.settings.max_split_size)
        ):
            block.allocated = True
            return block
        taken = Block(block.address, size, block.stream, pool)
        taken.allocated = True
        taken.reservation = block.reservation
        taken.prev = before = block.prev
        taken.next = block
        if before is not None:
            before.next = taken
        block.prev = taken
        block.address += size
        block.size = remaining
        block.age = pool.searches
        insort(pool.of(block.stream), (remaining, block.address, block))
        return taken

    # -- giving memory back --------------------------------------------------------------------------------------

    def release_block(self, block: Block) -> None:
        """`cudaFree` of a segment that is one free block."""
        block.pool.remove(block)
        self.driver.reserved -= block.size
        self.driver.record("segment_free", block.address, block.size, block)

    def release_cached_blocks(self) -> None:
        """Every segment without a live block, and every empty page of expandable ones, goes back."""
        for pool in (self.large, self.small):
            free = [e[2] for stream in sorted(pool.free) if stream != GRAPH_POOL for e in pool.free[stream]]
            for block in free:
                if block.reservation is None and not block.is_split:
                    self.release_block(block)
            for block in free:
                if block.reservation is not None:
                    segments.unmap(self.driver, block)

    def release_available_cached_blocks(self, pool: Pool, size: int, stream: int) -> bool:
        """With max_split_size: the smallest oversize block that is large enough, else the largest ones together."""
        max_split = self.settings.max_split_size
        if max_split == UNLIMITED:
            return False
        wanted = max(size, max_split)
        free = pool.of(stream)
        at = bisect_left(free, (wanted,))
        if at < len(free):
            self.release_block(free[at][2])
            return True
        released = 0
        while at > 0 and released < wanted and free[at - 1][0] >= max_split:
            at -= 1
            released += free[at][0]
            self.release_block(free[at][2])
        return released >= wanted

    def garbage_collect_cached_blocks(self) -> None:
        """Above the threshold: free segments of the large pool go back, those unused for longest first."""
        assert self.limit is not None
        target = self.driver.reserved - int(self.settings.garbage_collection_threshold * self.limit)
        if target <= 0:
            return
        searches = self.large.searches
        streams = [stream for stream in sorted(self.large.free) if stream != GRAPH_POOL]
        blocks = [entry[2] for stream in streams for entry in self.large.free[stream]]
        blocks = [block for block in blocks if not block.is_split and block.reservation is None]
        reclaimed, total, freed = 0, sum(searches - block.age for block in blocks), True
        while blocks and reclaimed < target and freed:
            threshold = total / len(blocks)
            old = [block for block in blocks if searches - block.age >= threshold]
            freed = bool(old)
            blocks = [block for block in blocks if searches - block.age < threshold]
            for block in old:
                reclaimed += block.size
                total -= searches - block.age
                self.release_block(block)

    def out_of_memory(self, key: int, nbytes: int, size: int, allocated: int) -> OutOfMemory:
        pools = (self.small, self.large)
        largest = max((free[-1][0] for pool in pools for free in pool.free.values() if free), default=0)
        reserved, segment = self.driver.reserved, self.settings.allocation_size(size)
        bounds = [bound for bound in (self.driver.capacity, self.limit) if bound is not None]
        return OutOfMemory(self.driver.time, key, nbytes, segment, allocated, reserved, min(bounds) - reserved, largest)


def free_block(block: Block) -> None:
    """A block goes back to its pool, one with its free neighbours."""
    block.allocated = False
    pool = block.pool
    for neighbour in (block.prev, block.next):
        if neighbour is not None and not neighbour.allocated:
            pool.merge(block, neighbour)
    pool.insert(block)
