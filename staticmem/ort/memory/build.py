"""From a ModelProto to the graph that the runtime executes: constants apart, functions without a kernel written out,
casts that follow casts taken out.

Source: onnxruntime/core/graph/graph.cc (Constant nodes become initializers when a graph is loaded; functions that no
kernel computes are written out, their nodes get the next free numbers) and, at every optimization level,
onnxruntime/core/optimizer/insert_cast_transformer.cc, RemoveDuplicateCastTransformer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from staticmem.frontends.onnx import isolation
from staticmem.frontends.onnx.convert import sizes_of
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ort.memory.graph import ExecGraph, ExecNode, PlannedType, constant_type, planned_type
from staticmem.ort.memory.half import NUMBERED
from staticmem.ort.memory.inference import CAST, constants_of, fill, inferred

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
    return _Builder(versions, executed, symbolic.ir_version).graph(symbolic.graph, {}, _NONE)


@dataclass(frozen=True, slots=True)
class _Constants:
    """Constants that bodies see, and which of those of bytes are all zero."""

    types: Mapping[str, PlannedType]
    zeros: Mapping[str, bool]

    def within(self, own: set[str], types: Mapping[str, PlannedType], zeros: Mapping[str, bool]) -> _Constants:
        """Those of a graph in this one: a name of its own hides one from outside."""
        kept = {name: kind for name, kind in self.types.items() if name not in own}
        return _Constants({**kept, **types}, {**{n: z for n, z in self.zeros.items() if n in kept}, **zeros})


_NONE = _Constants({}, {})
_OVERRIDABLE = 4  # from this version of the IR on a caller may replace an initializer that is listed as an input


class _Builder:
    """Builds a graph and its bodies. `versions` has the opset of each domain, `ir` is the version of the format."""

    def __init__(self, versions: Mapping[str, int], executed: bool, ir: int) -> None:
        self.versions, self.executed, self.ir = versions, executed, ir

    def graph(self, proto: Any, outer: Mapping[str, PlannedType], around: _Constants) -> ExecGraph:
        listed = {value.name: planned_type(value.type) for value in (*proto.input, *proto.value_info, *proto.output)}
        types = {name: kind for name, kind in listed.items() if kind is not None}
        initializers: dict[str, PlannedType] = {}
        for tensor in proto.initializer:
            dtype = dtypes.ONNX_CODES.get(tensor.data_type, dtypes.float32)
            initializers[tensor.name] = PlannedType(dtype, sizes_of(tensor))
        protos = []
        for node in proto.node:
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                initializers[node.output[0]] = types.get(node.output[0]) or constant_type(node)
            else:
                protos.append(node)
        own = {v.name for v in proto.input} | set(initializers) | {name for node in protos for name in node.output}
        kinds = {**outer, **types, **initializers}
        fill(proto, kinds, self.versions)
        nodes: list[ExecNode] = []
        outside: dict[str, None] = {}
        results = {v.name for v in proto.output}
        replaced = {v.name for v in proto.input} if self.ir >= _OVERRIDABLE else set()
        fixed = {name: kind for name, kind in initializers.items() if name not in replaced}
        constants = around.within(own, fixed, _zeros(proto, fixed))
        for node, index in zip(protos, _numbers(protos), strict=True):
            built = self._node(node, index, kinds, constants)
            nodes.append(built)
            outside.update(dict.fromkeys(n for n in (*built.inputs, *built.implicit) if n and n not in own))
        outside.update(dict.fromkeys(v.name for v in proto.output if v.name and v.name not in own))
        if not self.executed:
            nodes = list(without_duplicates(nodes, kinds, results))
        kept = own | set(outside)
        inputs = tuple(v.name for v in proto.input if v.name not in initializers)
        outputs = tuple(v.name for v in proto.output)
        used = {name: kind for name, kind in kinds.items() if name in kept}
        return ExecGraph(
            tuple(nodes), inputs, outputs, initializers, used, tuple(outside), constants.types, constants.zeros,
            self.versions.get("", 0),
        )  # fmt: skip

    def _node(self, proto: Any, index: int, kinds: Mapping[str, PlannedType], constants: _Constants) -> ExecNode:
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        if _is_cast_like(proto):
            return ExecNode(index, "Cast", "", "", tuple(proto.input[:1]), tuple(proto.output), proto=proto)
        bodies = {a.name: self.graph(a.g, kinds, constants) for a in proto.attribute if a.type == 5}
        implicit = tuple(dict.fromkeys(name for body in bodies.values() for name in body.outer))
        inputs, outputs = tuple(proto.input), tuple(proto.output)
        return ExecNode(index, proto.op_type, domain, proto.name, inputs, outputs, implicit, bodies, proto)


def _zeros(proto: Any, constants: Mapping[str, PlannedType]) -> dict[str, bool]:
    """Which constants of bytes are all zero: zero points. Contents that were not read are in no list."""
    zeros: dict[str, bool] = {}
    for name, tensor in constants_of(proto).items():
        kind = constants.get(name)
        if kind is not None and kind.dtype.name in ("int8", "uint8"):
            zeros[name] = not any(tensor.raw_data) and not any(tensor.int32_data)
    return zeros


def _numbers(protos: list[Any]) -> list[int]:
    """What takes the place of an operator without a kernel is numbered behind all nodes of the file."""
    casts = [p.doc_string.startswith(NUMBERED) for p in protos]
    last = sum(p.doc_string != FOLLOWING and not cast for p, cast in zip(protos, casts, strict=True))
    behind = last + sum(_is_cast_like(p) or p.doc_string in (WRITTEN_OUT, FOLLOWING) for p in protos)
    numbers, position = [], 0
    for proto, cast in zip(protos, casts, strict=True):
        if cast:
            numbers.append(behind + int(proto.doc_string.removeprefix(NUMBERED)))
            continue
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
    import onnx

    try:
        return onnx.ModelProto.FromString(isolation.inline_functions(model.SerializeToString()))
    except isolation.RefusedError:
        return model


def copied(graph: ExecGraph) -> list[str]:
    """Results of DequantizeLinear that several nodes read: the runtime makes a node for each, at every level, and saves
    that graph (core/optimizer/qdq_transformer/ensure_unique_dq_for_node_unit.cc)."""
    names = []
    readers = Counter(name for node in graph.nodes for name in {*node.inputs, *node.implicit})
    for node in graph.nodes:
        if node.op == "DequantizeLinear" and node.outputs:
            count = readers[node.outputs[0]] + (node.outputs[0] in graph.outputs)
            names += [node.outputs[0]] if count > 1 else []
        for body in node.bodies.values():
            names += copied(body)
    return names


def touched(model: Any, saved: Any) -> bool:
    """Whether the runtime changed a graph before it saved it. It executes a changed graph in the order of the saved
    file; one that it did not change it executes in its own order, and the saved file has another one."""
    return _listing(model) != _listing(saved)


def _listing(model: Any) -> list[tuple[str, str]]:
    return sorted((n.op_type, n.name) for n in model.graph.node if n.op_type != "Constant")


def without_duplicates(
    nodes: Sequence[ExecNode], types: Mapping[str, PlannedType], results: set[str]
) -> tuple[ExecNode, ...]:
    """The nodes without casts that a cast before them makes needless, and without casts that only casts read.

    Args:
        nodes: of one graph, in the order of the file.
        types: of all values; a cast without a known type stays.
        results: values that the graph gives; they stay.
    """
    by_result = {name: node for node in nodes for name in node.outputs if name}
    readers: dict[str, list[ExecNode]] = defaultdict(list)
    for node in nodes:
        for name in (*node.inputs, *node.implicit):
            if name in by_result:
                readers[name].append(node)
    source: dict[str, str] = {}  # what now stands for a value that is gone
    gone: set[int] = set()
    for node in sorted(nodes, key=lambda n: n.index):
        if not _is_cast(node) or node.index in gone:
            continue
        result = node.outputs[0]
        old, new = _type(types, source.get(node.inputs[0], node.inputs[0])), _type(types, result)
        if old is None or new is None:
            continue
        children = readers[result]
        casts = [child for child in children if _is_cast(child) and child.index not in gone]
        lossy = unsafe(old, new) and not _inserted(node, old, new)
        if lossy and any(
            unsafe(_type(types, c.outputs[0]), new) and not _inserted(c, _type(types, c.outputs[0]), new) for c in casts
        ):
            continue
        start = source.get(node.inputs[0], node.inputs[0])
        back = [c for c in casts if c.outputs[0] not in results and _type(types, c.outputs[0]) is old]
        for child in back:
            source[child.outputs[0]] = start
            gone.add(child.index)
        kept = [child for child in casts if child.index not in gone]
        truth = lossy and any(_type(types, child.outputs[0]) is dtypes.bool_ for child in kept)
        if children and len(casts) == len(children) and result not in results and not truth:
            source[result] = start
            gone.add(node.index)
    if not gone:
        return tuple(nodes)
    return tuple(_reading(node, source) for node in nodes if node.index not in gone)


def _inserted(node: ExecNode, old: DType | None, new: DType | None) -> bool:
    """Whether a cast that narrows floats is one that the runtime inserted: that loses nothing that the file has."""
    return node.name.startswith(CAST) and old is not None and new is not None and old.kind == new.kind == "float"


def _is_cast(node: ExecNode) -> bool:
    return node.op == "Cast" and not node.domain


def _type(types: Mapping[str, PlannedType], name: str) -> DType | None:
    kind = types.get(name)
    return kind.dtype if kind is not None else None


def _reading(node: ExecNode, source: Mapping[str, str]) -> ExecNode:
    def final(name: str) -> str:
        while name in source:
            name = source[name]
        return name

    return replace(node, inputs=tuple(map(final, node.inputs)), implicit=tuple(map(final, node.implicit)))


def unsafe(old: DType | None, new: DType | None) -> bool:
    """Whether a cast may change values, as the runtime judges it."""
    if old is None or new is None or dtypes.string in (old, new) or "complex" in (old.kind, new.kind):
        return True
    unsigned = {d: d.kind == "int" and d.name.startswith("u") for d in (old, new)}
    if unsigned[new] and old.kind != "bool" and not unsigned[old]:
        return True
    if old.kind == "float" and new.kind != "float":
        return True
    bits = {d: 1 if d.kind == "bool" else d.bits for d in (old, new)}
    if unsigned[old] and new.kind == "int" and not unsigned[new]:
        return bits[new] <= bits[old]
    if old.kind == "int" and new.kind == "float":
        return bits[new] <= bits[old]
    if {old.name, new.name} == {"float16", "bfloat16"}:
        return True
    return bits[old] > bits[new]
