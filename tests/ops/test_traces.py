"""Which ops `torch.compile` traces, and where: beside their rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staticmem.ops import registry
from staticmem.ops.traces import registry as traces

WITHOUT_TRACE = 149  # rules; docs/generated/ops.md lists them


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
