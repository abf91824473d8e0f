"""Sorting, extremes, search in sorted values, and what a sort gives: unique values and counts.

`size` is no argument of PyTorch's: frontends add it where the export or `--dim u0=N` says how many elements there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.arithmetic import any_inputs
from staticmem.ops.onnx import Context, integer, translation
from staticmem.ops.pointwise import grad_of, gradient_like
from staticmem.ops.reduction import axes_of, kept, reduced_shape
from staticmem.ops.registry import KernelCall, Temporary, rule, workspace
from staticmem.units import Band


@rule("max min", kinds=("commutative",))
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

    return e.record("MaxBackward1", out, [self], [Formula((0,), gradient)], [self, out])


@rule("amax amin")
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

    return e.record("AmaxBackward0", out, [self], [Formula((0,), gradient)], [self, out])


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
    gradient = gradient_like(self, "aten.zeros.default", self.dtype)
    e.record("ValuesBackward0", [out, indices], [self], [Formula((0,), gradient)], [*saves, indices])
    return out, indices


@rule("max.dim min.dim median.dim mode")
def max_dim(e: Eager, self: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Saves int64 indices; backward scatters into zeros of the input's size."""
    return _select_values(e, self, reduced_shape(self, axes_of(self, dim), keepdim), "aten.max.dim")


@rule("kthvalue")
def kthvalue(e: Eager, self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Saves int64 indices; backward scatters into zeros of the input's size."""
    return _select_values(e, self, reduced_shape(self, axes_of(self, dim), keepdim), "aten.kthvalue.default")


@rule("cummax cummin")
def cummax(e: Eager, self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Saves its input and int64 indices; backward adds into zeros of the input's size."""
    return _select_values(e, self, self.shape, "aten.cummax.default", saves=[self])


@rule("topk")
def topk(
    e: Eager, self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Saves int64 indices; backward scatters into zeros of the input's size."""
    axis = self.dim(dim)
    return _select_values(e, self, tuple(k if i == axis else s for i, s in enumerate(self.shape)), "aten.topk.default")


@rule("sort")
def sort(e: Eager, self: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Saves int64 indices, in the input's layout; backward scatters into zeros of the input's size."""
    return _select_values(e, self, self.shape, "aten.sort.default", layout.dense_like(self.shape, self.strides))


@workspace("aten.sort.default")
def sort_buffers(call: KernelCall) -> list[Temporary]:
    """Positions that are sorted along, and cub's radix sort, which has keys and positions once more
    (aten/src/ATen/native/cuda/SortStable.cu, `segmented_sort_pairs`: `reverse_indices`). Readings on an RTX 3090 show
    these 20 bytes of a float32 and its position. Up to 4,096 along the dimension they are sorted in place, in blocks.
    """
    values = call.results[0]
    if max(values.shape, default=0) <= 4096 or values.dtype is dtypes.bool_:
        return []
    elements, key, position = layout.numel(values.shape), values.dtype.itemsize, dtypes.int64.itemsize
    band = Band(elements * key, elements * (key + 2 * position), 2 * elements * (key + position))
    return [Temporary(band, "sort", held=False)]


@rule("argsort")
def argsort(e: Eager, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """int64 indices without gradient; the sorted values are made and dropped, and their history with them."""
    enabled, e.grad_enabled = e.grad_enabled, False
    indices = sort(e, self)[1]
    e.grad_enabled = enabled
    return indices


@rule("argmax argmin")
def argmax(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """int64 indices without gradient."""
    return e.empty(reduced_shape(self, axes_of(self, dim), keepdim), dtypes.int64, kernel="aten.argmax.default")


def _share_gradient(self: Tensor, other: Tensor, e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    """where(self == other, grad / 2, grad).masked_fill_(self < other, 0)"""
    grad = grad_of(grads)
    half = e.pointwise("aten.div.Tensor", grad)
    equal = e.pointwise("aten.eq.Tensor", self, other, dtype=dtypes.bool_)
    result = e.pointwise("aten.where.self", equal, half, grad, dtype=grad.dtype)
    e.pointwise("aten.lt.Tensor", self, other, dtype=dtypes.bool_)
    return result


@rule("maximum minimum min.other max.other", kinds=("commutative",))
def maximum(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both operands; each gradient takes a halved gradient, a mask, a choice and a fill mask."""
    out = e.pointwise("aten.maximum.default", self, other)
    formula = partial(_share_gradient, self, other)
    e.record("MaximumBackward0", out, [self, other], [Formula((1,), formula), Formula((0,), formula)], [other, self])
    return out


@rule("fmax fmin")
def fmax(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both operands; each gradient is a copy filled where the other operand won, and since 2.14 that of
    `maximum` (tools/autograd/derivatives.yaml)."""
    out = e.pointwise("aten.fmax.default", self, other)

    def fill(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        mask = e.pointwise("aten.ge.Tensor", self, other, dtype=dtypes.bool_)
        e.pointwise("aten.isnan.default", other, dtype=dtypes.bool_)
        return e.empty(mask.shape, grad_of(grads).dtype, kernel="aten.masked_fill.Scalar")

    formula = partial(_share_gradient, self, other) if e.torch >= (2, 14) else fill
    e.record("FmaxBackward0", out, [self, other], [Formula((1,), formula), Formula((0,), formula)], [other, self])
    return out


@rule("bucketize")
def bucketize(e: Eager, self: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Integer positions without gradient."""
    return e.empty(self.shape, dtypes.int32 if out_int32 else dtypes.int64, kernel="aten.bucketize.Tensor")


@rule("searchsorted")
def searchsorted(
    e: Eager, sorted_sequence: Tensor, self: Tensor, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Integer positions without gradient."""
    return e.empty(self.shape, dtypes.int32 if out_int32 else dtypes.int64, kernel="aten.searchsorted.Tensor")


def _unique(
    e: Eager, shape: tuple[int, ...], self: Tensor, inverse: tuple[int, ...], counts: int, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = f"aten.{name}.default"
    values = e.empty(shape, self.dtype, kernel=kernel)
    return values, e.empty(inverse, dtypes.int64), e.empty((counts,), dtypes.int64)


@rule("_unique2 _unique", kinds=("data_sized",))
def unique(
    e: Eager, self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, *,
    size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """At most all elements, with int64 positions and counts; without gradient."""
    count = self.numel if size is None else size
    inverse = self.shape if return_inverse else (0,)
    return _unique(e, (count,), self, inverse, count if return_counts else 0, "_unique2")


@rule("unique_consecutive", kinds=("data_sized",))
def unique_consecutive(
    e: Eager, self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None, *,
    size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `_unique2`, or along a dimension as `unique_dim`."""
    if dim is not None:
        return unique_dim(e, self, dim, True, return_inverse, return_counts, size=size)
    return unique(e, self, True, return_inverse, return_counts, size=size)


@rule("unique_dim", kinds=("data_sized",))
def unique_dim(
    e: Eager, self: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, *,
    size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """At most all slices along a dimension, with int64 positions and counts; without gradient."""
    axis = self.dim(dim)
    count = self.shape[axis] if size is None else size
    shape = tuple(count if d == axis else s for d, s in enumerate(self.shape))
    inverse = (self.shape[axis],) if return_inverse else (0,)
    return _unique(e, shape, self, inverse, count if return_counts else 0, "unique_dim")


@rule("bincount", kinds=("data_sized",))
def bincount(
    e: Eager, self: Tensor, weights: Tensor | None = None, minlength: int = 0, *, size: int | None = None
) -> Tensor:
    """Counts of each integer up to the largest one, which only the data tells: as many as there are elements, or
    `minlength`, unless the file says."""
    count = max(minlength, self.numel) if size is None else size
    dtype = dtypes.int64 if weights is None else dtypes.float64
    return e.empty((count,), dtype, kernel="aten.bincount.default")


@rule("histc")
def histc(e: Eager, self: Tensor, bins: int = 100, *_: Any, **__: Any) -> Tensor:
    """One number a bin; no gradient reaches the input."""
    out = e.empty((bins,), self.dtype, kernel="aten.histc.default")
    return e.record("HistcBackward0", out, [self], [])


@translation("ArgMax", "ArgMin")
def onnx_arg(ctx: Context, node: Node) -> list[Op]:
    keep = bool(integer(node, "keepdims", 1))
    return [ctx.op(node, f"aten::{node.op.lower()}", ctx.ref(node.inputs[0]), integer(node, "axis", 0), keep)]


translation("Max")(any_inputs("maximum"))
translation("Min")(any_inputs("minimum"))


@translation("TopK")
def onnx_top_k(ctx: Context, node: Node) -> list[Op] | None:
    k = ctx.number(node, 1)
    if k is None:
        return None
    names = tuple(n or ctx.fresh(node) for n in (*node.outputs, "")[:2])
    largest = bool(integer(node, "largest", 1))
    x, axis = ctx.ref(node.inputs[0]), integer(node, "axis", -1)
    return [ctx.op(node, "aten::topk", x, int(k), axis, largest, bool(integer(node, "sorted", 1)), outputs=names)]
