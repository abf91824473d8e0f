"""A replayed process, three steps from its start, for the viewers of other tools.

Memory snapshot: a pickle as `torch.cuda.memory._dump_snapshot` writes it, which pytorch.org/memory_viz opens. Frames
are what a reader looks for in place of a Python stack: the kernel, the tensor, the line of the model's code where the
export kept it, the modules, the step and its phase. The pickle has dicts, lists, tuples, strings, integers, floats and
booleans only. Format: torch/cuda/memory.py (`_snapshot`), torch/cuda/_memory_viz.py and torch/utils/viz/MemoryViz.js of
pytorch.

Trace for ui.perfetto.dev and chrome://tracing: memory as counters over phases and kernels. Format: the "Trace Event
Format" of Chromium (JSON object format): "C" events are counters, "X" are slices, "M" names. Time is logical: one
microsecond for each allocation or release.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

from staticmem.allocators.process import RELEASE, Process
from staticmem.allocators.result import Replay, SegmentEvent, SegmentState
from staticmem.allocators.settings import UNLIMITED, Settings
from staticmem.eager.trace import Trace
from staticmem.ir.graph import Graph
from staticmem.ir.record import record
from staticmem.report.formats import Format
from staticmem.report.text import PLAIN, View

PID = 1
PHASES, KERNELS = 1, 2  # thread ids of a trace: each is a row of slices
Frame = dict[str, Any]


@record(frozen=True)
class Replayed:
    """A process as the allocator replayed it. `graph` gives its kernels lines of code and modules."""

    process: Process
    replay: Replay
    trace: Trace
    graph: Graph | None = None
    settings: Settings = Settings()


def snapshot(of: Replayed) -> dict[str, Any]:
    """The snapshot: segments at the end, and everything that happened, in order."""
    frames = _Frames(of)
    replay, settings = of.replay, of.settings
    last = replay.oom.time if replay.oom is not None else max(len(replay) - 1, 0)
    stacks = {p.id: (p, frames.of(p.id, p.born)) for p in replay.placements()}
    return {
        "segments": [_segment(segment, stacks) for segment in replay.segments(last)],
        "device_traces": [_device_trace(of, stacks, frames)],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1 if settings.max_split_size == UNLIMITED else settings.max_split_size,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
            "expandable_segments": settings.expandable_segments,
            "roundup_power2_divisions": {str(2**i): n for i, n in enumerate(settings.roundup_power2_divisions)},
        },
        "external_annotations": [],
    }


def dump_snapshot(of: Replayed, view: View = PLAIN) -> bytes:
    """The snapshot as a pickle; the same replay always gives the same bytes."""
    return pickle.dumps(snapshot(of), protocol=4)


def _end(replay: Replay) -> int:
    """The event at which the replay ends: the allocation that failed, else the number of events."""
    return replay.oom.time if replay.oom is not None else len(replay)


class _Frames:
    """The frames of each allocation, innermost first. Equal ones are one list, which keeps the pickle small."""

    def __init__(self, of: Replayed) -> None:
        self.process, self.trace, self.graph = of.process, of.trace, of.graph
        self.phases: dict[tuple[int, str], Frame] = {}
        self.ops: dict[int, list[Frame]] = {}

    def of(self, id: int, time: int) -> list[Frame]:
        """Frames of allocation `id`, made by event `time`."""
        origin = self.process.origins[id]
        kernel = self.trace.kernels[origin.kernel]
        frames = [_frame("kernel", kernel.name)]
        if origin.buffer >= 0:
            buffer = self.trace.buffers[origin.buffer]
            shape = "x".join(str(size) for size in buffer.shape) or "scalar"
            frames.append(_frame(buffer.category, f"{buffer.name or 'unnamed'} {buffer.dtype.name}[{shape}]"))
        else:
            frames.append(_frame("workspace", origin.what))
        frames += self._op(kernel.op)
        mark = self.process.mark_at(time)
        where = (mark.step, mark.phase)
        if where not in self.phases:
            self.phases[where] = _frame(f"step {mark.step}" if mark.step else "before the first step", mark.phase)
        return [*frames, self.phases[where]]

    def _op(self, index: int) -> list[Frame]:
        if self.graph is None or not 0 <= index < len(self.graph.ops):
            return []
        if index not in self.ops:
            op = self.graph.ops[index]
            lines = [_frame(line.file, line.function, line.line) for line in reversed(op.stack)]
            modules = [_frame(module.cls or "module", module.path or "model") for module in reversed(op.modules)]
            self.ops[index] = lines + modules
        return self.ops[index]


def _frame(filename: str, name: str, line: int = 0) -> Frame:
    return {"filename": filename, "line": line, "name": name}


def _segment(segment: SegmentState, stacks: dict[int, Any]) -> dict[str, Any]:
    allocated = segment.allocated
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block.requested for block in segment.blocks),
        "stream": segment.stream,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": "inactive" if block.id is None else "active_allocated",
                "frames": [] if block.id is None else stacks[block.id][1],
            }
            for block in segment.blocks
        ],
    }


def _device_trace(of: Replayed, stacks: dict[int, Any], frames: _Frames) -> list[dict[str, Any]]:
    replay = of.replay
    entries: list[dict[str, Any]] = []

    def add(time: int, action: str, address: int, size: int, stream: int, stack: list[Frame]) -> None:
        entries.append(
            {"action": action, "addr": address, "size": size, "stream": stream, "time_us": time, "frames": stack}
        )

    changes: dict[int, list[SegmentEvent]] = {}
    for event in replay.segment_events:
        changes.setdefault(event.time, []).append(event)
    for time, (id, nbytes, _) in enumerate(of.process.events[: _end(replay)]):
        placement, stack = stacks.get(id, (None, []))
        for event in changes.get(time, ()):
            add(time, event.action, event.address, event.size, event.stream, stack)
        if placement is None:
            continue
        actions = ("free_requested", "free_completed") if nbytes == RELEASE else ("alloc",)
        for action in actions:
            add(time, action, placement.address, placement.requested, placement.stream, stack)
    if replay.oom is not None:
        oom = replay.oom
        stack = frames.of(oom.id, oom.time)
        for event in changes.get(oom.time, ()):
            add(oom.time, event.action, event.address, event.size, event.stream, stack)
        add(oom.time, "oom", oom.free, oom.requested, 0, stack)
        entries[-1]["device_free"] = oom.free
    return entries


def to_trace(of: Replayed) -> dict[str, Any]:
    """The trace as plain dicts: counters `allocated` and `reserved` in bytes, slices of phases and of kernels."""
    process, replay, end = of.process, of.replay, len(of.replay)
    events: list[dict[str, Any]] = [
        _name("process_name", 0, "staticmem: three steps from process start"),
        _name("thread_name", PHASES, "phases"),
        _name("thread_name", KERNELS, "kernels"),
    ]
    for mark, stop in process.spans():
        if mark.event < end:
            name = f"step {mark.step}: {mark.phase}" if mark.step else mark.phase
            events.append(_slice(name, PHASES, mark.event, min(stop, end)))
    events += _kernels(of, end)
    for counter, values in (("allocated", replay.allocated.tolist()), ("reserved", replay.reserved.tolist())):
        last = None
        for time, value in enumerate(values):
            if value != last:
                events.append({"ph": "C", "pid": PID, "name": counter, "ts": time, "args": {"bytes": value}})
                last = value
    return {"displayTimeUnit": "ms", "traceEvents": events}


def dump_trace(of: Replayed, view: View = PLAIN) -> str:
    """The trace as JSON text with a final newline; the same replay always gives the same text."""
    return json.dumps(to_trace(of), separators=(",", ":"), allow_nan=False) + "\n"


def _kernels(of: Replayed, end: int) -> list[dict[str, Any]]:
    """A slice from a kernel's first allocation to its last, for each time that it runs."""
    slices: list[dict[str, Any]] = []
    start = last = -1
    running = (-1, -1)

    def close() -> None:
        if start >= 0:
            slices.append(_slice(of.trace.kernels[running[1]].name, KERNELS, start, last + 1))

    for time, (id, nbytes, _) in enumerate(of.process.events[:end]):
        if nbytes == RELEASE:
            continue
        origin = of.process.origins[id]
        now = (origin.step, origin.kernel)
        if now != running:
            close()
            running, start = now, time
        last = time
    close()
    return slices


def _slice(name: str, thread: int, start: int, end: int) -> dict[str, Any]:
    return {"ph": "X", "pid": PID, "tid": thread, "name": name, "ts": start, "dur": max(end - start, 0)}


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": PID, "tid": thread, "name": what, "args": {"name": name}}


FORMATS = (
    Format("snapshot", "pickle", dump_snapshot, "replay"),
    Format("perfetto", "perfetto.json", dump_trace, "replay"),
)
