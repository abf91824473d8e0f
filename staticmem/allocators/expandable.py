"""Expandable segments: one address range for each pool and stream, to which memory is mapped as it is needed.

Source: c10/cuda/CUDACachingAllocator.cpp, Note [Expandable Segments], `ExpandableSegment`, `find_expandable_block`,
`map_block`, `try_allocate_expandable_block`, `unmap_block`.
"""

from __future__ import annotations

from staticmem.allocators.segments import Block, Driver, Free, Pool, Reservation
from staticmem.allocators.settings import ROUND_LARGE

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
