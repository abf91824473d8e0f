"""What the loss of the step before holds until the variable is assigned anew: itself, and its graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from staticmem.eager.tensor import Tensor
from staticmem.engine.features import Feature, RunningStep
from staticmem.engine.kept_history import fill_place
from staticmem.ir import dtypes
from staticmem.ir.graph import REQUIRES_GRAD
from staticmem.ops import kinds_of
from staticmem.scenario.step import HELD


class PreviousLoss(Feature):
    """The variable `loss` of the training loop, from the step before.

    Its graph holds tensors that the forward made require a gradient (`enable_input_require_grads`) with their
    gradients, and attributes of `ctx`.
    """

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        self.of_graph: Tensor | None = None  # stands for what the graph holds; it has no bytes until the step has run

    def place(self) -> None:
        step = self.step
        is_held_output = step.scenario.outputs == HELD and step.criterion.is_output
        if step.in_function or not is_held_output:
            old = self.e.empty((), dtypes.float32, kernel="loss of the previous step")
            self.e.categorise(old, "activation", "loss of the previous step")
            self.e.hold(old, step.loss)
        if not step.in_function and self._leaves_a_graph():
            what = "leaves of the previous step's graph with their gradients, and attributes of ctx"
            place = self.of_graph = self.e.empty((0,), dtypes.uint8, kernel="loss of the previous step")
            self.e.categorise(place, "activation", what)
            self.e.hold(place, step.loss)

    def _leaves_a_graph(self) -> bool:
        graph = self.step.graph
        if graph.recorded is not None and any(function.attributes for function in graph.recorded.functions.values()):
            return True
        if any("keeps_on_ctx" in kinds_of(base) for base in graph.bases):
            return True
        return any(op.target == REQUIRES_GRAD and op.kwargs for op in graph.ops)

    def end_step(self) -> None:
        if self.of_graph is None:
            return
        step = self.step
        attributes = step.interpreter.attributes
        kept = [held for name in step.kept_of_ctx() for held in attributes[name].held]
        elsewhere = {tensor.storage.id for tensor, _ in (*step.outputs.held, *step.loss.held, *kept)}
        fill_place(self.e.trace, self.of_graph.storage.id, self._storages_of_graph(elsewhere))

    def _storages_of_graph(self, others: Collection[int]) -> list[int]:
        """The buffers of this step that its graph holds when backward is over, without those of `others`."""
        trace = self.e.trace
        held = dict.fromkeys(tensor.storage.id for owner in self.step.owners_of_graph() for tensor, _ in owner.held)
        first = bisect_left(trace.buffers.born, dict(trace.phases)["forward"])
        return [id for id in held if id >= first and id not in others]
