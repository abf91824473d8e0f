"""Reductions, softmax and scans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem import dtypes
from staticmem.dtypes import DType
from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.rules.pointwise import grad_of
from staticmem.rules.registry import rule


def axes_of(self: Tensor, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == ():
        return tuple(range(self.ndim))
    return tuple(self.dim(d) for d in ((dim,) if isinstance(dim, int) else tuple(dim)))


def reduced_shape(self: Tensor, axes: Sequence[int], keepdim: bool) -> layout.Shape:
    if keepdim:
        return tuple(1 if i in axes else s for i, s in enumerate(self.shape))
    return tuple(s for i, s in enumerate(self.shape) if i not in axes)


def _expanded(e: Eager, grad: Tensor, self: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    """The gradient as an expanded view over the reduced dimensions (`sum_backward`)."""
    strides = list(grad.strides)
    if not keepdim:
        for axis in sorted(axes):
            strides.insert(axis, 0)
    return e.alias(grad, self.shape, tuple(0 if i in axes else s for i, s in enumerate(strides)))


@rule("aten::mean")
def mean(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """Saves sizes only; backward divides an expanded view: one tensor of the input's size."""
    if isinstance(dim, DType):
        dim, dtype = None, dim
    axes = axes_of(self, dim)
    name = "aten.mean.default" if dim is None else "aten.mean.dim"
    out = e.empty(reduced_shape(self, axes, keepdim), dtype or self.dtype, kernel=name)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.div.Scalar", _expanded(e, grad_of(grads), self, axes, keepdim))

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

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return _expanded(e, grad_of(grads), self, axes, keepdim)

    e.record("SumBackward1", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::var", "aten::std", "aten::var.correction", "aten::std.correction")
def var(e: Eager, self: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **_: Any) -> Tensor:
    """Saves its input (std: its result too); backward holds the mean, the centred input and the product."""
    if args and isinstance(args[-1], bool):
        keepdim = args[-1]
    axes = axes_of(self, None if isinstance(dim, bool) else dim)
    out = e.empty(reduced_shape(self, axes, keepdim), self.dtype, kernel="aten.var.correction")
    e.record("VarBackward0", out, [self], [Formula((0,), _var_gradient(self, axes))], [self])
    return out


def _var_gradient(self: Tensor, axes: Sequence[int]) -> Any:
    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        small = e.pointwise("aten.mul.Tensor", grad_of(grads))
        e.empty(reduced_shape(self, axes, True), self.dtype, kernel="aten.mean.dim")
        e.pointwise("aten.sub.Tensor", self)
        del small
        return e.pointwise("aten.mul.Tensor", self)

    return gradient


@rule("aten::var_mean", "aten::std_mean")
def var_mean(
    e: Eager, self: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """Saves its input; backward as `var`, plus an expanded, divided gradient of the mean."""
    if args and isinstance(args[-1], bool):
        keepdim = args[-1]
    axes = axes_of(self, None if isinstance(dim, bool) else dim)
    shape = reduced_shape(self, axes, keepdim)
    outs = e.empty(shape, self.dtype, kernel="aten.var_mean.correction"), e.empty(shape, self.dtype)
    by_var = _var_gradient(self, axes)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        result = None
        if grads[0] is not None:
            result = by_var(e, grads, need)
        if grads[1] is not None:
            other = e.pointwise("aten.div.Scalar", self)
            result = other if result is None else e.pointwise("aten.add.Tensor", result, other)
        assert result is not None
        return result

    e.record("VarMeanBackward0", outs, [self], [Formula((0,), gradient)], [self])
    return outs


@rule("aten::max", "aten::min", "aten::amax", "aten::amin")
def full_or_amax(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Saves its input and result; backward compares, counts and scales."""
    axes = axes_of(self, dim)
    out = e.empty(reduced_shape(self, axes, keepdim), self.dtype, kernel="aten.amax.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        e.pointwise("aten.eq.Tensor", self, dtype=dtypes.bool_)
        e.empty(reduced_shape(self, axes, True), dtypes.int64, kernel="aten.sum.dim_IntList")
        e.pointwise("aten.div.Tensor", grad_of(grads))
        return e.pointwise("aten.mul.Tensor", self)

    e.record("AmaxBackward0", out, [self], [Formula((0,), gradient)], [self, out])
    return out


@rule("aten::max.dim", "aten::min.dim", "aten::median.dim", "aten::mode", "aten::kthvalue", "aten::cummax",
      "aten::cummin")  # fmt: skip
def max_dim(e: Eager, self: Tensor, dim: int = -1, keepdim: bool = False, *_: Any) -> tuple[Tensor, Tensor]:
    """Saves int64 indices; backward scatters into zeros of the input's size."""
    shape = reduced_shape(self, axes_of(self, dim), keepdim)
    return _select_values(e, self, shape, "aten.max.dim")


def _select_values(e: Eager, self: Tensor, shape: layout.Shape, kernel: str) -> tuple[Tensor, Tensor]:
    out = e.empty(shape, self.dtype, kernel=kernel)
    indices = e.empty(shape, dtypes.int64)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, self.dtype, kernel="aten.zeros.default")

    e.record("MaxBackward0", [out, indices], [self], [Formula((0,), gradient)], [indices])
    indices.grad_fn, indices.requires_grad = None, False
    return out, indices


@rule("aten::topk")
def topk(e: Eager, self: Tensor, k: int, dim: int = -1, *_: Any) -> tuple[Tensor, Tensor]:
    """Saves int64 indices; backward scatters into zeros of the input's size."""
    axis = self.dim(dim)
    return _select_values(e, self, tuple(k if i == axis else s for i, s in enumerate(self.shape)), "aten.topk.default")


@rule("aten::sort", "aten::sort.stable")
def sort(e: Eager, self: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Saves int64 indices; backward scatters into zeros of the input's size."""
    return _select_values(e, self, self.shape, "aten.sort.default")


@rule("aten::argsort")
def argsort(e: Eager, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """int64 indices without gradient."""
    return _select_values(e, self, self.shape, "aten.sort.default")[1]


@rule("aten::argmax", "aten::argmin")
def argmax(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """int64 indices without gradient."""
    return e.empty(reduced_shape(self, axes_of(self, dim), keepdim), dtypes.int64, kernel="aten.argmax.default")


@rule("aten::any", "aten::all")
def any(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """A bool result without gradient."""
    return e.empty(reduced_shape(self, axes_of(self, dim), keepdim), dtypes.bool_, kernel="aten.any.default")


@rule("aten::prod", autocast="float32_dtype")
def prod(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """Saves its input and result; backward of the common case multiplies and divides."""
    out = e.empty(reduced_shape(self, axes_of(self, dim), keepdim), dtype or self.dtype, kernel="aten.prod.dim_int")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        e.pointwise("aten.mul.Tensor", grad_of(grads))
        return e.pointwise("aten.div.Tensor", self)

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
        from staticmem.rules.casts import to_copy

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
        e.pointwise("aten.sub.Tensor", self)
        e.pointwise("aten.exp.default", self)
        return e.pointwise("aten.mul.Tensor", self)

    e.record("LogsumexpBackward0", out, [self], [Formula((0,), gradient)], [self, out])
    return out


@rule("aten::cumsum", "aten::cumprod", autocast="float32_dtype")
def cumsum(e: Eager, self: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    """cumsum saves nothing; backward flips, sums and flips back."""
    result = dtype or (self.dtype if self.dtype.is_differentiable else dtypes.int64)
    out = e.pointwise("aten.cumsum.default", self, dtype=result)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        if grad.numel <= 1 or grad.shape[self.dim(dim)] == 1:
            return grad
        for kernel in ("aten.flip.default", "aten.cumsum.default"):
            e.pointwise(kernel, grad)
        return e.pointwise("aten.flip.default", grad)

    e.record("CumsumBackward0", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::linalg_vector_norm", "aten::norm", autocast="float32_dtype")
def vector_norm(
    e: Eager, self: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: DType | None = None
) -> Tensor:
    """Saves its input and result; backward of the 2-norm divides, masks and multiplies."""
    out = e.empty(
        reduced_shape(self, axes_of(self, dim), keepdim), dtype or self.dtype, kernel="aten.linalg_vector_norm"
    )

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        wide = dtypes.promote(self.dtype, out.dtype)
        e.pointwise("aten.div.Tensor", self, dtype=wide)
        e.pointwise("aten.eq.Scalar", out, dtype=dtypes.bool_)
        return e.pointwise("aten.mul.Tensor", self, dtype=wide)

    e.record("LinalgVectorNormBackward0", out, [self], [Formula((0,), gradient)], [self, out])
    return out
