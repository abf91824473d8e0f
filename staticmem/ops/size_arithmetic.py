"""Arithmetic of numbers: on sizes that an export carries as ops, and of elements that are known."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any


def _size(tensor: Any, dim: int) -> int:
    size: int = tensor.shape[tensor.dim(dim)]
    return size


SIZE_OPS: Mapping[str, Callable[..., Any]] = {
    "aten::sym_size": _size,
    "aten::sym_size.int": _size,
    "aten::sym_stride.int": lambda tensor, dim: tensor.strides[tensor.dim(dim)],
    "aten::sym_numel": lambda tensor: tensor.numel,
    "operator::mul": operator.mul,
    "operator::add": operator.add,
    "operator::sub": operator.sub,
    "operator::floordiv": operator.floordiv,
    "operator::truediv": operator.truediv,
    "operator::mod": operator.mod,
    "operator::neg": operator.neg,
    "operator::pow": lambda a, b: a**b if abs(b) <= 64 else 0,
    "operator::eq": operator.eq,
    "operator::ne": operator.ne,
    "operator::lt": operator.lt,
    "operator::le": operator.le,
    "operator::gt": operator.gt,
    "operator::ge": operator.ge,
    "operator::getitem": operator.getitem,
    "torch::sym_max": max,
    "torch::sym_min": min,
    "torch::sym_not": operator.not_,
    "torch::sym_float": float,
    "torch::sym_int": int,
    "torch::sym_ite": lambda c, a, b: a if c else b,
    "math::trunc": math.trunc,
    "math::ceil": math.ceil,
    "math::floor": math.floor,
    "_operator::mul": operator.mul,
}

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
