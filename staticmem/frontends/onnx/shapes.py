"""Sizes of every value at bound dimensions: onnx's inference on the model without weights and without old shapes.

Old shapes are cleared first, because inference keeps what it finds: sizes of the export would survive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from staticmem.frontends.onnx import isolation, wire
from staticmem.frontends.onnx.convert import tensor_value, type_value
from staticmem.ir.graph import Value
from staticmem.ir.onnx_graph import Node

if TYPE_CHECKING:
    import numpy as np

# nodes: of fewer, inference of the whole graph takes less than that of the first node of each kind
REPEATING = 1_000
LONG = 1 << 20  # elements of a vector that is no shape: following its contents takes onnx 70 bytes for each
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

    def __init__(self, proto: Any, tensors: dict[str, Value], count: int, nodes: Sequence[Node]) -> None:
        """Takes a ModelProto over, and `known`: its first `count` initializers. `nodes` are its nodes."""
        import onnx

        graph = proto.graph
        self.operators = {node.op for node in nodes}
        self.tensors = tensors
        self.late: list[Any] = []  # TensorProtos that reading the file has added
        for tensor in graph.initializer[count:]:
            value = tensor_value(tensor)
            self.late.append(onnx.TensorProto())
            self.late[-1].CopyFrom(tensor)
            self.tensors[value.name] = value
        self.long = any(value.shape is not None and _long(value.shape) for value in self.tensors.values())
        # the fields that go stand before the others: their order on the wire is that of their numbers
        whole = graph.SerializeToString()
        for field in ("node", "name", "initializer"):
            graph.ClearField(field)
        self.encoded = whole[: len(whole) - graph.ByteSize()]
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
            self._graph.ParseFromString(self.encoded)
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
        size = wire.encode_varint(len(self.encoded) + len(ends))
        return b"".join((model.SerializeToString(), wire.GRAPH, size, self.encoded, ends))


def infer(model: Any, strict: bool = False) -> dict[str, Value]:
    """Dtypes and sizes of all values of a ModelProto that inference reaches.

    Raises:
        ValueError: in strict mode, sizes contradict each other.
    """
    tensors = {tensor.name: tensor_value(tensor) for tensor in model.graph.initializer}
    given = [value for info in model.graph.input if (value := type_value(info.name, info.type)) is not None]
    short = not any(map(_long, (v.shape or () for v in (*given, *tensors.values()))))
    values = _inferred(model.SerializeToString(), strict, short)
    values.update(tensors)
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
    if len(nodes) >= REPEATING and contents is not None:
        inferred = _repeated(body, shapes, nodes, contents)
        if inferred is not None:
            return inferred, True
    short = not (body.long or any(map(_long, shapes.values())))
    values = _inferred(body.bound(shapes), False, short, nodes)
    values.update(body.tensors)
    return values, False


def _repeated(
    body: Body, shapes: Mapping[str, tuple[int, ...]], nodes: Sequence[Node], contents: dict[str, np.ndarray]
) -> dict[str, Value] | None:
    """The same node by node, where that is possible."""
    given = {v.name: type_value(v.name, v.type) for v in bound_proto(body.ends, shapes).graph.input}
    values = {name: value for name, value in given.items() if value is not None}
    if len(values) < len(given):
        return None
    values.update(body.tensors)
    consts = dict(contents)
    from staticmem.frontends.onnx.repeated import Repeated  # large graphs only

    if not Repeated(body, nodes, values, consts).run():
        return None
    contents.update(consts)
    return values


def _long(shape: Sequence[int]) -> bool:
    return len(shape) == 1 and shape[0] > LONG


def _inferred(data: bytes, strict: bool, short: bool, nodes: Sequence[Node] = ()) -> dict[str, Value]:
    """Inputs, values and outputs of a ModelProto by name, as far as their types are known after inference. `short`: it
    has no vector whose contents cannot be followed. `nodes` lend their objects for names.

    Raises:
        ValueError: in strict mode, sizes contradict each other.
    """
    import onnx

    try:
        graph = onnx.ModelProto.FromString(_infer_with_contents(data, strict, short)).graph
    except isolation.RefusedError:
        if strict:
            raise
        graph = onnx.ModelProto.FromString(data).graph
    names = {name: name for node in nodes for name in node.outputs}
    values: dict[str, Value] = {}
    for info in chain(graph.input, graph.value_info, graph.output):  # outputs count more than values
        name = names.get(info.name, info.name)
        value = type_value(name, info.type)
        if value is not None:
            values[name] = value
    del graph
    if len(data) > LARGE:
        give_back()
    return values


def _infer_with_contents(data: bytes, strict: bool, short: bool) -> bytes:
    """The model after inference. onnx follows contents of vectors of any length, element by element: where that ends
    badly or takes too much, it is asked for what follows from sizes alone, and `fold` follows contents of short ones.

    Raises:
        isolation.RefusedError: onnx has an error for it.
        isolation.FailedError: onnx ends without an answer either way.
    """
    try:
        return isolation.infer_shapes(data, strict, data_prop=short)
    except isolation.FailedError:
        try:
            return isolation.infer_shapes(data, strict)
        except isolation.FailedError as error:
            if error.signal and len(data) < LARGE:
                error.what = f"onnx cannot infer the sizes of {_first_failing(data)}"
            raise


def _first_failing(data: bytes) -> str:
    """The node at which inference of a model ends by a signal."""
    import onnx

    model = onnx.ModelProto.FromString(data)
    nodes = list(model.graph.node)
    model.graph.ClearField("output")
    passes, fails = 0, len(nodes)  # with so many of them
    while fails - passes > 1:
        middle = (passes + fails) // 2
        model.graph.ClearField("node")
        model.graph.node.extend(nodes[:middle])
        try:
            isolation.infer_shapes(model.SerializeToString())
        except isolation.FailedError:
            fails = middle
            continue
        except isolation.RefusedError:
            pass
        passes = middle
    return isolation.title(nodes[fails - 1])


def give_back() -> None:
    """Hands memory that C++ has freed back to the system: glibc keeps it, and Python's objects cannot use it."""
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # not glibc
        return
