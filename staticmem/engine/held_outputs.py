"""What the names of a loop hold until they are assigned anew: the model's outputs, and the loss of the step before.

In `outputs = model(x); loss = criterion(outputs, y)`, or in an inference's `outputs = model(x)` alone, the first name
has the outputs through backward and the optimizer's step, until the next forward has returned and the name is assigned
anew: for the length of a forward those of two steps exist. Outputs hold their history too: what leads to an output that
is no part of the loss keeps what it saved, because no backward runs through it.

The name of the loss has it with its graph.

Outputs that come back from autocast in float32.

Source: accelerate 1.15, `convert_outputs_to_fp32` (utils/operations.py), around the forward and its autocast.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Tensor
from staticmem.eager.trace import OPEN
from staticmem.engine.features import Feature, RunningStep
from staticmem.engine.kept_history import fill_place
from staticmem.errors import ModelFileError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import HALVES
from staticmem.ir.graph import REQUIRES_GRAD
from staticmem.ops import kinds_of
from staticmem.ops.casts import to_copy
from staticmem.scenario.step import HELD

PREVIOUS = "outputs of the previous step"
BEFORE = "outputs of the call before"  # of an inference
HISTORY = f"history of {PREVIOUS}"


class HeldOutputs(Feature):
    """The variable that has the outputs.

    A step begins with the outputs of the step before. Their sizes are known when the forward has run: until then
    buffers without bytes stand for them, one for each output and one for what their history has saved.
    """

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        self.places: list[int] = []
        self.storages: list[int] = []
        self.batch: Sequence[int] = ()  # buffers of inputs and targets, where the loop deletes them

    def place(self) -> None:
        step, e = self.step, self.e
        count = len(step.graph.outputs)
        name = BEFORE
        if step.training:
            count -= step.criterion.ops_after_model
            name = PREVIOUS
        step.outputs = Owner(Reason.OUTPUTS, name)
        for what in (*[name] * count, HISTORY):
            place = e.empty((0,), dtypes.uint8, kernel=what)
            e.categorise(place, "activation", what)
            e.hold(place, step.outputs)
        self.places = self.storages = [tensor.storage.id for tensor, _ in step.outputs.held]
        categories = e.trace.buffers.categories
        self.first = len(categories)
        if step.deletes_batch:  # the outputs may have that of the step before
            self.batch = [id for id, category in enumerate(categories) if category == "input"]

    def end_forward(self, outputs: list[Tensor]) -> list[Tensor]:
        self.assign(outputs)
        return outputs

    def assign(self, outputs: Sequence[Tensor]) -> None:
        """`outputs = model(x)`: the new ones exist when those of before are released.

        Raises:
            ModelFileError: by the file, an output does not live until the model returns.
        """
        before = self.step.outputs
        after = self.step.outputs = Owner(Reason.OUTPUTS, "outputs")
        for tensor in outputs:
            if self.e.trace.buffers.died[tensor.storage.id] != OPEN:  # a damaged recording may say so
                raise ModelFileError(
                    f"the model's output {list(tensor.shape)} is released before the model returns it",
                    "The file says of each value how long the code holds it, and an output is held until the end.",
                    "Export the model again.",
                    code="SM119",
                )
            self.e.hold(tensor, after)
        # an output may be an input of the model, or a view of another output
        storages = dict.fromkeys(
            t.storage.id for t in outputs if t.storage.id >= self.first or t.storage.id in self.batch
        )
        old, self.storages = self.storages, list(storages)
        trace = self.e.trace
        for id, new in zip(old, storages, strict=False):
            trace.replaced_by[id] = (new,)
            # the next CUDA graph takes the memory of what one has returned
            if old is self.places and not trace.in_cuda_graph(trace.buffers.kernels[new]):
                self._fill(id, new, trace.buffers.nbytes[new])
        self.e.release(before)

    def end_backward(self) -> None:
        """Where a function has the variable, it returns: the next step begins without outputs."""
        if not self.step.in_function:
            return
        self.e.release(self.step.outputs)
        self.storages = []
        for place in self.places:
            self.e.trace.buffers.nbytes[place] = 0

    def end_step(self) -> None:
        """Finds what the history of the outputs has saved, and nobody else holds."""
        step = self.step
        if step.training and len(self.storages) <= 1:  # backward has run through the only one
            return
        if not step.training and not self.e.grad_enabled:  # else the code has enabled gradients
            return
        owners = (step.loss, self.e.of_graph, *step.interpreter.attributes.values())
        others = {tensor.storage.id for owner in owners for tensor, _ in owner.held}
        trace = self.e.trace
        buffers = trace.buffers
        first = bisect_left(buffers.born, dict(trace.phases)["forward"])
        excluded = {*others, *step.histories.left, *self.storages}
        saved = [
            id
            for id in (*self.batch, *range(first, len(buffers)))
            if buffers.died[id] == OPEN and buffers.categories[id] != "gradient" and id not in excluded
        ]
        fill_place(trace, self.places[-1], saved)

    def _fill(self, place: int, like: int, nbytes: int) -> None:
        """Gives a place its bytes, and the layout of buffer `like`."""
        buffers = self.e.trace.buffers
        buffers.forms[place], buffers.nbytes[place] = buffers.forms[like], nbytes


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
        return any(op.target == REQUIRES_GRAD for op in graph.ops)

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


class Float32Outputs(Feature):
    """Copies of the outputs of half precision: the caller gets them when all are made, and the model's own end."""

    def end_forward(self, outputs: list[Tensor]) -> list[Tensor]:
        e, interpreter = self.e, self.step.interpreter
        env, owners = interpreter.env, interpreter.owners
        names = [name for name in interpreter.graph.outputs if isinstance(env.get(name), Tensor)]
        halves = [name for name in dict.fromkeys(names) if env[name].dtype in HALVES]
        e.open_scope()
        copies = {name: to_copy(e, env[name], dtypes.float32) for name in halves}
        for name, copy in copies.items():
            own = owners.pop(name, None)
            owners[name] = copy, e.take(copy, Reason.VALUE, name)
            env[name] = copy
            if own is not None:
                e.end(*own)
        e.close_scope()
        return [env[name] for name in names]
