"""Variance and standard deviation, alone and with the mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.reduction import axes_of, expanded, kept, reduced_shape
from staticmem.ops.registry import rule


def _flags(dim: Any, args: Sequence[Any], keepdim: bool) -> tuple[Any, bool]:
    """(dim, unbiased, keepdim) or (unbiased) or (dim, *, correction, keepdim), by the overload's positions."""
    if args and isinstance(args[-1], bool) and len(args) == 2:
        keepdim = args[-1]
    return (None if isinstance(dim, bool) else dim), keepdim


def _var_gradient(e: Eager, grad: Tensor, self: Tensor, axes: Sequence[int]) -> Tensor:
    """`var_backward`: (2 / (N - correction)) * grad * (self - mean(self)), evaluated from the right."""
    mean = e.empty(reduced_shape(self, axes, True), self.dtype, kernel="aten.mean.dim")
    centred = e.pointwise("aten.sub.Tensor", self, mean)
    scaled = e.pointwise("aten.mul.Tensor", grad)
    return e.pointwise("aten.mul.Tensor", scaled, centred)


def _std_gradient(e: Eager, grad: Tensor, self: Tensor, std: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    """`std_backward`: the gradient over twice the result, zero where that is zero, is one of the variance."""
    std = kept(e, std, self, axes, keepdim)
    e.open_scope()
    double = e.pointwise("aten.mul.Tensor", std)
    by_var = e.pointwise("aten.div.Tensor", grad, double)
    e.pointwise("aten.eq.Scalar", std, dtype=dtypes.bool_)
    e.close_scope(keep=[by_var])
    return _var_gradient(e, by_var, self, axes)


def _one(e: Eager, self: Tensor, dim: Any, keepdim: bool, std: bool) -> Tensor:
    axes = axes_of(self, dim)
    out = e.empty(reduced_shape(self, axes, keepdim), self.dtype, kernel="aten.var.correction")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        assert grads[0] is not None
        grad = kept(e, grads[0], self, axes, keepdim)
        return _std_gradient(e, grad, self, out, axes, keepdim) if std else _var_gradient(e, grad, self, axes)

    e.record(
        "StdBackward0" if std else "VarBackward0", out, [self], [Formula((0,), gradient)], [self, out if std else None]
    )
    return out


@rule("aten::var")
def var(e: Eager, self: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **_: Any) -> Tensor:
    """Saves its input; backward holds the mean, the centred input, the scaled gradient and the product."""
    return _one(e, self, *_flags(dim, args, keepdim), std=False)


@rule("aten::std")
def std(e: Eager, self: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **_: Any) -> Tensor:
    """Saves its input and result; backward divides the gradient by the result, then as `var`."""
    return _one(e, self, *_flags(dim, args, keepdim), std=True)


def _two(e: Eager, self: Tensor, dim: Any, keepdim: bool, std: bool) -> tuple[Tensor, Tensor]:
    axes = axes_of(self, dim)
    shape = reduced_shape(self, axes, keepdim)
    outs = e.empty(shape, self.dtype, kernel="aten.var_mean.correction"), e.empty(shape, self.dtype)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor | None:
        by_spread = by_mean = None
        if grads[0] is not None:
            e.open_scope()
            grad = kept(e, grads[0], self, axes, keepdim)
            by_spread = (
                _std_gradient(e, grad, self, outs[0], axes, keepdim) if std else _var_gradient(e, grad, self, axes)
            )
            e.close_scope(keep=[by_spread])
        if grads[1] is not None:
            by_mean = e.pointwise("aten.div.Scalar", expanded(e, grads[1], self, axes, keepdim))
        if by_spread is not None and by_mean is not None:
            return e.pointwise("aten.add.Tensor", by_spread, by_mean)
        return by_spread if by_mean is None else by_mean

    name = "StdMeanBackward0" if std else "VarMeanBackward0"
    e.record(name, outs, [self], [Formula((0,), gradient)], [self, outs[0] if std else None])
    return outs


@rule("aten::var_mean")
def var_mean(
    e: Eager, self: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """Saves its input; backward as `var`, plus an expanded, divided gradient of the mean."""
    return _two(e, self, *_flags(dim, args, keepdim), std=False)


@rule("aten::std_mean")
def std_mean(
    e: Eager, self: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """Saves its input and the deviation; backward as `std`, plus an expanded, divided gradient of the mean."""
    return _two(e, self, *_flags(dim, args, keepdim), std=True)
