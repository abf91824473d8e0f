"""A memory snapshot as `torch.cuda.memory._dump_snapshot` writes it: a pickle that pytorch.org/memory_viz opens.

It shows the whole process, three steps from its start. Frames are what a reader looks for in place of a Python stack:
the kernel, the tensor, the line of the model's code where the export kept it, the modules, the step and its phase.

Format: torch/cuda/memory.py (`_snapshot`), torch/cuda/_memory_viz.py and torch/utils/viz/MemoryViz.js of pytorch. The
pickle has dicts, lists, tuples, strings, integers, floats and booleans only.
"""

from __future__ import annotations

import pickle
from typing import Any

from staticmem.allocators.process import RELEASE, Process
from staticmem.allocators.result import Replay, SegmentEvent, SegmentState
from staticmem.allocators.settings import UNLIMITED, Settings
from staticmem.eager.trace import Trace
from staticmem.ir.graph import Graph

Frame = dict[str, Any]


class Frames:
    """The frames of each allocation, innermost first. Equal ones are one list, which keeps the pickle small."""

    def __init__(self, process: Process, trace: Trace, graph: Graph | None) -> None:
        self.process, self.trace, self.graph = process, trace, graph
        self.marks = {mark.event: mark for mark in process.marks}
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


def snapshot(
    process: Process, replay: Replay, trace: Trace, graph: Graph | None = None, settings: Settings | None = None
) -> dict[str, Any]:
    """The snapshot of a replayed process: its segments at the end, and everything that happened, in order."""
    frames = Frames(process, trace, graph)
    made = {p.id: (p, frames.of(p.id, p.born)) for p in replay.placements()}
    end = replay.oom.time if replay.oom is not None else max(len(replay) - 1, 0)
    return {
        "segments": [_segment(segment, made) for segment in replay.segments(end)],
        "device_traces": [_device_trace(process, replay, made, frames)],
        "allocator_settings": _settings(settings or Settings()),
        "external_annotations": [],
    }


def dumps(
    process: Process, replay: Replay, trace: Trace, graph: Graph | None = None, settings: Settings | None = None
) -> bytes:
    """The snapshot as a pickle; the same replay always gives the same bytes."""
    return pickle.dumps(snapshot(process, replay, trace, graph, settings), protocol=4)


def _segment(segment: SegmentState, made: dict[int, Any]) -> dict[str, Any]:
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
                "frames": [] if block.id is None else made[block.id][1],
            }
            for block in segment.blocks
        ],
    }


def _device_trace(process: Process, replay: Replay, made: dict[int, Any], frames: Frames) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []

    def add(time: int, action: str, address: int, size: int, stream: int, stack: list[Frame]) -> None:
        entries.append(
            {"action": action, "addr": address, "size": size, "stream": stream, "time_us": time, "frames": stack}
        )

    changes: dict[int, list[SegmentEvent]] = {}
    for event in replay.segment_events:
        changes.setdefault(event.time, []).append(event)
    end = replay.oom.time if replay.oom is not None else len(replay)
    for time, (id, nbytes, _) in enumerate(process.events[:end]):
        placement, stack = made.get(id, (None, []))
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


def _settings(settings: Settings) -> dict[str, Any]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1 if settings.max_split_size == UNLIMITED else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(2**i): n for i, n in enumerate(settings.roundup_power2_divisions)},
    }
