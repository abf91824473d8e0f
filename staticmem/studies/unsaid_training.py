"""What a file does not say of training, and the least that the step can have alive for it.

An ONNX file does not keep `requires_grad`, and a `.pt2` file that was exported for inference has it False everywhere:
any parameters but one may be frozen. And without source lines no file shows a checkpoint, nor a custom autograd
function that saves less than its ops would. The least is worked out from the step as it is expected, without another
run:

- of frozen parameters: what the model owns, with the largest tensor that its forward makes;
- of checkpoints and functions: backward and optimizer, in which what was saved for an op is there no sooner than that
  op's backward (a checkpoint computes it again); what code saves that calls no layer may not be there at all.

It is a `Lifetimes` as that of a step, so that it grows with the batch in the same way (`studies.between`).

What it does not say of the forward bounds that from above: the most that can be alive, whatever ran in place and
whatever variables hold. Most ops save as much for backward in place as out of place, but for those that write into a
view, and after the forward no variable holds what it computed: what a file leaves open moves the peak of a training
step only where it can lift the forward above it. The trace of one step bounds that without another run. Besides what it
has alive at each allocation, there can be

- what variables hold for longer: a buffer, from its release to the last op during which one may hold it;
- what ops make that may have run out of place: a buffer of the result's size, while the operand may be held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

from staticmem.eager.reasons import Reason
from staticmem.eager.trace import Buffers, Holds, Trace
from staticmem.ir.graph import Graph, Note, Ref
from staticmem.ir.stacks import LIBRARIES, call_ends
from staticmem.liveness import Lifetimes
from staticmem.ops.activations import SAVE_LESS_IN_PLACE
from staticmem.passes.restoring.inplace import writes_into_views
from staticmem.passes.variables.releases import Releases, releases_of
from staticmem.passes.variables.unseen_bounds import ends_of_frames
from staticmem.scenario.step import Scenario

FUSED_PATH = "SM342"  # the note of layers that may run as one op in evaluation mode
THAWED = "SM315"  # a file in which no parameter requires a gradient
_OWNED = frozenset(("parameter", "buffer", "input"))
_TORCH = "torch.nn."
_Span = tuple[int, int, int]  # the index of a buffer, and from when to when it is alive


def least_on_fused_path(notes: Iterable[Note], lifetimes: Lifetimes) -> Lifetimes | None:
    """The least of an inference whose layers PyTorch may run as one op each, of which the file has the ordinary ops;
    None of others."""
    return _cut_lifetimes(lifetimes, _alone(lifetimes)) if any(note.code == FUSED_PATH for note in notes) else None


def least_of_training(graph: Graph, scenario: Scenario, lifetimes: Lifetimes) -> Lifetimes | None:
    """The least that a training step has alive for what its file does not say of training; None where it says all."""
    if not scenario.training or graph.recorded is not None:
        return None
    if leaves_frozen_open(graph, scenario):
        return _cut_lifetimes(lifetimes, _alone(lifetimes))
    if leaves_checkpoints_open(graph, scenario):
        return _cut_lifetimes(lifetimes, _when_recomputed(graph, lifetimes))
    return None


def leaves_frozen_open(graph: Graph, scenario: Scenario) -> bool:
    """Whether neither the file nor the scenario says which parameters are trained."""
    if scenario.freeze is not None or scenario.lora is not None:
        return False
    return graph.format == "onnx" or any(note.code == THAWED for note in graph.notes)


def leaves_checkpoints_open(graph: Graph, scenario: Scenario) -> bool:
    """Whether neither source lines nor the scenario tell what runs in checkpoints. Code of published libraries is as it
    was compared: it has none unless it is asked to."""
    if scenario.checkpoint or scenario.checkpoint_segments or any(op.stack for op in graph.ops):
        return False
    classes = [cls for cls in graph.classes if cls]
    return not classes or any(not cls.startswith((*LIBRARIES, _TORCH)) for cls in classes)


def _cut_lifetimes(lifetimes: Lifetimes, spans: Iterator[_Span]) -> Lifetimes:
    """Lifetimes of these buffers of a step alone, each over one span or more."""
    trace, buffers = lifetimes.trace, Buffers()
    for index, start, end in sorted(spans, key=lambda span: (span[1], span[0])):
        buffers.append(trace.buffers[index]._replace(born=start, died=end if end < trace.ticks else None))
    return Lifetimes(replace(trace, buffers=buffers, holds=Holds()).seal())


def _alone(lifetimes: Lifetimes) -> Iterator[_Span]:
    """What the model owns, and each tensor of the forward without the others."""
    trace, ticks = lifetimes.trace, lifetimes.ticks
    forward, end = dict(trace.phases)["forward"], trace.marks.get("forward_end", ticks)
    rows = zip(trace.buffers.categories, lifetimes.born, strict=True)
    for index, (category, born) in enumerate(rows):
        if category in _OWNED:
            yield index, born, ticks
        elif category == "activation" and forward <= born < end:
            yield index, born, born + 1


def _when_recomputed(graph: Graph, lifetimes: Lifetimes) -> Iterator[_Span]:
    trace, end = lifetimes.trace, lifetimes.trace.marks["forward_end"]
    buffers, holds, kernels = trace.buffers, trace.holds, trace.kernels.ops
    begun: dict[int, int] = {}  # when the backward of an op allocates first
    for kernel, born in zip(buffers.kernels, lifetimes.born, strict=True):
        if born >= end and kernel >= 0:
            begun.setdefault(kernels[kernel], born)
    held = [0] * len(buffers)  # by others than autograd
    has_holds = [False] * len(buffers)
    spans: list[_Span] = []
    for buffer, kind, op, ended in zip(holds.buffers, holds.kinds, holds.ops, holds.ends, strict=True):
        has_holds[buffer] = True
        if kind is not Reason.SAVED or op < 0:
            held[buffer] = max(held[buffer], min(ended, lifetimes.ticks))
        elif op in begun and ended > end and _is_layer(graph, op):
            spans.append((buffer, begun[op], min(ended, lifetimes.ticks)))
    for index, (born, died) in enumerate(zip(lifetimes.born, lifetimes.died, strict=True)):
        until = held[index] if has_holds[index] else died
        held[index] = until
        if until > end:
            yield index, max(born, end), until
    for index, start, ended in sorted(spans):
        start = max(start, held[index])  # several ops may have saved one tensor
        if start < ended:
            held[index] = ended
            yield index, start, ended


def _is_layer(graph: Graph, op: int) -> bool:
    """Whether an op is run by a layer of torch.nn, which calls no function of its own."""
    modules = graph.ops[op].modules
    return bool(modules) and modules[-1].cls.startswith(_TORCH)


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
