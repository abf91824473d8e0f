"""The caching allocator once more, as plainly as it can be said: a list of segments, each a list of blocks; every
search is a walk over all of them. For tests that compare; without expandable segments.

Written from c10/cuda/CUDACachingAllocator.cpp (`malloc`, `get_free_block`, `should_split`, `free_block`,
`release_available_cached_blocks`, `release_cached_blocks`, `garbage_collect_cached_blocks`), not from staticmem's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from staticmem.allocators.process import EMPTY_CACHE, GRAPH_POOL, RELEASE, Event
from staticmem.allocators.settings import Settings

MIB = 2**20


def alloc(id: int, nbytes: int, stream: int = 0) -> Event:
    return Event(id, nbytes, stream)


def free(id: int) -> Event:
    return Event(id, RELEASE)


@dataclass(eq=False)
class Block:
    """`id` is the allocation that it serves, None while it is free; `base` what its pool had been searched by then."""

    size: int
    id: int | None = None
    base: int = 0


@dataclass(eq=False)
class Segment:
    address: int
    stream: int
    small: bool
    blocks: list[Block]

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def unused(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].id is None

    def free(self) -> Iterator[tuple[int, int, Block]]:
        at = self.address
        for block in self.blocks:
            if block.id is None:
                yield block.size, at, block
            at += block.size


@dataclass
class Reference:
    """`served`: for each event the bytes allocated and reserved behind it; `places`: address and size of each id."""

    settings: Settings
    capacity: int | None = None
    start: int = 0
    segments: list[Segment] = field(default_factory=list)
    searches: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    served: list[tuple[int, int]] = field(default_factory=list)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    failed: int | None = None
    retries: int = 0
    end: int = 0

    def run(self, events: Sequence[Event]) -> Reference:
        for event in events:
            if event.nbytes == RELEASE:
                self.release(event.id)
            elif event.nbytes == EMPTY_CACHE:
                self.empty()
            elif event.nbytes and not self.malloc(event):
                self.failed = event.id
                break
            live = sum(b.size for s in self.segments for b in s.blocks if b.id is not None)
            self.served.append((live, self.reserved))
        return self

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def limit(self) -> int | None:
        if self.capacity is None or self.settings.per_process_memory_fraction == 1:
            return None
        return int(self.capacity * self.settings.per_process_memory_fraction)

    @property
    def collects(self) -> bool:
        return self.limit is not None and self.settings.garbage_collection_threshold > 0

    def malloc(self, event: Event) -> bool:
        size = self.settings.round_size(event.nbytes)
        small = size <= MIB
        found = self.find(size, event.stream, small)
        if found is None:
            if self.collects:
                self.collect()
            found = self.open(size, event.stream, small)
        if found is None and self.give_oversize_back(size, event.stream, small):
            found = self.open(size, event.stream, small)
        if found is None:
            self.empty()
            self.retries += 1
            found = self.open(size, event.stream, small)
        if found is None:
            return False
        segment, address, block = found
        rest, longest = block.size - size, self.settings.max_split_size
        if rest >= 512 if small else rest > MIB and size < longest:
            block.size = size
            segment.blocks.insert(segment.blocks.index(block) + 1, Block(rest, None, self.searches[small]))
        block.id = event.id
        self.places[event.id] = (address, block.size)
        return True

    def find(self, size: int, stream: int, small: bool) -> tuple[Segment, int, Block] | None:
        if self.collects and stream != GRAPH_POOL:  # a private pool counts for itself
            self.searches[small] += 1
        fits = [
            (have, address, segment, block)
            for segment in self.segments
            for have, address, block in segment.free()
            if (segment.stream, segment.small) == (stream, small) and have >= size
        ]
        if not fits:
            return None
        have, address, segment, block = min(fits, key=lambda fit: fit[:2])
        longest = self.settings.max_split_size
        oversize = size >= longest
        if not oversize and have >= longest:
            return None
        if oversize and have >= size + self.settings.max_non_split_rounding_size:
            return None
        return segment, address, block

    def open(self, size: int, stream: int, small: bool) -> tuple[Segment, int, Block] | None:
        if small:
            whole = 2 * MIB
        elif size < 10 * MIB:
            whole = self.settings.large_segment_size
        else:
            whole = -(-size // (2 * MIB)) * 2 * MIB
        for bound in (self.capacity, self.limit):
            if bound is not None and self.reserved + whole > bound:
                return None
        block = Block(whole)
        segment = Segment(self.start + self.end, stream, small, [block])
        self.end += -(-whole // (2 * MIB)) * 2 * MIB
        self.segments.append(segment)
        return segment, segment.address, block

    def release(self, id: int) -> None:
        for segment in self.segments:
            for block in segment.blocks:
                if block.id == id:
                    block.id, block.base = None, self.searches[segment.small]
                    self.merge(segment, block)
                    return

    @staticmethod
    def merge(segment: Segment, block: Block) -> None:
        blocks = segment.blocks
        at = blocks.index(block)
        low = at - 1 if at and blocks[at - 1].id is None else at
        high = at + 1 if at + 1 < len(blocks) and blocks[at + 1].id is None else at
        blocks[low : high + 1] = [Block(sum(b.size for b in blocks[low : high + 1]), None, block.base)]

    def empty(self) -> None:
        self.segments = [s for s in self.segments if not s.unused or s.stream == GRAPH_POOL]

    def give_oversize_back(self, size: int, stream: int, small: bool) -> bool:
        longest = self.settings.max_split_size
        wanted = max(size, longest)
        of_pool = [s for s in self.segments if (s.stream, s.small) == (stream, small)]
        free = sorted(
            ((have, address, s) for s in of_pool for have, address, _ in s.free()), key=lambda entry: entry[:2]
        )
        enough = [segment for have, _, segment in free if have >= wanted]
        if enough:
            self.segments.remove(enough[0])
            return True
        released = 0
        for have, _, segment in reversed(free):
            if released >= wanted or have < longest:
                break
            released += have
            self.segments.remove(segment)
        return released >= wanted

    def collect(self) -> None:
        limit, searches = self.limit, self.searches[False]
        assert limit is not None
        target = self.reserved - int(limit * self.settings.garbage_collection_threshold)
        reclaimed = 0
        theirs = [s for s in self.segments if s.unused and not s.small and s.stream != GRAPH_POOL]
        ages = {id(s): searches - s.blocks[0].base for s in theirs}
        while reclaimed < target and ages:
            mean = sum(ages.values()) / len(ages)
            old = [s for s in self.segments if ages.get(id(s), -1) >= mean]
            for segment in old:
                reclaimed += segment.size
                del ages[id(segment)]
                self.segments.remove(segment)
