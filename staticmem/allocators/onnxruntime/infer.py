"""What the runtime knows of sizes when it plans: inference over open dimensions, its own operators included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from staticmem.allocators.onnxruntime.contents import Contents, constants_of
from staticmem.allocators.onnxruntime.contrib import CONTRIB, NCHWC, block_size, with_block
from staticmem.allocators.onnxruntime.graph import MADE_UP, Dim, PlannedType, planned_type
from staticmem.frontends.onnx.convert import Converter
from staticmem.ir import dtypes

_CODES = {dtype.name: code for code, dtype in dtypes.ONNX_CODES.items()}


def inferred(model: Any) -> Any:
    """The model with shapes as inference finds them, with the file's symbols and without following contents: the
    runtime has rules of its own for those (`contents`), and symbols in them it does not follow (core/graph/graph.cc,
    getSymbolicInput)."""
    import onnx
    from onnx.checker import ValidationError
    from onnx.shape_inference import InferenceError

    named = onnx.ModelProto()
    named.CopyFrom(model)
    # a file may have names of an earlier inference: they are symbols like others
    _symbols(named.graph, lambda name: f"file:{name}" if name.startswith(MADE_UP) else name)
    try:
        return onnx.shape_inference.infer_shapes(named, check_type=False, strict_mode=False, data_prop=False)
    except (InferenceError, ValidationError, RuntimeError, ValueError, TypeError):
        return named


def _symbols(graph: Any, rename: Callable[[str], str]) -> None:
    """Renames the symbols in the shapes of a graph and its bodies; one without a name is an open size."""
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
    opsets = _opsets(versions)
    for node in proto.node:
        open_results = [n for n in node.output if n and not _closed(types.get(n))]
        rule = CONTRIB.get((node.domain, node.op_type)) if open_results else None
        if rule is not None:
            plain = with_block(converter.node(node), block)
            found = rule(plain, [types.get(n) if n else None for n in node.input])
            for name, kind in zip(node.output, found, strict=False):
                if name in open_results and kind is not None:
                    types[name] = merged(kind, types.get(name))
        elif open_results:
            _ask(node, types, contents, versions, opsets, open_results)
        contents.follow(node, types)


def _opsets(versions: Mapping[str, int]) -> list[Any]:
    import onnx

    return [onnx.helper.make_opsetid(domain, version) for domain, version in versions.items()]


def _ask(
    node: Any,
    types: dict[str, PlannedType],
    contents: Contents,
    versions: Mapping[str, int],
    opsets: list[Any],
    wanted: list[str],
) -> None:
    """onnx's inference of one node."""
    import onnx
    from onnx.checker import ValidationError
    from onnx.defs import SchemaError
    from onnx.shape_inference import InferenceError, infer_node_outputs

    domain = "" if node.domain == "ai.onnx" else node.domain
    version = versions.get(domain)
    if version is None or any(a.type == 5 for a in node.attribute):
        return
    known = {name: _proto(types[name]) for name in node.input if name and name in types and types[name].tensor}
    data = contents.data(list(node.input))
    try:
        schema = onnx.defs.get_schema(node.op_type, version, domain)
        found = infer_node_outputs(schema, node, known, data, opset_imports=opsets, ir_version=10)
    except (InferenceError, ValidationError, SchemaError, RuntimeError, ValueError, TypeError, KeyError):
        return
    for name in wanted:
        kind = planned_type(found[name]) if name in found else None
        if kind is not None:
            types[name] = merged(kind, types.get(name))


def _closed(kind: PlannedType | None) -> bool:
    return kind is not None and (not kind.tensor or (kind.dims is not None and None not in kind.dims))


def merged(found: PlannedType, old: PlannedType | None) -> PlannedType:
    """Both are right; the more precise size of each dimension stays."""
    if old is None or old.dims is None or found.dims is None or len(old.dims) != len(found.dims):
        return found if found.dims is not None or old is None else old
    dims = tuple(a if isinstance(a, int) or b is None else b for a, b in zip(found.dims, old.dims, strict=True))
    return PlannedType(old.dtype, dims, old.tensor)


def _proto(kind: PlannedType) -> Any:
    import onnx

    code = _CODES.get(kind.dtype.name, 1)
    dims: tuple[Dim, ...] | None = kind.dims
    return onnx.helper.make_tensor_type_proto(code, dims)
