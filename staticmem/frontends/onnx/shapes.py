"""Sizes of every value at bound dimensions: onnx's inference on the model without weights and without old shapes.

Old shapes are cleared first, because inference keeps what it finds: sizes of the export would survive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticmem.frontends.onnx.convert import tensor_value, type_value
from staticmem.graph.ir import Value


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


def infer(model: Any, strict: bool = False) -> dict[str, Value]:
    """Dtypes and sizes of all values that inference reaches.

    Raises:
        ValueError: in strict mode, sizes contradict each other.
    """
    import onnx
    from onnx.checker import ValidationError
    from onnx.shape_inference import InferenceError

    try:
        model = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=strict, data_prop=True)
    except (InferenceError, ValidationError, RuntimeError, ValueError, TypeError) as error:
        if strict:
            raise ValueError(str(error)) from error
    values: dict[str, Value] = {}
    graph = model.graph
    for proto in (*graph.input, *graph.value_info, *graph.output):
        value = type_value(proto.name, proto.type)
        if value is not None:
            values[value.name] = value
    for tensor in graph.initializer:
        values[tensor.name] = tensor_value(tensor)
    return values
