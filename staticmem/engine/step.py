"""One step over a graph: forward, loss, backward, optimizer; or one inference. Gives the trace of its memory.

The step that is run is the second one: optimizer state exists from its start, `zero_grad()` has set gradients to None,
and the loss of the step before lives until the new one is assigned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field

from staticmem.eager.autograd import run_backward
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Owner, Tensor
from staticmem.eager.trace import Trace
from staticmem.engine import losses, optimizers
from staticmem.engine.checkpointing import Checkpoints
from staticmem.engine.gradients import GradScaler, clip_grad_norm
from staticmem.engine.interpreter import BAD_ARGUMENTS, Interpreter
from staticmem.engine.lever_notes import notes_of
from staticmem.engine.precision import WholeModelCast
from staticmem.errors import DimensionError, UsageError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph, Note, Parameter, Value
from staticmem.ir.record import record
from staticmem.passes.checkpoint_regions import Region, all_regions
from staticmem.passes.frames.releases import releases_of
from staticmem.passes.graph_notes import notes_of_graph
from staticmem.passes.pipeline import COUNTED_AGAIN
from staticmem.scenario.step import Scenario


@record(frozen=True)
class StepResult:
    """The trace, the graph as it was run (its `ops` are what `Kernel.op` indexes), and what was decided on the way."""

    trace: Trace
    graph: Graph
    notes: tuple[Note, ...]
    covered: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    unknown_bytes: Counter[str] = field(default_factory=Counter)
    loss: str | None = None
    output_shapes: tuple[tuple[int, ...], ...] = ()
    trained: int = 0  # parameters that received a gradient
    output_dtypes: tuple[DType, ...] = ()
    recomputed: tuple[int, ...] = ()  # ops that checkpoints ran again in one backward, as indices into `graph.ops`


def run_step(graph: Graph, scenario: Scenario, locals_policy: str = "expected") -> StepResult:
    """Runs the scenario's step over a graph that the passes prepared for it (`passes.pipeline.for_step`).

    `locals_policy` is one of `passes.frames.policy.POLICIES`.
    """
    # reports count these edits as notes of the graph and again as notes of the step
    notes = [note for edit in graph.edits if edit.name in COUNTED_AGAIN for note in edit.notes]
    step = _Step(graph, scenario, notes, locals_policy)
    result = step.run()
    keeps_gradients = scenario.training and not scenario.set_to_none
    if keeps_gradients or (scenario.optimizer is not None and step.without_gradient):
        # only parameters that get a gradient have optimizer state, and `.grad` before: backward alone can tell which
        again = _Step(graph, scenario, notes, locals_policy)
        again.untrained = step.without_gradient
        again.keeps_gradients = keeps_gradients
        result = again.run()
    return result


def _no_tensor() -> UsageError:
    return UsageError("the model has no tensor output", "A loss needs one.", "Use --mode infer.", code="SM131")


class _Step:
    def __init__(self, graph: Graph, scenario: Scenario, notes: Sequence[Note], locals_policy: str) -> None:
        self.graph, self.scenario = graph, scenario
        self.e = Eager(training=scenario.training)
        self.e.sdpa = scenario.sdpa
        low = scenario.dtype if scenario.dtype in (dtypes.float16, dtypes.bfloat16) else None
        self.releases = releases = releases_of(graph, locals_policy, scenario.training)
        self.interpreter = Interpreter(self.e, graph, WholeModelCast(low) if low else None, releases)
        self.interpreter.keeps_values = False
        self.notes: list[Note] = list(notes)
        self.persistent = Owner("model", "")
        self.grads: dict[int, Tensor] = {}
        self.loss_name: str | None = None
        self.output_dtypes: tuple[DType, ...] = ()
        self.untrained: frozenset[str] = frozenset()  # names of parameters known to get no gradient
        self.without_gradient: frozenset[str] = frozenset()
        self.keeps_gradients = False
        self.target: Tensor | None = None
        self.loss = Owner("value", "loss")
        self.recomputed: tuple[int, ...] = ()
        self.overwritten = 0
        self.graph_notes: list[Note] = []
        self.scaler = GradScaler(self.e) if scenario.training and scenario.grad_scaler else None

    def run(self) -> StepResult:
        e, trace = self.e, self.e.trace
        trace.begin("setup")
        parameters = self._place_model()
        if not self.scenario.training:
            trace.begin("forward")
            shapes = self._infer()
            return self._result(shapes, 0)
        with_grad = [p for p in parameters if p.requires_grad]
        reached = self._reached(with_grad)
        optimizer = None
        if self.scenario.optimizer is not None:
            optimizer = optimizers.make(e, self.scenario, reached)
            optimizer.make_state()
        if self.scaler is not None:
            self.scaler.place()
        if self.keeps_gradients:
            self._zeroed_gradients(reached)
        shapes = self._train()
        self.without_gradient = frozenset(p.name for p in reached if id(p) not in self.grads)
        trace.begin("optimizer")
        gradients = list(self.grads.values())
        if self.scaler is not None and optimizer is not None:
            self.scaler.unscale(fused=optimizer.fused and not self.scenario.clip_grad_norm)
        if self.scenario.clip_grad_norm:
            clip_grad_norm(e, gradients)
        if optimizer is not None:
            optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        return self._result(shapes, len(reached))

    # -- set-up --------------------------------------------------------------------------------------------------

    def _cast(self, dtype: DType) -> DType:
        """The dtype under a whole-model cast: floating-point tensors follow, others stay."""
        target = self.scenario.dtype
        return target if target is not None and dtype.is_floating_point else dtype

    def _place(self, value: Value, category: str, name: str) -> Tensor:
        try:
            tensor = self.e.empty(value.shape or (), self._cast(value.dtype), kernel="model")
        except ValueError as error:
            raise DimensionError(
                f"{category} '{name}' is too large", f"It is {error}.", "Choose smaller sizes.", code="SM118"
            ) from error
        tensor.name = name
        self.e.categorise(tensor, category, name)
        self.e.hold(tensor, self.persistent)
        return tensor

    def _place_model(self) -> list[Tensor]:
        placed: list[Tensor] = []
        by_name: dict[str, Tensor] = {}
        for group, category in ((self.graph.parameters, "parameter"), (self.graph.buffers, "buffer")):
            for p in group:
                tensor = self._place_parameter(p, category, by_name)
                if category == "parameter" and p.alias_of is None:
                    placed.append(tensor)
        for value in self.graph.constant_values.values():
            self.interpreter.define(value.name, self._place(value, "buffer", value.name), lasting=True)
        for value in self.graph.inputs:
            self.interpreter.define(value.name, self._place(value, "input", value.name))
        self._place_attributes()
        return placed

    def _place_attributes(self) -> None:
        """What modules keep of the step before, until this one assigns it."""
        for name, p in self.releases.attributes.items():
            kept = self.interpreter.attributes[name] = Owner("module", name)
            if self.scenario.training:
                old = self.e.empty(p.value.shape or (), self._cast(p.value.dtype), kernel="model")
                self.e.categorise(old, "activation", f"{p.fqn.rpartition('_')[0]} of the previous step")
                self.e.hold(old, kept)

    def _place_parameter(self, p: Parameter, category: str, by_name: dict[str, Tensor]) -> Tensor:
        known = by_name.get(p.alias_of) if p.alias_of is not None else None
        tensor = known if known is not None else self._place(p.value, category, p.fqn)
        tensor.requires_grad = tensor.requires_grad or (category == "parameter" and p.trainable)
        by_name[p.value.name] = tensor
        self.interpreter.define(p.value.name, tensor, lasting=True)
        return tensor

    def _reached(self, parameters: list[Tensor]) -> list[Tensor]:
        """Parameters that some op reads: the others get no gradient and no optimizer state."""
        read = self.graph.last_read
        ids = {id(tensor) for name, tensor in self.interpreter.env.items() if name in read and type(tensor) is Tensor}
        return [p for p in parameters if id(p) in ids and p.name not in self.untrained]

    # -- the step ------------------------------------------------------------------------------------------------

    def _infer(self) -> tuple[tuple[int, ...], ...]:
        e = self.e
        e.autocast = self.scenario.amp
        outputs = self.interpreter.forward()
        self.output_dtypes = tuple(t.dtype for t in outputs)
        self.notes += notes_of_graph(self.graph, False, outputs, None)
        e.trace.marks["forward_end"] = e.trace.ticks
        self.interpreter.forget_outputs()
        e.release(e.autocast_owner)
        return tuple(t.shape for t in outputs)

    def _train(self) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of a step. From the second one on they are all alike: two show everything."""
        e, i = self.e, self.interpreter
        self.target = self._make_target()
        old = e.empty((), dtypes.float32, kernel="loss of the previous step")
        e.categorise(old, "activation", "loss of the previous step")
        e.hold(old, self.loss)
        regions, said = all_regions(self.graph, self.scenario)
        self.notes += said
        shapes = self._micro_batch(regions)
        self.notes += self.graph_notes
        if self.scenario.accumulate > 1:
            seen, choices = (i.covered, i.unknown, i.unknown_bytes), e.choices
            i.covered, i.unknown, i.unknown_bytes, e.choices = Counter(), Counter(), Counter(), Counter()
            e.grad_enabled = True
            shapes = self._micro_batch(regions)
            (i.covered, i.unknown, i.unknown_bytes), e.choices = seen, choices
        return shapes

    def _micro_batch(self, regions: Sequence[Region]) -> tuple[tuple[int, ...], ...]:
        e, trace = self.e, self.e.trace
        checkpoints = Checkpoints(e, regions) if regions else None
        self.interpreter.around = checkpoints
        trace.begin("forward")
        e.autocast = self.scenario.amp
        outputs = self.interpreter.forward()
        shapes = tuple(t.shape for t in outputs)
        self.output_dtypes = tuple(t.dtype for t in outputs)
        self.graph_notes = notes_of_graph(self.graph, True, outputs, self.loss_name)
        assert self.loss_name is not None
        e.open_scope()
        if not outputs:
            raise _no_tensor()
        loss = losses.run(e, self.loss_name, outputs[0], self.target)
        previous, self.loss = self.loss, Owner("value", "loss")
        e.hold(loss, self.loss)
        e.close_scope()
        self.interpreter.forget_outputs()
        e.release(previous)
        e.release(e.autocast_owner)
        e.autocast, e.autocast_cache = None, {}
        trace.marks["forward_end"] = trace.ticks
        trace.begin("backward")
        if loss.grad_fn is not None:
            self._backward(loss)
        e.grad_enabled = False
        e.trace.op = -1
        if checkpoints is not None:
            self.recomputed, self.overwritten = tuple(checkpoints.recomputed), len(checkpoints.overwritten)
        return shapes

    def _backward(self, loss: Tensor) -> None:
        """`loss.backward()`: Python holds the root gradient, and with a scaler the scaled loss, until it returns."""
        e = self.e
        held = Owner("gradient", "root gradient")
        root = loss if self.scaler is None else self.scaler.scale(loss)
        if root is not loss:
            e.hold(root, held)
        e.grad_enabled = False
        ones = e.empty_like(root, kernel="aten.ones_like.default")
        e.hold(ones, held)
        try:
            run_backward(e, root, ones, self.grads)
        except (ValueError, *BAD_ARGUMENTS) as error:  # shapes that no real step has: the file contradicts itself
            if 0 <= e.trace.op < len(self.graph.ops):
                raise self.interpreter.explained(self.graph.ops[e.trace.op], error) from error
            raise DimensionError(
                "a gradient does not fit its parameter", f"Reason: {error}.",
                "A shape in the file contradicts the op that reads it: export the model again.", code="SM118",
            ) from error  # fmt: skip
        e.release(held)

    def _zeroed_gradients(self, parameters: Sequence[Tensor]) -> None:
        """`zero_grad(set_to_none=False)` leaves the gradients of the step before, filled with zeros."""
        for p in parameters:
            grad = self.e.empty_like(p, kernel="aten._foreach_zero_.default")
            grad.name = p.name
            self.e.categorise(grad, "gradient", f"{p.name}.grad")
            self.e.hold(grad, Owner("grad", p.name))
            self.grads[id(p)] = grad

    def _make_target(self) -> Tensor | None:
        """The target tensor of the loss, sized by the output; `auto` is decided here."""
        shape = self._output_shape()
        name = self.scenario.loss
        if name == "auto":
            name = losses.choose(shape)
            self.notes.append(
                Note(
                    "assumption",
                    "SM330",
                    f"loss: {name}, chosen by the output's shape {list(shape)} (--loss changes it)",
                )
            )
        self.loss_name = name
        wanted = losses.target_of(name, shape)
        if wanted is None:
            return None
        return self._place(Value("target", wanted[1], wanted[0]), "input", "target")

    def _output_shape(self) -> tuple[int, ...]:
        if not self.graph.outputs:
            raise UsageError("the model has no output", "A loss needs one.", "Use --mode infer.", code="SM131")
        value = self.graph.values.get(self.graph.outputs[0])
        if value is not None and value.shape is not None:
            return value.shape
        probe = Eager(training=False)
        interpreter = Interpreter(probe, self.graph)
        for name, tensor in self.interpreter.env.items():
            copy = probe.empty(tensor.shape, tensor.dtype)
            probe.hold(copy, Owner("model", name))
            interpreter.define(name, copy)
        outputs = interpreter.forward()
        if not outputs:
            raise _no_tensor()
        return outputs[0].shape

    def _result(self, shapes: tuple[tuple[int, ...], ...], trained: int) -> StepResult:
        i = self.interpreter
        for (what, why), count in sorted(self.e.choices.items()):
            text = f"{what}: {why} (as on an sm_90 GPU; --sdpa changes it)"
            self.notes.append(Note("assumption", "SM340", text, count))
        if self.scenario.training:
            self.notes += notes_of(self.scenario, self.overwritten)
        for tensor, _ in self.persistent.held:  # a cycle with its node, and the search for cycles rests meanwhile
            tensor.accumulate = None
        return StepResult(
            self.e.trace.seal(), self.graph, tuple(self.notes), i.covered, i.unknown, i.unknown_bytes, self.loss_name,
            shapes, trained, self.output_dtypes, self.recomputed,
        )  # fmt: skip
