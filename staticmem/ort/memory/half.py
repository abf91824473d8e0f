"""Which kernels of the CPU provider compute in half precision; around the others the runtime inserts casts.

Kernels: tried on onnxruntime 1.32 for x86-64, one node at a time; a kernel is missing where the saved graph has casts.
Casts: onnxruntime/core/optimizer/insert_cast_transformer.cc (InsertCastTransformer, IsIsolatedFp16NodeOnCpu). What they
make needless among themselves goes with `build.without_duplicates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticmem.ir import dtypes
from staticmem.ort.memory.graph import ExecGraph, ExecNode, planned_type
from staticmem.ort.memory.inference import CAST, inferred
from staticmem.ort.memory.plan import execution_order

NUMBERED = "staticmem: cast "  # in the doc_string of a cast, before its place among those of its graph
_FLOAT, _HALF = 1, 10  # TensorProto.FLOAT, FLOAT16

_NATIVE = """
    Identity Round Shrink Sign Shape Transpose Flatten IsNaN IsInf Clip Max Min Mod Concat Reshape Squeeze Unsqueeze
    Expand Slice Gather GatherND GatherElements ScatterND ScatterElements Split LayerNormalization
    SimplifiedLayerNormalization Compress QuantizeLinear DequantizeLinear Cast ReverseSequence
"""
NATIVE = frozenset({("", op) for op in _NATIVE.split()} | {("com.microsoft", "SkipLayerNormalization")})


def is_half(graph: ExecGraph, name: str) -> bool:
    """Whether a value has elements of half precision."""
    kind = graph.planned(name) if name else None
    return kind is not None and kind.tensor and kind.dtype is dtypes.float16


def lacks_kernel(node: ExecNode, graph: ExecGraph) -> bool:
    """Whether the runtime casts around a node: it reads half precision, and its kernel does not."""
    return (
        not node.bodies and (node.domain, node.op) not in NATIVE and any(is_half(graph, name) for name in node.inputs)
    )


def half_without_kernel(graph: ExecGraph) -> list[str]:
    """Operators of a graph and its bodies that the runtime casts around, and here are not."""
    ops: dict[str, None] = {}
    for node in graph.nodes:
        written = _cast(node) and (node.domain, node.op) not in NATIVE and _is_function(node, graph.opset)
        if written or lacks_kernel(node, graph):
            ops[node.op] = None
        for body in node.bodies.values():
            ops.update(dict.fromkeys(half_without_kernel(body)))
    return list(ops)


def _cast(node: ExecNode) -> bool:
    """Whether the node reads a value that was cast for it."""
    return any(name.startswith(CAST) for name in (*node.inputs, *node.outputs))


def _is_function(node: ExecNode, opset: int) -> bool:
    """Whether ONNX defines the operator by others: without a kernel the runtime writes it out before it casts."""
    import onnx
    from onnx.defs import SchemaError

    if node.domain or not opset:
        return bool(node.domain)
    try:
        schema = onnx.defs.get_schema(node.op, opset, "")
    except SchemaError:
        return True
    versions = (*schema.function_opset_versions, *schema.context_dependent_function_opset_versions)
    return any(version <= opset for version in versions)


def cast_around(model: Any) -> Any:
    """The model with the casts that the runtime inserts; itself where there are none. A copy has value names and nodes
    of the file, and a `CAST` name for each value that is read or made as a float32."""
    import onnx

    halves = {t.name for t in model.graph.initializer if t.data_type == _HALF}
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    listed = any(v.type.tensor_type.elem_type == _HALF for v in values)
    if not halves and not listed and not any(_makes_half(node) for node in model.graph.node):
        return model
    typed = inferred(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    changed = _Casts(typed.graph, set()).insert(copy.graph)
    return copy if changed else model


def _makes_half(node: Any) -> bool:
    to_half = any(a.name in ("to", "dtype") and a.i == _HALF for a in node.attribute)
    return to_half or any(a.type == 5 and any(_makes_half(n) for n in a.g.node) for a in node.attribute)


class _Casts:
    """Inserts casts into one graph. `around` are values of half precision of the graphs around it."""

    def __init__(self, typed: Any, around: set[str]) -> None:
        kinds = {v.name: planned_type(v.type) for v in (*typed.input, *typed.value_info, *typed.output)}
        self.half = {n for n, k in kinds.items() if k is not None and k.tensor and k.dtype is dtypes.float16}
        self.half |= {t.name for t in typed.initializer if t.data_type == _HALF}
        own = {*kinds, *(t.name for t in typed.initializer), *(n for node in typed.node for n in node.output)}
        for node in typed.node:
            tensors = [a.t for a in node.attribute if a.name == "value" and a.type == 4]
            if node.op_type == "Constant" and tensors and tensors[0].data_type == _HALF:
                self.half.update(node.output)
        self.half |= around - own
        self.bodies = {(tuple(node.output), a.name): a.g for node in typed.node for a in node.attribute if a.type == 5}

    def insert(self, graph: Any) -> bool:
        """Changes a GraphProto; says whether it did."""
        import onnx

        nodes = [node for node in graph.node if node.op_type != "Constant"]
        wanted = self._wanted(nodes, {value.name for value in graph.output})
        order = execution_order([_plain(node, index) for index, node in enumerate(nodes)])
        read: dict[str, str] = {}
        before: dict[int, list[Any]] = {}
        after: dict[int, list[Any]] = {}
        count, changed = 0, False
        for position in order:
            node = nodes[position]
            for attribute in node.attribute:
                if attribute.type == 5:
                    typed = self.bodies.get((tuple(node.output), attribute.name), attribute.g)
                    changed |= _Casts(typed, self.half).insert(attribute.g)
            if not wanted[position]:
                continue
            changed = True
            for index, name in enumerate(node.input):
                if name not in self.half:
                    continue
                if name not in read:
                    read[name] = f"{CAST}{name}::read"
                    cast = onnx.helper.make_node("Cast", [name], [read[name]], name=f"{CAST}{name}", to=_FLOAT)
                    cast.doc_string = f"{NUMBERED}{count}"
                    count += 1
                    before.setdefault(position, []).append(cast)
                node.input[index] = read[name]
            for attribute in node.attribute:
                if attribute.name == "dtype" and attribute.i == _HALF:
                    attribute.i = _FLOAT
            for index, name in enumerate(node.output):
                if name in self.half:
                    cast = onnx.helper.make_node("Cast", [f"{CAST}{name}"], [name], name=f"{CAST}{name}", to=_HALF)
                    cast.doc_string = f"{NUMBERED}{count}"
                    count += 1
                    after.setdefault(position, []).append(cast)
                    node.output[index] = f"{CAST}{name}"
        if not count:
            return changed
        # a cast stands behind what makes its input: those of inputs come first where a node of the graph makes none
        places = {id(node): position for position, node in enumerate(nodes)}
        computed = {name for node in graph.node for name in node.output}
        computed |= {cast.output[0] for row in after.values() for cast in row}
        first = [cast for row in before.values() for cast in row if cast.input[0] not in computed]
        old = list(graph.node)
        readers: dict[str, list[Any]] = {}
        for row in before.values():
            for cast in row:
                if not any(cast is other for other in first):
                    readers.setdefault(cast.input[0], []).append(cast)
        listed: list[Any] = list(first)
        for node in old:
            listed.append(node)
            behind = after.get(places[id(node)], []) if id(node) in places else []
            listed += behind
            for name in (*node.output, *(cast.output[0] for cast in behind)):
                listed += readers.pop(name, [])
        del graph.node[:]
        graph.node.extend(listed)
        return True

    def _wanted(self, nodes: list[Any], results: set[str]) -> list[bool]:
        """Which nodes run on floats: those without a kernel, then those whose neighbours all do."""
        wanted = [self._reads(node) and not _native(node) for node in nodes]
        producers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
        readers: dict[str, list[int]] = {}
        for index, node in enumerate(nodes):
            for name in node.input:
                readers.setdefault(name, []).append(index)
        for index, node in enumerate(nodes):
            inputs = [name for name in node.input[: 1 if node.op_type in ("Concat", "Max", "Min") else None] if name]
            halved = [name for name in node.output if name in self.half]
            edges = any(name in producers for name in node.input)
            if wanted[index] or not self._reads(node) or not _native(node) or not halved or not edges:
                continue
            if results & set(node.output) or any(a.type == 5 for a in node.attribute):
                continue
            sources = [producers[name] for name in inputs if name in self.half and name in producers]
            targets = [reader for name in halved for reader in readers.get(name, [])]
            if all(wanted[other] for other in (*sources, *targets)):
                wanted[index] = True
        return wanted

    def _reads(self, node: Any) -> bool:
        return any(name in self.half for name in node.input) and not any(a.type == 5 for a in node.attribute)


def _native(node: Any) -> bool:
    domain = "" if node.domain == "ai.onnx" else node.domain
    return (domain, node.op_type) in NATIVE


def _plain(node: Any, index: int) -> ExecNode:
    bodies: Mapping[str, Any] = {}
    return ExecNode(
        index, node.op_type, node.domain, node.name, tuple(node.input), tuple(node.output), (), bodies, node
    )
