"""Where PyTorch's caching allocator puts the tensors of one step: segments over time, with what lies in them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from staticmem.allocators.process import Process
from staticmem.allocators.result import Replay
from staticmem.report.html.pack import Words, block
from staticmem.report.html.timeline import UNIT, Span


@dataclass(frozen=True, slots=True)
class Row:
    """A segment: [address, address + size) in bytes, held over the events [start, end) of the shown ones."""

    address: int
    size: int
    start: int
    end: int
    small: bool


@dataclass(frozen=True, slots=True)
class AddressMap:
    """The last step of a replayed process, which no step after it differs from.

    Time is events of the replay: one allocation or one release each, from 0 to `events`. `rows` are in the order of
    addresses; block i lies at `offset[i]` of `rows[row[i]]` over [born[i], died[i]). `offset` and `size` are in units
    of 512 bytes. `buffer` is 1 + the index in the timeline, 0 for a workspace, which `what[i] - 1` of `words` names.
    `failed`: the card was full at the end of what is shown, and the next allocation failed.
    """

    setting: str
    step: int
    failed: bool
    events: int
    peak_at: int
    reserved_bytes: int
    phases: tuple[Span, ...]
    rows: tuple[Row, ...]
    words: tuple[str, ...]
    row: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    born: tuple[int, ...]
    died: tuple[int, ...]
    buffer: tuple[int, ...]
    what: tuple[int, ...]

    def packed(self) -> str:
        """The columns for a page (see `pack.block`)."""
        life = [died - born for born, died in zip(self.born, self.died, strict=True)]
        return block(
            {
                "segment_address": ("delta", [row.address // UNIT for row in self.rows]),
                "segment_size": ("plain", [row.size // UNIT for row in self.rows]),
                "segment_start": ("plain", [row.start for row in self.rows]),
                "segment_end": ("plain", [row.end for row in self.rows]),
                "segment_small": ("plain", [int(row.small) for row in self.rows]),
                "row": ("delta", self.row),
                "offset": ("delta", self.offset),
                "size": ("plain", self.size),
                "born": ("delta", self.born),
                "life": ("plain", life),
                "buffer": ("delta", self.buffer),
                "what": ("plain", self.what),
            },
            {"words": self.words},
        )


def address_map(process: Process, replay: Replay, setting: str) -> AddressMap:
    """The map of the last step that the replay reached.

    Args:
        setting: for whom this is, in words (a card, its workspaces).
    """
    end = len(replay) if replay.oom is None else replay.oom.time
    spans = [(mark, stop) for mark, stop in process.spans() if mark.event < end]
    step = spans[-1][0].step if spans else 0
    start = min((mark.event for mark, _ in spans if mark.step == step), default=0)
    phases = tuple(
        Span(mark.phase, mark.event - start, min(stop, end) - start) for mark, stop in spans if mark.step == step
    )
    rows = _rows(replay, start, end)
    words = Words()
    columns: list[tuple[int, int, int, int, int, int, int]] = []
    by_address = sorted(range(len(rows)), key=lambda index: rows[index].address)
    bases = [rows[index].address for index in by_address]
    for placed in replay.placements():
        died = end if placed.died < 0 else min(placed.died, end)
        if died <= start or placed.born >= end or not placed.size:
            continue
        born = max(placed.born, start)
        origin = process.origins[placed.id]
        row = _row_of(rows, by_address, bases, placed.address, born - start)
        what = 0 if origin.buffer >= 0 else words(origin.what or "workspace") + 1
        offset = (placed.address - rows[row].address) // UNIT
        columns.append((row, offset, -(-placed.size // UNIT), born - start, died - start, origin.buffer + 1, what))
    row_, offset_, size, born_, died_, buffer, what_ = zip(*columns, strict=True) if columns else ((),) * 7
    reserved = replay.peak_between(start, end)[1]
    return AddressMap(
        setting, step, replay.oom is not None, end - start, _first_at(rows, reserved), reserved, phases, tuple(rows),
        tuple(words.listed()), row_, offset_, size, born_, died_, buffer, what_,
    )  # fmt: skip


def _first_at(rows: list[Row], reserved: int) -> int:
    """The event at which so much is first held."""
    for time in sorted({row.start for row in rows}):
        if sum(row.size for row in rows if row.start <= time < row.end) == reserved:
            return time
    return 0


def _rows(replay: Replay, start: int, end: int) -> list[Row]:
    """The segments that are held in [start, end), by address, then by time."""
    held: dict[int, tuple[int, int, bool]] = {}
    rows: list[Row] = []

    def close(address: int, time: int) -> None:
        size, since, small = held.pop(address)
        if time > start and since < end:
            rows.append(Row(address, size, max(since, start) - start, min(time, end) - start, small))

    for event in replay.segment_events:
        if event.change > 0:
            held[event.address] = (event.size, event.time, event.small)
        elif event.address in held:
            close(event.address, event.time)
    for address in list(held):
        close(address, end)
    return sorted(rows, key=lambda row: (row.address, row.start))


def _row_of(rows: list[Row], by_address: list[int], bases: list[int], address: int, time: int) -> int:
    """The segment that an address lies in at a time."""
    at = bisect_right(bases, address) - 1
    while at > 0 and not rows[by_address[at]].start <= time < rows[by_address[at]].end:
        at -= 1
    return by_address[max(at, 0)]
