"""One step over a graph: forward, loss, backward, optimizer; or one inference. Gives the trace of its memory.

The step that is run is the second one: optimizer state exists from its start, `zero_grad()` has set gradients to None,
and what the loop assigns in each step, the loss and the model's outputs (`engine.held_outputs`), is of the step before
until it is assigned anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from staticmem.eager.autograd import OfCode, free_graph, run_backward
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Owner, Tensor, attributes_of_ctx
from staticmem.eager.trace import Trace
from staticmem.engine import losses, optimizers
from staticmem.engine.attributes import call_again, keep_after, kept_now
from staticmem.engine.held_outputs import BEFORE, HeldOutputs, in_float32
from staticmem.engine.interpreter import BAD_ARGUMENTS, Interpreter
from staticmem.engine.kept_history import KeptHistories, fill_place
from staticmem.engine.notes import note_of_offloading, notes_of_selection, notes_of_step
from staticmem.engine.shapes import check_output_shapes, no_tensor_output, output_shape, placed
from staticmem.errors import DimensionError, UsageError, closest
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import REQUIRES_GRAD, Graph, Note, Parameter, Region, Value
from staticmem.ir.record import record
from staticmem.ops import kinds_of
from staticmem.passes.checkpoint_regions import all_regions
from staticmem.passes.frames.releases import releases_of
from staticmem.passes.parameters import left_frozen, outer_matrices, projected_weights, values_of_loss
from staticmem.scenario.losses import ITSELF, has_terms
from staticmem.scenario.selection import Policy
from staticmem.scenario.step import AFTER_THE_MODEL, HEAD_LOSSES, HELD, OF_THE_MODEL, ON_GPU, Scenario

if TYPE_CHECKING:
    from staticmem.compiler.plan import Kernels
    from staticmem.engine.compiled_step import CompiledRegions, CompiledStep
    from staticmem.engine.gradients import GradScaler
    from staticmem.engine.loss_terms import TermOfOutput
    from staticmem.engine.offloading import Offloading


_AN_OUTPUT = ("none", "outputs", *OF_THE_MODEL)  # losses that are outputs of the model


@record(frozen=True)
class StepResult:
    """The trace, the graph as it was run (its `ops` are what `Kernel.op` indexes), and the step's notes and counts."""

    trace: Trace
    graph: Graph
    notes: tuple[Note, ...]
    covered: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    unknown_bytes: Counter[str] = field(default_factory=Counter)
    # those of which inputs and results are kept for backward, with the bytes of these and of their gradients
    unknown_kept: Counter[str] = field(default_factory=Counter)
    loss: str | None = None
    output_shapes: tuple[tuple[int, ...], ...] = ()
    trained: int = 0  # parameters that received a gradient
    output_dtypes: tuple[DType, ...] = ()
    recomputed: tuple[int, ...] = ()  # ops that checkpoints ran again in one backward, as indices into `graph.ops`
    compiled: CompiledStep | None = None
    autocast: DType | None = None
    runs_triton: bool = False  # code of torch.compile, of the model or of the optimizer
    choices: frozenset[tuple[str, str]] = frozenset()  # of kernels: what was chosen, and why


def run_step(
    graph: Graph, scenario: Scenario, locals_policy: str = "expected", kernels: Kernels = "expected"
) -> StepResult:
    """Runs the scenario's step over a graph that the passes prepared for it (`passes.pipeline.for_step`).

    `locals_policy` is one of `passes.frames.policy.POLICIES`; `kernels` of compiled code, of a step that has run with
    those that are expected (`compiler.inductor.plan`).
    """
    step = _Step(graph, scenario, locals_policy, kernels)
    if not scenario.training:
        return step.infer()
    result, expected, received = step.train()
    before = scenario.gradients_at_start
    if received != expected and (scenario.optimizer is not None or before):
        # Only parameters that get a gradient have optimizer state, and a `.grad` from the step before. The graph shows
        # which ones the loss depends on, but not through which ops autograd passes nothing on (`detach`, `argmax`, a
        # formula that gives None): then only a backward shows it, and the step is run again with what it reached.
        result, _, _ = _Step(graph, scenario, locals_policy, kernels).train(received)
    return result


class _Step:
    def __init__(self, graph: Graph, scenario: Scenario, locals_policy: str, kernels: Kernels = "expected") -> None:
        self.kernels = kernels
        self.graph, self.scenario, self.locals_policy = graph, scenario, locals_policy
        self.e = e = Eager(training=scenario.training)
        e.sdpa, e.torch = scenario.sdpa, scenario.torch
        cast = None
        if scenario.dtype in dtypes.HALVES:
            from staticmem.ops.whole_model_cast import cast_of  # few steps have it

            cast = cast_of(graph, scenario.dtype)
        self.releases = releases_of(graph, locals_policy, scenario.training, cast is not None)
        self.interpreter = Interpreter(e, graph, cast, self.releases)
        self.interpreter.keeps_values = False
        self.model, self.loss = self.interpreter.model, Owner("value", "loss")
        self.outputs: HeldOutputs | None = None
        self.of_loss: Sequence[str] = graph.outputs[:1]  # the outputs that it is of
        self.terms: Sequence[TermOfOutput] = ()  # of a loss over several
        self.targets: dict[str, Tensor] = {}  # of these
        self.histories = KeptHistories(e)
        # the variables of the training loop end with a function that each step calls, and autograd's graph with them
        self.in_function = scenario.retain_graph or not scenario.backward
        self.grads, self.received = e.grads, e.received
        self.scaler: GradScaler | None = None
        self.old_gradients: dict[int, Owner] = {}  # by id(parameter): those that zero_grad() ends after the forward
        self.ended: dict[int, int] = {}  # the same: storages of those that have ended
        self.recomputed: tuple[int, ...] = ()
        self.policies: list[Policy] = []  # of selective checkpoints
        self.gradients_of_leaves: Sequence[Owner] = ()
        self.offloaded = 0  # bytes that one forward copies to the CPU
        self.compiled: CompiledRegions | None = None
        self.overwritten = 0
        e.trace.begin("setup")

    def infer(self) -> StepResult:
        """One inference: a call of those after the first, whose result the loop holds until it has the next."""
        e = self.e
        self._place_model()
        if self.scenario.outputs == HELD and self.graph.generated is None:  # generate() returns numbers of tokens
            self.outputs = HeldOutputs(e, len(self.graph.outputs), BEFORE)
        e.trace.begin("forward")
        e.autocast = self.scenario.amp
        e.grad_enabled = self.graph.recorded is not None and self.graph.recorded.enables_grad
        self._compile(())
        generated = self.graph.generated
        steps = () if generated is None or generated.decode == len(self.graph.ops) else (generated.decode,)
        outputs = self.interpreter.forward(decode=steps)
        if self.outputs is not None:
            self.outputs.assign(outputs)
        e.trace.marks["forward_end"] = dict(e.trace.phases).get("decode", e.trace.ticks)
        self.interpreter.forget_outputs()
        e.release(e.autocast_owner)
        if self.outputs is not None and e.grad_enabled:  # the code has enabled gradients: its results have a history
            self.outputs.leave({t.storage.id for owner in self.interpreter.attributes.values() for t, _ in owner.held})
        return self._result(outputs, None, (), 0)

    def _compile(self, checkpoints: tuple[Region, ...]) -> tuple[Region, ...]:
        """Gives the interpreter the regions that run as compiled code; the checkpoints that are not inside of them."""
        if not self.scenario.compile:
            return checkpoints
        from staticmem.engine.compiled_step import regions_of_step  # few steps are compiled

        self.compiled = regions_of_step(self.graph, self.scenario, checkpoints, self.kernels)
        self.interpreter.compiled = self.compiled.regions
        return self.compiled.outside(checkpoints)

    def train(self, trained: Collection[int] | None = None) -> tuple[StepResult, Collection[int], Collection[int]]:
        """One step of training. `trained` are the indices of the parameters that get a gradient; None: those that the
        graph shows. Returns the result, these indices, and those of the parameters that did get one."""
        e, i, scenario, graph = self.e, self.interpreter, self.scenario, self.graph
        self._choose_terms()
        parameters = [p for p in self._place_model() if p.requires_grad]
        ids = {name: id(tensor) for name, tensor in i.env.items()}
        read = {ids[name] for name in graph.last_read if name in ids}
        if trained is None:
            of_loss = read.intersection([ids[name] for name in values_of_loss(graph, self.of_loss) if name in ids])
            trained = {k for k, p in enumerate(parameters) if id(p) in of_loss}
        with_gradient = [p for k, p in enumerate(parameters) if k in trained]
        optimizer = None
        if scenario.optimizer is not None:
            apart: Collection[str] = outer_matrices(graph) if scenario.optimizer == "muon" else ()
            if scenario.low_rank is not None:
                apart = projected_weights(graph, scenario.low_rank)
            optimizer = optimizers.make(e, scenario, with_gradient, {ids[name] for name in apart if name in ids})
            optimizer.make_state()
            self._make_state_of_other_call(parameters)
        if scenario.grad_scaler:
            from staticmem.engine.gradients import GradScaler  # few steps have one

            self.scaler = GradScaler(e)
            self.scaler.place()
        if scenario.gradients_at_start:
            self._place_gradients(with_gradient)
        if scenario.input_grad:
            self._require_input_gradients()
        loss, target, notes = self._loss_and_target()
        if scenario.outputs == HELD:
            self.outputs = HeldOutputs(e, len(graph.outputs) - (loss in AFTER_THE_MODEL))
        if self.outputs is None or self.in_function or not self._is_output(loss):
            old = e.empty((), dtypes.float32, kernel="loss of the previous step")
            e.categorise(old, "activation", "loss of the previous step")
            e.hold(old, self.loss)
        graph_before = self._place_graph_of_step_before()
        regions, region_notes = all_regions(graph, scenario, self.locals_policy)
        regions = self._compile(regions)
        outputs = self._micro_batch(regions, loss, target)
        if scenario.accumulate > 1:  # all micro-batches after the first are equal: two suffice
            counted = i.covered, i.unknown, i.unknown_bytes, e.choices
            i.covered, i.unknown, i.unknown_bytes, e.choices = Counter(), Counter(), Counter(), Counter()
            e.grad_enabled = True
            call_again(i)
            outputs = self._micro_batch(regions, loss, target)
            i.covered, i.unknown, i.unknown_bytes, e.choices = counted
        held = self.outputs.variable.held if self.outputs is not None else ()
        by_attributes = self.histories.fill(kept_now(i), [tensor for tensor, _ in held])
        if self.outputs is not None and len(self.outputs.storages) > 1:  # backward has run through the only one
            owners = (self.loss, e.of_graph, *i.attributes.values())
            self.outputs.leave(by_attributes.union(tensor.storage.id for owner in owners for tensor, _ in owner.held))
        if graph_before is not None:
            kept = [held for name in self._kept_of_ctx() for held in i.attributes[name].held]
            elsewhere = {tensor.storage.id for tensor, _ in (*held, *self.loss.held, *kept)}
            fill_place(e.trace, graph_before.storage.id, self._storages_of_graph(elsewhere))
        for key, storage in self.ended.items():
            if key in self.grads:
                e.trace.replaced_by[storage] = (self.grads[key].storage.id,)
        e.trace.begin("optimizer")
        self._update(optimizer)
        of_optimizer = () if optimizer is None else optimizer.notes()
        result = self._result(outputs, loss, [*notes, *region_notes, *of_optimizer], len(with_gradient))
        received = self.received & read  # once: both have an entry for each parameter
        return result, trained, {k for k, p in enumerate(parameters) if id(p) in received}

    def _make_state_of_other_call(self, parameters: Sequence[Tensor]) -> None:
        """The optimizer's state of parameters that another call of the code trains, and this one does not."""
        graph, env = self.graph, self.interpreter.env
        other = graph.recorded.other_call if graph.recorded is not None else None
        if other is None:
            return
        of_loss = [other.outputs[graph.outputs.index(name)] for name in self.of_loss]
        here = values_of_loss(graph, self.of_loss) - left_frozen(graph)
        names = values_of_loss(other, of_loss) - left_frozen(other) - here
        trained = {id(env[name]) for name in names if name in env}
        optimizers.make(self.e, self.scenario, [p for p in parameters if id(p) in trained]).make_state()

    # -- set-up --------------------------------------------------------------------------------------------------

    def _dtype(self, dtype: DType) -> DType:
        """The dtype under a whole-model cast, which changes floating-point tensors alone."""
        target = self.scenario.dtype
        return target if target is not None and dtype.is_floating_point else dtype

    def _empty(self, value: Value, category: str, name: str, cast: bool = True) -> Tensor:
        return placed(self.e, value, self._dtype(value.dtype) if cast else value.dtype, f"{category} '{name}'")

    def _place(self, value: Value, category: str, name: str, cast: bool = True) -> Tensor:
        tensor = self._empty(value, category, name, cast)
        tensor.name = name
        self.e.categorise(tensor, category, name)
        self.e.hold(tensor, self.model)
        return tensor

    def _place_model(self) -> list[Tensor]:
        """Places what the model owns, and its inputs; its parameters, without second names."""
        graph, define = self.graph, self.interpreter.define
        parameters: list[Tensor] = []
        tensors: dict[str, Tensor] = {}
        released = graph.recorded.last_held if graph.recorded is not None else {}
        for group, category in ((graph.parameters, "parameter"), (graph.buffers, "buffer")):
            for p in group:
                tensor = tensors.get(p.alias_of) if p.alias_of is not None else None
                if category == "buffer" and p.value.name in released:
                    self._place_replaced(p, tensor, released[p.value.name])
                    continue
                if tensor is None:
                    tensor = self._place(p.value, category, p.fqn, p.cast)
                    if p.loading:
                        self.e.trace.loading[tensor.storage.id] = p.loading
                tensors[p.value.name] = tensor
                define(p.value.name, tensor, lasting=True)
                if category == "parameter":
                    tensor.requires_grad = tensor.requires_grad or p.trainable
                    if p.alias_of is None:
                        parameters.append(tensor)
        for value in graph.constant_values.values():
            define(value.name, self._place(value, "buffer", value.name), lasting=True)
        for value in graph.inputs:
            define(value.name, self._place(value, "input", value.name))
        for name, attribute in self.releases.attributes.items():  # of the step before, until this one assigns them
            owner = keep_after(self.interpreter, name, attribute.after)
            if self.scenario.training:
                self.e.hold(self.histories.add_unsized(name, attribute.path), owner)
        if graph.recorded is not None:
            # what a checkpoint's recomputation assigns to a module takes the place of what the forward assigned
            self.interpreter.attributes |= {name: Owner("module", name) for name in graph.recorded.lasting}
            before = self._kept_of_ctx().values()
            for value, base in graph.recorded.kept:
                tensor = self._kept(value, base)
                if self.scenario.training:
                    self.histories.add(value.name, tensor)
                if value.name in before:  # the graph of the step before has it too, which ends with its loss
                    self.e.hold(tensor, self.loss)
                self.interpreter.keep(value.name, tensor)
        return parameters

    def _kept_of_ctx(self) -> dict[str, str]:
        """What modules keep because what they keep has a history with it: attributes of `ctx`, and for each its name as
        it was left by the step before."""
        recorded = self.graph.recorded
        if recorded is None or self.in_function or len(recorded.kept) != len(recorded.lasting):
            return {}
        of_ctx = {name for function in recorded.functions.values() for name in function.attributes}
        return {
            name: value.name for (value, _), name in zip(recorded.kept, recorded.lasting, strict=True) if name in of_ctx
        }

    def _place_replaced(self, buffer: Parameter, tensor: Tensor | None, until: int) -> None:
        """A buffer that the code replaces by another tensor after op `until`; -1: the step before has done so."""
        if until >= 0:
            if tensor is None:
                tensor = self._empty(buffer.value, "buffer", buffer.fqn)
                tensor.name = buffer.fqn
                self.e.categorise(tensor, "buffer", buffer.fqn)
            self.interpreter.keep(buffer.value.name, tensor)

    def _kept(self, value: Value, base: str) -> Tensor:
        """A tensor that the module has from the call before; a view where its storage has another name already."""
        e = self.e
        if base:
            return self.interpreter.kept_view(base, value.shape or ())
        tensor = self._empty(value, "activation", value.name)
        e.categorise(tensor, "activation", f"{value.name} of the previous step")
        return tensor

    def _place_graph_of_step_before(self) -> Tensor | None:
        """A place for what the graph of the step before holds until the loss is assigned anew: tensors that the forward
        made require a gradient (`enable_input_require_grads`) with their gradients, and attributes of `ctx`. It has no
        bytes yet."""
        if self.in_function or not self._leaves_a_graph():
            return None
        what = "leaves of the previous step's graph with their gradients, and attributes of ctx"
        place = self.e.empty((0,), dtypes.uint8, kernel="loss of the previous step")
        self.e.categorise(place, "activation", what)
        self.e.hold(place, self.loss)
        return place

    def _leaves_a_graph(self) -> bool:
        graph = self.graph
        if graph.recorded is not None and any(function.attributes for function in graph.recorded.functions.values()):
            return True
        if any("keeps_on_ctx" in kinds_of(base) for base in graph.bases):
            return True
        return any(op.target == REQUIRES_GRAD and op.kwargs for op in graph.ops)

    def _storages_of_graph(self, others: Collection[int]) -> list[int]:
        """The buffers of this step that its graph holds when backward is over, without those of `others`."""
        owners = (self.interpreter.made_leaves, *self.gradients_of_leaves, self.e.of_graph)
        held = dict.fromkeys(tensor.storage.id for owner in owners for tensor, _ in owner.held)
        first = bisect_left(self.e.trace.buffers.born, dict(self.e.trace.phases)["forward"])
        return [id for id in held if id >= first and id not in others]

    def _place_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Gradients of the step before: `zero_grad(set_to_none=False)` leaves them, filled with zeros, and one after
        the forward has not run yet."""
        kernel = "model" if self.scenario.set_to_none else "aten._foreach_zero_.default"
        for p in parameters:
            grad = self.e.empty_like(p, kernel=kernel)
            grad.name = p.name
            self.e.categorise(grad, "gradient", f"{p.name}.grad")
            owner = Owner("grad", p.name)
            self.e.hold(grad, owner)
            self.grads[id(p)] = grad
            if self.scenario.set_to_none:
                self.old_gradients[id(p)] = owner

    def _end_old_gradients(self) -> None:
        """`zero_grad()` after the forward: `.grad` is None again."""
        for key, owner in self.old_gradients.items():
            self.ended[key] = self.grads.pop(key).storage.id
            self.e.release(owner)
        self.old_gradients = {}

    def _require_input_gradients(self) -> None:
        """`requires_grad_()` of inputs; those that are read have a gradient of the step before, where it stays."""
        inputs = {v.name: self.interpreter.env[v.name] for v in self.graph.inputs}
        inputs = {name: tensor for name, tensor in inputs.items() if tensor.dtype.is_differentiable}
        names = [*inputs] if "all" in self.scenario.input_grad else self.scenario.input_grad
        for name in names:
            if name not in inputs:
                raise UsageError(
                    f"no input '{name}' that could have a gradient",
                    f"Floating-point inputs are {', '.join(inputs) or 'none'}.",
                    closest(name, inputs) or "Leave --input-grad out, or use all.",
                    code="SM165",
                )
            inputs[name].requires_grad = True
        if not self.scenario.set_to_none:
            self._place_gradients([inputs[name] for name in names if name in self.graph.last_read])

    def _choose_terms(self) -> None:
        """The terms of a loss that names outputs."""
        if has_terms(self.scenario.loss) and not self._has_own_loss():
            from staticmem.engine.loss_terms import terms_over  # few steps have several

            self.terms = terms_over(self.graph, self.scenario.loss)
            self.of_loss = [one.value for one in self.terms]

    def _has_own_loss(self) -> bool:
        """Whether the recording has the loss of the code."""
        return self.graph.recorded is not None and self.graph.recorded.loss

    def _is_output(self, loss: str) -> bool:
        """Whether the loss is one of the outputs."""
        if self.terms:
            (first, *others) = self.terms
            return not others and first.term.kind == ITSELF and not first.term.weight
        return loss in _AN_OUTPUT

    def _loss_and_target(self) -> tuple[str, Tensor | None, list[Note]]:
        """The loss, where `auto` is decided by the output's shape, and the target tensor that it needs."""
        loss, notes = self.scenario.loss, []
        if self.terms:
            return self._place_targets()
        shape = output_shape(self.graph)
        if self._has_own_loss():
            if loss not in ("auto", "none"):
                text = f"--loss {loss} is not used: the recording has the loss of the code"
                notes.append(Note("warning", "SM329", text))
            loss = "none"
        if loss in HEAD_LOSSES:  # the graph ends with it
            return loss, None, notes
        if loss == "auto":
            loss = losses.choose(shape)
            text = f"loss: {loss}, chosen by the output's shape {list(shape)} (--loss changes it)"
            notes.append(Note("assumption", "SM330", text))
        target = losses.target_of(loss, shape)
        return loss, target and self._place(Value("target", target[1], target[0]), "input", "target"), notes

    def _place_targets(self) -> tuple[str, None, list[Note]]:
        """The targets of a loss over several outputs, and its name."""
        from staticmem.engine.loss_terms import name_of, notes_on

        for target in filter(None, [one.target for one in self.terms]):
            if target.name not in self.targets:
                value = Value(target.name, target.dtype, target.shape)
                given = self.interpreter.env[target.name] if target.is_input else None
                self.targets[target.name] = given or self._place(value, "input", target.name)
        return name_of(self.terms), None, notes_on(self.graph, self.terms)

    # -- the step ------------------------------------------------------------------------------------------------

    def _micro_batch(self, regions: Sequence[Region], loss_name: str, target: Tensor | None) -> list[Tensor]:
        """Forward, loss and backward; the outputs of the model."""
        e, trace = self.e, self.e.trace
        checkpoints = None
        if regions:
            from staticmem.engine.checkpointing import Checkpoints  # few steps have some

            checkpoints = self.interpreter.checkpoints = Checkpoints(e, regions)
        trace.begin("forward")
        e.autocast = self.scenario.amp
        after = int(loss_name in AFTER_THE_MODEL)
        leaves_before, self.interpreter.made_leaves = self.interpreter.made_leaves, Owner("autograd", "leaves")
        graph_before, e.of_graph = e.of_graph, attributes_of_ctx()
        offloading = self._offload()
        outputs = self.interpreter.forward(after)
        check_output_shapes(self.graph, self.interpreter.env)
        if self.scenario.float32_outputs and self.scenario.amp is not None:
            outputs = in_float32(e, self.interpreter)
        if offloading is not None:
            e.saved_hooks.pop()
        if self.outputs is not None:
            self.outputs.assign(outputs)
        if after:
            outputs = self.interpreter.forward_rest(after)
        e.open_scope()
        if not outputs:
            raise no_tensor_output()
        if self.locals_policy == "last-use":  # code may take the loss's output alone: `loss_of(model(x)[0])`
            self.interpreter.forget_outputs(self.of_loss)
        roots = self._roots(outputs, loss_name, target)
        previous, self.loss = self.loss, Owner("value", "loss")
        for root in roots:
            e.hold(root, self.loss)
        trace.replaced_by.update({old.storage.id: (roots[0].storage.id,) for old, _ in previous.held})
        e.close_scope()
        self.interpreter.forget_outputs()
        for owner in (previous, leaves_before, graph_before, *self.gradients_of_leaves):
            e.release(owner)
        e.release(e.autocast_owner)
        e.autocast, e.autocast_cache = None, {}
        trace.marks["forward_end"] = trace.ticks
        roots = [root for root in roots if root.grad_fn is not None]
        self._end_old_gradients()
        if self.scenario.backward:
            trace.begin("backward")
            if roots:
                self._backward(roots)
        if offloading is not None:
            offloading.ended()
            self.offloaded = offloading.copied
        if self.in_function:
            if self.outputs is not None:
                self.outputs.end()
            free_graph(e, roots)
            for owner in (self.interpreter.made_leaves, e.of_graph, *self.gradients_of_leaves):
                e.release(owner)
        e.grad_enabled = False
        trace.op = -1
        if checkpoints is not None:
            self.recomputed, self.overwritten = tuple(checkpoints.recomputed), len(checkpoints.overwritten)
            self.policies = [*checkpoints.policies.values()]
        return outputs

    def _roots(self, outputs: Sequence[Tensor], loss: str, target: Tensor | None) -> list[Tensor]:
        """What backward starts from: the loss, or all outputs."""
        if self.terms:
            from staticmem.engine.loss_terms import run

            return [run(self.e, self.terms, self.interpreter.env, self.targets)]
        several = outputs if loss == "outputs" else outputs[:1]
        return [losses.run(self.e, loss, output, target) for output in several]

    def _offload(self) -> Offloading | None:
        """Begins to copy what autograd saves to the CPU."""
        kind = self.scenario.offload_activations
        if kind == ON_GPU:
            return None
        from staticmem.engine.offloading import Offloading, head_of  # few steps do

        parameters = [self.interpreter.env[p.value.name] for p in self.graph.parameters]
        hooks = Offloading(self.e, kind, parameters, head_of(self.graph, kind))
        self.e.saved_hooks.append(hooks)
        return hooks

    def _backward(self, losses: Sequence[Tensor]) -> None:
        """`loss.backward()`: Python holds the root gradient, and with a scaler the scaled loss, until it returns."""
        e = self.e
        held = Owner("gradient", "root gradient")
        roots = losses if self.scaler is None else [self.scaler.scale(loss) for loss in losses]
        if self.scaler is not None:
            for root in roots:
                e.hold(root, held)
        e.grad_enabled = False
        gradients = [e.empty_like(root, kernel="aten.ones_like.default") for root in roots]
        for gradient in gradients:
            e.hold(gradient, held)
        leaves = [leaf for leaf, _ in self.interpreter.made_leaves.held]
        owners = OfCode(captures=False) if leaves else None
        try:
            self.received |= run_backward(e, roots, gradients, self.grads, self.scenario.retain_graph, owners)
        except (ValueError, *BAD_ARGUMENTS) as error:  # shapes that no real step has: the file contradicts itself
            if 0 <= e.trace.op < len(self.graph.ops):
                raise self.interpreter.explained(self.graph.ops[e.trace.op], error) from error
            what = "a gradient does not fit its parameter"
            hint = "A shape in the file contradicts the op that reads it: export the model again."
            raise DimensionError(what, f"Reason: {error}.", hint, code="SM118") from error
        e.release(held)
        if owners is not None:
            self.gradients_of_leaves = [owners.owners[id(leaf)] for leaf in leaves if id(leaf) in owners.owners]
            for leaf in leaves:  # the optimizer and clip_grad_norm_ have parameters
                self.grads.pop(id(leaf), None)

    def _update(self, optimizer: optimizers.Optimizer | optimizers.Several | None) -> None:
        """The training loop after backward: unscales and clips gradients, then the optimizer's step."""
        scaler, clips = self.scaler, bool(self.scenario.clip_grad_norm)
        if scaler is not None and optimizer is not None:
            scaler.unscale(fused=optimizer.fused and not clips)
        if clips:
            from staticmem.engine.gradients import clip_grad_norm  # few steps do

            clip_grad_norm(self.e, list(self.grads.values()))
        if optimizer is not None:
            optimizer.step()
        if scaler is not None:
            scaler.update()

    def _result(self, outputs: Sequence[Tensor], loss: str | None, notes: Sequence[Note], trained: int) -> StepResult:
        i, graph, scenario = self.interpreter, self.graph, self.scenario
        for tensor, _ in self.model.held:  # avoids a reference cycle with its node: garbage collection is off meanwhile
            tensor.accumulate = None
        own = [*notes_of_step(graph, scenario, outputs, loss, self.e.choices, self.overwritten)]
        compiled = self.compiled.done(graph) if self.compiled is not None else None
        if compiled is not None:
            own += compiled.notes
        if scenario.checkpoint_save and scenario.training:
            policies = [*self.policies, *(self.compiled.policies() if self.compiled is not None else ())]
            own += notes_of_selection(scenario.checkpoint_save, policies)
        if scenario.training and scenario.offload_activations != ON_GPU:
            own.append(note_of_offloading(scenario.offload_activations, self.offloaded))
        return StepResult(
            trace=self.e.trace.seal(),
            graph=graph,
            notes=(*notes, *own),
            covered=i.covered,
            unknown=i.unknown,
            unknown_bytes=i.unknown_bytes,
            unknown_kept=i.unknown_kept,
            loss=loss,
            output_shapes=tuple(t.shape for t in outputs),
            trained=trained,
            output_dtypes=tuple(t.dtype for t in outputs),
            recomputed=self.recomputed,
            compiled=compiled,
            autocast=scenario.amp,
            runs_triton=bool(scenario.compile) or scenario.compile_optimizer,
            choices=frozenset(self.e.choices),
        )
