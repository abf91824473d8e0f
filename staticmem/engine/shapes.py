"""Shapes and sizes of every value of a graph from a run of its forward, as the file may not have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.engine.interpreter import Interpreter
from staticmem.errors import DimensionError, UsageError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import RUN_AUTOGRAD, Graph, Value
from staticmem.ir.record import record


@record(frozen=True, slots=True)
class ValueInfo:
    """A value: views of one storage have equal `storage`; `fresh` is True for the first value of a storage.

    `nbytes` are those of the value's own elements, not rounded.
    """

    shape: tuple[int, ...]
    dtype: DType
    storage: int
    fresh: bool
    nbytes: int


def output_shape(graph: Graph) -> tuple[int, ...]:
    """The shape of the model's first output.

    Raises:
        UsageError: the model has none, or it is made of texts, which are no tensor in PyTorch.
    """
    if not graph.outputs:
        raise UsageError("the model has no output", "A loss needs one.", "Use --mode infer.", code="SM131")
    value = graph.values.get(graph.outputs[0])
    if value is not None and value.dtype is dtypes.string:
        raise no_tensor_output()
    if value is not None and value.shape is not None:
        return value.shape
    if graph.recorded is not None and graph.outputs[0] in graph.recorded.output_shapes:
        return graph.recorded.output_shapes[graph.outputs[0]]
    shapes = value_infos(graph, training=False)
    shape = next((shapes[name].shape for name in graph.outputs if name in shapes), None)
    if shape is None:
        raise no_tensor_output()
    return shape


def check_output_shapes(graph: Graph, env: Mapping[str, Any]) -> None:
    """Compares the outputs of a forward, by name in `env`, with the shapes that a recording has of them: the target was
    made for those.

    Raises:
        ModelFileError: they differ.
    """
    for name, shape in graph.recorded.output_shapes.items() if graph.recorded is not None else ():
        tensor = env.get(name)
        if isinstance(tensor, Tensor) and tensor.shape != shape:
            from staticmem.frontends.recording_format import damaged  # late: it takes LZMA to import

            raise damaged(graph.name, f"an output has the shape {list(shape)}, and its ops give {list(tensor.shape)}")


def no_tensor_output() -> UsageError:
    return UsageError(
        "the model has no tensor output that a loss could use",
        "Its outputs are constants or texts, or it has none.",
        "Use --mode infer.",
        code="SM131",
    )


def placed(e: Eager, value: Value, dtype: DType, what: str) -> Tensor:
    """A tensor that is there before the graph runs. `what` it is: for the error.

    Raises:
        DimensionError: it is too large, or a size of it is negative.
    """
    if any(size < 0 for size in value.shape or ()):
        why = f"Its shape is {list(value.shape or ())}."
        raise DimensionError(f"{what} has a negative size", why, "Export the model again.", "SM118")
    try:
        return e.empty(value.shape or (), dtype, kernel="model")
    except ValueError as error:
        raise DimensionError(
            f"{what} is too large", f"With these sizes, {error}.", "Choose smaller sizes.", code="SM118"
        ) from error


def value_infos(graph: Graph, training: bool) -> dict[str, ValueInfo]:
    """All tensors of a bound graph by name: parameters, buffers, constants, inputs and results.

    Precision casts of a step (autocast, `dtype`) are not in it: sizes are those of the file.
    """
    e = Eager(training=training)
    interpreter = Interpreter(e, graph)
    values: dict[str, ValueInfo] = {}
    e.grad_enabled = not RUN_AUTOGRAD.isdisjoint(graph.bases)  # else nothing needs a history
    trained = {p.value.name for p in graph.parameters if p.trainable} if e.grad_enabled else set()
    owned = [p.value for p in (*graph.parameters, *graph.buffers)]
    for value in (*owned, *graph.constant_values.values(), *graph.inputs):
        tensor = placed(e, value, value.dtype, f"tensor '{value.name}'")
        e.hold(tensor, interpreter.model)
        tensor.requires_grad = value.name in trained
        interpreter.define(value.name, tensor)
        values[value.name] = _info(tensor, True)
    for value, base in graph.recorded.kept if graph.recorded is not None else ():
        shape = value.shape or ()
        tensor = interpreter.kept_view(base, shape) if base else e.empty(shape, value.dtype, kernel="model")
        interpreter.define(value.name, tensor)
    storages = {value.storage for value in values.values()}
    interpreter.forward()
    for op in graph.ops:
        for name in op.outputs:
            result = interpreter.env.get(name)
            if isinstance(result, Tensor):
                values[name] = _info(result, result.storage.id not in storages)
                storages.add(result.storage.id)
    return values


def _info(tensor: Tensor, fresh: bool) -> ValueInfo:
    return ValueInfo(tensor.shape, tensor.dtype, tensor.storage.id, fresh, tensor.nbytes)
