"""Complex tensors: views as pairs of real numbers, their parts, and what makes them.

Conjugation is a flag of a view (aten/src/ATen/native/ComplexHelper.h, c10 `Conjugate` key): it allocates nothing
until a kernel that cannot read it gets a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule
from staticmem.ops.views import alias, select


def _as_real(tensor: Tensor) -> tuple[layout.Shape, layout.Strides]:
    return (*tensor.shape, 2), (*(2 * s for s in tensor.strides), 1)


def _view(e: Eager, out: Tensor, self: Tensor, node: str, gradient: Any) -> Tensor:
    """A view of another element type that autograd knows."""
    out.base = self.base if self.base is not None else self
    e.record(node, out, [self], [Formula((0,), gradient)])
    return out


def _retyped(tensor: Tensor, shape: layout.Shape, strides: layout.Strides, dtype: DType) -> Tensor:
    return Tensor(tensor.storage, shape, strides, dtype)


@rule("aten::view_as_real", kinds=("view",))
def view_as_real(e: Eager, self: Tensor) -> Tensor:
    """A view with one more dimension of size 2; so is its gradient."""

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        if not grad.is_contiguous:
            grad = e.empty(grad.shape, grad.dtype, kernel="aten.clone.default")
        strides = tuple(s // 2 for s in grad.strides[:-1])
        return _retyped(grad, grad.shape[:-1], strides, dtypes.complex_of(grad.dtype))

    out = _retyped(self, *_as_real(self), dtypes.real_of(self.dtype))
    return _view(e, out, self, "ViewAsRealBackward0", gradient)


@rule("aten::view_as_complex", kinds=("view",))
def view_as_complex(e: Eager, self: Tensor) -> Tensor:
    """A view without the last dimension; so is its gradient."""

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return _retyped(grad, *_as_real(grad), dtypes.real_of(grad.dtype))

    strides = tuple(s // 2 for s in self.strides[:-1])
    out = _retyped(self, self.shape[:-1], strides, dtypes.complex_of(self.dtype))
    return _view(e, out, self, "ViewAsComplexBackward0", gradient)


@rule("aten::real", "aten::imag", kinds=("view",))
def real(e: Eager, self: Tensor) -> Tensor:
    """A view; backward makes a complex tensor of zeros for the other part. Real tensors are their own real part."""
    return select(e, view_as_real(e, self), -1, 0) if self.dtype.kind == "complex" else self


@rule("aten::conj")
def conj(e: Eager, self: Tensor) -> Tensor:
    """A view of the same numbers (the tensor itself where they are real)."""
    return alias(e, self) if self.dtype.kind == "complex" else self


@rule("aten::complex")
def complex(e: Eager, real: Tensor, imag: Tensor) -> Tensor:
    """Saves a part that needs a gradient (for its dtype); the gradients are views of the incoming one."""
    dtype = dtypes.complex_of(real.dtype)
    out = e.pointwise("aten.complex.default", real, imag, dtype=dtype)

    def part(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return _retyped(grad, grad.shape, tuple(2 * s for s in grad.strides), real.dtype)

    saves = [t if e.needs_grad(t) else None for t in (real, imag)]
    e.record("ComplexBackward0", out, [real, imag], [Formula((0,), part), Formula((1,), part)], saves)
    return out


@rule("aten::polar")
def polar(e: Eager, abs: Tensor, angle: Tensor) -> Tensor:
    """Saves the result; each gradient is a complex product with a conjugated copy, of which the real part is a view."""
    out = e.pointwise("aten.polar.default", abs, angle, dtype=dtypes.complex_of(abs.dtype))

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)  # FunctionsManual.cpp, polar_backward

        def times_conjugate(kernel: str) -> Tensor:
            factor = e.pointwise(kernel, out)
            conjugate = e.empty_like(factor, kernel="aten.clone.default")
            product = e.pointwise("aten.mul.Tensor", grad, conjugate)
            e.free(conjugate)
            e.free(factor)
            return product

        return times_conjugate("aten.sgn.default"), times_conjugate("aten.mul.Scalar")

    e.record("PolarBackward0", out, [abs, angle], [Formula((0, 1), gradients)], [out])
    return out


@rule("aten::angle")
def angle(e: Eager, self: Tensor) -> Tensor:
    """Saves its input; backward of a complex one takes its size, its square and five complex tensors of its size."""
    floating = self.dtype if self.dtype.is_differentiable else dtypes.float32
    dtype = dtypes.real_of(floating)
    out = e.pointwise("aten.angle.default", self, dtype=dtype)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)  # FunctionsManual.cpp, angle_backward
        if self.dtype.kind != "complex":
            return e.empty((), grad.dtype, kernel="aten.zeros.default")
        size = e.pointwise("aten.abs.default", self, dtype=dtype)
        e.pointwise("aten.pow.Tensor_Scalar", size)
        product = e.pointwise("aten.mul.Tensor", grad, self)
        ratio = e.pointwise("aten.div.Tensor", product)
        scaled = e.pointwise("aten.mul.Scalar", ratio)
        e.empty((), self.dtype, kernel="aten.zeros.default")
        e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        return e.pointwise("aten.where.self", scaled, dtype=self.dtype)

    e.record("AngleBackward0", out, [self], [Formula((0,), gradient)], [self])
    return out
