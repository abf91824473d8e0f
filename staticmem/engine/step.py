"""One step over a graph: forward, loss, backward, optimizer; or one inference. Gives the trace of its memory.

The step that is run is the second one: optimizer state exists from its start, `zero_grad()` has set gradients to None,
and what the loop assigns in each step, the loss and the model's outputs (`engine.held_outputs`), is of the step before
until it is assigned anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from operator import attrgetter
from typing import TYPE_CHECKING

from staticmem.eager.autograd import AskedBackward, free_graph, leaves_below, run_backward
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Tensor, attributes_of_ctx
from staticmem.eager.trace import Trace
from staticmem.engine import optimizers
from staticmem.engine.features import Feature, LossOfStep, features_of
from staticmem.engine.interpreter import Coverage, Interpreter
from staticmem.engine.kept_history import KeptHistories, call_again, keep_after, kept_now
from staticmem.engine.notes import notes_of_step
from staticmem.engine.shapes import check_output_shapes, no_tensor_output, placed
from staticmem.errors import DimensionError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph, Note, Parameter, Region, Value
from staticmem.ir.record import record
from staticmem.ops.dispatch import BAD_ARGUMENTS
from staticmem.passes.requested.parameters import left_frozen, outer_matrices, projected_weights, values_of_loss
from staticmem.passes.requested.regions import all_regions
from staticmem.passes.variables.releases import releases_of
from staticmem.scenario.checkpointing import Policy
from staticmem.scenario.edits import BATCH_OF_LOOP, LOSS_OF_LOOP
from staticmem.scenario.step import Scenario

if TYPE_CHECKING:
    from staticmem.compiler.plan import Kernels
    from staticmem.engine.compiled_step import CompiledStep


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
    recomputed: tuple[int, ...] = ()  # ops that checkpoints ran again in one backward, by their indices
    compiled: CompiledStep | None = None
    autocast: DType | None = None
    runs_triton: bool = False  # code of torch.compile, of the model or of the optimizer (torchao's compile theirs)
    choices: frozenset[tuple[str, str]] = frozenset()  # of kernels: what was chosen, and why
    moved: int = 0  # bytes that a step moves between the GPU and the CPU, all micro-batches together


def run_step(
    graph: Graph,
    scenario: Scenario,
    locals_policy: str = "expected",
    kernels: Kernels = "expected",
    machine: Callable[[bool], Eager] = Eager,
) -> StepResult:
    """Runs the scenario's step over a graph that the passes prepared for it (`passes.pipeline.for_step`).

    `locals_policy` is one of `passes.variables.policy.POLICIES`; `kernels` of compiled code, of a step that has run
    with those that are expected (`compiler.inductor.plan`). `machine` makes what the ops run on, given whether it is
    training.
    """
    step = StepRun(graph, scenario, locals_policy, kernels, machine)
    if not scenario.training:
        return step.infer()
    result, expected, received = step.train()
    before = scenario.gradients_at_start
    if received != expected and (scenario.optimizer is not None or before):
        # Only parameters that get a gradient have optimizer state, and a `.grad` from the step before. The graph shows
        # which ones the loss depends on, but not through which ops autograd passes nothing on (`detach`, `argmax`, a
        # formula that gives None): then only a backward shows it, and the step is run again with what it reached.
        result, _, _ = StepRun(graph, scenario, locals_policy, kernels, machine).train(received)
    return result


class StepRun:
    """A run of a step: what it is of, and what the variables of the loop around it have."""

    graph: Graph
    scenario: Scenario
    training: bool
    e: Eager
    features: list[Feature]
    criterion: LossOfStep  # of a training step

    def __init__(
        self,
        graph: Graph,
        scenario: Scenario,
        locals_policy: str,
        kernels: Kernels = "expected",
        machine: Callable[[bool], Eager] = Eager,
    ) -> None:
        self.kernels = kernels
        self.graph, self.scenario, self.locals_policy = graph, scenario, locals_policy
        self.training = scenario.training
        self.e = e = machine(scenario.training)
        e.sdpa, e.torch = scenario.sdpa, scenario.torch
        cast = None
        if scenario.dtype in dtypes.HALVES:
            from staticmem.ops.whole_model_cast import cast_of  # few steps have it

            cast = cast_of(graph, scenario.dtype)
        self.releases = releases_of(graph, locals_policy, scenario.training, cast is not None)
        self.interpreter = Interpreter(e, graph, cast, self.releases)
        self.interpreter.keeps_values = False
        self.model = self.interpreter.model
        self.loss, self.outputs = Owner(Reason.VALUE, "loss"), Owner(Reason.VALUE, "outputs")  # variables of the loop
        self.histories = KeptHistories(e)
        # the variables of the training loop end with a function that each step calls, and autograd's graph with them,
        # or the loop deletes them
        self.keeps_loss = LOSS_OF_LOOP not in scenario.let_go
        self.deletes_batch = BATCH_OF_LOOP in scenario.let_go
        self.in_function = scenario.retain_graph or not scenario.backward or not self.keeps_loss
        self.grads, self.received = e.grads, e.received
        self.with_gradient: Sequence[Tensor] = ()  # parameters that get one
        self.moved = 0
        self.gradients_of_leaves: Sequence[Owner] = ()
        self.has_own_loss = graph.recorded is not None and graph.recorded.loss
        self.notes: list[Note] = []
        self.checkpoints: tuple[Region, ...] = ()
        self.recomputed: tuple[int, ...] = ()
        self.overwritten = 0  # checkpoints that change an input in place
        self.compiled: CompiledStep | None = None
        self.compiled_policies: Collection[Policy] = ()  # of selective checkpoints inside of compiled code
        e.trace.begin("setup")

    def infer(self) -> StepResult:
        """One inference: a call of those after the first, whose result the loop holds until it has the next."""
        e = self.e
        self._place_model()
        self.features = features_of(self)
        for feature in self.features:
            feature.place()
        e.trace.begin("forward")
        e.autocast = self.scenario.amp
        e.grad_enabled = self.graph.recorded is not None and self.graph.recorded.enables_grad
        generated = self.graph.generated
        steps = () if generated is None or generated.decode == len(self.graph.ops) else (generated.decode,)
        outputs = self.interpreter.forward(decode=steps)
        for feature in self.features:
            outputs = feature.end_forward(outputs)
        e.trace.marks["forward_end"] = dict(e.trace.phases).get("decode", e.trace.ticks)
        self.interpreter.forget_outputs()
        e.release(e.autocast_owner)
        for feature in self.features:
            feature.end_step()
        return self._result(outputs)

    def train(self, trained: Collection[int] | None = None) -> tuple[StepResult, Collection[int], Collection[int]]:
        """One step of training. `trained` are the indices of the parameters that get a gradient; None: those that the
        graph shows. Returns the result, these indices, and those of the parameters that did get one."""
        e, i, scenario, graph = self.e, self.interpreter, self.scenario, self.graph
        self.checkpoints, region_notes = all_regions(graph, scenario, self.locals_policy)
        self.features = features_of(self)
        parameters = [p for p in self._place_model() if p.requires_grad]
        ids = {name: id(tensor) for name, tensor in i.env.items()}
        read = {ids[name] for name in graph.last_read if name in ids}
        if trained is None:
            names = values_of_loss(graph, self.criterion.values)
            of_loss = read.intersection([ids[name] for name in names if name in ids])
            trained = {k for k, p in enumerate(parameters) if id(p) in of_loss}
        self.with_gradient = [p for k, p in enumerate(parameters) if k in trained]
        optimizer = self._place_optimizer(parameters, ids)
        for feature in self.features:
            feature.place()
        self.notes += region_notes
        outputs = self._micro_batch()
        if scenario.accumulate > 1:  # all micro-batches after the first are equal: two suffice
            counted = i.coverage, e.choices
            i.coverage, e.choices = Coverage(unknown_kept=i.coverage.unknown_kept), Counter()
            e.grad_enabled = True
            call_again(i)
            outputs = self._micro_batch()
            i.coverage, e.choices = counted
        self.histories.fill(kept_now(i), [tensor for tensor, _ in self.outputs.held])
        for feature in self.features:
            feature.end_step()
        e.trace.begin("optimizer")
        for feature in self.features:
            feature.begin_update(optimizer)
        if optimizer is not None:
            optimizer.step()
            self.notes += optimizer.notes()
        for feature in self.features:
            feature.end_update()
        result = self._result(outputs)
        received = self.received & read  # once: both have an entry for each parameter
        return result, trained, {k for k, p in enumerate(parameters) if id(p) in received}

    def _place_optimizer(
        self, parameters: Sequence[Tensor], ids: Mapping[str, int]
    ) -> optimizers.Optimizer | optimizers.OptimizersOfGroups | None:
        """Places the state that the optimizer has from the step before. `ids` are those of tensors, by name."""
        scenario, graph = self.scenario, self.graph
        if scenario.optimizer is None:
            return None
        apart: Collection[str] = outer_matrices(graph) if scenario.optimizer == "muon" else ()
        if scenario.low_rank is not None:
            apart = projected_weights(graph, scenario.low_rank)
        optimizer = optimizers.make(self.e, scenario, self.with_gradient, {ids[name] for name in apart if name in ids})
        optimizer.make_state()
        self._make_state_of_other_call(parameters)
        return optimizer

    def _make_state_of_other_call(self, parameters: Sequence[Tensor]) -> None:
        """The optimizer's state of parameters that another call of the code trains, and this one does not."""
        graph, env = self.graph, self.interpreter.env
        other = graph.recorded.other_call if graph.recorded is not None else None
        if other is None:
            return
        of_loss = [other.outputs[graph.outputs.index(name)] for name in self.criterion.values]
        here = values_of_loss(graph, self.criterion.values) - left_frozen(graph)
        names = values_of_loss(other, of_loss) - left_frozen(other) - here
        trained = {id(env[name]) for name in names if name in env}
        optimizers.make(self.e, self.scenario, [p for p in parameters if id(p) in trained]).make_state()

    # -- set-up --------------------------------------------------------------------------------------------------

    def _empty(self, value: Value, category: str, name: str, cast: bool = True) -> Tensor:
        dtype, of_model = value.dtype, self.scenario.dtype
        if cast and of_model is not None and dtype.is_floating_point:  # a cast of the whole model changes these alone
            dtype = of_model
        return placed(self.e, value, dtype, f"{category} '{name}'")

    def place(self, value: Value, category: str, name: str, cast: bool = True) -> Tensor:
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
                    tensor = self.place(p.value, category, p.fqn, p.cast)
                    if p.loading:
                        self.e.trace.loading[tensor.storage.id] = p.loading
                tensors[p.value.name] = tensor
                define(p.value.name, tensor, lasting=True)
                if category == "parameter":
                    tensor.requires_grad = tensor.requires_grad or p.trainable
                    if p.alias_of is None:
                        parameters.append(tensor)
        for value in graph.constant_values.values():
            define(value.name, self.place(value, "buffer", value.name), lasting=True)
        for value in graph.inputs:
            define(value.name, self.place(value, "input", value.name))
        for name, attribute in self.releases.attributes.items():  # of the step before, until this one assigns them
            owner = keep_after(self.interpreter, name, attribute.after)
            if self.scenario.training:
                self.e.hold(self.histories.add_unsized(name, attribute.path), owner)
        if graph.recorded is not None:
            # what a checkpoint's recomputation assigns to a module takes the place of what the forward assigned
            self.interpreter.attributes |= {name: Owner(Reason.MODULE, name) for name in graph.recorded.lasting}
            before = self.kept_of_ctx().values()
            for value, base in graph.recorded.kept:
                tensor = self._kept(value, base)
                if self.scenario.training:
                    self.histories.add(value.name, tensor)
                if value.name in before:  # the graph of the step before has it too, which ends with its loss
                    self.e.hold(tensor, self.loss)
                self.interpreter.keep(value.name, tensor)
        return parameters

    def kept_of_ctx(self) -> dict[str, str]:
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

    # -- the step ------------------------------------------------------------------------------------------------

    def _micro_batch(self) -> list[Tensor]:
        """Forward, loss and backward; the outputs of the model."""
        e, trace = self.e, self.e.trace
        trace.begin("forward")
        e.autocast = self.scenario.amp
        after = self.criterion.ops_after_model
        leaves_before, self.interpreter.made_leaves = self.interpreter.made_leaves, Owner(Reason.AUTOGRAD, "leaves")
        graph_before, e.of_graph = e.of_graph, attributes_of_ctx()
        for feature in self.features:
            feature.begin_forward()
        outputs = self.interpreter.forward(after)
        check_output_shapes(self.graph, self.interpreter.env)
        for feature in self.features:
            outputs = feature.end_forward(outputs)
        if after:
            outputs = self.interpreter.forward_rest(after)
        e.open_scope()
        if not outputs:
            raise no_tensor_output()
        if self.locals_policy == "last-use":  # code may take the loss's output alone: `loss_of(model(x)[0])`
            self.interpreter.forget_outputs(self.criterion.values)
        roots = self.criterion.compute(outputs)
        previous, self.loss = self.loss, Owner(Reason.VALUE, "loss")
        for root in roots:
            e.hold(root, self.loss)
        trace.replaced_by.update({old.storage.id: (roots[0].storage.id,) for old, _ in previous.held})
        e.close_scope()
        self.interpreter.forget_outputs()
        if leaves_before.held:
            self._forget_leaves(leaves_before)
        for owner in (previous, leaves_before, graph_before, *self.gradients_of_leaves):
            e.release(owner)
        e.release(e.autocast_owner)
        e.autocast, e.autocast_cache = None, {}
        trace.marks["forward_end"] = trace.ticks
        for feature in self.features:
            feature.begin_backward()
        roots = [root for root in roots if root.grad_fn is not None]
        # Until the next loss takes its place, the graph of the loss has leaves that the code made, and their gradients.
        leaves, self.interpreter.code_leaves = self.interpreter.code_leaves, []
        below = leaves_below(roots) if leaves else ()
        for leaf in leaves:
            node = leaf.accumulate
            if node is None or not node.saved or any(tensor is leaf for tensor, _ in self.model.held):
                continue
            if id(leaf) in below:
                e.hold(leaf, self.interpreter.made_leaves)
            else:
                e.forget(node)
        if self.scenario.backward:
            trace.begin("backward")
            if roots:
                self._backward(roots)
        for feature in self.features:
            feature.end_backward()
        if self.in_function:
            free_graph(e, roots)
            if self.interpreter.made_leaves.held:
                self._forget_leaves(self.interpreter.made_leaves)
            for owner in (*self.owners_of_graph(), *(() if self.keeps_loss else (self.loss,))):
                e.release(owner)
        e.grad_enabled = False
        trace.op = -1
        return outputs

    def _forget_leaves(self, of_graph: Owner) -> None:
        """The graph of a loss ends, with the nodes that gather the gradients of its leaves. The histories of attributes
        may have some of them."""
        attributes = self.interpreter.attributes.values()
        kept = leaves_below([tensor for owner in attributes for tensor, _ in owner.held])
        for leaf, _ in of_graph.held:
            if leaf.accumulate is not None and id(leaf) not in kept:
                self.e.forget(leaf.accumulate)

    def _backward(self, losses: Sequence[Tensor]) -> None:
        """`loss.backward()`: Python holds the root gradient, and with a scaler the scaled loss, until it returns."""
        e = self.e
        held = Owner(Reason.GRADIENT, "root gradient")
        roots = losses
        for feature in self.features:
            roots = feature.scale(roots)
        if roots is not losses:
            for root in roots:
                e.hold(root, held)
        e.grad_enabled = False
        gradients = [e.empty_like(root, kernel="aten.ones_like.default") for root in roots]
        for gradient in gradients:
            e.hold(gradient, held)
        leaves = [leaf for leaf, _ in self.interpreter.made_leaves.held]
        owners = AskedBackward(captures=False) if leaves else None
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

    def owners_of_graph(self) -> tuple[Owner, ...]:
        """Who has what autograd's graph holds when backward is over: leaves that the forward made, attributes of `ctx`,
        gradients of the leaves."""
        return (self.interpreter.made_leaves, *self.gradients_of_leaves, self.e.of_graph)

    def _result(self, outputs: Sequence[Tensor]) -> StepResult:
        i, graph, scenario = self.interpreter, self.graph, self.scenario
        for tensor, _ in self.model.held:  # avoids a reference cycle with its node: garbage collection is off meanwhile
            tensor.accumulate = None
        loss = self.criterion.name if self.training else None
        self.notes += notes_of_step(graph, scenario, outputs, loss, self.e.choices, self.overwritten)
        self.moved *= scenario.accumulate
        if scenario.offload_optimizer:
            self.moved += 2 * sum(p.nbytes for p in self.with_gradient)
        for feature in self.features:
            self.notes += feature.notes()
            del feature.step  # as above: the step has its features
        return StepResult(
            trace=self.e.trace.seal(),
            graph=graph,
            notes=tuple(self.notes),
            covered=i.coverage.covered,
            unknown=i.coverage.unknown,
            unknown_bytes=i.coverage.unknown_bytes,
            unknown_kept=i.coverage.unknown_kept,
            loss=loss,
            output_shapes=tuple(map(attrgetter("shape"), outputs)),
            trained=len(self.with_gradient),
            output_dtypes=tuple(map(attrgetter("dtype"), outputs)),
            recomputed=self.recomputed,
            compiled=self.compiled,
            autocast=scenario.amp,
            runs_triton=scenario.runs_triton,
            choices=frozenset(self.e.choices),
            moved=self.moved,
        )
