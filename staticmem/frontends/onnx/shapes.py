"""Sizes of every value at bound dimensions: onnx's inference on the model without weights and without old shapes.

Old shapes are cleared first, because inference keeps what it finds: sizes of the export would survive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from staticmem.frontends.onnx import wire
from staticmem.frontends.onnx.convert import tensor_value, type_value
from staticmem.frontends.onnx.repeated import Repeated
from staticmem.ir import dtypes
from staticmem.ir.graph import Value
from staticmem.ir.onnx_graph import Node

if TYPE_CHECKING:
    import numpy as np

# nodes: of fewer, inference of the whole graph takes less than that of the first node of each kind
REPEATING = 1_000
LARGE = 4 << 20  # bytes of a graph without weights: what its inference leaves behind is worth giving back


def bound_proto(proto: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """A copy of a ModelProto whose inputs have these sizes and whose outputs have none."""
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(proto)
    for value in model.graph.input:
        sizes = shapes.get(value.name)
        if sizes is None or value.type.WhichOneof("value") != "tensor_type":
            continue
        shape = value.type.tensor_type.shape
        shape.Clear()
        shape.SetInParent()
        for size in sizes:
            shape.dim.add().dim_value = size
    for value in model.graph.output:
        if value.type.WhichOneof("value") == "tensor_type":
            value.type.tensor_type.ClearField("shape")
    return model


class Body:
    """A model as its inference reads it. Nodes and initializers are bytes: a binding changes a few dimensions of
    inputs, so the rest is neither copied nor serialized again, and takes a fifth of the memory of messages.

    `graph` and `opset_import` are those of the ModelProto, for what looks at single nodes; they are made when asked
    for.
    """

    def __init__(self, proto: Any, known: dict[str, Value], count: int, nodes: Sequence[Node]) -> None:
        """Takes a ModelProto over, and `known`: its first `count` initializers. `nodes` are its nodes."""
        import onnx

        graph = proto.graph
        self.operators = {node.op for node in nodes}
        self.tensors = known
        self.late: list[Any] = []  # TensorProtos that reading the file has added
        for tensor in graph.initializer[count:]:
            value = tensor_value(tensor)
            self.late.append(onnx.TensorProto())
            self.late[-1].CopyFrom(tensor)
            self.tensors[value.name] = value
        # the fields that go stand before the others: their order on the wire is that of their numbers
        whole = graph.SerializeToString()
        for field in ("node", "name", "initializer"):
            graph.ClearField(field)
        self.known = whole[: len(whole) - graph.ByteSize()]
        self.ends = onnx.ModelProto()  # the memory of what was taken out of a message goes when the message goes
        self.ends.ParseFromString(proto.SerializeToString())
        self.opset_import = self.ends.opset_import
        self._graph: Any = None

    @property
    def graph(self) -> Any:
        """A GraphProto of nodes and initializers."""
        if self._graph is None:
            import onnx

            self._graph = onnx.GraphProto()
            self._graph.ParseFromString(self.known)
        return self._graph

    def proto(self, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """The same as a message."""
        import onnx

        model = onnx.ModelProto()
        model.ParseFromString(self.bound(shapes))
        return model

    def bound(self, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
        """The ModelProto whose inputs have these sizes and whose outputs have none."""
        model = bound_proto(self.ends, shapes)
        ends = model.graph.SerializeToString()
        model.ClearField("graph")
        size = wire.encode_varint(len(self.known) + len(ends))
        return b"".join((model.SerializeToString(), wire.GRAPH, size, self.known, ends))


def infer(model: Any, strict: bool = False) -> dict[str, Value]:
    """Dtypes and sizes of all values of a ModelProto that inference reaches.

    Raises:
        ValueError: in strict mode, sizes contradict each other.
    """
    from onnx.checker import ValidationError
    from onnx.shape_inference import InferenceError

    data = model.SerializeToString()
    try:
        data = _inferred(data, strict)
    except (InferenceError, ValidationError, RuntimeError, ValueError, TypeError) as error:
        if strict:
            raise ValueError(str(error)) from error
    values = _described(wire.without_nodes(data))
    for tensor in model.graph.initializer:
        values[tensor.name] = tensor_value(tensor)
    return values


def infer_body(
    body: Body,
    shapes: Mapping[str, tuple[int, ...]],
    nodes: Sequence[Node] = (),
    contents: dict[str, np.ndarray] | None = None,
) -> tuple[dict[str, Value], bool]:
    """`infer` of a file's model at these sizes of its inputs, and whether all sizes are known now. `nodes` are its
    nodes, whose objects for names are used. `contents` has those of small initializers; those of small results may be
    added."""
    from onnx.checker import ValidationError
    from onnx.shape_inference import InferenceError

    if len(nodes) >= REPEATING and contents is not None:
        found = _repeated(body, shapes, nodes, contents)
        if found is not None:
            return found, True
    data = body.bound(shapes)
    with suppress(InferenceError, ValidationError, RuntimeError, ValueError, TypeError):
        data = _inferred(data, False)
    start, end = wire.graph_of(data)
    # inference adds to the end of a graph, unless it has other graphs in it
    follows = data.startswith(body.known, start)
    values = _described(data[start + len(body.known) : end] if follows else wire.without_nodes(data), nodes)
    values.update(body.tensors)
    return values, False


def _repeated(
    body: Body, shapes: Mapping[str, tuple[int, ...]], nodes: Sequence[Node], contents: dict[str, np.ndarray]
) -> dict[str, Value] | None:
    """The same node by node, where that is possible."""
    given = {v.name: type_value(v.name, v.type) for v in bound_proto(body.ends, shapes).graph.input}
    known = {name: value for name, value in given.items() if value is not None}
    if len(known) < len(given):
        return None
    known.update(body.tensors)
    consts = dict(contents)
    if not Repeated(body, nodes, known, consts).run():
        return None
    contents.update(consts)
    return known


def _inferred(data: bytes, strict: bool) -> bytes:
    """What inference makes of a ModelProto."""
    from onnx.onnx_cpp2py_export import shape_inference

    inferred: bytes = shape_inference.infer_shapes(data, False, strict, True)
    if len(data) > LARGE:
        give_back()
    return inferred


def _described(data: bytes, nodes: Sequence[Node] = ()) -> dict[str, Value]:
    """Inputs, values and outputs of a GraphProto by name, as far as their types are known. Most of a graph's values
    have one of a few types, so that the bytes of a type are looked up before they are read. `nodes` lend their objects
    for names: inference goes through them in order."""
    import onnx

    values: dict[str, Value] = {}
    types: dict[bytes, Value | None] = {}
    outputs: list[tuple[str, bytes]] = []
    made = (name for node in nodes for name in node.outputs)
    near: dict[str, str] = {}

    # outputs come before the values on the wire, and count more
    for field, name, rest in chain(wire.value_infos(data), ((0, *output) for output in outputs)):
        if field == wire.OUTPUT:
            outputs.append((name, rest))
            continue
        kind = types.get(rest, _NEW)
        if kind is _NEW:
            proto = onnx.ValueInfoProto()
            proto.ParseFromString(rest)
            kind = types[rest] = type_value(name, proto.type)
        if kind is not None:
            if name not in near and field == wire.VALUE_INFO:
                near = {n: n for n in islice(made, _NEAR)}
            name = near.get(name, name)
            values[name] = Value(name, kind.dtype, kind.shape)
    return values


_NEAR = 1024  # names of nodes' results that are looked up at a time
_NEW = Value("", dtypes.float32, None)  # stands for a type that was not met yet


def give_back() -> None:
    """Hands memory that C++ has freed back to the system: glibc keeps it, and Python's objects cannot use it."""
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # not glibc
        return
