"""Optimizer state and the temporaries of `step()`, per implementation.

Sources: torch/optim/{sgd,adam,adamw,rmsprop,adagrad}.py, `_multi_tensor_*` (foreach, the default on CUDA),
`_single_tensor_*` (for-loop), `_fused_*`. `step` counters are CPU scalars, except with fused=True (float32 on the GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from staticmem import dtypes
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Owner, Tensor


@dataclass(frozen=True)
class OptimizerFacts:
    """`states`: tensors of a parameter's size kept between steps. `foreach`: whole-model lists alive together at the
    step. `loop`: the parameter-sized temporaries of one iteration, in order; the last one lives into the next."""

    states: tuple[str, ...]
    foreach: tuple[str, ...]
    loop: tuple[str, ...]
    fused: bool


FACTS = {
    "sgd": OptimizerFacts((), (), (), True),
    "sgd-momentum": OptimizerFacts(("momentum_buffer",), (), (), True),
    "adam": OptimizerFacts(("exp_avg", "exp_avg_sq"), ("aten._foreach_sqrt",), ("aten.sqrt", "aten.div"), True),
    "adamw": OptimizerFacts(("exp_avg", "exp_avg_sq"), ("aten._foreach_sqrt",), ("aten.sqrt", "aten.div"), True),
    "rmsprop": OptimizerFacts(("square_avg",), ("aten._foreach_sqrt",), ("aten.sqrt",), False),
    "adagrad": OptimizerFacts(("sum",), ("aten._foreach_sqrt", "aten._foreach_mul"), ("aten.sqrt",), True),
}


def facts_of(optimizer: str, momentum: float) -> OptimizerFacts:
    return FACTS["sgd-momentum" if optimizer == "sgd" and momentum else optimizer]


def make_state(e: Eager, facts: OptimizerFacts, impl: str, parameters: Sequence[Tensor]) -> list[Owner]:
    """State of every trained parameter: zeros_like keeps the parameter's layout."""
    owners = []
    for p in parameters:
        owner = Owner("optimizer", p.name)
        for state in facts.states:
            tensor = e.empty_like(p, kernel="aten.zeros_like.default")
            e.categorise(tensor, "optimizer_state", f"{p.name}.{state}")
            e.hold(tensor, owner)
        if impl == "fused" and facts.states and facts.states[0] != "momentum_buffer":
            step = e.empty((), dtypes.float32, kernel="aten.zeros.default")
            e.categorise(step, "optimizer_state", f"{p.name}.step")
            e.hold(step, owner)
        owners.append(owner)
    return owners


def step(e: Eager, facts: OptimizerFacts, impl: str, parameters: Sequence[Tensor]) -> None:
    """The temporaries of `optimizer.step()`."""
    if impl == "fused":
        e.kernel("aten._fused_adamw_.default")
        return
    if impl == "foreach":
        e.open_scope()
        for name in facts.foreach:
            e.kernel(f"{name}.default")
            for p in parameters:
                e.empty_like(p)
        e.close_scope()
        return
    _for_loop(e, facts, parameters)


def _for_loop(e: Eager, facts: OptimizerFacts, parameters: Sequence[Tensor]) -> None:
    """One parameter at a time; the local variable of the last temporary survives until it is assigned again."""
    previous: Owner | None = None
    for p in parameters:
        e.open_scope()
        made = [e.empty_like(p, kernel=f"{name}.default") for name in facts.loop]
        if made:
            current = Owner("local", "denom")
            e.hold(made[-1], current)
        e.close_scope()
        if made:
            if previous is not None:
                e.release(previous)
            previous = current
    if previous is not None:
        e.release(previous)
