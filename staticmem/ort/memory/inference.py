"""What the runtime knows of sizes when it plans: inference over open dimensions, its own operators included, and the
contents of shape tensors as far as it follows them, which is less than onnx's inference does.

Source of the second: onnxruntime/core/graph/data_propagation and graph.cc (getInputData). Each rule was tried on
onnxruntime 1.31 by asking a session for the sizes of its results: a vector counts only where all of it is a number;
constants of the file serve the operator that reads them and are followed no further; `Cast`, `Slice`, `Identity`, `Max`
and the like are not followed; `Size` of a shape gives the product of that shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from staticmem.frontends.onnx import isolation
from staticmem.frontends.onnx.convert import Converter
from staticmem.frontends.onnx.evaluate import LIMIT
from staticmem.ir import dtypes
from staticmem.ort.memory.contrib import CONTRIB, NCHWC, block_size, with_block
from staticmem.ort.memory.graph import MADE_UP, PlannedType, planned_type

_CODES = {dtype.name: code for code, dtype in dtypes.ONNX_CODES.items()}


def inferred(model: Any) -> Any:
    """The model with shapes as inference finds them, with the file's symbols and without following contents: the
    runtime has rules of its own for those (`contents`), and symbols in them it does not follow (core/graph/graph.cc,
    getSymbolicInput)."""
    import onnx

    named = onnx.ModelProto()
    named.CopyFrom(model)
    # a file may have names of an earlier inference: they are symbols like others
    _symbols(named.graph, lambda name: f"file:{name}" if name.startswith(MADE_UP) else name)
    try:
        return onnx.ModelProto.FromString(isolation.infer_shapes(named.SerializeToString()))
    except isolation.RefusedError:
        return named


def _symbols(graph: Any, rename: Callable[[str], str]) -> None:
    """Renames the symbols in the shapes of a graph and its bodies; one without a name, or a negative size, is open."""
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.WhichOneof("value") != "tensor_type":
            continue
        for dim in value.type.tensor_type.shape.dim:
            if dim.WhichOneof("value") == "dim_param":
                name = rename(dim.dim_param)
                if name:
                    dim.dim_param = name
                else:
                    dim.Clear()
            elif dim.WhichOneof("value") == "dim_value" and dim.dim_value < 0:
                dim.Clear()  # core/graph/graph.cc, NodeArg: a negative size is an open one
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == 5:
                _symbols(attribute.g, rename)


def fill(proto: Any, types: dict[str, PlannedType], versions: Mapping[str, int]) -> None:
    """Adds to `types` what follows from contents of shapes, and from the runtime's own operators, at which onnx's
    inference stops.

    Args:
        proto: a GraphProto after inference.
        types: what is known; initializers and outer values included.
        versions: the opset of each domain.
    """

    converter = Converter()
    contents = Contents(constants_of(proto))
    block = block_size([types.get(n.input[1]) for n in proto.node if n.domain == NCHWC and n.op_type == "Conv"])
    for node in proto.node:
        open_results = [n for n in node.output if n and not _closed(types.get(n))]
        rule = CONTRIB.get((node.domain, node.op_type)) if open_results else None
        if rule is not None:
            plain = with_block(converter.node(node), block)
            results = rule(plain, [types.get(n) if n else None for n in node.input])
            for name, kind in zip(node.output, results, strict=False):
                if name in open_results and kind is not None:
                    types[name] = merged(kind, types.get(name))
        elif open_results:
            _ask(node, types, contents, versions, open_results)
        contents.follow(node, types)


CAST = "InsertedPrecisionFreeCast_"  # before the name of a value of half precision, as a float32


def carried_over(model: Any, saved: Any) -> Any:
    """The graph that the runtime saved, with the shapes that it knew from the file and did not save: those of values
    that have kept their names, and those that its float32 twins of values of half precision had when they were made
    (insert_cast_transformer.cc), by the shapes of the file. A copy, where the file has shapes."""
    import onnx

    if not model.graph.value_info:
        return saved
    result = onnx.ModelProto()
    result.CopyFrom(saved)
    versions = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
    symbolic = inferred(model)
    types = {v.name: planned_type(v.type) for v in (*symbolic.graph.input, *symbolic.graph.value_info)}
    kinds = {name: kind for name, kind in types.items() if kind is not None}
    for tensor in model.graph.initializer:
        dtype = dtypes.ONNX_CODES.get(tensor.data_type, dtypes.float32)
        kinds[tensor.name] = PlannedType(dtype, tuple(int(d) for d in tensor.dims))
    contents = Contents(constants_of(model.graph))
    has = {value.name for value in (*saved.graph.value_info, *saved.graph.input, *saved.graph.output)}
    computed = {name for node in saved.graph.node for name in node.output}
    twins = {name.removeprefix(CAST) for name in computed if name.startswith(CAST)}
    for node in model.graph.node:
        for name in node.output:
            kind = kinds.get(name)
            if name in computed and name not in has and kind is not None:
                result.graph.value_info.append(onnx.helper.make_value_info(name, _type_proto(kind)))
        halves = [name for name in node.output if name in twins]
        if halves:
            seen = {name: kind for name, kind in kinds.items() if name not in halves}
            _ask(node, seen, contents, versions, halves)
            for name in halves:
                kind = seen.get(name)
                if kind is not None and f"{CAST}{name}" not in has:
                    kind = PlannedType(dtypes.float32, kind.dims, kind.tensor)
                    result.graph.value_info.append(onnx.helper.make_value_info(f"{CAST}{name}", _type_proto(kind)))
        contents.follow(node, kinds)
    return result


def _ask(
    node: Any, types: dict[str, PlannedType], contents: Contents, versions: Mapping[str, int], wanted: list[str]
) -> None:
    """onnx's inference of one node."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = versions.get(domain)
    if version is None or any(a.type == 5 for a in node.attribute):
        return
    inputs = {name: _type_proto(types[name]) for name in node.input if name and name in types and types[name].tensor}
    data = contents.data(list(node.input))
    try:
        results = isolation.infer_node(node, version, inputs, data, versions, domain)
    except isolation.RefusedError:
        return
    for name in wanted:
        kind = planned_type(results[name]) if name in results else None
        if kind is not None:
            types[name] = merged(kind, types.get(name))


def _closed(kind: PlannedType | None) -> bool:
    return kind is not None and (not kind.tensor or (kind.dims is not None and None not in kind.dims))


def merged(new: PlannedType, old: PlannedType | None) -> PlannedType:
    """Both are right; the more precise size of each dimension stays."""
    if old is None or old.dims is None or new.dims is None or len(old.dims) != len(new.dims):
        return new if new.dims is not None or old is None else old
    dims = tuple(a if isinstance(a, int) or b is None else b for a, b in zip(new.dims, old.dims, strict=True))
    return PlannedType(old.dtype, dims, old.tensor)


def _type_proto(kind: PlannedType) -> Any:
    import onnx

    return onnx.helper.make_tensor_type_proto(_CODES.get(kind.dtype.name, 1), kind.dims)


# -- contents of shape tensors ---------------------------------------------------------------------------------------


_INT64 = 7  # TensorProto.INT64
_LIMIT = 1 << 62  # larger products are no sizes


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers in a scalar or a vector."""

    scalar: bool
    values: tuple[int, ...]


@dataclass(slots=True)
class Contents:
    """Contents of one graph. `constants` are initializers and Constant nodes as TensorProtos; `results` are numbers
    that other nodes give."""

    constants: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Numbers] = field(default_factory=dict)

    def data(self, names: list[str]) -> dict[str, Any]:
        """TensorProtos for onnx's inference of a node that reads `names`."""
        protos: dict[str, Any] = {}
        for name in names:
            if name in self.constants:
                protos[name] = self.constants[name]
            elif name in self.results:
                protos[name] = _tensor_proto(self.results[name])
        return protos

    def follow(self, node: Any, types: Mapping[str, PlannedType]) -> None:
        """Notes what is known of a node's result."""
        rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        result = rule(self, node, types) if rule is not None else None
        if result is None or len(result.values) > LIMIT:  # a Concat of a vector with itself doubles it
            return
        if all(abs(v) < _LIMIT for v in result.values):
            self.results[node.output[0]] = result

    def index(self, name: str) -> Numbers | None:
        """A constant of one integer."""
        tensor = self.constants.get(name)
        if tensor is None or len(tensor.dims) > 1 or math.prod(tensor.dims) != 1:
            return None
        import onnx

        try:
            return Numbers(not tensor.dims, (int(onnx.numpy_helper.to_array(tensor).reshape(-1)[0]),))
        except (ValueError, TypeError):
            return None


def constant_proto(node: Any) -> Any | None:
    """The TensorProto of a Constant node, None for kinds that no shape is made of."""
    import onnx

    for attribute in node.attribute:
        if attribute.name == "value":
            return attribute.t
        if attribute.name == "value_int":
            return onnx.helper.make_tensor(node.output[0], _INT64, [], [attribute.i])
        if attribute.name == "value_ints":
            return onnx.helper.make_tensor(node.output[0], _INT64, [len(attribute.ints)], list(attribute.ints))
    return None


def constants_of(graph: Any) -> dict[str, Any]:
    """Initializers whose contents were read, and Constant nodes."""
    constants = {t.name: t for t in graph.initializer if t.data_location == 0 and _has_data(t)}
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            tensor = constant_proto(node)
            if tensor is not None and _has_data(tensor):
                constants[node.output[0]] = tensor
    return constants


def _has_data(tensor: Any) -> bool:
    return bool(tensor.raw_data or tensor.int64_data or tensor.int32_data or tensor.float_data)


def _tensor_proto(content: Numbers) -> Any:
    import onnx

    dims = [] if content.scalar else [len(content.values)]
    return onnx.helper.make_tensor("", _INT64, dims, list(content.values))


def _attribute(node: Any, name: str, default: int | None) -> int | None:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _shape(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Numbers | None:
    kind = types.get(node.input[0])
    if kind is None or kind.dims is None or not kind.tensor:
        return None
    taken = kind.dims[slice(_attribute(node, "start", 0), _attribute(node, "end", None))]
    values = tuple(d for d in taken if isinstance(d, int))
    return Numbers(False, values) if values and len(values) == len(taken) else None


def _size(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Numbers | None:
    """The runtime multiplies the contents of its input, not its dimensions."""
    content = contents.results.get(node.input[0])
    return Numbers(True, (math.prod(content.values),)) if content is not None and not content.scalar else None


def _gather(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Numbers | None:
    content, index = contents.results.get(node.input[0]), contents.index(node.input[1])
    if content is None or content.scalar or index is None:
        return None
    at = index.values[0]
    if not -len(content.values) <= at < len(content.values):
        return None
    return Numbers(index.scalar, (content.values[at],))


def _unsqueeze(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Numbers | None:
    content = contents.results.get(node.input[0])
    return Numbers(False, content.values) if content is not None and content.scalar else None


def _squeeze(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Numbers | None:
    content = contents.results.get(node.input[0])
    return Numbers(len(content.values) == 1, content.values) if content is not None and not content.scalar else None


def _concat(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Numbers | None:
    parts = [contents.results.get(name) for name in node.input]
    values: list[int] = []
    for part in parts:
        if part is None or part.scalar:
            return None
        values.extend(part.values)
    return Numbers(False, tuple(values))


def _arithmetic(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Numbers | None:
    parts = [contents.results.get(name) for name in node.input]
    if len(parts) != 2 or parts[0] is None or parts[1] is None:
        return None
    first, second = parts[0], parts[1]
    if len(first.values) != 1 or len(second.values) != 1 or (node.op_type == "Div" and second.values[0] == 0):
        return None
    return Numbers(first.scalar and second.scalar, (_OPERATORS[node.op_type](first.values[0], second.values[0]),))


def _divided(a: int, b: int) -> int:
    """C++ rounds to zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _divided,
}
_RULES: dict[str, Callable[[Contents, Any, Mapping[str, PlannedType]], Numbers | None]] = {
    "Shape": _shape,
    "Size": _size,
    "Gather": _gather,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
    **dict.fromkeys(_OPERATORS, _arithmetic),
}
