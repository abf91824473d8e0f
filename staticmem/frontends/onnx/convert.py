"""Protobuf nodes and types as the plain data that recovery reads."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Value
from staticmem.ir.onnx_graph import Attr, Node, Subgraph

SMALL = 4096  # bytes of a tensor whose contents are kept
SHARED = 512  # bytes of a node's attributes that are looked up among those of earlier nodes
NEAR = 20_000  # names that are looked up among the last ones
MOST = 4096  # sets of attributes that are kept for it; real models have some tens
_PLAIN = (1, 2, 3, 6, 7, 8)  # AttributeProto.AttributeType: numbers, strings and lists of them

_FX = "pkg.torch.onnx.fx_node"
_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_STACK = "pkg.torch.onnx.stack_trace"
_ITEM = re.compile(r"'([^']*)'|\"([^\"]*)\"")


class Converter:
    """Converts nodes; one for a file, because names, attributes and metadata texts repeat from node to node."""

    def __init__(self) -> None:
        self._lists: dict[str, tuple[str, ...]] = {}
        # one object for each name: it stands where it is made and, soon after, where it is read
        self._names: dict[str, str] = {}
        self._attributes: dict[tuple[bytes, ...], dict[str, Attr]] = {(): {}}
        self.bodies = False  # whether a node had a subgraph

    def node(self, proto: Any, strip: bool = False) -> Node:
        """The node of a NodeProto. `strip`: its metadata are taken out, which inference has no use for."""
        fx = ""
        scopes: tuple[str, ...] = ()
        classes: tuple[str, ...] = ()
        stack = ""
        metadata = proto.metadata_props
        if metadata:
            for entry in metadata:
                key = entry.key
                if key == _FX:
                    fx = entry.value
                elif key == _SCOPES:
                    scopes = self._list(entry.value)
                elif key == _CLASSES:
                    classes = self._list(entry.value)
                elif key == _STACK:
                    stack = entry.value
            if strip:
                del metadata[:]
        if strip and proto.doc_string:
            proto.ClearField("doc_string")
        if len(self._names) > NEAR:
            self._names.clear()
        same = self._names.setdefault
        op, domain = proto.op_type, proto.domain
        inputs, outputs = proto.input[:], proto.output[:]
        attrs = self._attrs(proto.attribute)
        if op == "GatherND" and isinstance(first := attrs.get("batch_dims"), int) and first < 0:
            raise _no_batch_dims(proto, first)
        return Node(
            same(op, op),
            "" if domain == "ai.onnx" else same(domain, domain),
            proto.name,
            tuple(map(same, inputs, inputs)),
            tuple(map(same, outputs, outputs)),
            attrs,
            fx,
            scopes,
            classes,
            stack,
        )

    def _attrs(self, protos: Any) -> dict[str, Attr]:
        """Attributes by name; one object for all nodes that have the same small ones."""
        if not protos:
            return self._attributes[()]
        given = protos[:]
        key = tuple([a.SerializeToString() for a in given])
        converted = self._attributes.get(key)
        if converted is None:
            converted = {a.name: self._attribute(a) for a in given}
            if len(self._attributes) < MOST and sum(map(len, key)) < SHARED and all(a.type in _PLAIN for a in given):
                self._attributes[key] = converted
        return converted

    def subgraph(self, graph: Any) -> Subgraph:
        self.bodies = True
        return Subgraph(
            tuple(self.node(n) for n in graph.node),
            tuple(i.name for i in graph.input),
            tuple(o.name for o in graph.output),
            (*(t.name for t in graph.initializer), *(s.values.name for s in graph.sparse_initializer)),
        )

    def _list(self, text: str) -> tuple[str, ...]:
        items = self._lists.get(text)
        if items is None:
            items = tuple(a or b for a, b in _ITEM.findall(text[: 1 << 16]))
            self._lists[text] = items
        return items

    def _attribute(self, attribute: Any) -> Attr:
        kind = attribute.type
        if kind == 2:
            return int(attribute.i)
        if kind == 7:
            return tuple(attribute.ints)
        if kind == 1:
            return float(attribute.f)
        if kind == 3:
            return str(attribute.s.decode("utf-8", "replace"))
        if kind == 6:
            return tuple(attribute.floats)
        if kind == 8:
            return tuple(s.decode("utf-8", "replace") for s in attribute.strings)
        if kind == 4:
            contents: Attr = array(attribute.t)
            return contents
        if kind == 5:
            return self.subgraph(attribute.g)
        if kind == 10:
            return tuple(self.subgraph(g) for g in attribute.graphs)
        return None


def with_metadata(graph: Any, nodes: Sequence[Node]) -> None:
    """Puts back what `Converter.node` took out of the nodes of a GraphProto, of which `nodes` were made."""
    for proto, node in zip(graph.node, nodes, strict=False):
        texts = {_FX: node.fx, _STACK: node.stack}
        texts |= {key: repr(list(items)) for key, items in ((_SCOPES, node.scopes), (_CLASSES, node.classes)) if items}
        for key, text in texts.items():
            if text:
                proto.metadata_props.add(key=key, value=text)


def array(tensor: Any) -> Any:
    """The contents of a small tensor as a numpy array, or None where the file's reader dropped them."""
    dtype = dtypes.ONNX_CODES.get(tensor.data_type)
    if dtype is None or dtype is dtypes.string or tensor.data_location == 1:
        return None
    shape = sizes_of(tensor)
    numel = math.prod(shape)
    if dtype.nbytes(numel) > SMALL:
        return None
    import numpy as np
    import onnx

    if tensor.data_type == 7 and tensor.raw_data:  # most constants, without the generic path
        if len(tensor.raw_data) != 8 * numel:
            return None
        return np.frombuffer(tensor.raw_data, dtype="<i8").reshape(shape)
    try:
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError):
        return None


def tensor_value(tensor: Any, name: str | None = None) -> Value:
    """Name, dtype and sizes of a TensorProto."""
    dtype = dtypes.ONNX_CODES.get(tensor.data_type, dtypes.float32)
    return Value(tensor.name if name is None else name, dtype, sizes_of(tensor))


def _no_batch_dims(node: Any, number: int) -> ModelFileError:
    """The error for a count of dimensions below zero. onnx 1.23 reads memory that is not its own there, which may end
    its process or give sizes of anything (`GatherND`, onnx/defs/tensor/defs.cc)."""
    return ModelFileError(
        f"node '{node.name or (*node.output, '')[0]}' (GatherND) has {number} batch dimensions",
        "The number of the dimensions that its inputs have in common cannot be negative.",
        "Check the file with onnx.checker.check_model, and export the model again.",
        code="SM157",
    )


def sizes_of(tensor: Any, name: str | None = None) -> tuple[int, ...]:
    """Dimensions of a TensorProto or a SparseTensorProto.

    Raises:
        ModelFileError: one of them is negative.
    """
    shape = _same(tuple(tensor.dims[:]))
    if shape and min(shape) < 0:
        raise ModelFileError(
            f"tensor '{tensor.name if name is None else name}' has a negative size",
            f"Its shape is {list(shape)}.",
            "Check the file with onnx.checker.check_model, and export the model again.",
            code="SM157",
        )
    return shape


@lru_cache(4096)
def _same(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One object for all tensors of a shape."""
    return shape


def type_value(name: str, proto: Any) -> Value | None:
    """Name, dtype and sizes of a TypeProto; sizes are None where one of them is not an integer."""
    kind = proto.WhichOneof("value")
    if kind == "optional_type":
        return type_value(name, proto.optional_type.elem_type)
    if kind == "sequence_type":
        inner = type_value(name, proto.sequence_type.elem_type)
        return Value(name, inner.dtype, None) if inner is not None else None
    if kind not in ("tensor_type", "sparse_tensor_type"):
        return None
    tensor = getattr(proto, kind)
    dtype: DType | None = dtypes.ONNX_CODES.get(tensor.elem_type)
    if dtype is None:
        return None
    if not tensor.HasField("shape"):
        return Value(name, dtype, None)
    sizes = []
    for dim in tensor.shape.dim:
        if dim.WhichOneof("value") != "dim_value":
            return Value(name, dtype, None)
        sizes.append(int(dim.dim_value))
    if sizes and min(sizes) < 0:  # of a kernel that is larger than its input; the op's rule says so
        return Value(name, dtype, None)
    return Value(name, dtype, tuple(sizes))
