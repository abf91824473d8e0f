"""Gradients of the step before that are there when the forward runs.

`zero_grad(set_to_none=False)` leaves them, filled with zeros; a `zero_grad()` after the forward has not run yet.

Inputs that require a gradient: adversarial training, saliency, embeddings that are an input.
"""

from __future__ import annotations

from collections.abc import Iterable

from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Tensor
from staticmem.engine.features import Feature, RunningStep
from staticmem.errors import UsageError, closest


class OldGradients(Feature):
    """Those of the parameters that get a gradient."""

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        self.owners: dict[int, Owner] = {}  # by id(parameter): of those that zero_grad() ends after the forward
        self.ended: dict[int, int] = {}  # the same: storages of those that have ended

    def place(self) -> None:
        owners = place_gradients(self.step, self.step.with_gradient)
        if self.step.scenario.set_to_none:
            self.owners = owners

    def begin_backward(self) -> None:
        """`zero_grad()` after the forward: `.grad` is None again."""
        for key, owner in self.owners.items():
            self.ended[key] = self.step.grads.pop(key).storage.id
            self.e.release(owner)
        self.owners = {}

    def end_step(self) -> None:
        grads = self.step.grads
        for key, storage in self.ended.items():
            if key in grads:
                self.e.trace.replaced_by[storage] = (grads[key].storage.id,)


def place_gradients(step: RunningStep, tensors: Iterable[Tensor]) -> dict[int, Owner]:
    """Gives tensors a `.grad`; who has it, by id(tensor)."""
    e = step.e
    kernel = "model" if step.scenario.set_to_none else "aten._foreach_zero_.default"
    owners: dict[int, Owner] = {}
    for tensor in tensors:
        grad = e.empty_like(tensor, kernel=kernel)
        grad.name = tensor.name
        e.categorise(grad, "gradient", f"{tensor.name}.grad")
        owners[id(tensor)] = Owner(Reason.GRAD, tensor.name)
        e.hold(grad, owners[id(tensor)])
        step.grads[id(tensor)] = grad
    return owners


class InputGradients(Feature):
    """`requires_grad_()` of inputs; those that are read have a gradient of the step before, where it stays."""

    def place(self) -> None:
        """
        Raises:
            UsageError: the model has no such input.
        """
        step, scenario = self.step, self.step.scenario
        inputs = {v.name: step.interpreter.env[v.name] for v in step.graph.inputs}
        inputs = {name: tensor for name, tensor in inputs.items() if tensor.dtype.is_differentiable}
        names = [*inputs] if "all" in scenario.input_grad else scenario.input_grad
        for name in names or ["all"]:
            if name not in inputs:
                raise UsageError(
                    f"no input '{name}' that could have a gradient",
                    f"Floating-point inputs are {', '.join(inputs) or 'none'}.",
                    closest(name, inputs) or f"Leave --input-grad out{', or use all' * bool(inputs)}.",
                    code="SM165",
                )
            inputs[name].requires_grad = True
        if not scenario.set_to_none:
            place_gradients(step, [inputs[name] for name in names if name in step.graph.last_read])
