"""Reductions, softmax and scans."""

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


def axes_of(self: Tensor, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == ():
        return tuple(range(self.ndim))
    return tuple(self.dim(d) for d in ((dim,) if isinstance(dim, int) else tuple(dim)))


def reduced_shape(self: Tensor, axes: Sequence[int], keepdim: bool) -> layout.Shape:
    if keepdim:
        return tuple(1 if i in axes else s for i, s in enumerate(self.shape))
    return tuple(s for i, s in enumerate(self.shape) if i not in axes)


def expanded(e: Eager, grad: Tensor, self: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    """The gradient as an expanded view over the reduced dimensions (`sum_backward`)."""
    strides = list(grad.strides)
    if not keepdim:
        for axis in sorted(axes):
            strides.insert(axis, 0)
    return e.alias(grad, self.shape, tuple(0 if i in axes else s for i, s in enumerate(strides)))


def kept(e: Eager, grad: Tensor, self: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    """The gradient with the reduced dimensions at size 1 (`unsqueeze_multiple`)."""
    if keepdim:
        return grad
    strides = list(grad.strides)
    for axis in sorted(axes):
        strides.insert(axis, 1)
    return e.alias(grad, reduced_shape(self, axes, True), tuple(strides))


@rule("aten::mean")
def mean(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """Saves sizes only; backward divides an expanded view: one tensor of the input's size."""
    if isinstance(dim, DType):
        dim, dtype = None, dim
    axes = axes_of(self, dim)
    name = "aten.mean.default" if dim is None else "aten.mean.dim"
    out = e.empty(reduced_shape(self, axes, keepdim), dtype or self.dtype, kernel=name)
    e.reduces(self, axes)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.div.Scalar", expanded(e, grad_of(grads), self, axes, keepdim))

    e.record("MeanBackward1", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::sum", autocast="float32_dtype")
def sum(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """Saves sizes only; backward is an expanded view."""
    if isinstance(dim, DType):
        dim, dtype = None, dim
    axes = axes_of(self, dim)
    result = dtype or (self.dtype if self.dtype.is_differentiable else dtypes.int64)
    out = e.empty(reduced_shape(self, axes, keepdim), result, kernel="aten.sum.dim_IntList")
    e.reduces(self, axes)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return expanded(e, grad_of(grads), self, axes, keepdim)

    e.record("SumBackward1", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::any", "aten::all")
def any(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """A bool result without gradient."""
    return e.empty(reduced_shape(self, axes_of(self, dim), keepdim), dtypes.bool_, kernel="aten.any.default")


@rule("aten::prod", autocast="float32_dtype")
def prod(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """Saves its input and result; backward, without zeros in the input: a mask of zeros, a quotient and a product."""
    out = e.empty(reduced_shape(self, axes_of(self, dim), keepdim), dtype or self.dtype, kernel="aten.prod.dim_int")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        mask = e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        if dim is None:
            e.free(mask)
        else:
            e.empty(reduced_shape(self, axes_of(self, dim), True), dtypes.int64, kernel="aten.sum.dim_IntList")
            e.free(e.empty((), dtypes.int64, kernel="aten.sum.default"))
        ratio = e.pointwise("aten.div.Tensor", self)
        return e.pointwise("aten.mul.Tensor", ratio)

    e.record("ProdBackward1", out, [self], [Formula((0,), gradient)], [self, out])
    return out


@rule("aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax", autocast="float32_dtype")
def softmax(
    e: Eager, self: Tensor, dim: int, dtype: DType | bool | None = None, *, kernel: str = "aten._softmax"
) -> Tensor:
    """Saves its result; backward makes one tensor. A dtype other than fp16 -> float32 copies the input first."""
    source = self
    if isinstance(dtype, DType) and dtype is not self.dtype:
        if self.dtype is dtypes.float16 and dtype is dtypes.float32:  # half_to_float inside the kernel
            return _softmax_result(e, self, dtype, kernel)
        from staticmem.ops.casts import to_copy

        source = to_copy(e, self, dtype)
    return _softmax_result(e, source, source.dtype, kernel)


def _softmax_result(e: Eager, self: Tensor, dtype: DType, kernel: str) -> Tensor:
    out = e.empty(self.shape, dtype, kernel=f"{kernel}.default")  # the structured kernel asks for no strides

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, self.dtype, kernel=f"{kernel}_backward_data.default")

    e.record("SoftmaxBackward0", out, [self], [Formula((0,), gradient)], [out])
    return out


@rule("aten::logsumexp", autocast="float32")
def logsumexp(e: Eager, self: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Saves its input and result; backward holds a difference, its exponential and the product."""
    axes = axes_of(self, dim)
    out = e.empty(reduced_shape(self, axes, keepdim), self.dtype, kernel="aten.logsumexp.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        difference = e.pointwise("aten.sub.Tensor", self)
        exponential = e.pointwise("aten.exp.default", difference)
        return e.pointwise("aten.mul.Tensor", kept(e, grad_of(grads), self, axes, keepdim), exponential)

    e.record("LogsumexpBackward0", out, [self], [Formula((0,), gradient)], [self, out])
    return out


@rule("aten::cumsum", autocast="float32_dtype")
def cumsum(e: Eager, self: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    """Contiguous, saves nothing; backward flips, sums and flips back."""
    result = dtype or (self.dtype if self.dtype.is_differentiable else dtypes.int64)
    out = e.empty(self.shape, result, kernel="aten.cumsum.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = e.to_dtype(grad_of(grads), self.dtype)
        if grad.numel <= 1 or grad.shape[self.dim(dim)] == 1:
            return grad
        e.empty_like(grad, kernel="aten.flip.default")
        for kernel in ("aten.cumsum.default", "aten.flip.default"):
            grad = e.empty(grad.shape, grad.dtype, kernel=kernel)
        return grad

    e.record("CumsumBackward0", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::cumprod", autocast="float32_dtype")
def cumprod(e: Eager, self: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    """Saves its input and result; backward without zeros in the input: a product, its reversed sum and a quotient."""
    out = e.empty(self.shape, dtype or self.dtype, kernel="aten.cumprod.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        if self.numel <= 1 or self.shape[self.dim(dim)] == 1:
            return grad_of(grads)
        product = e.pointwise("aten.mul.Tensor", out, grad_of(grads))
        e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        made = [
            e.empty_like(product, kernel=kernel)
            for kernel in ("aten.flip.default", "aten.cumsum.default", "aten.flip.default")
        ]
        for temporary in made[:2]:
            e.free(temporary)
        return e.pointwise("aten.div.Tensor", made[2], self)

    e.record("CumprodBackward0", out, [self], [Formula((0,), gradient)], [self, out])
    return out


@rule("aten::linalg_vector_norm", autocast="float32_dtype")
def vector_norm(
    e: Eager, self: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: DType | None = None
) -> Tensor:
    """Saves its input and result; backward of the 2-norm divides, masks and multiplies."""
    axes = axes_of(self, dim)
    out = e.empty(reduced_shape(self, axes, keepdim), dtype or self.dtype, kernel="aten.linalg_vector_norm.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return norm_gradient(e, grad_of(grads), self, out, ord, axes, keepdim)

    e.record("LinalgVectorNormBackward0", out, [self], [Formula((0,), gradient)], [self, out])
    return out


def norm_gradient(
    e: Eager, grad: Tensor, self: Tensor, out: Tensor, ord: Any, axes: Sequence[int], keepdim: bool
) -> Tensor:
    """`norm_backward` of FunctionsManual.cpp."""
    grad, norm = kept(e, grad, self, axes, keepdim), kept(e, out, self, axes, keepdim)
    if ord == 1:
        sign = e.pointwise("aten.sgn.default", self)
        return e.pointwise("aten.mul.Tensor", sign, grad)
    if ord == 2:
        ratio = e.pointwise("aten.div.Tensor", self, norm)
        e.pointwise("aten.eq.Scalar", norm, dtype=dtypes.bool_)
        return e.pointwise("aten.mul.Tensor", grad, ratio)
    scaled = e.pointwise("aten.abs.default", self)  # the power is taken in place
    product = e.pointwise("aten.mul.Tensor", self, scaled)
    e.free(scaled)
    power = e.pointwise("aten.pow.Tensor_Scalar", norm)
    factor = e.pointwise("aten.mul.Tensor", grad, power)
    e.free(power)
    e.free(e.pointwise("aten.eq.Scalar", norm, dtype=dtypes.bool_))
    return e.pointwise("aten.mul.Tensor", product, factor)


@rule("aten::norm", autocast="float32")
def norm(
    e: Eager, self: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: DType | None = None
) -> Tensor:
    """As `linalg_vector_norm`; the first argument after the input is the order."""
    return vector_norm(e, self, 2 if p is None else p, dim, keepdim, dtype)
