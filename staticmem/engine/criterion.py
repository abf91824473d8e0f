"""The loss of a training step: which outputs it is of, its target, and what backward starts from."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.tensor import Tensor
from staticmem.engine import losses
from staticmem.engine.features import Feature, RunningStep
from staticmem.engine.shapes import output_shape
from staticmem.ir.graph import Note, Value
from staticmem.scenario.losses import AFTER_THE_MODEL, HEAD_LOSSES, OF_THE_MODEL

_AN_OUTPUT = ("none", "outputs", *OF_THE_MODEL)  # losses that are outputs of the model


class Criterion(Feature):
    """A loss of the first output; `auto` is decided by its shape."""

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        step.criterion = self
        self.values: Sequence[str] = step.graph.outputs[:1]  # the outputs that it is of
        self.name = step.scenario.loss
        self.target: Tensor | None = None

    @property
    def is_output(self) -> bool:
        """Whether the loss is one of the outputs."""
        return self.name in _AN_OUTPUT

    @property
    def ops_after_model(self) -> int:
        """How many ops at the graph's end are of the training loop."""
        return int(self.name in AFTER_THE_MODEL)

    def place(self) -> None:
        """Places the target."""
        step = self.step
        shape = output_shape(step.graph)
        if step.has_own_loss:
            if self.name not in ("auto", "none"):
                text = f"--loss {self.name} is not used: the recording has the loss of the code"
                step.notes.append(Note("warning", "SM329", text))
            self.name = "none"
        if self.name in HEAD_LOSSES:  # the graph ends with it
            return
        if self.name == "auto":
            self.name = losses.choose(shape)
            text = f"loss: {self.name}, chosen by the output's shape {list(shape)} (--loss changes it)"
            step.notes.append(Note("assumption", "SM330", text))
        target = losses.target_of(self.name, shape)
        if target is not None:
            self.target = step.place(Value("target", target[1], target[0]), "input", "target")

    def compute(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """What backward starts from: the loss, or all outputs."""
        several = outputs if self.name == "outputs" else outputs[:1]
        return [losses.run(self.e, self.name, output, self.target) for output in several]
