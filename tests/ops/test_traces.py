"""Which ops `torch.compile` traces, and where: beside their rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staticmem.ops import registry, unary
from staticmem.ops.pointwise import kernels_of
from staticmem.ops.traces import registry as traces

WITHOUT_TRACE = 151  # rules; docs/generated/ops.md lists them


def family(function: Callable[..., Any]) -> str:
    """The file that registers a function."""
    return Path(inspect.getfile(inspect.unwrap(function))).stem


def test_a_trace_stands_beside_its_rule() -> None:
    assert traces.lookup("aten::of_no_family") is None  # all are imported
    apart = {}
    for target, function in traces.TRACED.items():
        rule = registry.lookup(target)
        # rows of functions of one input are registered by what they share
        if rule is not None and family(rule.function) not in (family(function), "pointwise"):
            apart[target] = family(function), family(rule.function)
    assert apart == {}
    assert set(traces.FAMILIES) <= set(registry.FAMILIES)


def test_new_rules_come_with_a_trace() -> None:
    assert len(traces.untraced()) <= WITHOUT_TRACE


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_gradients_call_what_autograd_calls() -> None:
    """In order: the gradients that are written once are those of eager code."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(function).split(".")[1])
            return function(*args, **(kwargs or {}))

    differing = {}
    for row in unary.PLAIN:
        called: list[str] = []
        x = torch.full((3,), 1.5 if row.name == "acosh" else 0.5, requires_grad=True)
        out = getattr(torch.ops.aten, row.name)(x)
        with Log():
            torch.autograd.grad(out, x, torch.ones(3))
        rsub = ["empty_like", "fill_", "sub_"]  # by which PyTorch composes it
        made = " ".join(name for name in called if name not in ("ones", "detach")).replace(" ".join(rsub), "rsub")
        if made != " ".join(kernels_of(row.gradient)[0]):
            differing[row.name] = made
    assert differing == {}
