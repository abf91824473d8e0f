"""Names that PyTorch dispatches to another op: the same function, saves and gradients.

Source: aten/src/ATen/native/UnaryOps.cpp, BinaryOps.cpp, TensorShape.cpp (one-line definitions such as
`Tensor arccos(const Tensor& self) { return self.acos(); }`). Autocast acts on the op that they call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from staticmem.eager.context import Eager
from staticmem.ops import (  # noqa: F401  (the rules that names below stand for)
    activations,
    comparison,
    indexing,
    joining,
    linear,
    pointwise,
    reduction,
    scattering,
    ternary,
    views,
)
from staticmem.ops.dispatch import call
from staticmem.ops.registry import RULES, Rule, kinds_of, rule

_NAMES = {
    "absolute": "abs", "arccos": "acos", "arcsin": "asin", "arctan": "atan", "fix": "trunc", "negative": "neg",
    "multiply": "mul", "subtract": "sub", "divide": "div",
}  # fmt: skip
_OUT_OF_PLACE = {
    "arccosh": "acosh", "arcsinh": "asinh", "arctanh": "atanh", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "not_equal": "ne", "moveaxis": "movedim", "unsafe_chunk": "chunk", "unsafe_split": "split",
    "unsafe_split_with_sizes": "split_with_sizes", "linalg_matmul": "matmul", "bitwise_left_shift": "__lshift__",
    "bitwise_right_shift": "__rshift__", "special_erf": "erf", "special_erfc": "erfc", "special_expit": "sigmoid",
    "special_exp2": "exp2", "special_expm1": "expm1", "special_gammaln": "lgamma", "special_log1p": "log1p",
    "special_logit": "logit", "special_round": "round", "special_softmax": "softmax",
    "special_log_softmax": "log_softmax", "special_logsumexp": "logsumexp",
}  # fmt: skip


def _same_as(original: Rule) -> Callable[..., Any]:
    def run(e: Eager, *args: Any, **kwargs: Any) -> Any:
        return call(e, original, args, kwargs)

    run.__doc__ = f"As `{original.target.removeprefix('aten::')}`."
    run.__module__ = __name__
    return run


def _define(names: dict[str, str], suffix: str = "") -> None:
    for name, original in names.items():
        same_as = RULES[f"aten::{original}{suffix}"]
        rule(f"aten::{name}{suffix}", kinds=tuple(kinds_of(same_as.target)))(_same_as(same_as))


_define(_NAMES)
_define(_NAMES, "_")
_define(_OUT_OF_PLACE)
