"""A trace for ui.perfetto.dev and chrome://tracing: memory as counters over the phases and kernels of a process.

Format: the "Trace Event Format" of Chromium (JSON object format): "C" events are counters, "X" are slices, "M" names.
Time is logical: one microsecond for each allocation or release.
"""

from __future__ import annotations

import json
from typing import Any

from staticmem.allocators.process import RELEASE, Process
from staticmem.allocators.result import Replay
from staticmem.eager.trace import Trace

PID = 1
PHASES, KERNELS = 1, 2  # thread ids: each is a row of slices


def to_trace(process: Process, replay: Replay, trace: Trace) -> dict[str, Any]:
    """The trace as plain dicts: counters `allocated` and `reserved` in bytes, slices of phases and of kernels."""
    end = len(replay)
    events: list[dict[str, Any]] = [
        _name("process_name", 0, "staticmem: three steps from process start"),
        _name("thread_name", PHASES, "phases"),
        _name("thread_name", KERNELS, "kernels"),
    ]
    for mark, stop in process.spans():
        if mark.event < end:
            name = f"step {mark.step}: {mark.phase}" if mark.step else mark.phase
            events.append(_slice(name, PHASES, mark.event, min(stop, end)))
    events += _kernels(process, trace, end)
    for counter, values in (("allocated", replay.allocated.tolist()), ("reserved", replay.reserved.tolist())):
        last = None
        for time, value in enumerate(values):
            if value != last:
                events.append({"ph": "C", "pid": PID, "name": counter, "ts": time, "args": {"bytes": value}})
                last = value
    return {"displayTimeUnit": "ms", "traceEvents": events}


def dumps(process: Process, replay: Replay, trace: Trace) -> str:
    """The trace as JSON text with a final newline; the same replay always gives the same text."""
    return json.dumps(to_trace(process, replay, trace), separators=(",", ":"), allow_nan=False) + "\n"


def _kernels(process: Process, trace: Trace, end: int) -> list[dict[str, Any]]:
    """A slice from a kernel's first allocation to its last, for each time that it runs."""
    slices: list[dict[str, Any]] = []
    start = -1
    running = (-1, -1)
    last = -1
    for time, (id, nbytes, _) in enumerate(process.events[:end]):
        if nbytes == RELEASE:
            continue
        origin = process.origins[id]
        now = (origin.step, origin.kernel)
        if now != running:
            if start >= 0:
                slices.append(_slice(trace.kernels[running[1]].name, KERNELS, start, last + 1))
            running, start = now, time
        last = time
    if start >= 0:
        slices.append(_slice(trace.kernels[running[1]].name, KERNELS, start, last + 1))
    return slices


def _slice(name: str, thread: int, start: int, end: int) -> dict[str, Any]:
    return {"ph": "X", "pid": PID, "tid": thread, "name": name, "ts": start, "dur": max(end - start, 0)}


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": PID, "tid": thread, "name": what, "args": {"name": name}}
