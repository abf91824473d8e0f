"""Functions of two numbers, special functions and the kernels around them, with the formulas of derivatives.yaml.

`e.free` ends a C++ temporary where its last reader consumes it (an rvalue); the others live until their formula ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, result_type
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.pointwise import grad_of
from staticmem.ops.reduction import axes_of, kept, reduced_shape
from staticmem.ops.registry import rule


def _atan2_gradients(self: Tensor, other: Tensor) -> Any:
    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)  # FunctionsManual.cpp, atan2_backward
        square = e.pointwise("aten.mul.Tensor", other)
        first = e.pointwise("aten.mul.Tensor", self)
        total = e.pointwise("aten.add.Tensor", first, square)
        e.free(first)
        e.free(square)
        inverse = e.pointwise("aten.reciprocal.default", total)
        zero = e.pointwise("aten.eq.Scalar", total, dtype=dtypes.bool_)
        filled = e.pointwise("aten.masked_fill.Scalar", inverse)
        for done in (inverse, zero):
            e.free(done)
        by_self = by_other = None
        if need[0]:
            scaled = e.pointwise("aten.mul.Tensor", grad, other)
            by_self = e.pointwise("aten.mul.Tensor", scaled, filled)
        if need[1]:
            negative = e.pointwise("aten.neg.default", self)
            product = e.pointwise("aten.mul.Tensor", grad, negative)
            by_other = e.pointwise("aten.mul.Tensor", product, filled)
        return by_self, by_other

    return gradients


@rule("aten::atan2", "aten::arctan2")
def atan2(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both; backward takes the reciprocal of the sum of squares, masked at zero, and two products a gradient."""
    out = e.pointwise("aten.atan2.default", self, other, dtype=_floating(self, other))
    e.record("Atan2Backward0", out, [self, other], [Formula((0, 1), _atan2_gradients(self, other))], [self, other])
    return out


def _floating(*operands: Tensor) -> Any:
    found = result_type(operands)
    return found if found.is_differentiable else dtypes.float32


@rule("aten::hypot")
def hypot(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves the result, and each operand that needs a gradient: a product and a quotient."""
    out = e.pointwise("aten.hypot.default", self, other)

    def by(side: Tensor) -> Any:
        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            ratio = e.pointwise("aten.mul.Tensor", grad_of(grads), side)
            return e.pointwise("aten.div.Tensor", ratio, out)

        return gradient

    formulas = [Formula((1,), by(other)), Formula((0,), by(self))]
    saves = [self if e.needs_grad(self) else None, other if e.needs_grad(other) else None, out]
    e.record("HypotBackward0", out, [self, other], formulas, saves)
    return out


@rule("aten::xlogy", "aten::special_xlogy")
def xlogy(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both; the gradient of `self` takes a logarithm, three masks and a choice, that of `other` a quotient."""
    out = e.pointwise("aten.xlogy.Tensor", self, other, dtype=_floating(self, other))

    def by_other(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        scaled = e.pointwise("aten.mul.Tensor", grad_of(grads), self)
        return e.pointwise("aten.div.Tensor", scaled, other)

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        product = e.pointwise("aten.xlogy.Tensor", grad, other)
        negative = e.pointwise("aten.le.Scalar", other, dtype=dtypes.bool_)
        zero = e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        e.pointwise("aten.bitwise_and.Tensor", zero, negative, dtype=dtypes.bool_)
        return e.pointwise("aten.masked_fill.Scalar", product)

    formulas = [Formula((1,), by_other), Formula((0,), by_self)]
    e.record("XlogyBackward0", out, [self, other], formulas, [self, other])
    return out


@rule("aten::copysign")
def copysign(e: Eager, self: Tensor, other: Tensor | float) -> Tensor:
    """Saves `self` and the result; its gradient takes a quotient, a mask and a product, that of `other` is zeros."""
    b = other if isinstance(other, Tensor) else None
    out = e.pointwise("aten.copysign.Tensor", self, *([] if b is None else [b]))

    def by_other(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        assert b is not None
        return e.empty(b.shape, b.dtype, kernel="aten.zeros.default")

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        ratio = e.pointwise("aten.div.Tensor", out, self)
        e.free(e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_))
        return e.pointwise("aten.mul.Tensor", grad_of(grads), ratio)

    saves = [self if e.needs_grad(self) else None, out]
    e.record("CopysignBackward0", out, [self, b], [Formula((1,), by_other), Formula((0,), by_self)], saves)
    return out


@rule("aten::sinc", "aten::special_sinc")
def sinc(e: Eager, self: Tensor) -> Tensor:
    """Saves its input; backward runs ten kernels of the input's size, most of which live until its end."""
    out = e.pointwise("aten.sinc.default", self)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)  # FunctionsManual.cpp, sinc_backward
        scaled = e.pointwise("aten.mul.Scalar", self)
        square = e.pointwise("aten.mul.Tensor", self, self)
        denominator = e.pointwise("aten.mul.Scalar", square)
        e.free(square)
        sine = e.pointwise("aten.sin.default", scaled)
        cosine = e.pointwise("aten.cos.default", scaled)
        product = e.pointwise("aten.mul.Tensor", scaled, cosine)
        difference = e.pointwise("aten.sub.Tensor", product, sine)
        ratio = e.pointwise("aten.div.Tensor", difference, denominator)
        result = e.pointwise("aten.mul.Tensor", grad, ratio)
        for done in (sine, cosine, product, difference, ratio):
            e.free(done)
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        mask = e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        return e.pointwise("aten.where.self", mask, result, dtype=grad.dtype)

    e.record("SincBackward0", out, [self], [Formula((0,), gradient)], [self])
    return out


@rule("aten::digamma", "aten::special_digamma", "aten::special_psi")
def digamma(e: Eager, self: Tensor) -> Tensor:
    """Saves its input; backward runs polygamma, mul."""
    out = e.pointwise("aten.digamma.default", self)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        slope = e.pointwise("aten.polygamma.default", self)
        return e.pointwise("aten.mul.Tensor", grad_of(grads), slope)

    e.record("DigammaBackward0", out, [self], [Formula((0,), gradient)], [self])
    return out


@rule("aten::positive", "aten::resolve_neg")
def positive(e: Eager, self: Tensor) -> Tensor:
    """The tensor itself."""
    return self


@rule("aten::logcumsumexp", autocast="float32")
def logcumsumexp(e: Eager, self: Tensor, dim: int) -> Tensor:
    """Saves its input and result; backward sums positive and negative parts apart, each through four full tensors."""
    out = e.empty(self.shape, self.dtype, kernel="aten.logcumsumexp.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)  # FunctionsManual.cpp, logcumsumexp_backward
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        size = e.pointwise("aten.abs.default", grad)
        log = e.pointwise("aten.log.default", size)
        e.free(size)
        signed = []
        for comparison in ("gt", "lt"):
            mask = e.pointwise(f"aten.{comparison}.Scalar", grad, dtype=dtypes.bool_)
            signed.append(e.pointwise("aten.where.self", mask, log, dtype=grad.dtype))
            e.free(mask)
        parts = []
        for part in signed:
            difference = e.pointwise("aten.sub.Tensor", part, out)
            reverse = e.empty_like(difference, kernel="aten.flip.default")
            total = e.empty(reverse.shape, reverse.dtype, kernel="aten.logcumsumexp.default")
            back = e.empty_like(total, kernel="aten.flip.default")
            e.free(reverse)
            e.free(total)
            shifted = e.pointwise("aten.add.Tensor", back, self)
            parts.append(e.pointwise("aten.exp.default", shifted))
            for done in (difference, back, shifted):
                e.free(done)
        return e.pointwise("aten.sub.Tensor", *parts)

    e.record("LogcumsumexpBackward0", out, [self], [Formula((0,), gradient)], [self, out])
    return out


@rule("aten::nansum")
def nansum(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """Saves its input; backward multiplies by a mask of what is a number."""
    axes = axes_of(self, dim)
    out = e.empty(reduced_shape(self, axes, keepdim), dtype or self.dtype, kernel="aten.nansum.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        nan = e.pointwise("aten.isnan.default", self, dtype=dtypes.bool_)
        mask = e.pointwise("aten.logical_not.default", nan, dtype=dtypes.bool_)
        return e.pointwise("aten.mul.Tensor", kept(e, grad_of(grads), self, axes, keepdim), mask)

    e.record("NansumBackward0", out, [self], [Formula((0,), gradient)], [self])
    return out


@rule("aten::count_nonzero")
def count_nonzero(e: Eager, self: Tensor, dim: Any = None) -> Tensor:
    """int64 counts without gradient."""
    shape = () if dim is None else reduced_shape(self, axes_of(self, dim), False)
    return e.empty(shape, dtypes.int64, kernel="aten.count_nonzero.default")


@rule("aten::histc")
def histc(e: Eager, self: Tensor, bins: int = 100, *_: Any, **__: Any) -> Tensor:
    """One number a bin; no gradient reaches the input."""
    out = e.empty((bins,), self.dtype, kernel="aten.histc.default")
    e.record("HistcBackward0", out, [self], [])
    return out


@rule("aten::addbmm", kinds=("product",), autocast="half")
def addbmm(e: Eager, self: Tensor, batch1: Tensor, batch2: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Each batch is saved if the other needs a gradient; each gradient is one bmm with the expanded incoming one."""
    shape = (batch1.shape[1], batch2.shape[2])
    out = e.empty(shape, batch1.dtype, kernel="aten.addbmm.default")

    def scaled(factor: Any, grad: Tensor) -> Tensor:
        return grad if factor == 1 else e.pointwise("aten.mul.Tensor", grad)

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return scaled(beta, grad_of(grads))

    def by(like: Tensor) -> Any:
        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            result = e.empty(like.shape, like.dtype, kernel="aten.bmm.default")
            return scaled(alpha, result)

        return gradient

    formulas = [Formula((1,), by(batch1)), Formula((2,), by(batch2)), Formula((0,), by_self)]
    saves = [batch1 if e.needs_grad(batch2) else None, batch2 if e.needs_grad(batch1) else None]
    e.record("AddbmmBackward0", out, [self, batch1, batch2], formulas, saves)
    return out


@rule("aten::_weight_norm")
def weight_norm(e: Eager, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Fused on CUDA for the first and the last dimension: saves v, g and float32 norms; both gradients in one go."""
    out = e.empty_like(v, kernel="aten._weight_norm_interface.default")
    norms = e.empty(g.shape, dtypes.float32 if g.dtype in (dtypes.float16, dtypes.bfloat16) else g.dtype)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten._weight_norm_interface_backward.default")
        return e.empty_like(v), e.empty_like(g)

    e.record("WeightNormInterfaceBackward0", out, [v, g], [Formula((0, 1), gradients)], [v, g, norms])
    return out


@rule("aten::_is_all_true", "aten::_is_any_true")
def is_all_true(e: Eager, self: Tensor) -> Tensor:
    """One bool without gradient."""
    return e.empty((), dtypes.bool_, kernel="aten._is_all_true.default")


@rule("aten::isin")
def isin(e: Eager, elements: Any, test_elements: Any, **_: Any) -> Tensor:
    """A bool for each element, without gradient."""
    like = elements if isinstance(elements, Tensor) else test_elements
    shape = elements.shape if isinstance(elements, Tensor) else ()
    return e.empty(shape, dtypes.bool_, kernel=f"aten.isin.{'Tensor_Tensor' if like is elements else 'Scalar_Tensor'}")


@rule("aten::item", "aten::_local_scalar_dense", transparent=True)
def item(e: Eager, self: Tensor) -> None:
    """A number on the host."""
