"""What the outputs that a training loop holds add to the peak."""

from __future__ import annotations

from itertools import pairwise

from staticmem.eager.reasons import Reason
from staticmem.eager.trace import OPEN
from staticmem.liveness.intervals import Lifetimes


def added_by_held_outputs(lifetimes: Lifetimes) -> int:
    """Bytes by which the peak would be lower if nothing held the outputs once the loss is computed."""
    trace = lifetimes.trace
    holds = trace.holds
    until = {buffer: 0 for buffer, kind in zip(holds.buffers, holds.kinds, strict=True) if kind is Reason.OUTPUTS}
    if not until:
        return 0
    for buffer, kind, end in zip(holds.buffers, holds.kinds, holds.ends, strict=True):
        if kind is not Reason.OUTPUTS and buffer in until:
            until[buffer] = max(until[buffer], lifetimes.ticks if end == OPEN else end)
    for before in tuple(until):
        for buffer in trace.replaced_by.get(before, ()):  # what the outputs' history has saved goes with them
            until.setdefault(buffer, trace.marks["forward_end"])
    changes = {0: 0, lifetimes.ticks: 0}
    for buffer, end in until.items():
        start, stop = max(end, lifetimes.born[buffer]), lifetimes.died[buffer]
        if start < stop:
            changes[start] = changes.get(start, 0) + lifetimes.sizes[buffer]
            changes[stop] = changes.get(stop, 0) - lifetimes.sizes[buffer]
    peak = added = 0
    for start, stop in pairwise(sorted(changes)):
        added += changes[start]
        peak = max(peak, max(lifetimes.live[start:stop]) - added)
    return lifetimes.peak_bytes - peak
