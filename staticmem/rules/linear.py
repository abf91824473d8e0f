"""Matrix products.

Sources: aten/src/ATen/native/Linear.cpp (`linear`), LinearAlgebra.cpp (`matmul`, `should_fold`), derivatives.yaml and
FunctionsManual.cpp (`mm_mat1_backward`, `mm_mat2_backward`). Generated code evaluates formulas in alphabetical order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.rules.pointwise import add_, grad_of, same
from staticmem.rules.registry import rule
from staticmem.rules.views import expand, reshape, t, transpose, unsqueeze


def _check(a: Tensor, b: Tensor) -> None:
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"cannot multiply {list(a.shape)} by {list(b.shape)}")


def _mm_gradient(e: Eager, grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of a factor: column-major where the factor is, as `t()` of a product."""
    rows, columns = like.shape
    if like.strides[0] == 1 and like.strides[1] == rows:
        made = e.empty((columns, rows), grad.dtype, kernel="aten.mm.default")
        return e.alias(made, (rows, columns), (1, rows))
    return e.empty((rows, columns), grad.dtype, kernel="aten.mm.default")


def _factor(like: Tensor) -> Any:
    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return _mm_gradient(e, grad_of(grads), like)

    return gradient


@rule("aten::mm", autocast="half")
def mm(e: Eager, self: Tensor, mat2: Tensor) -> Tensor:
    """Each factor is saved only if the other one needs a gradient."""
    _check(self, mat2)
    out = e.empty((self.shape[0], mat2.shape[1]), self.dtype, kernel="aten.mm.default")
    saves = [self if e.needs_grad(mat2) else None, mat2 if e.needs_grad(self) else None]
    formulas = [Formula((1,), _factor(mat2)), Formula((0,), _factor(self))]
    e.record("MmBackward0", out, [self, mat2], formulas, saves)
    return out


@rule("aten::addmm", autocast="half")
def addmm(e: Eager, self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Each factor is saved only if the other one needs a gradient; the bias gradient is summed after both products."""
    _check(mat1, mat2)
    out = e.empty((mat1.shape[0], mat2.shape[1]), mat1.dtype, kernel="aten.addmm.default")
    saves = [mat1 if e.needs_grad(mat2) else None, mat2 if e.needs_grad(mat1) else None]
    formulas = [Formula((1,), _factor(mat1)), Formula((2,), _factor(mat2)), Formula((0,), same)]
    e.record("AddmmBackward0", out, [self, mat1, mat2], formulas, saves)
    return out


@rule("aten::bmm", autocast="half")
def bmm(e: Eager, self: Tensor, mat2: Tensor) -> Tensor:
    """Each factor is saved only if the other one needs a gradient."""
    _check(self, mat2)
    out = e.empty((self.shape[0], self.shape[1], mat2.shape[2]), self.dtype, kernel="aten.bmm.default")

    def by(like: Tensor) -> Any:
        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            return e.empty(like.shape, grad_of(grads).dtype, kernel="aten.bmm.default")

        return gradient

    saves = [self if e.needs_grad(mat2) else None, mat2 if e.needs_grad(self) else None]
    e.record("BmmBackward0", out, [self, mat2], [Formula((1,), by(mat2)), Formula((0,), by(self))], saves)
    return out


@rule("aten::baddbmm", autocast="half")
def baddbmm(e: Eager, self: Tensor, batch1: Tensor, batch2: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Each factor is saved only if the other one needs a gradient; `self` receives the incoming gradient."""
    _check(batch1, batch2)
    out = e.empty((batch1.shape[0], batch1.shape[1], batch2.shape[2]), batch1.dtype, kernel="aten.baddbmm.default")

    def by(like: Tensor, scaled: bool) -> Any:
        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            made = e.empty(like.shape, grad_of(grads).dtype, kernel="aten.bmm.default")
            return e.pointwise("aten.mul.Tensor", made) if scaled else made

        return gradient

    saves = [batch1 if e.needs_grad(batch2) else None, batch2 if e.needs_grad(batch1) else None]
    formulas = [Formula((1,), by(batch1, alpha != 1)), Formula((2,), by(batch2, alpha != 1)), Formula((0,), same)]
    e.record("BaddbmmBackward0", out, [self, batch1, batch2], formulas, saves)
    return out


@rule("aten::linear", autocast="half")
def linear(e: Eager, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """With bias and a contiguous input: view, addmm, view; else matmul and an in-place bias add."""
    if input.shape[-1] != weight.shape[-1]:
        raise ValueError(f"linear expects {weight.shape[-1]} input features, got {input.shape[-1]}")
    if bias is not None and input.ndim == 2:
        return addmm(e, bias, input, t(e, weight))
    if bias is not None and input.ndim > 2 and input.is_contiguous:
        flat = reshape(e, input, (-1, input.shape[-1]))
        out = addmm(e, bias, flat, t(e, weight))
        return reshape(e, out, (*input.shape[:-1], out.shape[-1]))
    out = matmul(e, input, t(e, weight))
    return out if bias is None else add_(e, out, bias)


@rule("aten::matmul", autocast="half")
@scoped
def matmul(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """mm where a factor is 1-D or 2-D and folding pays, else expand, reshape (a clone where needed) and bmm."""
    a, b = self.ndim, other.ndim
    if a == 1 and b == 1:
        return _dot(e, self, other)
    if a == 2 and b == 1:
        return reshape(e, mm(e, self, unsqueeze(e, other, 1)), (self.shape[0],))
    if a == 1 and b == 2:
        return reshape(e, mm(e, unsqueeze(e, self, 0), other), (other.shape[1],))
    if a == 2 and b == 2:
        return mm(e, self, other)
    if _should_fold(e, self, other):
        return _fold(e, self, other)
    return _batched(e, self, other)


def _dot(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    out = e.empty((), self.dtype, kernel="aten.dot.default")

    def by(like: Tensor) -> Any:
        return lambda e, grads, need: e.pointwise("aten.mul.Tensor", like)

    e.record("DotBackward0", out, [self, other], [Formula((0,), by(self)), Formula((1,), by(other))], [self, other])
    return out


def _should_fold(e: Eager, self: Tensor, other: Tensor) -> bool:
    first_larger = self.ndim >= other.ndim
    large, small = (self, other) if first_larger else (other, self)
    if not (large.ndim >= 3 and small.ndim <= 2):
        return False
    if small.requires_grad:  # avoids an expanded weight gradient in backward
        return True
    if self.ndim == 2:
        return False
    shape, strides = large.shape, large.strides
    if not first_larger:  # the larger one is transposed first
        shape, strides = (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
    return all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(len(shape) - 2))


def _fold(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    first_larger = self.ndim >= other.ndim
    large = self if first_larger else transpose(e, other, -2, -1)
    small = other if first_larger else (t(e, self) if self.ndim == 2 else self)
    flat = reshape(e, large, (-1, large.shape[-1]))
    if small.ndim == 1:
        out = reshape(e, mm(e, flat, unsqueeze(e, small, 1)), large.shape[:-1])
        return out
    out = reshape(e, mm(e, flat, small), (*large.shape[:-1], small.shape[1]))
    if first_larger:
        return out
    from staticmem.rules.views import contiguous

    return contiguous(e, transpose(e, out, -2, -1))


def _batched(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    left = unsqueeze(e, self, 0) if self.ndim == 1 else self
    right = unsqueeze(e, other, 1) if other.ndim == 1 else other
    n, m = left.shape[-2:]
    p = right.shape[-1]
    batch = layout.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    count = layout.numel(batch)
    left = reshape(e, expand(e, left, (*batch, n, m)), (count, n, m))
    right = reshape(e, expand(e, right, (*batch, right.shape[-2], p)), (count, right.shape[-2], p))
    shape = batch + ((n,) if self.ndim > 1 else ()) + ((p,) if other.ndim > 1 else ())
    return reshape(e, bmm(e, left, right), shape)


@rule("aten::bilinear", autocast="promote")
def bilinear(e: Eager, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Trilinear product, saves all three factors."""
    shape = (*input1.shape[:-1], weight.shape[0])
    out = e.empty(shape, input1.dtype, kernel="aten._trilinear.default")

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten._trilinear.default")
        made: list[Tensor | None] = [e.empty(x.shape, x.dtype) for x in (input1, input2, weight)]
        return [*made, grad_of(grads) if bias is not None else None]

    saves = [input1, input2, weight]
    e.record("TrilinearBackward0", out, [*saves, bias], [Formula((0, 1, 2, 3), gradients)], saves)
    return out
