"""Distances between vectors, and losses of their margins: composites of element-wise ops in C++ order.

Source: aten/src/ATen/native/Loss.cpp, Distance.cpp. The in-place steps there are taken as they run on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.strides import broadcast_shapes
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.arithmetic import add, div, mul, rsub, sub
from staticmem.ops.loss import reduced
from staticmem.ops.pointwise import end_statement, grad_of
from staticmem.ops.reduction import norm, vector_norm
from staticmem.ops.reduction import sum as sum_
from staticmem.ops.registry import function_of, rule
from staticmem.ops.views import clone, expand

_MATRIX_PRODUCT_ROWS = 25  # Distance.cpp, cdist_impl: p = 2 and more rows than this on a side use a matrix product


@rule("cdist", autocast="float32")
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
    return e.record("CdistBackward0", out, [x1, x2], formulas, [x1, x2, out])


def _by_product(x1: Tensor, x2: Tensor, out: Tensor) -> Callable[..., Any]:
    batched = out.ndim > 2
    product = "aten.bmm.default" if batched else "aten.mm.default"

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.pointwise("aten.div.Tensor", grad_of(grads), out)  # FunctionsManual.cpp, _euclidean_dist_backward
        zero = e.pointwise("aten.eq.Scalar", out, dtype=dtypes.bool_)
        e.free(zero)
        results = []
        for side in (x1, x2):
            shape = (*out.shape[:-2], *side.shape[-2:])
            multiplied = e.empty(shape, out.dtype, kernel=product)
            total = e.empty((*shape[:-1], 1), out.dtype, kernel="aten.sum.dim_IntList")
            scaled = e.pointwise("aten.mul.Tensor", side, total)
            results.append(e.pointwise("aten.sub.Tensor", scaled, multiplied))
        return results

    return gradients


@rule("dist")
def dist(e: Eager, self: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """Saves both and the result; each gradient takes a difference, a quotient, a mask and a product."""
    out = e.empty((), self.dtype, kernel="aten.dist.default")

    def slope(e: Eager, grads: Grads) -> Tensor:
        difference = e.pointwise("aten.sub.Tensor", self, other)
        ratio = e.pointwise("aten.div.Tensor", difference, out)
        mask = e.empty((), dtypes.bool_, kernel="aten.eq.Scalar")
        result = e.pointwise("aten.mul.Tensor", ratio, grad_of(grads))
        e.free(ratio, mask)
        return result

    def by_other(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.neg.default", slope(e, grads))

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return slope(e, grads)

    formulas = [Formula((1,), by_other), Formula((0,), by_self)]
    return e.record("DistBackward0", out, [self, other], formulas, [self, other, out])


@rule("pairwise_distance")
@scoped
def pairwise_distance(
    e: Eager, x1: Tensor, x2: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """The norm of x1 - x2 + eps over the last dimension, which saves that sum and its result."""
    difference = add(e, sub(e, x1, x2), eps)
    return norm(e, difference, p, (difference.ndim - 1,), keepdim)


@rule("cosine_similarity", autocast="promote")
@scoped
def cosine_similarity(e: Eager, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Two norms, cloned to clamp them without history, two quotients, their product and its sum (Distance.cpp)."""
    shape = broadcast_shapes(x1.shape, x2.shape)
    x1, x2 = (x if x.shape == shape else expand(e, x, shape) for x in (x1, x2))
    norms = []
    for x in (x1, x2):
        norm = vector_norm(e, x, 2, dim, True)
        norms.append(clone(e, norm))
        e.free(norm)  # unless its backward saved it
    e.empty((), x1.dtype, kernel="aten.scalar_tensor.default")
    second = div(e, x2, norms[1])  # C++ evaluates the second factor first
    return sum_(e, mul(e, div(e, x1, norms[0]), second), dim)


def _chosen(e: Eager, comparison: str, target: Tensor, number: float, self: Tensor, other: Tensor) -> Tensor:
    mask = function_of(f"aten::{comparison}")(e, target, number)
    result: Tensor = function_of("aten::where")(e, mask, self, other)
    e.free(mask)
    return result


@rule("margin_ranking_loss", autocast="float32")
@scoped
def margin_ranking_loss(
    e: Eager, input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1
) -> Tensor:
    """-target * (input1 - input2) + margin, clamped in place."""
    difference = sub(e, input1, input2)
    sign = function_of("aten::neg")(e, target)
    product = mul(e, sign, difference)
    loss = add(e, product, margin)
    end_statement(e, sign, difference, product)
    return reduced(e, function_of("aten::clamp_min_")(e, loss, 0), reduction)


@rule("hinge_embedding_loss", autocast="float32")
@scoped
def hinge_embedding_loss(e: Eager, self: Tensor, target: Tensor, margin: float = 1.0, reduction: int = 1) -> Tensor:
    """Zeros, the margin's rest clamped in place, two masks and two selections, whose sum is the loss."""
    zeros = function_of("aten::zeros_like")(e, self)
    rest = function_of("aten::clamp_min_")(e, rsub(e, self, margin), 0)
    first = _chosen(e, "ne", target, 1, rest, zeros)
    second = _chosen(e, "ne", target, -1, self, zeros)
    return reduced(e, add(e, first, second), reduction)


@rule("cosine_embedding_loss", autocast="float32")
@scoped
def cosine_embedding_loss(
    e: Eager, input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1
) -> Tensor:
    """Three products over the last dimension, their cosine, and two selections by the sign of the target."""
    dim = (target.ndim,)

    product = mul(e, input1, input2)
    both = sum_(e, product, dim)
    end_statement(e, product)
    sizes = []
    for x in (input1, input2):
        square = mul(e, x, x)
        total = sum_(e, square, dim)
        sizes.append(add(e, total, 1e-12))
        end_statement(e, square, total)
    cosine = div(e, both, function_of("aten::sqrt_")(e, mul(e, *sizes)))
    zeros = function_of("aten::zeros_like")(e, cosine)
    near = rsub(e, cosine, 1)
    far = function_of("aten::clamp_min_")(e, sub(e, cosine, margin), 0)
    first = _chosen(e, "eq", target, 1, near, zeros)
    second = _chosen(e, "eq", target, -1, far, zeros)
    return reduced(e, add(e, first, second), reduction)


@rule("triplet_margin_loss", autocast="float32")
@scoped
def triplet_margin_loss(
    e: Eager, anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, reduction: int = 1,
) -> Tensor:  # fmt: skip
    """Distances to both (with `swap` also between those), and what is above the margin."""
    near = pairwise_distance(e, anchor, positive, p, eps)
    far = pairwise_distance(e, anchor, negative, p, eps)
    if swap:
        between = pairwise_distance(e, positive, negative, p, eps)
        nearest = function_of("aten::minimum")(e, far, between)
        end_statement(e, far, between)
        far = nearest
    raised = add(e, near, margin)
    difference = sub(e, raised, far)
    loss = function_of("aten::clamp_min")(e, difference, 0)
    end_statement(e, raised, difference)
    return reduced(e, loss, reduction)
