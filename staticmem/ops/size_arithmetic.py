"""Integer arithmetic on sizes that an export carries as ops: allocates nothing."""

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
