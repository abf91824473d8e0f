"""Arithmetic of numbers: on sizes that an export carries as ops, and of elements that are known."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any


def _size(tensor: Any, dim: int) -> int:
    size: int = tensor.shape[tensor.dim(dim)]
    return size


# Functions that FX graphs hold for expressions of sizes (torch/fx/experimental/sym_node.py, METHOD_TO_OPERATOR)
NUMBERS: dict[str, Callable[..., Any]] = {
    "pow": lambda a, b: a**b if abs(b) <= 64 else 0,
    "sym_max": max,
    "sym_min": min,
    "sym_not": operator.not_,
    "sym_float": float,
    "sym_int": int,
    "sym_sqrt": math.sqrt,
    "_sym_sqrt": math.sqrt,
    "trunc": math.trunc,
    "ceil": math.ceil,
    "floor": math.floor,
    "round": round,
}
SIZE_OPS: dict[str, Callable[..., Any]] = {
    "aten::sym_size": _size,
    "aten::sym_size.int": _size,
    "aten::sym_stride.int": lambda tensor, dim: tensor.strides[tensor.dim(dim)],
    "aten::sym_numel": lambda tensor: tensor.numel,
    "operator::getitem": operator.getitem,
    "torch::sym_ite": lambda c, a, b: a if c else b,
}
for _name in "add sub mul floordiv truediv mod neg pos eq ne lt le gt ge".split():
    NUMBERS[_name] = getattr(operator, _name)
for _module in ("operator", "_operator", "torch", "math"):
    for _name, _run in NUMBERS.items():
        SIZE_OPS[f"{_module}::{_name}"] = _run

# What elementwise ATen calls compute of numbers: those that constant folding works out. Others with known operands are
# left as they are, which costs a kernel's input.
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "div": operator.truediv, "abs": abs, "exp": math.exp, "log": math.log, "sqrt": math.sqrt, "tanh": math.tanh,
    "rsqrt": lambda a: 1 / math.sqrt(a), "reciprocal": lambda a: 1 / a, "sigmoid": lambda a: 1 / (1 + math.exp(-a)),
    "relu": lambda a: max(a, 0), "pow": operator.pow, "maximum": max, "minimum": min, "clamp_min": max,
    "clamp_max": min, "logical_not": operator.not_, "logical_and": lambda a, b: bool(a) and bool(b),
    "logical_or": lambda a, b: bool(a) or bool(b), "bitwise_and": operator.and_, "bitwise_or": operator.or_,
    "where": lambda c, a, b: a if c else b, "scalar_tensor": lambda a: a, "isinf": math.isinf, "isnan": math.isnan,
}  # fmt: skip
for _name in "add sub mul neg eq ne lt le gt ge".split():
    OF_NUMBERS[_name] = getattr(operator, _name)
