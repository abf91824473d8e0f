"""From a ModelProto to the graph that the runtime executes: constants apart, functions without a kernel written out.

Source: onnxruntime/core/graph/graph.cc (Constant nodes become initializers when a graph is loaded; functions that no
kernel computes are written out, their nodes get the next free numbers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticmem.allocators.onnxruntime.casts import without_duplicates
from staticmem.allocators.onnxruntime.graph import ExecGraph, ExecNode, PlannedType, constant_type, planned_type
from staticmem.allocators.onnxruntime.infer import fill, inferred
from staticmem.ir import dtypes

WRITTEN_OUT = "staticmem: written out"  # the first node of a definition
FOLLOWING = "staticmem: written out, following"

# onnx/defs, function bodies; $x is the input, $y the result, others are made up
_DEFINITIONS: Mapping[str, tuple[tuple[str, tuple[str, ...], str, Mapping[str, float]], ...]] = {
    "HardSwish": (
        ("HardSigmoid", ("$x",), "sigmoid", {"alpha": 1 / 6, "beta": 0.5}),
        ("Mul", ("$x", "sigmoid"), "$y", {}),
    ),
    "Mish": (("Softplus", ("$x",), "plus", {}), ("Tanh", ("plus",), "tanh", {}), ("Mul", ("$x", "tanh"), "$y", {})),
}


def written_out(model: Any) -> Any:
    """The model with operators that the CPU provider has no kernel for as their definitions."""
    import onnx

    if not any(node.op_type in _DEFINITIONS for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = list(copy.graph.node)
    del copy.graph.node[:]
    for node in nodes:
        if node.op_type not in _DEFINITIONS or node.domain not in ("", "ai.onnx"):
            copy.graph.node.append(node)
            continue
        names = {"$x": node.input[0], "$y": node.output[0]}
        for number, (kind, inputs, result, attributes) in enumerate(_DEFINITIONS[node.op_type]):
            names.setdefault(result, f"{node.output[0]}::{result}")
            new = onnx.helper.make_node(kind, [names[n] for n in inputs], [names[result]], **attributes)
            new.doc_string = FOLLOWING if number else WRITTEN_OUT
            copy.graph.node.append(new)
    return copy


def build(model: Any, executed: bool = False) -> ExecGraph:
    """The executed graph of a ModelProto whose own functions are inlined. Shapes are those that inference finds for
    open dimensions as they are in the file: the runtime plans without knowing the sizes of a run.

    `executed`: the runtime saved this graph, so what it does at every optimization level is done already.
    """
    symbolic = inferred(model)
    versions = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
    return _Builder(versions, executed).graph(symbolic.graph, {})


def _types(proto: Any) -> dict[str, PlannedType]:
    types: dict[str, PlannedType] = {}
    for value in (*proto.input, *proto.value_info, *proto.output):
        found = planned_type(value.type)
        if found is not None:
            types[value.name] = found
    return types


class _Builder:
    """Builds a graph and its bodies. `versions` has the opset of each domain."""

    def __init__(self, versions: Mapping[str, int], executed: bool) -> None:
        self.versions, self.executed = versions, executed

    def graph(self, proto: Any, outer: Mapping[str, PlannedType]) -> ExecGraph:
        types = _types(proto)
        initializers: dict[str, PlannedType] = {}
        for tensor in proto.initializer:
            dtype = dtypes.ONNX_CODES.get(tensor.data_type, dtypes.float32)
            initializers[tensor.name] = PlannedType(dtype, tuple(int(d) for d in tensor.dims))
        protos = []
        for node in proto.node:
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                initializers[node.output[0]] = types.get(node.output[0]) or constant_type(node)
            else:
                protos.append(node)
        own = {v.name for v in proto.input} | set(initializers) | {name for node in protos for name in node.output}
        known = {**outer, **types, **initializers}
        fill(proto, known, self.versions)
        nodes: list[ExecNode] = []
        outside: dict[str, None] = {}
        results = {v.name for v in proto.output}
        for node, index in zip(protos, _numbers(protos), strict=True):
            built = self._node(node, index, known)
            nodes.append(built)
            outside.update(dict.fromkeys(n for n in (*built.inputs, *built.implicit) if n and n not in own))
        outside.update(dict.fromkeys(v.name for v in proto.output if v.name and v.name not in own))
        if not self.executed:
            nodes = list(without_duplicates(nodes, known, results))
        kept = own | set(outside)
        return ExecGraph(
            tuple(nodes),
            tuple(v.name for v in proto.input if v.name not in initializers),
            tuple(v.name for v in proto.output),
            initializers,
            {name: kind for name, kind in known.items() if name in kept},
            tuple(outside),
        )

    def _node(self, proto: Any, index: int, known: Mapping[str, PlannedType]) -> ExecNode:
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        if _is_cast_like(proto):
            return ExecNode(index, "Cast", "", "", tuple(proto.input[:1]), tuple(proto.output), proto=proto)
        bodies = {a.name: self.graph(a.g, known) for a in proto.attribute if a.type == 5}
        implicit = tuple(dict.fromkeys(name for body in bodies.values() for name in body.outer))
        return ExecNode(
            index, proto.op_type, domain, proto.name, tuple(proto.input), tuple(proto.output), implicit, bodies, proto
        )


def _numbers(protos: list[Any]) -> list[int]:
    """What takes the place of an operator without a kernel is numbered behind all nodes of the file."""
    last = sum(p.doc_string != FOLLOWING for p in protos)
    numbers, position = [], 0
    for proto in protos:
        late = _is_cast_like(proto) or proto.doc_string in (WRITTEN_OUT, FOLLOWING)
        numbers.append(last if late else position)
        last += late
        position += proto.doc_string != FOLLOWING
    return numbers


def _is_cast_like(proto: Any) -> bool:
    return bool(proto.op_type == "CastLike" and proto.domain in ("", "ai.onnx"))


def inlined(model: Any) -> Any:
    """The model with its own functions written out, as the runtime does when it loads a file."""
    if not model.functions:
        return model
    import onnx.inliner

    try:
        return onnx.inliner.inline_local_functions(model)
    except (RuntimeError, ValueError, TypeError):
        return model


def touched(model: Any, saved: Any) -> bool:
    """Whether the runtime changed a graph before it saved it. It executes a changed graph in the order of the saved
    file; one that it did not change it executes in its own order, and the saved file has another one."""
    return _listing(model) != _listing(saved)


def _listing(model: Any) -> list[tuple[str, str]]:
    return sorted((n.op_type, n.name) for n in model.graph.node if n.op_type != "Constant")
