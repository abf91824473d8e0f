"""The data of a page's charts: every buffer of the step with its life, and where the allocator puts it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from staticmem.allocators.process import Process
from staticmem.allocators.result import Replay
from staticmem.ir.graph import Graph
from staticmem.liveness import Lifetimes
from staticmem.liveness.why import module_of, module_of_op, short
from staticmem.report.html.page import Strings, block, cut, visible
from staticmem.report.model import CATEGORIES

UNIT = 512  # bytes: sizes are multiples of it
Columns = Mapping[str, tuple[str, Sequence[int]]]  # by name: how it is packed, and the values (see `pack.block`)


@dataclass(frozen=True, slots=True)
class Span:
    """A phase over the ticks [start, end)."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step in columns: `born`, `life`, `size`, `category`, `kernel`, `name`, `module`, `dtype` and `shape` of every
    buffer in order of allocation, `kernel_name` and `kernel_module` of every kernel.

    Time is ticks: one allocation or one release each. A buffer lives over [born, born + life); one that outlives the
    step lives to `ticks`. `size` is in units of 512 bytes; `category` is an index of `categories`; names, modules,
    dtypes and shapes are indices of `strings`.
    """

    ticks: int
    peak_tick: int
    phases: tuple[Span, ...]
    categories: tuple[str, ...]
    strings: tuple[str, ...]
    columns: Columns

    def packed(self) -> str:
        """The columns for a page."""
        return block(self.columns, {"words": self.strings})


def timeline(graph: Graph, lifetimes: Lifetimes) -> Timeline:
    """The timeline of a step over the graph that it ran."""
    trace, strings, categories = lifetimes.trace, Strings(), Strings(CATEGORIES)
    buffers, kernels = trace.buffers, trace.kernels
    starts = [*trace.phases, ("", lifetimes.ticks)]
    kernel_modules = [strings(module_of_op(graph, kernel.op)) for kernel in kernels]
    lives = [died - born for born, died in zip(lifetimes.born, lifetimes.died, strict=True)]
    columns: Columns = {
        "born": ("delta", lifetimes.born),
        "life": ("plain", lives),
        "size": ("plain", [size // UNIT for size in lifetimes.sizes]),
        "category": ("plain", [categories(b.category) for b in buffers]),
        "kernel": ("delta", [max(b.kernel, 0) for b in buffers]),
        "name": ("delta", [strings(b.name or f"({short(kernels[b.kernel].name)})") for b in buffers]),
        "module": ("delta", [strings(module_of(graph, b.category, b.name, kernels[b.kernel].op)) for b in buffers]),
        "dtype": ("plain", [strings(b.dtype.name) for b in buffers]),
        "shape": ("delta", [strings(", ".join(map(str, b.shape))) for b in buffers]),
        "kernel_name": ("plain", [strings(short(kernel.name)) for kernel in kernels]),
        "kernel_module": ("delta", kernel_modules),
    }
    return Timeline(
        ticks=lifetimes.ticks,
        peak_tick=lifetimes.peak_tick,
        phases=tuple(Span(name, start, end) for (name, start), (_, end) in pairwise(starts)),
        categories=tuple(categories.listed()),
        strings=tuple(visible(cut(text)) for text in strings.listed()),
        columns=columns,
    )


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
    """The last step of a replayed process, which no step after it differs from: its segments, with what lies in them.

    Time is events of the replay: one allocation or one release each, from 0 to `events`. `rows` are in the order of
    addresses. Columns are of blocks: each lies at `offset` of the segment `row` over [born, born + life); `offset` and
    `size` are in units of 512 bytes. `buffer` is 1 + the index in the timeline, 0 for a workspace, which `what - 1`
    names in `strings`. `failed`: the card was full at the end of what is shown, and the next allocation failed.
    """

    setting: str
    step: int
    failed: bool
    events: int
    peak_at: int
    reserved_bytes: int
    phases: tuple[Span, ...]
    rows: tuple[Row, ...]
    strings: tuple[str, ...]
    columns: Columns

    def packed(self) -> str:
        """The columns for a page."""
        segments: Columns = {
            "segment_address": ("delta", [row.address // UNIT for row in self.rows]),
            "segment_size": ("plain", [row.size // UNIT for row in self.rows]),
            "segment_start": ("plain", [row.start for row in self.rows]),
            "segment_end": ("plain", [row.end for row in self.rows]),
            "segment_small": ("plain", [int(row.small) for row in self.rows]),
        }
        return block({**segments, **self.columns}, {"words": self.strings})


def address_map(process: Process, replay: Replay, setting: str) -> AddressMap:
    """The map of the last step that the replay reached; `setting` says for whom it is (a card, its workspaces)."""
    end = len(replay) if replay.oom is None else replay.oom.time
    spans = [(mark, stop) for mark, stop in process.spans() if mark.event < end]
    step = spans[-1][0].step if spans else 0
    of_step = [(mark, stop) for mark, stop in spans if mark.step == step]
    start = min((mark.event for mark, _ in of_step), default=0)
    rows, strings = _rows(replay, start, end), Strings()
    by_address = sorted(range(len(rows)), key=lambda index: rows[index].address)
    bases = [rows[index].address for index in by_address]
    kinds = {"row": "delta", "offset": "delta", "size": "plain", "born": "delta", "life": "plain", "buffer": "delta"}
    kinds["what"] = "plain"
    blocks = []
    for placed in replay.placements():
        died = end if placed.died < 0 else min(placed.died, end)
        if died <= start or placed.born >= end or not placed.size:
            continue
        born = max(placed.born, start)
        origin = process.origins[placed.id]
        row = _find_row(rows, by_address, bases, placed.address, born - start)
        what = 0 if origin.buffer >= 0 else strings(origin.what or "workspace") + 1
        offset = (placed.address - rows[row].address) // UNIT
        blocks.append((row, offset, -(-placed.size // UNIT), born - start, died - born, origin.buffer + 1, what))
    values = zip(*blocks, strict=True) if blocks else ((),) * len(kinds)
    reserved = replay.peak_between(start, end)[1]
    return AddressMap(
        setting=setting,
        step=step,
        failed=replay.oom is not None,
        events=end - start,
        peak_at=_find_event(rows, reserved),
        reserved_bytes=reserved,
        phases=tuple(Span(mark.phase, mark.event - start, min(stop, end) - start) for mark, stop in of_step),
        rows=tuple(rows),
        strings=tuple(strings.listed()),
        columns={name: (kind, column) for (name, kind), column in zip(kinds.items(), values, strict=True)},
    )


def _find_event(rows: list[Row], reserved: int) -> int:
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


def _find_row(rows: list[Row], by_address: list[int], bases: list[int], address: int, time: int) -> int:
    """The segment that an address lies in at a time."""
    at = bisect_right(bases, address) - 1
    while at > 0 and not rows[by_address[at]].start <= time < rows[by_address[at]].end:
        at -= 1
    return by_address[max(at, 0)]
