"""PyTorch's memory snapshots as plain values: what was allocated when, peaks, and the stack of each allocation.

Format: torch/csrc/cuda/memory_snapshot.cpp and torch/cuda/memory.py of pytorch (`_dump_snapshot`): `device_traces` is
a list of events for each device, `segments` what the allocator holds at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from staticmem.eager.trace import round_up
from staticmem.errors import UsageError
from staticmem.files import unreadable
from staticmem.validate import plain_pickle

FRAMES = 64  # of an allocation that are looked at
LARGEST = 1 << 50  # bytes: no card has more
# Events, and blocks of segments: a pickle names one list many times for two bytes each, so that their sums are bounded.
# A snapshot of a million events has some 300 MB.
MOST_EVENTS = 5_000_000
MOST_BLOCKS = 5_000_000
_GROWS = ("segment_alloc", "segment_map")
_SHRINKS = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Allocation:
    """A block: bytes as asked for, rounded up to 512; `born` and `died` are indices of events, None at the end.

    `frames` are (file, line, function), innermost first.
    """

    size: int
    born: int
    died: int | None
    frames: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Snapshot:
    """One device. `allocated` and `reserved` are bytes after each event.

    `before` is what was allocated when the recording began, which the events do not tell.
    """

    allocations: tuple[Allocation, ...]
    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    before: int

    @property
    def peak_allocated(self) -> tuple[int, int]:
        """Bytes, and the event that reached them."""
        return _peak(self.allocated)

    @property
    def peak_reserved(self) -> tuple[int, int]:
        return _peak(self.reserved)

    def alive(self, event: int) -> list[Allocation]:
        """What is allocated after an event, of what was recorded."""
        return [a for a in self.allocations if a.born <= event and (a.died is None or a.died > event)]


def read(path: str) -> Snapshot:
    """The snapshot in a file, of the device on which most happened.

    Raises:
        UsageError: the file is no pickle of plain values (SM233), or no snapshot (SM234).
    """
    try:
        document = plain_pickle.load(path)
    except plain_pickle.PickleError as error:
        raise UsageError(
            f"{path} cannot be read as a snapshot",
            f"Of a pickle only plain values are read: {error}.",
            "Give the file that torch.cuda.memory._dump_snapshot wrote, or 'staticmem analyze -f snapshot'.",
            code="SM233",
        ) from error
    except OSError as error:
        raise unreadable(path, error, "SM233") from error
    return snapshot_of(document, path)


def snapshot_of(document: Any, path: str) -> Snapshot:
    """The snapshot of plain values, as they are in a file; `path` is for the error.

    Raises:
        UsageError: it is no snapshot (SM234).
    """
    try:
        traces, segments = document["device_traces"], document["segments"]
        device = max(range(len(traces)), key=lambda d: len(traces[d]))
        events = traces[device]
        if not events:
            raise _no_snapshot(path, "Nothing was recorded (torch.cuda.memory._record_memory_history)")
        if len(events) > MOST_EVENTS:
            raise _no_snapshot(path, f"It has more than {MOST_EVENTS:,} events")
        own = [s for s in segments if s.get("device", 0) == device]
        if sum(len(segment["blocks"]) for segment in own) > MOST_BLOCKS:
            raise _no_snapshot(path, f"It has more than {MOST_BLOCKS:,} blocks")
        return _snapshot(events, own)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _no_snapshot(path, "Its values are not those of a memory snapshot") from error


def _no_snapshot(path: str, why: str) -> UsageError:
    hint = "Record with torch.cuda.memory._record_memory_history(), then torch.cuda.memory._dump_snapshot(FILE)."
    return UsageError(f"{path} is not a memory snapshot", f"{why}.", hint, code="SM234")


def _snapshot(events: list[Mapping[str, Any]], segments: list[Mapping[str, Any]]) -> Snapshot:
    open_blocks: dict[int, tuple[int, int, Any]] = {}
    rows: list[tuple[int, int, int | None, Any]] = []
    allocated, reserved = [0], [0]
    for index, event in enumerate(events):
        action, change, held = event["action"], 0, 0
        if action == "alloc":
            size = round_up(_bytes(event["size"]))
            open_blocks[_bytes(event["addr"])] = (size, index, event.get("frames") or ())
            change = size
        elif action in ("free_completed", "free"):
            block = open_blocks.pop(_bytes(event["addr"]), None)
            if block is None:
                change = -round_up(_bytes(event["size"]))
            else:
                change = -block[0]
                rows.append((block[0], block[1], index, block[2]))
        elif action in _GROWS:
            held = _bytes(event["size"])
        elif action in _SHRINKS:
            held = -_bytes(event["size"])
        allocated.append(allocated[-1] + change)
        reserved.append(reserved[-1] + held)
    rows += [(size, born, None, frames) for size, born, frames in open_blocks.values()]
    rows.sort(key=lambda row: row[1])
    blocks = [b for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
    at_end = sum(round_up(_bytes(b.get("requested_size", b["size"]))) for b in blocks)
    before = max(at_end - allocated[-1], 0)
    held_before = max(sum(_bytes(s["total_size"]) for s in segments) - reserved[-1], 0)
    read_frames = _SharedFrames()
    return Snapshot(
        tuple(Allocation(size, born, died, read_frames(frames)) for size, born, died, frames in rows),
        tuple(before + level for level in allocated[1:]),
        tuple(held_before + level for level in reserved[1:]),
        before,
    )


def _bytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ValueError
    return value


class _SharedFrames:
    """Reads the frames of events. One list of frames is shared by many events, and read once."""

    def __init__(self) -> None:
        self.read: dict[int, tuple[tuple[str, int, str], ...]] = {}  # by the list, which the document keeps alive

    def __call__(self, frames: Any) -> tuple[tuple[str, int, str], ...]:
        key = id(frames)
        if key not in self.read:
            self.read[key] = tuple(_frame(frame) for frame in frames[:FRAMES])
        return self.read[key]


def _frame(frame: Mapping[str, Any]) -> tuple[str, int, str]:
    line = frame.get("line", 0) or 0
    return _text(frame.get("filename", "")), _bytes(line), _text(frame.get("name", ""))


def _text(value: Any) -> str:
    """The beginning of a text. Anything else is refused: lists within lists, shared, have texts without end."""
    if value is not None and not isinstance(value, str):
        raise ValueError
    return (value or "")[:300]


def _peak(levels: tuple[int, ...]) -> tuple[int, int]:
    most = max(levels)
    return most, levels.index(most)
