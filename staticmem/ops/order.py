"""Extremes, order statistics and sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.pointwise import grad_of
from staticmem.ops.reduction import axes_of, kept, reduced_shape
from staticmem.ops.registry import rule


@rule("aten::max", "aten::min")
def full_max(e: Eager, self: Tensor) -> Tensor:
    """Saves its input and result; backward spreads the gradient over all equal elements: masks, a count, a product."""
    out = e.empty((), self.dtype, kernel="aten.max.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        # evenly_distribute_backward: NaNs count as equal; the mask and the NaN mask live until the end
        e.pointwise("aten.isnan.default", self, dtype=dtypes.bool_)
        e.empty((), dtypes.bool_, kernel="aten.isnan.default")
        mask = e.pointwise("aten.eq.Tensor", self, dtype=dtypes.bool_)
        e.empty((), dtypes.int64, kernel="aten.sum.default")
        e.empty((), self.dtype, kernel="aten.div.Tensor")
        return e.pointwise("aten.mul.Tensor", mask, dtype=self.dtype)

    e.record("MaxBackward1", out, [self], [Formula((0,), gradient)], [self, out])
    return out


@rule("aten::amax", "aten::amin")
def amax(e: Eager, self: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """Saves its input and result; backward compares, counts, divides and multiplies."""
    axes = axes_of(self, dim)
    out = e.empty(reduced_shape(self, axes, keepdim), self.dtype, kernel="aten.amax.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = kept(e, grad_of(grads), self, axes, keepdim)
        mask = e.pointwise("aten.eq.Tensor", kept(e, out, self, axes, keepdim), self, dtype=dtypes.bool_)
        count = e.empty(reduced_shape(self, axes, True), dtypes.int64, kernel="aten.sum.dim_IntList")
        share = e.pointwise("aten.div.Tensor", grad, count, dtype=self.dtype)
        return e.pointwise("aten.mul.Tensor", share, mask, dtype=self.dtype)

    e.record("AmaxBackward0", out, [self], [Formula((0,), gradient)], [self, out])
    return out


def _select_values(
    e: Eager,
    self: Tensor,
    shape: layout.Shape,
    kernel: str,
    strides: layout.Strides | None = None,
    saves: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    out = e.empty(shape, self.dtype, strides, kernel)
    indices = e.empty(shape, dtypes.int64, strides)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, self.dtype, kernel="aten.zeros.default")

    e.record("ValuesBackward0", [out, indices], [self], [Formula((0,), gradient)], [*saves, indices])
    return out, indices


@rule("aten::max.dim", "aten::min.dim", "aten::median.dim", "aten::mode")
def max_dim(e: Eager, self: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Saves int64 indices; backward scatters into zeros of the input's size."""
    return _select_values(e, self, reduced_shape(self, axes_of(self, dim), keepdim), "aten.max.dim")


@rule("aten::kthvalue")
def kthvalue(e: Eager, self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Saves int64 indices; backward scatters into zeros of the input's size."""
    return _select_values(e, self, reduced_shape(self, axes_of(self, dim), keepdim), "aten.kthvalue.default")


@rule("aten::cummax", "aten::cummin")
def cummax(e: Eager, self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Saves its input and int64 indices; backward adds into zeros of the input's size."""
    return _select_values(e, self, self.shape, "aten.cummax.default", saves=[self])


@rule("aten::topk")
def topk(
    e: Eager, self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Saves int64 indices; backward scatters into zeros of the input's size."""
    axis = self.dim(dim)
    return _select_values(e, self, tuple(k if i == axis else s for i, s in enumerate(self.shape)), "aten.topk.default")


@rule("aten::sort")
def sort(e: Eager, self: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Saves int64 indices, in the input's layout; backward scatters into zeros of the input's size."""
    return _select_values(e, self, self.shape, "aten.sort.default", layout.dense_like(self.shape, self.strides))


@rule("aten::argsort")
def argsort(e: Eager, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """int64 indices without gradient; the sorted values are made and dropped."""
    return sort(e, self)[1]


@rule("aten::argmax", "aten::argmin")
def argmax(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """int64 indices without gradient."""
    return e.empty(reduced_shape(self, axes_of(self, dim), keepdim), dtypes.int64, kernel="aten.argmax.default")
