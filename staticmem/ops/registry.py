"""The table of rules: ATen target -> function with the schema's signature, run over tensors without data.

A rule makes its outputs through `Eager`, records the backward node with what it saves, and states its backward
formulas. It does not read the scenario and does not sum bytes.
Precision under autocast is a fact of the op too: `autocast` says
what `torch.autocast("cuda")` does with its floating-point inputs (lists of aten/src/ATen/autocast_mode.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from staticmem.ir.record import record

Autocast = Literal["half", "float32", "float32_dtype", "promote", ""]
RuleFn = TypeVar("RuleFn", bound=Callable[..., Any])


@record(frozen=True, slots=True)
class Rule:
    """`state` is "ruled", or "transparent" for what allocates nothing on the device (shape arithmetic, asserts)."""

    target: str
    function: Callable[..., Any]
    autocast: Autocast
    state: Literal["ruled", "transparent"]

    @property
    def facts(self) -> str:
        return " ".join((self.function.__doc__ or "").split())


RULES: dict[str, Rule] = {}


def rule(*targets: str, autocast: Autocast = "", transparent: bool = False) -> Callable[[RuleFn], RuleFn]:
    """Registers a rule for ATen targets, with or without an overload name; a target can have only one rule."""

    def register(function: RuleFn) -> RuleFn:
        for target in targets:
            if target in RULES:
                raise ValueError(f"two rules for {target}")
            RULES[target] = Rule(target, function, autocast, "transparent" if transparent else "ruled")
        return function

    return register


def lookup(target: str) -> Rule | None:
    """The rule for `aten::add.Tensor`, else for `aten::add`, else None (an unknown op)."""
    return RULES.get(target) or RULES.get(target.split(".", 1)[0])
