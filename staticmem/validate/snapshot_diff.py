"""Memory snapshots beside each other: two of one program, by source line, or those of all ranks of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from staticmem.errors import UsageError
from staticmem.report.formats import JSON, Format
from staticmem.report.formats.diff import change_text
from staticmem.report.text import PLAIN, Text, View, printable
from staticmem.validate import snapshots
from staticmem.validate.snapshots import Allocation, Snapshot

SCHEMA = "staticmem.snapshot-diff/1"
MOST_FILES = 1_024  # ranks of one run
BEFORE = "before the recording began"  # has no line


@dataclass(frozen=True)
class SnapshotPeak:
    """A snapshot: peaks in bytes, and the source line whose allocation reached that of allocated memory."""

    path: str
    allocated_bytes: int
    reserved_bytes: int
    at: str


@dataclass(frozen=True)
class LineChange:
    """What a source line holds at the peak of each of two snapshots: bytes and allocations."""

    line: str
    before_bytes: int
    after_bytes: int
    change_bytes: int = field(metadata={"signed": True})
    before_count: int
    after_count: int


@dataclass(frozen=True)
class SnapshotDiff:
    """`lines` are what changed from the file `before` to the file `after` (indices of `files`), the largest change
    first. Of two files these are they, in the order given; of more, ranks of one run, the smallest and the largest.
    `skew_bytes` is what the largest peak of allocated memory is above the smallest."""

    schema: str
    files: tuple[SnapshotPeak, ...]
    before: int
    after: int
    change_bytes: int = field(metadata={"signed": True})
    skew_bytes: int
    lines: tuple[LineChange, ...]


def is_snapshot(path: str) -> bool:
    """Whether a file begins as a pickle does, which neither a model nor a report do."""
    try:
        with open(path, "rb") as file:
            return file.read(1) == b"\x80"
    except OSError:
        return False


def diff(paths: Sequence[str]) -> SnapshotDiff:
    """The comparison of two snapshots or more. Of many, one is read at a time, and what is alive at its peak is kept.

    Raises:
        UsageError: a file is no snapshot (SM233, SM234), or there are too many.
    """
    if len(paths) > MOST_FILES:
        why = f"{len(paths):,} are given; one for each rank of a run is what is compared."
        raise UsageError(f"more than {MOST_FILES:,} snapshots", why, "Give fewer.", "SM140")
    files, holders = [], []
    for path in paths:
        snapshot = snapshots.read(path)
        allocated, event = snapshot.peak_allocated
        files.append(SnapshotPeak(path, allocated, snapshot.peak_reserved[0], _reached_at(snapshot, event)))
        holders.append(_held_by_line(snapshot, event))
    order = sorted(range(len(files)), key=lambda i: (files[i].allocated_bytes, i))
    before, after = (0, 1) if len(files) == 2 else (order[0], order[-1])
    change = files[after].allocated_bytes - files[before].allocated_bytes
    skew = files[order[-1]].allocated_bytes - files[order[0]].allocated_bytes
    lines = _line_changes(holders[before], holders[after])
    return SnapshotDiff(SCHEMA, tuple(files), before, after, change, skew, lines)


def _held_by_line(snapshot: Snapshot, event: int) -> dict[str, tuple[int, int]]:
    """Bytes and allocations by source line of what is alive after an event."""
    sizes: Counter[str] = Counter({BEFORE: snapshot.before} if snapshot.before else {})
    counts: Counter[str] = Counter()
    for one in snapshot.alive(event):
        line = source_line(one)
        sizes[line] += one.size
        counts[line] += 1
    return {line: (sizes[line], counts[line]) for line in sizes}


def source_line(allocation: Allocation) -> str:
    """The innermost line of Python that is not PyTorch's own: a layer's line is the same for every layer. Without one
    (autograd's threads have none) the innermost frame."""
    python = [frame for frame in allocation.frames if frame[0].endswith(".py")]
    own = [frame for frame in python if "/torch/" not in frame[0].replace("\\", "/")]
    for file, number, name in (own or python)[:1]:
        return f"{file}:{number} {name}".rstrip()
    for file, _, name in allocation.frames[:1]:
        return name or file or "no stack"
    return "no stack"


def _reached_at(snapshot: Snapshot, event: int) -> str:
    return next((source_line(one) for one in snapshot.allocations if one.born == event), "")


def _line_changes(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> tuple[LineChange, ...]:
    changes = []
    for line in {**before, **after}:
        (old, olds), (new, news) = before.get(line, (0, 0)), after.get(line, (0, 0))
        if new != old:
            changes.append(LineChange(line, old, new, new - old, olds, news))
    return tuple(sorted(changes, key=lambda change: (-abs(change.change_bytes), change.line)))


def answer(result: SnapshotDiff, view: View = PLAIN) -> str:
    """The sentence that a user came for."""
    before, after = result.files[result.before], result.files[result.after]
    low, high = view.size(before.allocated_bytes), view.size(after.allocated_bytes)
    names = printable(before.path), printable(after.path)
    if len(result.files) > 2:
        text = f"{len(result.files):,} snapshots peak at {low} ({names[0]}) to {high} ({names[1]})"
        share = result.skew_bytes / max(before.allocated_bytes, 1)
        return f"{text}: the largest is {view.size(result.skew_bytes)} ({share:.1%}) above the smallest."
    return f"The peak of allocated memory {change_text(before.allocated_bytes, after.allocated_bytes, view)}."


def render(result: SnapshotDiff, view: View = PLAIN) -> str:
    """The answer, the peak of each file, and source lines by what changed."""
    if view.quiet:
        return view.line(answer(result, view))
    text = Text(view)
    text.answer(answer(result, view))
    text.heading("Peaks")
    rows = [("", "snapshot", "allocated", "reserved", "reached at")]
    for file in result.files:
        sizes = view.size(file.allocated_bytes), view.size(file.reserved_bytes)
        rows.append(("", printable(file.path), *sizes, printable(file.at)))
    text.columns(rows, right=(2, 3))
    whose = "from the smallest to the largest" if len(result.files) > 2 else "before and after"
    text.heading(f"Alive at the peak by source line, {whose}")
    top = view.top or len(result.lines)
    lines = [("", "change", "before", "after", "line")]
    for one in result.lines[:top]:
        sign = "+" if one.change_bytes > 0 else ""
        change = f"{sign}{view.size(one.change_bytes)}"
        lines.append(("", change, view.size(one.before_bytes), view.size(one.after_bytes), printable(one.line)))
    text.columns(lines, right=(1, 2, 3))
    if len(result.lines) > top:
        text.add(f"  and {len(result.lines) - top:,} more: --top N")
    return text.end()


FORMATS = (Format("table", "txt", render), JSON)
