"""Calls of sibling modules that the TorchScript exporter merged: equal nodes become one, in the module that ran first.

Modules of a list that begin with the same call of the same tensor (`F.leaky_relu(x)` in each residual block of a
vocoder) have one node for it, which stands in the first of them. PyTorch runs the call in each, and each result lives
as long as its own module needs it.

Source: torch/csrc/jit/passes/common_subexpression_elimination.cpp, which torch.onnx.export runs (torch/onnx/utils.py,
`_optimize_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from staticmem.ir.graph import Frame, Graph, Note, Op
from staticmem.ir.stacks import Stack, common_depth, general_path
from staticmem.passes.edit import reading_instead


@dataclass(slots=True)
class _Calls:
    """What runs in each module call."""

    reads: dict[Stack, set[str]] = field(default_factory=dict)
    makes: dict[Stack, set[str]] = field(default_factory=dict)


def run_in_each(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """The graph with a call of its own in each of the modules."""
    calls = _what_calls_do(graph)
    maker = {name: op for op in graph.ops for name in op.outputs}
    again: dict[tuple[str, Stack], str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        names: dict[str, str] = {}
        for name in op.refs():
            first = maker.get(name)
            depth = common_depth(first.modules, op.modules) if first is not None else 0
            if first is None or not _is_merged(first, op, depth, calls):
                continue
            call = op.modules[: depth + 1]
            if (name, call) not in again:
                again[name, call] = f"{name}::{call[-1].path}"
                ops.append(first.changed(outputs=(again[name, call],), modules=_within(first.modules, call)))
            names[name] = again[name, call]
        ops.append(reading_instead(op, names) if names else op)
    if not again:
        return graph, ()
    values = {new: replace(graph.values[old], name=new) for (old, _), new in again.items() if old in graph.values}
    text = "calls that the exporter merged run again in each module of a list"
    changed = replace(graph, ops=tuple(ops), values={**graph.values, **values})
    return changed, [Note("assumption", "SM271", text, len(again))]


def _what_calls_do(graph: Graph) -> _Calls:
    calls = _Calls()
    for op in graph.ops:
        for depth in range(1, len(op.modules) + 1):
            call = op.modules[:depth]
            calls.reads.setdefault(call, set()).update(op.refs())
            calls.makes.setdefault(call, set()).update(op.outputs)
    return calls


def _is_merged(maker: Op, reader: Op, depth: int, calls: _Calls) -> bool:
    """Whether what a module reads is an inner result of another of its list, which it has the input of as well."""
    if len(maker.modules) <= depth or len(reader.modules) <= depth or len(maker.outputs) != 1:
        return False
    first, later = maker.modules[depth], reader.modules[depth]
    if first.path == later.path or general_path(first.path) != general_path(later.path):
        return False
    own, other = maker.modules[: depth + 1], reader.modules[: depth + 1]
    inputs = maker.refs()
    is_inner = maker.outputs[0] in calls.reads[own] and len(calls.makes[own]) > 1
    return bool(inputs) and is_inner and calls.makes[own].isdisjoint(inputs) and calls.reads[other].issuperset(inputs)


def _within(modules: Stack, call: Stack) -> Stack:
    """The modules of an op as they are in another call."""
    old, new = modules[len(call) - 1].path, call[-1].path
    return (*call, *(Frame(new + frame.path[len(old) :], frame.cls, frame.call) for frame in modules[len(call) :]))
