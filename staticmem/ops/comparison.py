"""Comparisons, bit operations, remainders and the larger of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.pointwise import Scalar, grad_of, result_of, same, tensors_of
from staticmem.ops.registry import rule


@rule("aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge", kinds=("comparison",))
@rule("aten::logical_and", "aten::logical_or", "aten::logical_xor")
def compare(e: Eager, self: Tensor, other: Tensor | Scalar) -> Tensor:
    """A bool result without gradient."""
    operands = [self, other] if isinstance(other, Tensor) else [self]
    return e.pointwise("aten.eq.Tensor", *operands, dtype=dtypes.bool_)


@rule("aten::logical_not", "aten::isnan", "aten::isposinf", "aten::isneginf", "aten::isinf")
def predicate(e: Eager, self: Tensor) -> Tensor:
    """A bool result without gradient."""
    return e.pointwise("aten.logical_not.default", self, dtype=dtypes.bool_)


@rule("aten::isfinite")
def isfinite(e: Eager, self: Tensor) -> Tensor:
    """A bool result without gradient: (self == self) * (abs(self) != inf), as in TensorCompare.cpp."""
    if not self.dtype.is_differentiable:
        return e.empty_like(self, dtypes.bool_, "aten.ones_like.default")
    absolute = e.pointwise("aten.abs.default", self)
    e.pointwise("aten.ne.Scalar", absolute, dtype=dtypes.bool_)
    e.pointwise("aten.eq.Tensor", self, self, dtype=dtypes.bool_)
    return e.pointwise("aten.mul.Tensor", self, dtype=dtypes.bool_)


@rule("aten::nan_to_num")
def nan_to_num(e: Eager, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """Saves its input; backward multiplies by a mask of the finite elements."""
    out = e.pointwise("aten.nan_to_num.default", self)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        e.open_scope()
        mask = isfinite(e, self)
        e.close_scope(keep=[mask])
        return e.pointwise("aten.mul.Tensor", grad_of(grads), mask, dtype=self.dtype)

    e.record("NanToNumBackward0", out, [self], [Formula((0,), gradient)], [self])
    return out


@rule(
    "aten::bitwise_and", "aten::bitwise_or", "aten::bitwise_xor", "aten::__and__", "aten::__or__", "aten::__xor__",
    "aten::floor_divide", "aten::__lshift__", "aten::__rshift__",
)  # fmt: skip
def integer_binary(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """One new result without gradient."""
    a, b = tensors_of(self, other)
    return result_of(e, "aten.bitwise_and.Tensor", a, b, self if a is None else other)


@rule("aten::remainder", "aten::fmod")
def remainder(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """`self` receives the incoming gradient; a tensor `other` saves both and takes three products of its size.

    A number `self` has no derivative for `other`.
    """
    a, b = tensors_of(self, other)
    out = result_of(e, "aten.remainder.Tensor", a, b, self if a is None else other)
    if a is None:
        return out
    if b is None:
        e.record("RemainderBackward0", out, [a], [Formula((0,), same)])
        return out

    def by_other(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        quotient = e.pointwise("aten.div.Tensor_mode", a, b)
        negative = e.pointwise("aten.neg.default", grad_of(grads))
        return e.pointwise("aten.mul.Tensor", negative, quotient)

    saves = [a, b] if e.needs_grad(b) else []
    e.record("RemainderBackward1", out, [a, b], [Formula((1,), by_other), Formula((0,), same)], saves)
    return out


@rule("aten::bitwise_not")
def bitwise_not(e: Eager, self: Tensor) -> Tensor:
    """One new result without gradient."""
    return e.pointwise("aten.bitwise_not.default", self)


@rule("aten::maximum", "aten::minimum", "aten::min.other", "aten::max.other")
def maximum(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both operands; each gradient takes a halved gradient, a mask, a choice and a fill mask."""
    out = e.pointwise("aten.maximum.default", self, other)

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)  # where(self == other, grad / 2, grad).masked_fill_(self < other, 0)
        half = e.pointwise("aten.div.Tensor", grad)
        equal = e.pointwise("aten.eq.Tensor", self, other, dtype=dtypes.bool_)
        result = e.pointwise("aten.where.self", equal, half, grad, dtype=grad.dtype)
        e.pointwise("aten.lt.Tensor", self, other, dtype=dtypes.bool_)
        return result

    e.record("MaximumBackward0", out, [self, other], [Formula((1,), formula), Formula((0,), formula)], [self, other])
    return out


@rule("aten::fmax", "aten::fmin")
def fmax(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both operands; each gradient is a copy filled where the other operand won."""
    out = e.pointwise("aten.fmax.default", self, other)

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        mask = e.pointwise("aten.ge.Tensor", self, other, dtype=dtypes.bool_)
        e.pointwise("aten.isnan.default", other, dtype=dtypes.bool_)
        return e.empty(mask.shape, grad_of(grads).dtype, kernel="aten.masked_fill.Scalar")

    e.record("FmaxBackward0", out, [self, other], [Formula((1,), formula), Formula((0,), formula)], [self, other])
    return out


@rule("aten::logaddexp")
def logaddexp(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both operands; each gradient takes a difference, its exponential, one more and a quotient."""
    out = e.pointwise("aten.logaddexp.default", self, other)

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        difference = e.pointwise("aten.sub.Tensor", other, self)
        exponential = e.pointwise("aten.exp.default", difference)
        one_more = e.pointwise("aten.add.Tensor", exponential)
        return e.pointwise("aten.div.Tensor", grad_of(grads), one_more)

    e.record("LogaddexpBackward0", out, [self, other], [Formula((1,), formula), Formula((0,), formula)], [self, other])
    return out
