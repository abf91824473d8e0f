"""Histories of custom functions whose backward no file has, within bounds (`passes.restoring.custom_functions`)."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.context import Eager
from staticmem.eager.tensor import Formula, Grads, Tensor
from staticmem.ops.registry import rule


@rule("staticmem::own_backward")
def own_backward(
    e: Eager, result: Tensor, inputs: Sequence[Tensor], saved: Sequence[Tensor], temporaries: int
) -> Tensor:
    """`result` with a node that saves `saved`, and makes as many buffers of its size in backward as `temporaries`, and
    a gradient for each input; without temporaries it passes the incoming one on where it fits (a straight-through
    estimator)."""
    named = Tensor(result.storage, result.shape, result.strides, result.dtype)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("backward of a custom function")
        incoming = grads[0]
        for _ in range(temporaries):
            e.empty_like(result)
        passed = incoming if temporaries == 0 else None
        of_inputs: list[Tensor | None] = []
        for tensor, wanted in zip(inputs, need, strict=True):
            if not wanted:
                of_inputs.append(None)
            elif passed is not None and passed.shape == tensor.shape:
                of_inputs.append(passed)
            else:
                of_inputs.append(e.empty_like(tensor))
        return of_inputs

    formula = Formula(tuple(range(len(inputs))), gradients)
    return e.record("backward of a custom function", named, list(inputs), [formula], [*saved])
