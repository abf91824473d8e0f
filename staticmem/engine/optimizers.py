"""Runs an optimizer: its state, and the temporaries of `step()` in each implementation (`optimizer_steps` has both).

`step` counters are CPU scalars, except with fused=True (float32 on the GPU).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from staticmem.eager.context import Eager, KeptTensor
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import Form, contiguous_strides, dense_like, form_of
from staticmem.eager.tensor import Owner, Tensor
from staticmem.engine.optimizer_steps import FACTS, Drop, Make, MakeAll, OptimizerFacts, SecondName, State, Steps
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Note
from staticmem.scenario.optimizers import APOLLO, LowRank
from staticmem.scenario.step import Scenario
from staticmem.units import format_bytes


def _kept(state: State, p: Tensor) -> KeptTensor:
    """A state of a parameter."""
    dtype = state.dtype or p.dtype
    if state.shape is None:  # keeps the parameter's layout
        kernel, shape, strides = "aten.zeros_like.default", p.shape, dense_like(p.shape, p.strides)
    else:
        kernel, shape = "aten.zeros.default", state.shape(p.shape)
        strides = contiguous_strides(shape)
    return KeptTensor(kernel, form_of(shape, strides, dtype))


def make(
    e: Eager, scenario: Scenario, parameters: Sequence[Tensor], apart: Collection[int] = frozenset()
) -> Optimizer | OptimizersOfGroups:
    """The optimizer of a scenario over the parameters that get a gradient.

    `apart`: ids of matrices that Muon leaves to AdamW, or of the weights that GaLore or APOLLO projects.
    """
    if scenario.low_rank is not None:
        return _project_weights(e, scenario, scenario.low_rank, parameters, apart)
    if scenario.optimizer == "muon":
        hidden = [p for p in parameters if p.ndim == 2 and id(p) not in apart]
        of_muon = {id(p) for p in hidden}
        rest = [p for p in parameters if id(p) not in of_muon]
        return OptimizersOfGroups([_one(e, scenario, hidden), _one(e, replace(scenario, optimizer="adamw"), rest)])
    return _one(e, scenario, parameters)


def _one(e: Eager, scenario: Scenario, parameters: Sequence[Tensor]) -> Optimizer:
    assert scenario.optimizer is not None
    facts = FACTS[scenario.optimizer](scenario)
    impl = scenario.optimizer_impl
    if facts.only_fused:
        impl = "fused"
    elif impl == "foreach" and facts.foreach is None:
        impl = "for-loop"
    return Optimizer(e, facts, impl, parameters, scenario.offload_optimizer, scenario.compile_optimizer)


def _project_weights(
    e: Eager, scenario: Scenario, asked: LowRank, parameters: Sequence[Tensor], targets: Collection[int]
) -> Optimizer:
    """GaLore's or APOLLO's: one loop over two groups, that of projected weights last."""
    from staticmem.engine.low_rank_steps import PLAIN, note_on, projecting  # few steps have one

    projected = [p for p in parameters if id(p) in targets]
    rest = [p for p in parameters if id(p) not in targets]
    facts = projecting(asked, scenario.optimizer == APOLLO)
    return Optimizer(
        e,
        PLAIN,
        "for-loop",
        [*rest, *projected],
        scenario.offload_optimizer,
        own={id(p): facts for p in projected},
        said=[note_on(asked, projected, len(rest))],
    )


class OptimizersOfGroups:
    """Optimizers over groups of parameters, each with a `step()` of its own."""

    fused = False

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts

    def make_state(self) -> None:
        for part in self.parts:
            part.make_state()

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def notes(self) -> Iterator[Note]:
        matrices, rest = (len(part.parameters) for part in self.parts)
        text = (
            f"torch.optim.Muon has the {matrices:,} matrices of hidden layers, an AdamW the other {rest:,} parameters: "
            "embeddings, the last layer, and what is no matrix"
        )
        yield Note("assumption", "SM283", text)


class Optimizer:
    """An optimizer over `parameters`. `offload`: states and update are the CPU's, the device sees only the copies of
    gradients out and of parameters in, which make no tensor there (torchao's CPUOffloadOptimizer, ZeRO-Offload).
    `own`: facts of parameters that are in a group of their own, by id; `said`: notes on it.
    `compiled`: `step()` runs under torch.compile, whose kernels keep what foreach puts into lists in registers; Dynamo
    moves the counters of steps to the device (torch/_dynamo/variables/optimizer.py, `move_step_if_cpu`)."""

    def __init__(
        self,
        e: Eager,
        facts: OptimizerFacts,
        impl: str,
        parameters: Sequence[Tensor],
        offload: bool = False,
        compiled: bool = False,
        own: Mapping[int, OptimizerFacts] | None = None,
        said: Sequence[Note] = (),
    ) -> None:
        self.e, self.facts, self.impl, self.parameters, self.offload = e, facts, impl, parameters, offload
        self.compiled, self.own, self.said = compiled, own or {}, said
        self.fused = impl == "fused"
        self.locals: dict[str, Owner] = {}

    def facts_of(self, p: Tensor) -> OptimizerFacts:
        """The facts of the group that a parameter is in."""
        return self.own.get(id(p), self.facts) if self.own else self.facts

    # -- state ---------------------------------------------------------------------------------------------------

    def make_state(self) -> None:
        """State of every parameter, as the step before has left it."""
        if self.parameters and not self.offload:
            self.e.keep("optimizer_state", Reason.OPTIMIZER, self._states())

    def _states(self) -> Iterator[tuple[KeptTensor, str, str]]:
        of_form: dict[tuple[int, Form], tuple[State, ...]] = {}  # by id of the facts
        for p in self.parameters:
            facts = self.facts_of(p)
            if (id(facts), p.form) not in of_form:
                of_form[id(facts), p.form] = facts.states(p.shape, p.dtype)
        if any(states and states[0].dtype is dtypes.uint8 for states in of_form.values()):
            first = self.parameters[0]
            for state in self.facts.shared:
                yield _kept(state, first), state.name, "all parameters"
        on_device = (self.fused or self.compiled) and self.facts.fused_step
        step = (State("step", lambda shape: (), dtypes.float32),) if on_device else ()
        by_form: dict[tuple[int, Form], list[tuple[KeptTensor, str]]] = {}
        for p in self.parameters:
            key = id(self.facts_of(p)), p.form
            name, states = p.name, by_form.get(key)
            if states is None:
                on_card = [state for state in (*of_form[key], *step) if not state.managed]
                states = [(_kept(state, p), state.name) for state in on_card]
                by_form[key] = states
            for kept, suffix in states:
                yield kept, f"{name}.{suffix}", name

    def notes(self) -> Iterator[Note]:
        """What a reader must know of the state."""
        yield from self.said
        managed = sum(
            form_of(p.shape, p.strides, state.dtype or p.dtype).nbytes
            for p in self.parameters
            for state in self.facts_of(p).states(p.shape, p.dtype)
            if state.managed and not self.offload
        )
        if managed:
            text = (
                f"{format_bytes(managed)} of optimizer state are in CUDA's managed memory, which no figure here has: "
                "they move to the GPU for the step, and stay there while there is room"
            )
            yield Note("assumption", "SM284", text)

    # -- step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """The temporaries of `optimizer.step()`."""
        if self.offload:
            self.e.kernel("aten.copy_.default")
            return
        if self.compiled:
            self.e.kernel("triton: optimizer.step")
            return
        if self.fused:
            self.e.kernel("aten._fused_adamw_.default")
            return
        if self.impl == "foreach" and self.facts.foreach is not None:
            groups: dict[DType, list[Tensor]] = {}
            for p in self.parameters:
                groups.setdefault(p.dtype, []).append(p)
            for group in groups.values():
                self._run(self.facts.foreach(group[0].shape), group)
        else:
            for p in self.parameters:  # a variable keeps its tensor until the next parameter assigns it again
                self._run(self.facts_of(p).loop(p.shape, p.dtype), [p])
        for owner in self.locals.values():
            self.e.release(owner)
        self.locals = {}

    def _run(self, steps: Steps, parameters: Sequence[Tensor]) -> None:
        for step in steps:
            if isinstance(step, Make):
                self._make(step, parameters)
            elif isinstance(step, MakeAll):
                self._make_all(step, parameters[0])
            elif isinstance(step, Drop):
                self._drop(step.names)
            elif isinstance(step, SecondName):
                self._add_second_name(step)

    def _make(self, step: Make, parameters: Sequence[Tensor]) -> None:
        e = self.e
        e.open_scope()
        e.kernel(step.kernel)
        owner = Owner(Reason.LOCAL, step.name)
        for p in parameters:
            dtype = step.dtype or p.dtype
            tensor = e.empty_like(p, dtype) if step.shape is None else e.empty(step.shape(p.shape), dtype)
            if step.name:
                e.hold(tensor, owner)
        e.close_scope()
        self._drop(step.frees)
        if step.name:
            self._drop((step.name,))
            self.locals[step.name] = owner

    def _make_all(self, step: MakeAll, p: Tensor) -> None:
        self.e.kernel(step.kernel)
        for name, shape in zip(step.names, step.shapes, strict=True):
            owner = Owner(Reason.LOCAL, name)
            self.e.hold(self.e.empty(shape(p.shape), step.dtype), owner)
            self._drop((name,))
            self.locals[name] = owner

    def _add_second_name(self, step: SecondName) -> None:
        owner = Owner(Reason.LOCAL, step.name)
        for tensor, _ in self.locals[step.of].held:
            self.e.hold(tensor, owner)
        self._drop((step.name,))
        self.locals[step.name] = owner

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            owner = self.locals.pop(name, None)
            if owner is not None:
                self.e.release(owner)
