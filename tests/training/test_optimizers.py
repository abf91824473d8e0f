"""Optimizer state and the temporaries of a step against torch.optim on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from staticmem import dtypes
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Owner, Tensor
from staticmem.training import optimizers
from staticmem.training.scenario import IMPLEMENTATIONS, OPTIMIZERS

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
SHAPES = ((6, 10), (10,), (7, 10), (3, 5, 4))
SCALAR = 8  # bytes: step counters and what a CPU makes of Python numbers
CLASSES: dict[str, tuple[str, float]] = {
    "sgd": ("SGD", 0.0), "sgd-momentum": ("SGD", 0.9), "adam": ("Adam", 0.0), "adamw": ("AdamW", 0.0),
    "rmsprop": ("RMSprop", 0.0), "adagrad": ("Adagrad", 0.0),
}  # fmt: skip


def build(name: str, impl: str) -> tuple[Any, list[Any]]:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for p in parameters:
        p.grad = torch.ones_like(p)
    cls, momentum = CLASSES[name]
    kwargs: dict[str, Any] = {"fused": True} if impl == "fused" else {"foreach": impl == "foreach"}
    if momentum:
        kwargs["momentum"] = momentum
    optimizer = getattr(torch.optim, cls)(parameters, lr=0.1, **kwargs)
    optimizer.step()
    return optimizer, parameters


def memory(run: Callable[[], object]) -> list[tuple[int, int]]:
    """(bytes, alive) of each allocation of more than a scalar."""
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    steps, live = [], 0
    for event in profile.profiler.kineto_results.events():
        nbytes = event.nbytes() if event.name() == "[memory]" else 0
        if abs(nbytes) > SCALAR:
            live += nbytes
            if nbytes > 0:
                steps.append((nbytes, live))
    return steps


def place(e: Eager) -> list[Tensor]:
    parameters = []
    for k, shape in enumerate(SHAPES):
        tensor = e.empty(shape, dtypes.float32)
        tensor.name = f"p{k}"
        e.hold(tensor, Owner("model", ""))
        parameters.append(tensor)
    return parameters


def ours(name: str, impl: str) -> list[tuple[int, int]]:
    e = Eager()
    e.trace.begin("optimizer")
    parameters = place(e)
    first = len(e.trace.buffers)
    optimizers.step(e, facts(name), impl, parameters)
    made = e.trace.buffers[first:]
    return [
        (b.nbytes, sum(o.nbytes for o in made if o.born <= b.born and (o.died is None or o.died > b.born)))
        for b in made
    ]


def facts(name: str) -> optimizers.OptimizerFacts:
    return optimizers.facts_of(name.partition("-")[0], CLASSES[name][1])


@pytest.mark.parametrize("impl", ["foreach", "for-loop"])
@pytest.mark.parametrize("name", CLASSES)
def test_temporaries_of_a_step(name: str, impl: str) -> None:
    optimizer, _ = build(name, impl)
    assert ours(name, impl) == memory(optimizer.step)


@pytest.mark.parametrize("name", [n for n in CLASSES if optimizers.FACTS[n].fused])
def test_a_fused_step_makes_nothing(name: str) -> None:
    optimizer, _ = build(name, "fused")
    assert ours(name, "fused") == memory(optimizer.step) == []


def test_fused_is_offered_exactly_where_torch_has_it() -> None:
    for name, (cls, _) in CLASSES.items():
        supports = "fused" in getattr(torch.optim, cls).__init__.__code__.co_varnames
        assert optimizers.FACTS[name].fused == supports, name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CLASSES)
def test_state_is_that_of_the_state_dict(name: str, impl: str) -> None:
    if impl == "fused" and not optimizers.FACTS[name].fused:
        pytest.skip("torch has no fused implementation")
    optimizer, parameters = build(name, impl)
    expected = [
        {key: (tuple(t.shape), t.numel() * t.element_size()) for key, t in optimizer.state.get(p, {}).items()
         if isinstance(t, torch.Tensor) and (key != "step" or impl == "fused")}
        for p in parameters
    ]  # fmt: skip
    e = Eager()
    e.trace.begin("setup")
    owners = optimizers.make_state(e, facts(name), impl, place(e))
    found = []
    for owner in owners:
        buffers = [e.trace.buffers[t.storage.id] for t, _ in owner.held]
        assert all(b.category == "optimizer_state" for b in buffers)
        found.append({b.name.split(".")[-1]: (b.shape, b.nbytes) for b in buffers})
    assert found == expected


def test_every_optimizer_of_a_scenario_has_facts() -> None:
    names: Sequence[str] = [optimizer for optimizer in OPTIMIZERS if optimizers.facts_of(optimizer, 0.0)]
    assert tuple(names) == OPTIMIZERS
