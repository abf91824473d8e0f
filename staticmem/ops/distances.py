"""Distances between rows and between tensors (aten/src/ATen/native/Distance.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.strides import broadcast_shapes
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule

_MATRIX_PRODUCT_ROWS = 25  # Distance.cpp, cdist_impl: p = 2 and more rows than this on a side use a matrix product


@rule("aten::cdist", autocast="float32")
def cdist(e: Eager, x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """Saves both and the result. By a matrix product (p = 2, more than 25 rows) the gradients take seven tensors, two
    of the result's size; else a kernel a gradient, and transposed copies of gradient and result for that of x2."""
    batch = broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    rows, columns = x1.shape[-2], x2.shape[-2]
    by_product = p == 2 and (
        compute_mode == 1 or (not compute_mode and (rows > _MATRIX_PRODUCT_ROWS or columns > _MATRIX_PRODUCT_ROWS))
    )
    kernel = "aten._euclidean_dist.default" if by_product else "aten._cdist_forward.default"
    out = e.empty((*batch, rows, columns), x1.dtype, kernel=kernel)
    if by_product:
        e.record("EuclideanDistBackward0", out, [x1, x2], [Formula((0, 1), _by_product(x1, x2, out))], [x1, x2, out])
        return out

    def by_first(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty((*batch, *x1.shape[-2:]), x1.dtype, kernel="aten._cdist_backward.default")

    def by_second(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        shape = (*batch, columns, rows)
        e.empty(shape, out.dtype, kernel="aten.clone.default")
        e.empty(shape, out.dtype, kernel="aten.clone.default")
        return e.empty((*batch, *x2.shape[-2:]), x2.dtype, kernel="aten._cdist_backward.default")

    formulas = [Formula((0,), by_first), Formula((1,), by_second)]
    e.record("CdistBackward0", out, [x1, x2], formulas, [x1, x2, out])
    return out


def _by_product(x1: Tensor, x2: Tensor, out: Tensor) -> Callable[..., Any]:
    batched = out.ndim > 2
    product = "aten.bmm.default" if batched else "aten.mm.default"

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.pointwise("aten.div.Tensor", grad_of(grads), out)  # FunctionsManual.cpp, _euclidean_dist_backward
        zero = e.pointwise("aten.eq.Scalar", out, dtype=dtypes.bool_)
        e.free(zero)
        found = []
        for side in (x1, x2):
            shape = (*out.shape[:-2], *side.shape[-2:])
            made = e.empty(shape, out.dtype, kernel=product)
            total = e.empty((*shape[:-1], 1), out.dtype, kernel="aten.sum.dim_IntList")
            scaled = e.pointwise("aten.mul.Tensor", side, total)
            found.append(e.pointwise("aten.sub.Tensor", scaled, made))
        return found

    return gradients


@rule("aten::dist")
def dist(e: Eager, self: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """Saves both and the result; each gradient takes a difference, a quotient, a mask and a product."""
    out = e.empty((), self.dtype, kernel="aten.dist.default")

    def slope(e: Eager, grads: Grads) -> Tensor:
        difference = e.pointwise("aten.sub.Tensor", self, other)
        ratio = e.pointwise("aten.div.Tensor", difference, out)
        mask = e.empty((), dtypes.bool_, kernel="aten.eq.Scalar")
        result = e.pointwise("aten.mul.Tensor", ratio, grad_of(grads))
        e.free(ratio)
        e.free(mask)
        return result

    def by_other(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.neg.default", slope(e, grads))

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return slope(e, grads)

    formulas = [Formula((1,), by_other), Formula((0,), by_self)]
    e.record("DistBackward0", out, [self, other], formulas, [self, other, out])
    return out
