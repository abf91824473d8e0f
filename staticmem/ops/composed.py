"""Composite ops: what they call, in C++ order, so that autograd sees only those (CompositeImplicitAutograd)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.strides import broadcast_shapes
from staticmem.eager.tensor import Tensor
from staticmem.ops.elementary import xlogy
from staticmem.ops.joining import cat, flip
from staticmem.ops.linear import mm
from staticmem.ops.pointwise import add, mul, sub
from staticmem.ops.reduction import mean, norm
from staticmem.ops.reduction import sum as sum_
from staticmem.ops.registry import RULES, rule
from staticmem.ops.views import expand, permute, reshape, transpose, unsqueeze


def _at_least(e: Eager, self: Tensor, dims: int) -> Tensor:
    if self.ndim >= dims:
        return self
    if self.ndim == 0:
        return reshape(e, self, (1,) * dims)
    if dims == 3:
        return unsqueeze(e, self if self.ndim == 2 else unsqueeze(e, self, 0), -1)
    return unsqueeze(e, self, 0)


def _stacked(dims: int, axis: int) -> Callable[..., Tensor]:
    def run(e: Eager, tensors: Sequence[Tensor]) -> Tensor:
        """Views of at least so many dimensions, and `cat`."""
        parts = [_at_least(e, t, dims) for t in tensors]
        return cat(e, parts, 0 if parts[0].ndim == 1 else axis)

    return run


def _with_dims(dims: int) -> Callable[..., Any]:
    def run(e: Eager, self: Any) -> Any:
        """A view with dimensions of size 1; the tensor itself where it has enough."""
        return _at_least(e, self, dims) if isinstance(self, Tensor) else [_at_least(e, t, dims) for t in self]

    return run


rule("aten::hstack")(_stacked(1, 1))
rule("aten::vstack", "aten::row_stack")(_stacked(2, 0))
rule("aten::dstack")(_stacked(3, 2))
for _dims in (1, 2, 3):
    rule(f"aten::atleast_{_dims}d")(_with_dims(_dims))


@rule("aten::column_stack")
def column_stack(e: Eager, tensors: Sequence[Tensor]) -> Tensor:
    """Columns are views of vectors; then `cat`."""
    return cat(e, [reshape(e, t, (t.numel, 1)) if t.ndim <= 1 else t for t in tensors], 1)


@rule("aten::broadcast_tensors", kinds=("view",))
def broadcast_tensors(e: Eager, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Expanded views."""
    shape = broadcast_shapes(*(t.shape for t in tensors))
    return [expand(e, t, shape) for t in tensors]


@rule("aten::ravel", kinds=("view",))
def ravel(e: Eager, self: Tensor) -> Tensor:
    """As `reshape` to one dimension."""
    return reshape(e, self, (-1,))


@rule("aten::adjoint", "aten::mH", "aten::matrix_H", kinds=("view",))
def adjoint(e: Eager, self: Tensor) -> Tensor:
    """A transposed view (complex conjugation is a flag of the view)."""
    return transpose(e, self, -2, -1)


@rule("aten::fliplr", "aten::flipud")
def fliplr(e: Eager, self: Tensor) -> Tensor:
    """As `flip`."""
    return flip(e, self, (1 if self.ndim > 1 else 0,))


@rule("aten::tensordot")
@scoped
def tensordot(e: Eager, self: Tensor, other: Tensor, dims_self: Any, dims_other: Any) -> Tensor:
    """Permuted views, flattened (a copy where strides do not allow a view), and `mm`, which saves them."""
    left, right = [self.dim(d) for d in dims_self], [other.dim(d) for d in dims_other]
    rows = [d for d in range(self.ndim) if d not in left]
    columns = [d for d in range(other.ndim) if d not in right]
    inner = 1
    for d in left:
        inner *= self.shape[d]
    a = reshape(e, permute(e, self, (*rows, *left)), (-1, inner))
    b = reshape(e, permute(e, other, (*right, *columns)), (inner, -1))
    return reshape(e, mm(e, a, b), (*(self.shape[d] for d in rows), *(other.shape[d] for d in columns)))


@rule("aten::inner")
def inner(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """As `tensordot` over the last dimensions, or a product with a 0-dim tensor."""
    if self.ndim == 0 or other.ndim == 0:
        return mul(e, self, other)
    return tensordot(e, self, other, (-1,), (-1,))


def _reduced(e: Eager, loss: Tensor, reduction: int) -> Tensor:
    return loss if reduction == 0 else mean(e, loss) if reduction == 1 else sum_(e, loss)


@rule("aten::l1_loss", autocast="float32")
@scoped
def l1_loss(e: Eager, self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """sub, abs and a reduction: saves the difference."""
    size = RULES["aten::abs"].function(e, sub(e, self, target))
    return _reduced(e, size, reduction)


@rule("aten::kl_div", autocast="float32")
@scoped
def kl_div(e: Eager, self: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False) -> Tensor:
    """target * (log(target) - input): xlogy, a product and their difference; of a logarithm exp, sub and mul."""
    if log_target:
        right = sub(e, target, self)
        left = RULES["aten::exp"].function(e, target)
        loss = mul(e, left, right)
    else:
        right = mul(e, target, self)
        left = xlogy(e, target, target)
        loss = sub(e, left, right)
    e.free(left)  # unless their backward saved them
    e.free(right)
    return _reduced(e, loss, reduction)


@rule("aten::binary_cross_entropy_with_logits", autocast="float32")
def binary_cross_entropy_with_logits(
    e: Eager,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """Saves input, target and weights; backward is one tensor, with `pos_weight` three at once."""
    shape = self.shape if reduction == 0 else ()
    out = e.empty(shape, self.dtype, kernel="aten.binary_cross_entropy_with_logits.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        # FunctionsManual.cpp, binary_cross_entropy_with_logits_backward
        if pos_weight is None:
            return e.pointwise("aten.sigmoid.default", self)  # the rest runs in it
        e.pointwise("aten.mul.Tensor", pos_weight, target)
        result = e.pointwise("aten.add.Scalar", target)
        e.free(e.pointwise("aten.sigmoid.default", self))
        return result

    saves = [self, target, weight, pos_weight]
    e.record("BinaryCrossEntropyWithLogitsBackward0", out, [self], [Formula((0,), gradient)], saves)
    return out


@rule("aten::pairwise_distance")
@scoped
def pairwise_distance(
    e: Eager, x1: Tensor, x2: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """The norm of x1 - x2 + eps over the last dimension, which saves that sum and its result."""
    difference = add(e, sub(e, x1, x2), eps)
    return norm(e, difference, p, (difference.ndim - 1,), keepdim)
