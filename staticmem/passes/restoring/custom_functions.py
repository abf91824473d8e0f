"""What a file may have lost of autograd: custom functions, gradients, and `detach`; the least and the most of each.

Source lines show the calls of custom functions (`Swish.apply(x)`): the ops of such a line ran without a history, and
the function's own backward is unknown. At least it saves nothing and passes the gradient on; at most it saves all that
went in, came out and was made between, and computes with a few buffers of the result's size. `x * sigmoid(x)` is more
than one thing as well: files of the TorchScript exporter write `nn.SiLU` as these two ops, and code that computes them
saves more.

Without source lines an export has the forward of such a function alone. Where its ops have no derivative (the `x > 0`
of a spike, the sign of a binarised weight), the function's own backward is what trains the layers before it: at most it
saves what it read and what it made of it, and computes a gradient. And a region that is read as `torch.no_grad()`
(SM262) may be a region of autocast, or a checkpoint with use_reentrant=True: at most all of its ops are recorded.

Files of the TorchScript exporter have no `detach()`, and do not tell buffers from parameters: at least, a
straight-through estimator (`z + (q - z).detach()`) or the maximum that a softmax subtracts has no gradient where its
code has that call, and a tensor is not trained whose name no layer of torch.nn gives to a parameter.

Ops of published libraries are as their code has them, and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Arg, Graph, Op, Parameter, Ref, Region, SourceLine
from staticmem.ir.record import record
from staticmem.ir.stacks import is_published
from staticmem.ops.registry import NO_DERIVATIVE, Kind, kinds_of
from staticmem.passes.variables.unseen_code import is_of_called_module, line_calling_function
from staticmem.scenario.step import Scenario

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


_APPLY = re.compile(r"\b([A-Za-z_]\w*)\.apply\(")
OWN_BACKWARD = "staticmem::own_backward"  # of a function whose backward is not that of its ops
_TORCH = re.compile(r"[/\\]torch[/\\]")
_SIZES = ("operator::", "aten::sym_")  # what makes integers
_TEMPORARIES = 3  # of a backward as people write it: a few products before the last one

_Place = tuple[object, ...]


def has_functions(graph: Graph) -> bool:
    """Whether `ends_of_functions` has anything to say."""
    if any(True for _ in _regions(graph)) if any(op.stack for op in graph.ops) else _has_fused(graph):
        return True
    return has_regions_taken_for_no_grad(graph) or bool(steps_of(graph)) or with_least_gradients(graph) is not None


def ends_of_functions(graph: Graph, scenario: Scenario) -> tuple[Graph, Graph] | None:
    """The graph with the least and with the most that its custom functions may do in training; None where it has
    none."""
    if not scenario.training or not has_functions(graph):
        return None
    regions = [*_regions(graph)]
    least = _bound_regions(with_least_gradients(graph) or graph, regions, 0)
    if has_regions_taken_for_no_grad(graph):
        graph = replace(graph, ops=tuple(op if op.grad else replace(op, grad=True, amp=False) for op in graph.ops))
    most = _add_backwards(_bound_regions(graph, regions, _TEMPORARIES))
    return least, _taken_apart(most) if _has_fused(graph) else most


def _place(op: Op) -> _Place | None:
    for depth, line in enumerate(op.stack):
        if ".apply(" in line.text and _APPLY.search(line.text) and not _TORCH.search(line.file):
            if is_of_called_module(op, depth):
                return None
            return (op.modules, *((frame.file, frame.line) for frame in op.stack[: depth + 1]))
    number = line_calling_function(op)
    if number is None:
        return None
    return (op.modules, *((frame.file, frame.line) for frame in op.stack[: number + 1]))


def _regions(graph: Graph) -> Iterator[tuple[int, int]]:
    """Runs of ops under one call of a custom function: [start, end)."""
    start, current = 0, None
    for index, op in enumerate((*graph.ops, None)):
        place = _place(op) if op is not None else None
        if place != current:
            if current is not None:
                yield start, index
            start, current = index, place


def _bound_regions(graph: Graph, regions: list[tuple[int, int]], temporaries: int) -> Graph:
    ops: list[Op] = []
    renamed: dict[str, str] = {}
    ends, at = dict(regions), 0
    computed = {name for op in graph.ops if not op.target.startswith(_SIZES) for name in op.outputs}
    tensors = computed | {p.value.name for p in graph.parameters} | {v.name for v in graph.inputs}
    last = {**graph.last_read, **dict.fromkeys(graph.outputs, len(graph.ops))}
    while at < len(graph.ops):
        if at not in ends:
            ops.append(_renamed(graph.ops[at], renamed))
            at += 1
            continue
        region = [_renamed(op, renamed) for op in graph.ops[at : ends[at]]]
        at = ends[at]
        ops += [replace(op, grad=False) for op in region]
        own = {name for op in region for name in op.outputs}
        inputs = [n for n in dict.fromkeys(n for op in region for n in op.refs()) if n not in own and n in tensors]
        results = [name for name in own if last.get(name, -1) >= at]
        for result in sorted(results):
            within = (n for op in region if not op.target.startswith(_SIZES) for n in op.outputs)
            saved = dict.fromkeys((*inputs, *within)) if temporaries else ()
            name = f"{result}::function"
            args: tuple[Arg, ...] = (Ref(result), tuple(map(Ref, inputs)), tuple(map(Ref, saved)), temporaries)
            like = region[-1]
            ops.append(Op(name, "staticmem::own_backward", args, {}, (name,), like.modules, stack=like.stack))
            renamed[result] = name
            tensors.add(name)
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    return replace(graph, ops=tuple(ops), outputs=outputs)


def _add_backwards(graph: Graph) -> Graph:
    """The graph with a backward of its own for all that has no derivative."""
    steps = steps_of(graph)
    if not steps:
        return graph
    ops: list[Op] = []
    renamed: dict[str, str] = {}
    for index, old in enumerate(graph.ops):
        op = _renamed(old, renamed)
        ops.append(op)
        step = steps.get(index)
        if step is None:
            continue
        name = f"{step.result}::function"
        inputs = tuple(Ref(renamed.get(read, read)) for read in step.inputs)
        saved = (*inputs, *map(Ref, step.between))
        args: tuple[Arg, ...] = (Ref(step.result), inputs, saved, _TEMPORARIES)
        ops.append(Op(name, "staticmem::own_backward", args, {}, (name,), op.modules, stack=op.stack))
        renamed[step.result] = name
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    return replace(graph, ops=tuple(ops), outputs=outputs)


def _renamed(op: Op, names: dict[str, str]) -> Op:
    if not names or names.keys().isdisjoint(op.refs()):
        return op

    def swap(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.name, arg.name))
        return tuple(swap(a) for a in arg) if isinstance(arg, tuple) else arg

    return op.changed(args=tuple(map(swap, op.args)), kwargs={k: swap(v) for k, v in op.kwargs.items()})


def _has_fused(graph: Graph) -> bool:
    if graph.bases.isdisjoint(("aten::silu", "aten::silu_")):
        return False
    return not any(op.stack for op in graph.ops) and any(_is_fused(op) for op in graph.ops)


def _is_fused(op: Op) -> bool:
    cls = op.modules and op.modules[-1].cls
    return op.base in ("aten::silu", "aten::silu_") and not cls


def _taken_apart(graph: Graph) -> Graph:
    """Every `silu` that no class tells as the two ops of `x * sigmoid(x)`."""
    ops: list[Op] = []
    for op in graph.ops:
        if _is_fused(op) and op.args and isinstance(op.args[0], Ref):
            gate = f"{op.outputs[0]}::gate"
            ops.append(op.changed(target="aten::sigmoid.default", outputs=(gate,), kwargs={}))
            ops.append(op.changed(target="aten::mul.Tensor", args=(op.args[0], Ref(gate)), kwargs={}))
        else:
            ops.append(op)
    return replace(graph, ops=tuple(ops))


def _function(op: Op) -> tuple[tuple[SourceLine, ...], str] | None:
    """The trace of an op down to the line that calls a custom autograd function, and the function's name."""
    number = line_calling_function(op)
    if number is None:
        return None
    match = _APPLY.search(op.stack[number].text)
    return op.stack[: number + 1], match[1] if match is not None else "a function"


def functions(graph: Graph) -> Iterator[tuple[Region, bool]]:
    """The calls of custom autograd functions, each with whether its result depends on its inputs by ops that have a
    derivative."""
    last: tuple[tuple[SourceLine, ...], str] | None = None
    start, ops = 0, graph.ops
    for index in range(len(ops) + 1):
        call = _function(ops[index]) if index < len(ops) and ops[index].stack else None
        if last is not None and (call != last or ops[index].modules != ops[start].modules):
            yield Region(start, index, len(ops[start].modules), last[1]), _has_derivative(graph, ops[start:index])
            last = None
        if call is not None and last is None:
            start = index
        last = call


def _has_derivative(graph: Graph, ops: Sequence[Op]) -> bool:
    results: set[str] = set()
    floats: set[str] = set()
    reached = False
    if any(op.base == OWN_BACKWARD for op in ops):
        return False
    for op in ops:
        args = op.args[1:] if op.base == "aten::where" else op.args
        reads = [arg.name for arg in args if isinstance(arg, Ref)]
        value = graph.values.get(op.outputs[0]) if op.outputs else None
        reached = any(name in floats or name not in results for name in reads) and op.base not in NO_DERIVATIVE
        reached = reached and (value is None or value.dtype.is_differentiable)
        results.update(op.outputs)
        floats.update(op.outputs if reached else ())
    return reached
