"""The most that the forward of a training step can have alive, whatever ran in place and whatever variables hold.

Most ops save as much for backward in place as out of place, but for those that write into a view, and after the forward
no variable holds what it computed: what a file leaves open moves the peak of a training step only where it can lift the
forward above it. The trace of one
step bounds that without another run. Besides what it has alive at each allocation, there can be

- what variables hold for longer: a buffer, from its release to the last op during which one may hold it;
- what ops make that may have run out of place: a buffer of the result's size, while the operand may be held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate

from staticmem.eager.reasons import Reason
from staticmem.eager.trace import Trace
from staticmem.ir.graph import Graph, Ref
from staticmem.ir.stacks import call_ends
from staticmem.liveness import Lifetimes
from staticmem.ops.activations import SAVE_LESS_IN_PLACE
from staticmem.passes.restoring.inplace import writes_into_views
from staticmem.passes.variables.releases import Releases, releases_of
from staticmem.passes.variables.unseen_bounds import ends_of_frames

LastHeld = Callable[[Collection[str]], Mapping[str, int]]


def held_in_calls(graph: Graph) -> LastHeld:
    """Whatever may have a name in a call has it until the call returns. Source lines may tell of longer ones."""
    if any(op.stack for op in graph.ops):
        return lambda names: {}
    expected = releases_of(graph, "expected", training=True)

    def last_held(names: Collection[str]) -> Mapping[str, int]:
        held = _released(graph, expected, names)
        for name, end in ends_of_frames(graph, names).items():
            held[name] = max(held[name], end)
        return held

    return last_held


def held_by_most(graph: Graph) -> LastHeld:
    """As the upper end of the band has it."""
    most = releases_of(graph, "most", training=True)
    return lambda names: _released(graph, most, names)


def _released(graph: Graph, releases: Releases, names: Collection[str]) -> dict[str, int]:
    """The last op during which a value's name or a frame holds it."""
    held = {name: releases.last_use[name] for name in names if name in releases.last_use}
    in_frames = held.keys() & releases.frames.keys()
    ends, ops = call_ends(graph) if in_frames else {}, graph.ops
    for name in in_frames:
        last = held[name]
        stack = ops[last].modules[: releases.frames[name] + 1] if last < len(ops) else ()
        last = max(last, ends.get(stack, len(ops)))
        while last + 1 < len(ops) and not ops[last + 1].modules:  # it runs in the frame as well
            last += 1
        held[name] = last
    return held


class ForwardBound:
    """The forward of a step that has been run without checkpoints: its allocations and its holds, in order."""

    def __init__(self, graph: Graph, trace: Trace, lifetimes: Lifetimes) -> None:
        self.graph, self.lifetimes = graph, lifetimes
        start, self.end = dict(trace.phases)["forward"], trace.marks["forward_end"]  # the last micro-batch's
        buffers, holds, kernels, count = trace.buffers, trace.holds, trace.kernels.ops, len(graph.ops)
        part = slice(bisect_left(buffers.born, start), bisect_left(buffers.born, self.end))
        self.born = buffers.born[part]
        last = [0] * (count + 1)  # after each op: how many allocations there were; those of the loss come last
        for number, kernel in enumerate(buffers.kernels[part], 1):
            last[kernels[kernel]] = number
        self.allocated = list(accumulate(last, max))
        part = slice(bisect_left(holds.starts, start), bisect_left(holds.starts, self.end))
        self.kinds, self.names, self.buffers = holds.kinds[part], holds.whos[part], holds.buffers[part]
        self.ends, self.ops = holds.ends[part], holds.ops[part]
        rows = zip(self.kinds, self.names, self.buffers, strict=True)
        self.values = {name: buffer for kind, name, buffer in rows if kind is Reason.VALUE}

    def stays_below(self, peak: int, open_ops: Collection[int], last_held: LastHeld) -> bool:
        """Whether the forward cannot have more than `peak` bytes, nor backward something else.

        `open_ops` are the indices of ops that may run in place or out of place. `last_held` says of names of values
        during which op a variable may hold them last; those that it leaves out may be held to the end.
        """
        ops = [self.graph.ops[index] for index in open_ops]
        if any(op.base.rstrip("_") in SAVE_LESS_IN_PLACE for op in ops) or writes_into_views(self.graph, ops):
            return False
        most = self.most(open_ops, last_held)
        return most is not None and most <= peak

    def most(self, open_ops: Collection[int], last_held: LastHeld) -> int | None:
        """The most bytes that can be alive; None where an op that may be in place writes into what backward needs."""
        died, sizes = self.lifetimes.died, self.lifetimes.sizes
        end, born, allocated = self.end, self.born, self.allocated
        operands, every = self._operands(open_ops), len(self.born)
        written = {buffer for _, buffer in operands.values()}
        held = last_held([name for name, buffer in self.values.items() if died[buffer] < end or buffer in written])
        added = [0] * (every + 1)
        until = dict.fromkeys(written, 0)  # the allocations before which something else than autograd lets go
        saved: dict[int, int] = {}  # the op whose backward needs a written buffer first
        rows = zip(self.kinds, self.names, self.buffers, self.ends, self.ops, strict=True)
        for kind, name, buffer, ended, op in rows:
            if kind is Reason.SAVED:
                if ended < end:  # the node died with its result, which may be held for longer
                    until[buffer] = every
                elif buffer in written:
                    saved.setdefault(buffer, op)
                continue
            if kind is Reason.VALUE and name in operands:
                index, operand = operands[name]
                if buffer != operand:  # out of place here; in place one buffer is held as both are
                    until[buffer] = max(until.get(buffer, 0), until[operand])
                elif saved.get(buffer, index) < index:
                    return None
                else:
                    first = allocated[index - 1]
                    last = max(until[operand], allocated[index], first + 1)
                    if first == allocated[index] and first:  # it allocates nothing here: the level before it
                        first -= 1
                    added[first] += sizes[buffer]
                    added[min(last, every)] -= sizes[buffer]
            if died[buffer] < end or buffer in written:
                at = every
                if kind is not Reason.VALUE:
                    at = bisect_left(born, ended)
                elif name in held:
                    at = allocated[held[name]]
                if at > until.get(buffer, 0):
                    until[buffer] = at
        for buffer, last in until.items():
            first = bisect_left(born, died[buffer])
            if first < last:
                added[first] += sizes[buffer]
                added[last] -= sizes[buffer]
        live = self.lifetimes.live
        return max((live[tick] + more for tick, more in zip(born, accumulate(added), strict=False)), default=0)

    def _operands(self, open_ops: Collection[int]) -> dict[str, tuple[int, int]]:
        """The results of open ops that may write into a value: the index, and the value's buffer."""
        operands: dict[str, tuple[int, int]] = {}
        for index in open_ops:
            op = self.graph.ops[index]
            first = op.args[0] if op.args else None
            if isinstance(first, Ref) and first.name in self.values:
                operands[op.outputs[0]] = index, self.values[first.name]
        return operands
