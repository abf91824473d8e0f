"""Where a file may have lost gradients, or `detach`: the most and the least that training can save there.

An export has the forward of a custom `autograd.Function` alone. Where its ops have no derivative (the `x > 0` of a
spike, the sign of a binarised weight), the function's own backward is what trains the layers before it: at most it
saves what it read and what it made of it, and computes a gradient. And a region that is read as `torch.no_grad()`
(SM262) may be a region of autocast, or a checkpoint with use_reentrant=True: at most all of its ops are recorded.

Files of the TorchScript exporter have no `detach()`, and do not tell buffers from parameters: at least, a
straight-through estimator (`z + (q - z).detach()`) or the maximum that a softmax subtracts has no gradient where its
code has that call, and a tensor is not trained whose name no layer of torch.nn gives to a parameter.

Ops of published libraries are as their code has them, and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Arg, Graph, Op, Parameter, Ref
from staticmem.ir.record import record
from staticmem.ir.stacks import is_published
from staticmem.ops.registry import NO_DERIVATIVE, Kind, kinds_of

_KEEP_STEP: tuple[Kind, ...] = ("cast", "copy", "masking")
_ENDS = NO_DERIVATIVE | {"aten::argmax", "aten::topk"}
_MAXIMA = ("aten::amax", "aten::max")
# the names of parameters in torch.nn, with the old and the new norms of weights
_LAYERS = re.compile(
    r"(^|[._])(weight|bias|[qkv]_proj_weight|in_proj_weight|in_proj_bias|bias_[kv]|(weight|bias)_[ih]h(_l\d+\w*)?|"
    r"weight_[gv]|weight_orig|original\d?)$"
)
_TAKEN_FOR_NO_GRAD = "SM262"


@record(frozen=True, slots=True)
class Step:
    """A float tensor that depends on values with a gradient through ops without a derivative alone: what made it,
    those values, and what was made in between."""

    result: str
    inputs: tuple[str, ...]
    between: tuple[str, ...]


def steps_of(graph: Graph) -> Mapping[int, Step]:
    """The steps of a graph that something reads, by the index of the op that makes the result."""
    if not any("step" in kinds_of(base) for base in graph.bases):
        return {}
    flows = {p.value.name for p in graph.parameters if p.trainable}
    running: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}  # inputs, and what was made so far
    steps: dict[int, Step] = {}
    for index, op in enumerate(graph.ops):
        if not op.outputs or not op.grad:
            continue
        name, reads = op.outputs[0], op.refs()
        flowing = tuple(dict.fromkeys(read for read in reads if read in flows))
        begun: tuple[tuple[str, ...], tuple[str, ...]]
        kinds = kinds_of(op.base)
        if "step" in kinds and flowing and not is_published(op):
            begun = flowing, (name,)
        elif not kinds.isdisjoint(_KEEP_STEP) and not flowing and any(read in running for read in reads):
            before = next(running[read] for read in reads if read in running)
            begun = before[0], (*before[1], name)
        else:
            if flowing and op.base not in _ENDS and "step" not in kinds:
                flows.update(op.outputs)
            continue
        if ("step" in kinds and "comparison" not in kinds) or _makes_float(op, graph):
            if name in graph.last_read:
                steps[index] = Step(name, *begun)
            flows.add(name)
        else:
            running[name] = begun
    return steps


def has_regions_taken_for_no_grad(graph: Graph) -> bool:
    """Whether ops are under `torch.no_grad()` because nothing else is known to look so."""
    return any(note.code == _TAKEN_FOR_NO_GRAD for edit in graph.edits for note in edit.notes)


def with_gradients(graph: Graph) -> Graph:
    """The graph with all ops recorded by autograd, and those that were not outside of the step's autocast."""
    return replace(graph, ops=tuple(op if op.grad else replace(op, grad=True, amp=False) for op in graph.ops))


def with_least_gradients(graph: Graph) -> Graph | None:
    """The graph as it is where the file lacks calls of `detach` and has parameters that are buffers; None: it is so."""
    if graph.format != "onnx":
        return None
    readers: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.refs():
            readers.setdefault(name, []).append(op)
    # what only a region of no_grad reads gets no gradient in any case; autocast keeps casts of trained weights alone
    unread = {
        p.value.name
        for p in graph.parameters
        if p.trainable and p.value.name in readers and not any(op.grad for op in readers[p.value.name])
    }
    detached, doubtful = (
        (set[str](), set[str]()) if any(op.stack for op in graph.ops) else _without_detach(graph, readers)
    )
    doubtful |= unread
    if not detached and not doubtful:
        return None
    parameters = tuple(replace(p, trainable=False) if p.value.name in doubtful else p for p in graph.parameters)
    changed = tuple(replace(op, grad=False) if not detached.isdisjoint(op.outputs) else op for op in graph.ops)
    return replace(graph, ops=changed, parameters=parameters)


def _without_detach(graph: Graph, readers: Mapping[str, Sequence[Op]]) -> tuple[set[str], set[str]]:
    """Values that code may detach, and parameters that may be buffers: TorchScript exports have neither."""
    ops = {name: op for op in graph.ops for name in op.outputs}
    detached: set[str] = set()
    for op in graph.ops:
        operands = [arg.name for arg in op.args[:2] if isinstance(arg, Ref)]
        if op.base == "aten::sub" and len(operands) == 2 and not is_published(op):
            maker = ops.get(operands[1])  # x - x.amax().detach(), which keeps exp() in its range
            if maker is not None and maker.base in _MAXIMA and maker.args[:1] == (Ref(operands[0]),):
                detached.add(operands[1])
        if op.base == "aten::add" and len(operands) == 2 and not is_published(op):
            for value, difference in (operands, operands[::-1]):
                maker = ops.get(difference)
                if maker is not None and maker.base == "aten::sub" and maker.args[1:2] == (Ref(value),):
                    detached.add(difference)
    return detached, {p.value.name for p in graph.parameters if p.trainable and _may_be_buffer(p, readers)}


def _may_be_buffer(parameter: Parameter, readers: Mapping[str, Sequence[Op]]) -> bool:
    reading = readers.get(parameter.value.name, ())
    if is_of_layer(parameter.fqn) or not reading:
        return False
    return not any(is_published(op) for op in reading)


def is_of_layer(name: str) -> bool:
    """Whether a layer of torch.nn gives a parameter such a name."""
    return name.endswith((".weight", ".bias")) or _LAYERS.search(name) is not None


def _makes_float(op: Op, graph: Graph) -> bool:
    value = graph.values.get(op.outputs[0])
    if value is not None:
        return value.dtype.is_differentiable
    if op.base == "aten::where":
        return any(_is_float(arg, graph) for arg in op.args[1:])
    return any(isinstance(arg, DType) and arg.is_differentiable for arg in (*op.args, *op.kwargs.values()))


def _is_float(arg: Arg, graph: Graph) -> bool:
    if isinstance(arg, Ref):
        value = graph.values.get(arg.name)
        return value is not None and value.dtype.is_differentiable
    return isinstance(arg, float)
