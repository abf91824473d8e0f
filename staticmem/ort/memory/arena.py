"""The arena of the ONNX Runtime (BFC: best fit with coalescing), and the memory pattern: one block of it for all
intermediate values of a run, planned from the run before. Only sizes and neighbours, no memory.

Source: onnxruntime/core/framework/bfc_arena.{h,cc}, mem_pattern_planner.h (best fit into gaps by offset).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from staticmem.ort.options import STRATEGIES

ALIGNMENT = 256  # kMinAllocationSize: requests are rounded up to it
INITIAL_CHUNK = 1 << 20  # DEFAULT_INITIAL_CHUNK_SIZE_BYTES
MAX_DEAD = 128 << 20  # DEFAULT_MAX_DEAD_BYTES_PER_CHUNK: a chunk with this much to spare is split
MAX_EXTENSION = 1 << 30  # DEFAULT_MAX_POWER_OF_TWO_EXTEND_BYTES


class ArenaFullError(Exception):
    """The limit of the arena is reached. `needed` are the bytes that were asked for, `left` those that it may take."""

    def __init__(self, needed: int, left: int) -> None:
        super().__init__(f"{needed} bytes asked for, {left} left")
        self.needed, self.left = needed, left


@dataclass(slots=True, eq=False)
class Chunk:
    """A piece of a region. `requested` is 0 while it is free."""

    address: int
    size: int
    requested: int = 0
    before: Chunk | None = None
    after: Chunk | None = None


class Arena:
    """Allocates and frees by handle; counts what a session's statistics count. All sizes are in bytes.

    Args:
        strategy: how it grows, one of `STRATEGIES`.
        limit: the most it may hold (`gpu_mem_limit`), None for no limit. It stands for the arena alone.
    """

    def __init__(self, strategy: str = "kNextPowerOfTwo", limit: int | None = None) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"{strategy}: one of {', '.join(STRATEGIES)}")
        self._doubles = strategy == "kNextPowerOfTwo"
        self._limit = limit
        self._next = _round(min(limit, INITIAL_CHUNK) if limit is not None else INITIAL_CHUNK)
        self._free: list[tuple[int, int]] = []  # (size, address), as the bins order them
        self._free_chunks: dict[int, Chunk] = {}
        self._top = 0
        self.held = 0
        self.reserved = 0
        self.requested = 0
        self.in_use = 0
        self.peak_in_use = 0
        self.regions: list[int] = []

    def reserve(self, size: int) -> None:
        """Takes memory beside the regions, as for initializers. It is never used for anything else."""
        self.reserved += size
        self.held += size
        self.requested += size
        self.in_use += size
        self.peak_in_use = max(self.peak_in_use, self.in_use)

    def allocate(self, size: int) -> Chunk | None:
        """A chunk for a request, None for a request of no bytes.

        Raises:
            ArenaFullError: the limit does not allow it.
        """
        if size <= 0:
            return None
        rounded = _round(size)
        chunk = self._find(rounded)
        if chunk is None:
            self._extend(rounded)
            chunk = self._find(rounded)
            assert chunk is not None, "a region is as large as the request"
        if chunk.size >= 2 * rounded or chunk.size - rounded >= MAX_DEAD:
            self._split(chunk, rounded)
        chunk.requested = size
        self.requested += size
        self.in_use += chunk.size
        self.peak_in_use = max(self.peak_in_use, self.in_use)
        return chunk

    def free(self, chunk: Chunk | None) -> None:
        """Gives a chunk back and joins it with free neighbours of its region."""
        if chunk is None:
            return
        self.requested -= chunk.requested
        self.in_use -= chunk.size
        chunk.requested = 0
        after, before = chunk.after, chunk.before
        if after is not None and not after.requested:
            self._take(after)
            chunk.size += after.size
            chunk.after = after.after
            if after.after is not None:
                after.after.before = chunk
        if before is not None and not before.requested:
            self._take(before)
            before.size += chunk.size
            before.after = chunk.after
            if chunk.after is not None:
                chunk.after.before = before
            chunk = before
        self._put(chunk)

    @property
    def most_held(self) -> int:
        """The most that was held at any moment; regions are never given back."""
        return self.held

    def _find(self, rounded: int) -> Chunk | None:
        """The smallest free chunk that fits; of equal ones that with the lowest address."""
        index = bisect_left(self._free, (rounded, 0))
        if index == len(self._free):
            return None
        _, address = self._free.pop(index)
        return self._free_chunks.pop(address)

    def _split(self, chunk: Chunk, size: int) -> None:
        rest = Chunk(chunk.address + size, chunk.size - size, 0, chunk, chunk.after)
        if chunk.after is not None:
            chunk.after.before = rest
        chunk.after = rest
        chunk.size = size
        self._put(rest)

    def _extend(self, rounded: int) -> None:
        left = None if self._limit is None else max(self._limit - self.held, 0) // ALIGNMENT * ALIGNMENT
        if left is not None and rounded > left:
            raise ArenaFullError(rounded, left)
        size = rounded
        if self._doubles:
            grown = rounded > self._next
            while rounded > self._next:
                self._next *= 2
            size = self._next if left is None else min(self._next, left)
            if not grown:
                self._next = self._next * 2 if self._next * 2 < MAX_EXTENSION else MAX_EXTENSION
        self.held += size
        self.regions.append(size)
        self._put(Chunk(self._top, size))
        self._top += size + ALIGNMENT  # regions are never neighbours

    def _put(self, chunk: Chunk) -> None:
        insort(self._free, (chunk.size, chunk.address))
        self._free_chunks[chunk.address] = chunk

    def _take(self, chunk: Chunk) -> None:
        del self._free[bisect_left(self._free, (chunk.size, chunk.address))]
        del self._free_chunks[chunk.address]


class SystemMemory(Arena):
    """No arena (`enable_cpu_mem_arena` off): every request goes to the system and back. `held` is what is allocated."""

    def allocate(self, size: int) -> Chunk | None:
        """A chunk of exactly the request, None for a request of no bytes."""
        if size <= 0:
            return None
        self.requested += size
        self.in_use += size
        self.held += size
        self.peak_in_use = max(self.peak_in_use, self.in_use)
        return Chunk(0, size, size)

    def free(self, chunk: Chunk | None) -> None:
        """Gives a chunk back to the system."""
        if chunk is None:
            return
        self.requested -= chunk.requested
        self.in_use -= chunk.size
        self.held -= chunk.size
        chunk.requested = 0

    @property
    def most_held(self) -> int:
        return self.peak_in_use


def _round(size: int) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@dataclass(slots=True)
class _Block:
    name: str
    offset: int
    size: int


class PatternPlanner:
    """Traces the allocations of a run. `peak` is the size of the block, in bytes."""

    def __init__(self) -> None:
        self._live: list[_Block] = []  # by offset
        self.peak = 0
        self.offsets: dict[str, int] = {}

    def allocate(self, name: str, size: int) -> None:
        """Places a value of `size` bytes (aligned already) into the gap that fits best, else behind the last one."""
        if size <= 0:
            return
        at, position, waste, current = 0, len(self._live), -1, 0
        if self._live:
            at = self._live[-1].offset + self._live[-1].size
        for index, block in enumerate(self._live):
            gap = block.offset - current
            if gap >= size and (waste < 0 or gap - size < waste):
                at, position, waste = current, index, gap - size
            current = block.offset + block.size
        tail = self.peak - current
        if tail >= size and (waste < 0 or tail - size < waste):
            at, position = current, len(self._live)
        self._live.insert(position, _Block(name, at, size))
        self.offsets[name] = at
        self.peak = max(self.peak, at + size)

    def free(self, name: str) -> None:
        """Forgets a value; its place is a gap from now on."""
        for index, block in enumerate(self._live):
            if block.name == name:
                del self._live[index]
                return
