"""The table of rules: ATen target -> function with the schema's signature, run over tensors without data.

A rule makes its outputs through `Eager`, records the backward node with what it saves, and states its backward
formulas. It does not read the scenario and does not sum bytes. Beside it stand the facts of the op that other stages
ask for: its kinds (`kinds_of("aten::split")` has "view"), the names of its arguments, and what autocast does with it:
`autocast` says what `torch.autocast("cuda")` does with floating-point inputs (lists of aten/src/ATen/autocast_mode.h).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeVar

from staticmem.ir.graph import Arg, Op
from staticmem.ir.record import record

Autocast = Literal["half", "float32", "float32_dtype", "promote", ""]
Kind = Literal[
    "arithmetic",  # one of + - * / with a number or a tensor
    "batch_norm",  # any form of batch normalisation, the functional ones of exports too
    "cast",  # a copy in the dtype that an argument names
    "check",  # allocates nothing on the device: asserts and constraints of exports
    "comparison",  # one of == != < <= > >=
    "convolution",  # any rank, transposed ones too
    "data_sized",  # sizes of the result are in the data
    "dropout",
    "factory",  # makes a tensor of given sizes, whose contents no tensor decides
    "norm",  # normalisation layers
    "product",  # matrix product
    "recurrent",  # a whole layer over all steps
    "split",  # gives a list of views of its input
    "view",  # the memory of its input in another shape; `reshape` and its like rarely copy
]
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
_KINDS: dict[str, frozenset[Kind]] = {}  # by target without overload
_NO_KINDS: frozenset[Kind] = frozenset()


def rule(
    *targets: str, kinds: tuple[Kind, ...] = (), autocast: Autocast = "", transparent: bool = False
) -> Callable[[RuleFn], RuleFn]:
    """Registers a rule for ATen targets, with or without an overload name; a target can have only one rule."""
    declare(*targets, kinds=kinds)

    def register(function: RuleFn) -> RuleFn:
        for target in targets:
            if target in RULES:
                raise ValueError(f"two rules for {target}")
            RULES[target] = Rule(target, function, autocast, "transparent" if transparent else "ruled")
        return function

    return register


def declare(*targets: str, kinds: tuple[Kind, ...]) -> None:
    """Kinds of ops. Those without a rule are in exports only: passes replace them by ops that eager code calls."""
    for target in targets if kinds else ():
        base = target.split(".", 1)[0]
        _KINDS[base] = _KINDS.get(base, _NO_KINDS).union(kinds)


def lookup(target: str) -> Rule | None:
    """The rule for `aten::add.Tensor`, else for `aten::add`, else None (an unknown op)."""
    return RULES.get(target) or RULES.get(target.split(".", 1)[0])


@lru_cache(maxsize=4096)
def kinds_of(base: str) -> frozenset[Kind]:
    """What an op is, by its target without overload: `"view" in kinds_of(op.base)`."""
    return _KINDS.get(base, _NO_KINDS)


@lru_cache(maxsize=4096)
def in_place(base: str) -> bool:
    """Whether an op writes to its first argument: PyTorch's name ends in `_`, Python's `__and__` is another thing."""
    return base.endswith("_") and not base.endswith("__")


@lru_cache(maxsize=4096)
def parameters(target: str) -> tuple[str, ...]:
    """Names of an op's positional arguments, from the signature of its rule, which is that of the schema."""
    found = lookup(target)
    if found is None:
        return ()
    code = getattr(found.function, "__wrapped__", found.function).__code__
    return tuple(code.co_varnames[1 : code.co_argcount])


def argument(op: Op, name: str) -> Arg:
    """An argument of an op by the name of the schema; None where the op has or states none."""
    if name in op.kwargs:
        return op.kwargs[name]
    names = parameters(op.target)
    position = names.index(name) if name in names else len(op.args)
    return op.args[position] if position < len(op.args) else None
