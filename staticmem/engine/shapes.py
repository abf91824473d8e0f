"""Shapes and sizes of every value of a graph: what a run of the forward knows and a file may not say."""

from __future__ import annotations

from dataclasses import dataclass

from staticmem.eager.context import Eager
from staticmem.eager.tensor import Owner, Tensor
from staticmem.engine.interpreter import Interpreter
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class Known:
    """A value: `storage` tells views of one memory; `fresh` is True where the value is the first name of its storage.

    `nbytes` are those of the value's own elements, not rounded.
    """

    shape: tuple[int, ...]
    dtype: DType
    storage: int
    fresh: bool
    nbytes: int


def known_values(graph: Graph, training: bool) -> dict[str, Known]:
    """All tensors of a bound graph by name: parameters, buffers, inputs and results.

    Precision casts of a step (autocast, `dtype`) are not in it: sizes are those of the file.
    """
    e = Eager(training=training)
    interpreter = Interpreter(e, graph)
    found: dict[str, Known] = {}
    held = Owner("model", "")
    for value in (*(p.value for p in (*graph.parameters, *graph.buffers)), *graph.inputs):
        tensor = e.empty(value.shape or (), value.dtype, kernel="model")
        tensor.requires_grad = False
        e.hold(tensor, held)
        interpreter.define(value.name, tensor)
        found[value.name] = _known(tensor, True)
    seen = {known.storage for known in found.values()}
    interpreter.forward()
    for op in graph.ops:
        for name in op.outputs:
            result = interpreter.env.get(name)
            if isinstance(result, Tensor):
                found[name] = _known(result, result.storage.id not in seen)
                seen.add(result.storage.id)
    return found


def _known(tensor: Tensor, fresh: bool) -> Known:
    return Known(tensor.shape, tensor.dtype, tensor.storage.id, fresh, tensor.nbytes)
