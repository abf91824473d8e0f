"""Inputs that require a gradient: adversarial training, saliency, embeddings that are an input."""

from __future__ import annotations

from staticmem.engine.features import Feature
from staticmem.engine.old_gradients import place_gradients
from staticmem.errors import UsageError, closest


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
        for name in names:
            if name not in inputs:
                raise UsageError(
                    f"no input '{name}' that could have a gradient",
                    f"Floating-point inputs are {', '.join(inputs) or 'none'}.",
                    closest(name, inputs) or "Leave --input-grad out, or use all.",
                    code="SM165",
                )
            inputs[name].requires_grad = True
        if not scenario.set_to_none:
            place_gradients(step, [inputs[name] for name in names if name in step.graph.last_read])
