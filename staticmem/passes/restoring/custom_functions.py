"""The least and the most that custom autograd functions can make of training, where a file has only their forward.

Source lines show the calls (`Swish.apply(x)`): the ops of such a line ran without a history, and the function's own
backward is unknown. At least it saves nothing and passes the gradient on; at most it saves all that went in, came out
and was made between, and computes with a few buffers of the result's size. `x * sigmoid(x)` is more than one thing as
well: files of the TorchScript exporter write `nn.SiLU` as these two ops, and code that computes them saves more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from staticmem.ir.graph import Arg, Graph, Op, Ref, Region, SourceLine
from staticmem.ops.registry import NO_DERIVATIVE
from staticmem.passes.restoring.lost_gradients import (
    has_regions_taken_for_no_grad,
    steps_of,
    with_gradients,
    with_least_gradients,
)
from staticmem.passes.variables.unseen_code import line_calling_function
from staticmem.scenario.step import Scenario

_APPLY = re.compile(r"\b[A-Za-z_]\w*\.apply\(")
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
    least = _with_bounds(with_least_gradients(graph) or graph, regions, 0)
    if has_regions_taken_for_no_grad(graph):
        graph = with_gradients(graph)
    most = _with_steps(_with_bounds(graph, regions, _TEMPORARIES))
    return least, _taken_apart(most) if _has_fused(graph) else most


def _place(op: Op) -> _Place | None:
    for depth, line in enumerate(op.stack):
        if ".apply(" in line.text and _APPLY.search(line.text) and not _TORCH.search(line.file):
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


def _with_bounds(graph: Graph, regions: list[tuple[int, int]], temporaries: int) -> Graph:
    ops: list[Op] = []
    renamed: dict[str, str] = {}
    ends = dict(regions)
    at = 0
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
        inputs = [
            n for n in dict.fromkeys(n for op in region for n in op.refs()) if n not in own and _base(n) in tensors
        ]
        results = [name for name in own if last.get(name, -1) >= at]
        for result in sorted(results):
            within = (n for op in region if not op.target.startswith(_SIZES) for n in op.outputs)
            saved = dict.fromkeys((*inputs, *within)) if temporaries else ()
            name = f"{result}::function"
            args: tuple[Arg, ...] = (
                Ref(result), tuple(map(Ref, inputs)), tuple(map(Ref, saved)), temporaries,
            )  # fmt: skip
            like = region[-1]
            ops.append(Op(name, "staticmem::own_backward", args, {}, (name,), like.modules, stack=like.stack))
            renamed[result] = name
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    return replace(graph, ops=tuple(ops), outputs=outputs)


def _with_steps(graph: Graph) -> Graph:
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


def _base(name: str) -> str:
    return name.removesuffix("::function")


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


_APPLIED = re.compile(r"\b([A-Za-z_]\w*)\.apply\(")


def _function(op: Op) -> tuple[tuple[SourceLine, ...], str] | None:
    """The trace of an op down to the line that calls a custom autograd function, and the function's name."""
    number = line_calling_function(op)
    if number is None:
        return None
    match = _APPLIED.search(op.stack[number].text)
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
