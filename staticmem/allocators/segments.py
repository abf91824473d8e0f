"""What the allocator works on: blocks of segments, its two pools of free blocks, and the driver under it.

Expandable segments: one address range for each pool and stream, to which memory is mapped as it is needed.

Source: c10/cuda/CUDACachingAllocator.cpp, Note [Expandable Segments], `ExpandableSegment`, `find_expandable_block`,
`map_block`, `try_allocate_expandable_block`, `unmap_block`.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from staticmem.allocators.result import SegmentEvent
from staticmem.allocators.settings import ROUND_LARGE, Layout


class Block:
    """A piece of a segment. `prev` and `next` are its neighbours there, None at the segment's ends.

    `reservation` is the address range of an expandable segment that it belongs to, else None. `mapped` is False for
    the part of such a range that has no memory behind it. `placement` is the index of the allocation that it serves.
    """

    __slots__ = "address age allocated mapped next placement pool prev reservation size stream".split()

    def __init__(self, address: int, size: int, stream: int, pool: Pool) -> None:
        self.address, self.size, self.stream, self.pool = address, size, stream, pool
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.mapped = True
        self.reservation: Reservation | None = None
        self.placement = -1
        self.age = 0  # searches of the pool when it was freed: gc_count_base

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Puts the block between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class Reservation:
    """The address space of an expandable segment: `size` bytes in pages of `page` bytes."""

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, size: int, page: int) -> None:
        self.address, self.size, self.page = address, size, page


Free = list[tuple[int, int, Block]]


class Pool:
    """Free blocks of the small or of the large pool, for each stream in the order of (size, address).

    `std::set<Block*, BlockComparatorSize>` of c10/cuda/CUDACachingAllocator.cpp, which orders by stream first.
    """

    __slots__ = ("free", "searches", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: dict[int, Free] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}  # by address; expandable segments only
        self.searches = 0  # get_free_blocks_call_count

    def of(self, stream: int) -> Free:
        free = self.free.get(stream)
        if free is None:
            free = self.free[stream] = []
        return free

    def insert(self, block: Block) -> None:
        block.age = self.searches
        insort(self.of(block.stream), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        free = self.free[block.stream]
        del free[bisect_left(free, (block.size, block.address))]

    def insert_unmapped(self, block: Block) -> None:
        insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        unmapped = self.unmapped[block.stream]
        del unmapped[bisect_left(unmapped, (block.address,))]

    def merge(self, block: Block, neighbour: Block | None) -> None:
        """`try_merge_blocks`: a free neighbour that is mapped as the block is becomes part of it."""
        if neighbour is None or neighbour.allocated or neighbour.mapped is not block.mapped:
            return
        if neighbour.mapped:
            self.remove(neighbour)
        else:
            self.remove_unmapped(neighbour)
        if block.prev is neighbour:
            block.address = neighbour.address
            block.splice(neighbour.prev, block.next)
        else:
            block.splice(block.prev, neighbour.next)
        block.size += neighbour.size


class Driver:
    """Hands out memory as `cudaMalloc` and `cuMemCreate` do: `capacity` bytes at most, of a device of `total`.

    `history` has what was taken and given back, each with the `time` of the event that caused it.
    """

    __slots__ = ("capacity", "history", "layout", "number", "offset", "reserved", "time", "total")

    def __init__(self, capacity: int | None, total: int | None, layout: Layout) -> None:
        self.capacity, self.layout = capacity, layout
        self.total = capacity if total is None else total
        self.reserved = self.number = self.offset = self.time = 0
        self.history: list[SegmentEvent] = []

    def take(self, size: int) -> bool:
        """Whether `size` more bytes are there; counts them if so."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        return True

    def address(self, size: int) -> int:
        """Where the next segment or reservation lies. Addresses are never used again: two segments never meet."""
        address = self.layout(self.number, self.offset, size)
        self.number += 1
        self.offset += -(-size // ROUND_LARGE) * ROUND_LARGE
        return address

    def record(self, action: str, address: int, size: int, block: Block) -> None:
        """Adds to the history; `action` is one of `SegmentEvent`."""
        self.history.append(SegmentEvent(self.time, action, address, size, block.stream, block.pool.small))


ADDRESS_SPACE = 1 << 39  # bytes of a reservation where memory has no end: more than any device has


def best_fit(free: Free, at: int) -> int:
    """The free block to take: one that more memory can follow counts with all that could be mapped behind it."""
    while free[at][2].reservation is not None and at + 1 < len(free):
        if _could_be(free[at + 1][2]) >= _could_be(free[at][2]):
            break
        at += 1
    return at


def _could_be(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def try_allocate(driver: Driver, pool: Pool, size: int, stream: int, page: int) -> Block | None:
    """A free block of at least `size` bytes, made by mapping pages; None where the driver has no more.

    A request above a whole reservation, which is larger than the device, runs out of memory while that is mapped.
    """
    block = _find(driver, pool, size, stream, page)
    if not block.mapped and not _map(driver, block, min(block.size, size)):
        return None
    while block.size < size:
        after = block.next
        if after is None or not _map(driver, after, min(size - block.size, after.size)):
            return None
        block = after
    pool.remove(block)
    return block


def _find(driver: Driver, pool: Pool, size: int, stream: int, page: int) -> Block:
    """The block at the lowest address from which `size` bytes are free or can be mapped; a new reservation, if none."""
    for _, block in pool.unmapped.get(stream, ()):
        before = block.prev
        start = before if before is not None and not before.allocated else block
        room, piece = 0, start
        while piece is not None and not piece.allocated and room < size:
            room += piece.size
            piece = piece.next  # type: ignore[assignment]
        if room >= size:
            return start
    if driver.capacity is None or driver.total is None:
        wanted = max(ADDRESS_SPACE, size)  # no end of memory: no request may find the range too short
    else:
        wanted = driver.total + driver.total // 8
    whole = -(-wanted // page) * page
    address = driver.address(whole + ROUND_LARGE)  # a gap behind it: two reservations never touch
    reservation = Reservation(address, whole, page)
    block = Block(address, whole, stream, pool)
    block.mapped = False
    block.reservation = reservation
    pool.insert_unmapped(block)
    return block


def _map(driver: Driver, block: Block, size: int) -> bool:
    """Maps whole pages at the block's start, enough for `size` bytes, and makes them a free block."""
    reservation, pool = block.reservation, block.pool
    assert reservation is not None
    mapped = -(-size // reservation.page) * reservation.page
    if not driver.take(mapped):
        return False
    driver.record("segment_map", block.address, mapped, block)
    pool.remove_unmapped(block)
    block.mapped = True
    if mapped < block.size:
        rest = Block(block.address + mapped, block.size - mapped, block.stream, pool)
        rest.mapped = False
        rest.reservation = reservation
        rest.splice(block, block.next)
        pool.insert_unmapped(rest)
        block.size = mapped
    pool.merge(block, block.prev)
    pool.merge(block, block.next)
    pool.insert(block)
    return True


def unmap(driver: Driver, block: Block) -> None:
    """Gives back the whole pages inside a free block; what is left of it on either side stays free."""
    reservation, pool = block.reservation, block.pool
    assert reservation is not None
    base, page = reservation.address, reservation.page
    low = base + -(-(block.address - base) // page) * page
    high = base + (block.address + block.size - base) // page * page
    if low >= high:
        return
    pool.remove(block)
    end = block.address + block.size
    for address, size, before in ((block.address, low - block.address, True), (high, end - high, False)):
        if size > 0:
            rest = Block(address, size, block.stream, pool)
            rest.reservation = reservation
            rest.splice(block.prev if before else block, block if before else block.next)
            pool.insert(rest)
    block.address, block.size, block.mapped = low, high - low, False
    pool.merge(block, block.prev)
    pool.merge(block, block.next)
    pool.insert_unmapped(block)
    driver.reserved -= high - low
    driver.record("segment_unmap", low, high - low, block)
    if not block.is_split:  # the whole range is empty: release_expandable_segment
        pool.remove_unmapped(block)
