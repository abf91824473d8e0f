"""What lies under the allocator: the device's memory, and the addresses at which segments come."""

from __future__ import annotations

from collections.abc import Callable

from staticmem.allocators.settings import ROUND_LARGE

BASE = 0x7F0000000000  # where CUDA's addresses lie on Linux; nothing but order depends on it
SLOT = 1 << 40  # bytes between two segments where they are not laid side by side: more than any device has
SLOTS = 1 << 16

# From the sizes of the segments before (in bytes) and the next one's number and size to its address.
Layout = Callable[[int, int, int], int]


def ascending(number: int, offset: int, size: int) -> int:
    """Each segment behind the one before: the deterministic layout. `offset` is the bytes taken so far."""
    return BASE + offset


def descending(number: int, offset: int, size: int) -> int:
    """Each segment in front of the one before."""
    return BASE - offset - size


def shuffled(seed: int) -> Layout:
    """Segments in an order that looks random and is the same for the same seed."""
    factor = (2654435761 * (2 * seed + 1)) | 1  # Knuth's multiplicative hash; odd, so that no two numbers collide

    def layout(number: int, offset: int, size: int) -> int:
        return BASE + (number * factor + seed) % SLOTS * SLOT

    return layout


class Driver:
    """Counts what `cudaMalloc` and `cuMemCreate` hand out: `capacity` bytes at most, of a device of `total`."""

    __slots__ = ("capacity", "layout", "number", "offset", "reserved", "total")

    def __init__(self, capacity: int | None, total: int | None, layout: Layout) -> None:
        self.capacity, self.layout = capacity, layout
        self.total = capacity if total is None else total
        self.reserved = 0
        self.number = 0
        self.offset = 0

    def take(self, size: int) -> bool:
        """Whether `size` more bytes are there; counts them if so."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        return True

    def address(self, size: int) -> int:
        """Where the next segment or reservation lies. Addresses are never used again: two segments never meet."""
        found = self.layout(self.number, self.offset, size)
        self.number += 1
        self.offset += -(-size // ROUND_LARGE) * ROUND_LARGE
        return found
