"""What a replay of the caching allocator gives: peaks, timelines, and its segments at any moment."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from staticmem.ir.record import record

if TYPE_CHECKING:
    import numpy as np


class SegmentEvent(NamedTuple):
    """Memory taken from the driver or given back. `action` is segment_alloc, segment_free, segment_map or
    segment_unmap (the names in PyTorch's snapshots); `time` is the index of the event that caused it."""

    time: int
    action: str
    address: int
    size: int
    stream: int
    small: bool

    @property
    def expandable(self) -> bool:
        return self.action in ("segment_map", "segment_unmap")

    @property
    def change(self) -> int:
        """Bytes that reserved grows by."""
        return self.size if self.action in ("segment_alloc", "segment_map") else -self.size


class Placement(NamedTuple):
    """Where an allocation lay: [address, address + size), over the events [born, died); died is -1 at the end."""

    id: int
    address: int
    size: int
    requested: int
    stream: int
    born: int
    died: int

    def alive(self, time: int) -> bool:
        return self.born <= time and (self.died < 0 or time < self.died)


class BlockState(NamedTuple):
    """A block of a segment; `id` is the allocation that it serves, None for a free one."""

    address: int
    size: int
    requested: int
    id: int | None


@record(frozen=True, slots=True)
class SegmentState:
    """A segment with its blocks in the order of addresses."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[BlockState, ...]

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self.blocks if block.id is not None)


@record(frozen=True, slots=True)
class Fragmentation:
    """Reserved memory at one moment, in bytes: reserved = requested + rounding + releasable + stuck.

    `rounding` is what blocks are larger than requests. `releasable` is in segments without a live block, which
    `empty_cache()` gives back; `stuck` is free beside live blocks; `largest_free` is the largest free block.
    """

    reserved: int
    allocated: int
    requested: int
    releasable: int
    stuck: int
    largest_free: int

    @property
    def rounding(self) -> int:
        return self.allocated - self.requested

    @property
    def share(self) -> float:
        """The part of reserved that no live block has."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0


@record(frozen=True, slots=True)
class OutOfMemory:
    """The allocation that failed, after everything that can be given back was: sizes in bytes.

    `segment` is what the driver was asked for, `free` what it had left; `largest_cached` is the largest free block in
    the allocator's hands, which was too small or too large to serve the request.
    """

    time: int
    id: int
    requested: int
    segment: int
    allocated: int
    reserved: int
    free: int
    largest_cached: int


@record(frozen=True)
class Replay:
    """A sequence of events served by the allocator.

    `allocated[t]` and `reserved[t]` are bytes after event t: what `torch.cuda.memory_allocated()` and
    `memory_reserved()` say. `peak_*_at` are the events that first reach the peaks. `retries` counts how often
    everything cached was given back to serve a request (`num_alloc_retries`), `returned` the bytes that were.
    """

    peak_allocated: int
    peak_allocated_at: int
    peak_reserved: int
    peak_reserved_at: int
    retries: int
    returned: int
    oom: OutOfMemory | None
    segment_events: tuple[SegmentEvent, ...]
    fallbacks: tuple[tuple[int, int], ...]  # (id, bytes): allocations that took less than they asked for
    _allocated: array[int]
    _reserved: array[int]
    _placements: list[list[int]]

    def __len__(self) -> int:
        return len(self._allocated)

    @property
    def allocated(self) -> np.ndarray:
        """Bytes of live blocks after each event (int64)."""
        import numpy as np

        return np.asarray(self._allocated, dtype=np.int64)

    @property
    def reserved(self) -> np.ndarray:
        """Bytes taken from the driver after each event (int64)."""
        import numpy as np

        return np.asarray(self._reserved, dtype=np.int64)

    @property
    def addresses(self) -> np.ndarray:
        """The address map: rows (id, address, size, requested, stream, born, died) in order of birth (int64)."""
        import numpy as np

        return np.asarray(self._placements, dtype=np.int64).reshape(-1, len(Placement._fields))

    def placements(self) -> Iterator[Placement]:
        """Where each allocation lay, in order of birth."""
        return (Placement(*row) for row in self._placements)

    def peak_between(self, start: int, end: int) -> tuple[int, int]:
        """The largest allocated and reserved bytes after the events of [start, end)."""
        return max(self._allocated[start:end], default=0), max(self._reserved[start:end], default=0)

    def segments(self, time: int | None = None) -> tuple[SegmentState, ...]:
        """The segments after event `time` (default: where reserved peaks), by address."""
        time = self.peak_reserved_at if time is None else time
        live = sorted((p.address, p) for p in self.placements() if p.alive(time))
        states = []
        position = 0
        for address, size, stream, small, expandable in self._ranges(time):
            while position < len(live) and live[position][0] < address:  # pragma: no cover - blocks lie in segments
                position += 1
            blocks: list[BlockState] = []
            at, end = address, address + size
            while position < len(live) and live[position][0] < end:
                p = live[position][1]
                if p.address > at:
                    blocks.append(BlockState(at, p.address - at, 0, None))
                blocks.append(BlockState(p.address, p.size, p.requested, p.id))
                at = p.address + p.size
                position += 1
            if at < end:
                blocks.append(BlockState(at, end - at, 0, None))
            states.append(SegmentState(address, size, stream, small, expandable, tuple(blocks)))
        return tuple(states)

    def _ranges(self, time: int) -> list[tuple[int, int, int, bool, bool]]:
        """(address, size, stream, small, expandable) of memory held after event `time`, by address."""
        held: dict[int, SegmentEvent] = {}
        for event in self.segment_events:
            if event.time > time:
                break
            if event.action == "segment_unmap":
                _cut(held, event)
            elif event.action == "segment_free":
                del held[event.address]
            else:
                held[event.address] = event
        ranges: list[tuple[int, int, int, bool, bool]] = []
        for event in sorted(held.values(), key=lambda e: e.address):
            if event.expandable and ranges and ranges[-1][4] and sum(ranges[-1][:2]) == event.address:
                address, size = ranges[-1][:2]
                ranges[-1] = (address, size + event.size, event.stream, event.small, True)
            else:
                ranges.append((event.address, event.size, event.stream, event.small, event.expandable))
        return ranges

    def fragmentation(self, time: int | None = None) -> Fragmentation:
        """What reserved consists of after event `time` (default: where reserved peaks)."""
        time = self.peak_reserved_at if time is None else time
        reserved = allocated = requested = releasable = stuck = largest = 0
        for segment in self.segments(time):
            live = segment.allocated
            reserved += segment.size
            allocated += live
            requested += sum(block.requested for block in segment.blocks)
            largest = max(largest, max((b.size for b in segment.blocks if b.id is None), default=0))
            if live:
                stuck += segment.size - live
            else:
                releasable += segment.size
        return Fragmentation(reserved, allocated, requested, releasable, stuck, largest)


def _cut(held: dict[int, SegmentEvent], gone: SegmentEvent) -> None:
    """Takes the range of an unmapping out of the mapped ranges, which it may split."""
    low, high = gone.address, gone.address + gone.size
    for event in [e for e in held.values() if e.address < high and low < e.address + e.size]:
        del held[event.address]
        end = event.address + event.size
        if event.address < low:
            held[event.address] = event._replace(size=low - event.address)
        if end > high:
            held[high] = event._replace(address=high, size=end - high)
