"""Runs an optimizer: its state, and the temporaries of `step()` in each implementation (`optimizer_steps` has both).

`step` counters are CPU scalars, except with fused=True (float32 on the GPU).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from staticmem.eager.context import Eager, Kept
from staticmem.eager.strides import Form, contiguous_strides, dense_like, form_of
from staticmem.eager.tensor import Owner, Tensor
from staticmem.engine.optimizer_steps import FACTS, Also, Drop, Make, OptimizerFacts, State, Steps
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Note
from staticmem.scenario.step import Scenario
from staticmem.units import format_bytes


def _kept(state: State, p: Tensor) -> Kept:
    """A state of a parameter."""
    dtype = state.dtype or p.dtype
    if state.shape is None:  # keeps the parameter's layout
        kernel, shape, strides = "aten.zeros_like.default", p.shape, dense_like(p.shape, p.strides)
    else:
        kernel, shape = "aten.zeros.default", state.shape(p.shape)
        strides = contiguous_strides(shape)
    return Kept(kernel, form_of(shape, strides, dtype))


def facts_of(scenario: Scenario) -> OptimizerFacts:
    """The facts of the scenario's optimizer, with its options."""
    assert scenario.optimizer is not None
    return FACTS[scenario.optimizer](scenario)


def make(
    e: Eager, scenario: Scenario, parameters: Sequence[Tensor], others: Collection[int] = frozenset()
) -> Optimizer | Several:
    """The optimizer of a scenario over the parameters that get a gradient.

    `others`: ids of matrices that Muon leaves to AdamW.
    """
    if scenario.optimizer == "muon":
        hidden = [p for p in parameters if p.ndim == 2 and id(p) not in others]
        of_muon = {id(p) for p in hidden}
        rest = [p for p in parameters if id(p) not in of_muon]
        return Several([_one(e, scenario, hidden), _one(e, replace(scenario, optimizer="adamw"), rest)])
    return _one(e, scenario, parameters)


def _one(e: Eager, scenario: Scenario, parameters: Sequence[Tensor]) -> Optimizer:
    facts = facts_of(scenario)
    impl = scenario.optimizer_impl
    if facts.only_fused:
        impl = "fused"
    elif impl == "foreach" and facts.foreach is None:
        impl = "for-loop"
    return Optimizer(e, facts, impl, parameters, scenario.offload_optimizer, scenario.compile_optimizer)


class Several:
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
    ) -> None:
        self.e, self.facts, self.impl, self.parameters, self.offload = e, facts, impl, parameters, offload
        self.compiled = compiled
        self.locals: dict[str, Owner] = {}

    @property
    def fused(self) -> bool:
        return self.impl == "fused"

    # -- state ---------------------------------------------------------------------------------------------------

    def make_state(self) -> None:
        """State of every parameter, as the step before has left it."""
        if self.parameters and not self.offload:
            self.e.keep("optimizer_state", "optimizer", self._states())

    def _states(self) -> Iterator[tuple[Kept, str, str]]:
        of_shape = {shape: self.facts.states(shape) for shape in {p.shape for p in self.parameters}}
        if any(states and states[0].dtype is dtypes.uint8 for states in of_shape.values()):
            first = self.parameters[0]
            for state in self.facts.shared:
                yield _kept(state, first), state.name, "all parameters"
        on_device = (self.fused or self.compiled) and self.facts.fused_step
        step = (State("step", lambda shape: (), dtypes.float32),) if on_device else ()
        by_form: dict[Form, list[tuple[Kept, str]]] = {}
        for p in self.parameters:
            name, states = p.name, by_form.get(p.form)
            if states is None:
                on_card = [state for state in (*of_shape[p.shape], *step) if not state.managed]
                states = [(_kept(state, p), state.name) for state in on_card]
                by_form[p.form] = states
            for kept, suffix in states:
                yield kept, f"{name}.{suffix}", name

    def notes(self) -> Iterator[Note]:
        """What a reader must know of the state."""
        managed = sum(
            form_of(p.shape, p.strides, state.dtype or p.dtype).nbytes
            for p in self.parameters
            for state in self.facts.states(p.shape)
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
                self._run(self.facts.loop(p.shape, p.dtype), [p])
        for owner in self.locals.values():
            self.e.release(owner)
        self.locals = {}

    def _run(self, steps: Steps, parameters: Sequence[Tensor]) -> None:
        for step in steps:
            if isinstance(step, Make):
                self._make(step, parameters)
            elif isinstance(step, Drop):
                self._drop(step.names)
            elif isinstance(step, Also):
                self._also(step)

    def _make(self, step: Make, parameters: Sequence[Tensor]) -> None:
        e = self.e
        e.open_scope()
        e.kernel(step.kernel)
        owner = Owner("local", step.name)
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

    def _also(self, step: Also) -> None:
        owner = Owner("local", step.name)
        for tensor, _ in self.locals[step.of].held:
            self.e.hold(tensor, owner)
        self._drop((step.name,))
        self.locals[step.name] = owner

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            owner = self.locals.pop(name, None)
            if owner is not None:
                self.e.release(owner)
