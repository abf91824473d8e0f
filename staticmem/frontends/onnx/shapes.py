"""Sizes of every value at bound dimensions: onnx's inference on the model without weights and without old shapes.

Old shapes are cleared first, because inference keeps what it finds: sizes of the export would survive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticmem.frontends.onnx import wire
from staticmem.frontends.onnx.convert import tensor_value, type_value
from staticmem.graph.ir import Value

LARGE = 4 << 20  # bytes of a graph without weights: what its inference leaves behind is worth giving back


def bound_proto(proto: Any, shapes: Mapping[str, tuple[int, ...]], in_place: bool = False) -> Any:
    """A copy of a ModelProto (or itself) whose inputs have these sizes and whose outputs have none."""
    import onnx

    model = proto
    if not in_place:
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


def infer(model: Any, strict: bool = False) -> dict[str, Value]:
    """Dtypes and sizes of all values that inference reaches.

    Raises:
        ValueError: in strict mode, sizes contradict each other.
    """
    from onnx.checker import ValidationError
    from onnx.shape_inference import InferenceError

    try:
        model = _inferred(model.SerializeToString(), strict)
    except (InferenceError, ValidationError, RuntimeError, ValueError, TypeError) as error:
        if strict:
            raise ValueError(str(error)) from error
    values: dict[str, Value] = {}
    graph = getattr(model, "graph", model)
    for proto in (*graph.input, *graph.value_info, *graph.output):
        value = type_value(proto.name, proto.type)
        if value is not None:
            values[value.name] = value
    for tensor in graph.initializer:
        values[tensor.name] = tensor_value(tensor)
    return values


def _inferred(data: bytes, strict: bool) -> Any:
    """What inference finds, as a GraphProto without nodes: they are most of a large graph, and known."""
    import onnx
    from onnx.onnx_cpp2py_export import shape_inference

    inferred = shape_inference.infer_shapes(data, False, strict, True)
    graph = onnx.GraphProto()
    graph.ParseFromString(wire.without_nodes(inferred))
    if len(data) > LARGE:
        give_back()
    return graph


def give_back() -> None:
    """Hands memory that C++ has freed back to the system: glibc keeps it, and Python's objects cannot use it."""
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # not glibc
        return
