"""Reductions: sums, means, products, norms, variances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context, integer, translation
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule


def axes_of(self: Tensor, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == ():
        return tuple(range(self.ndim))
    axes = tuple(self.dim(d) for d in ((dim,) if isinstance(dim, int) else tuple(dim)))
    if not self.ndim and set(axes) <= {0, -1}:  # PyTorch takes these of a scalar, which has nothing to reduce
        return ()
    if axes and not 0 <= min(axes) <= max(axes) < self.ndim:
        raise ValueError(f"a tensor of {self.ndim} dimensions is reduced over {list(axes)}")
    return axes


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


@rule("mean")
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

    return e.record("MeanBackward1", out, [self], [Formula((0,), gradient)])


@rule("sum", kinds=("running",), autocast="float32_dtype")
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

    return e.record("SumBackward1", out, [self], [Formula((0,), gradient)])


@rule("any all")
def any(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """A bool result without gradient."""
    return e.empty(reduced_shape(self, axes_of(self, dim), keepdim), dtypes.bool_, kernel="aten.any.default")


@rule("prod", kinds=("running",), autocast="float32_dtype")
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

    return e.record("ProdBackward1", out, [self], [Formula((0,), gradient)], [self, out])


@rule("linalg_vector_norm", autocast="float32_dtype")
def vector_norm(
    e: Eager, self: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: DType | None = None
) -> Tensor:
    """Saves its input and result; backward of the 2-norm divides, masks and multiplies."""
    axes = axes_of(self, dim)
    out = e.empty(reduced_shape(self, axes, keepdim), dtype or self.dtype, kernel="aten.linalg_vector_norm.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return norm_gradient(e, grad_of(grads), self, out, ord, axes, keepdim)

    return e.record("LinalgVectorNormBackward0", out, [self], [Formula((0,), gradient)], [self, out])


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


@rule("norm", autocast="float32")
def norm(
    e: Eager, self: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: DType | None = None
) -> Tensor:
    """As `linalg_vector_norm`; the first argument after the input is the order."""
    return vector_norm(e, self, 2 if p is None else p, dim, keepdim, dtype)


@rule("nansum")
def nansum(e: Eager, self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """Saves its input; backward multiplies by a mask of what is a number."""
    axes = axes_of(self, dim)
    out = e.empty(reduced_shape(self, axes, keepdim), dtype or self.dtype, kernel="aten.nansum.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        nan = e.pointwise("aten.isnan.default", self, dtype=dtypes.bool_)
        mask = e.pointwise("aten.logical_not.default", nan, dtype=dtypes.bool_)
        return e.pointwise("aten.mul.Tensor", kept(e, grad_of(grads), self, axes, keepdim), mask)

    return e.record("NansumBackward0", out, [self], [Formula((0,), gradient)], [self])


@rule("count_nonzero")
def count_nonzero(e: Eager, self: Tensor, dim: Any = None) -> Tensor:
    """int64 counts without gradient."""
    shape = () if dim is None else reduced_shape(self, axes_of(self, dim), False)
    return e.empty(shape, dtypes.int64, kernel="aten.count_nonzero.default")


def _flags(dim: Any, args: Sequence[Any], keepdim: bool) -> tuple[Any, bool]:
    """(dim, unbiased, keepdim) or (unbiased) or (dim, *, correction, keepdim), by the overload's positions."""
    if args and isinstance(args[-1], bool) and len(args) == 2:
        keepdim = args[-1]
    return (None if isinstance(dim, bool) else dim), keepdim


def _var_gradient(e: Eager, grad: Tensor, self: Tensor, axes: Sequence[int]) -> Tensor:
    """`var_backward`: (2 / (N - correction)) * grad * (self - mean(self)), evaluated from the right."""
    mean = e.empty(reduced_shape(self, axes, True), self.dtype, kernel="aten.mean.dim")
    centred = e.pointwise("aten.sub.Tensor", self, mean)
    scaled = e.pointwise("aten.mul.Tensor", grad)
    return e.pointwise("aten.mul.Tensor", scaled, centred)


def _std_gradient(e: Eager, grad: Tensor, self: Tensor, std: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    """`std_backward`: the gradient over twice the result, zero where that is zero, is one of the variance."""
    std = kept(e, std, self, axes, keepdim)
    e.open_scope()
    double = e.pointwise("aten.mul.Tensor", std)
    by_var = e.pointwise("aten.div.Tensor", grad, double)
    e.pointwise("aten.eq.Scalar", std, dtype=dtypes.bool_)
    e.close_scope(keep=[by_var])
    return _var_gradient(e, by_var, self, axes)


def _one(e: Eager, self: Tensor, dim: Any, keepdim: bool, std: bool) -> Tensor:
    axes = axes_of(self, dim)
    out = e.empty(reduced_shape(self, axes, keepdim), self.dtype, kernel="aten.var.correction")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        assert grads[0] is not None
        grad = kept(e, grads[0], self, axes, keepdim)
        return _std_gradient(e, grad, self, out, axes, keepdim) if std else _var_gradient(e, grad, self, axes)

    return e.record(
        "StdBackward0" if std else "VarBackward0", out, [self], [Formula((0,), gradient)], [self, out if std else None]
    )


@rule("var")
def var(e: Eager, self: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **_: Any) -> Tensor:
    """Saves its input; backward holds the mean, the centred input, the scaled gradient and the product."""
    return _one(e, self, *_flags(dim, args, keepdim), std=False)


@rule("std")
def std(e: Eager, self: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **_: Any) -> Tensor:
    """Saves its input and result; backward divides the gradient by the result, then as `var`."""
    return _one(e, self, *_flags(dim, args, keepdim), std=True)


def _two(e: Eager, self: Tensor, dim: Any, keepdim: bool, std: bool) -> tuple[Tensor, Tensor]:
    axes = axes_of(self, dim)
    shape = reduced_shape(self, axes, keepdim)
    outs = e.empty(shape, self.dtype, kernel="aten.var_mean.correction"), e.empty(shape, self.dtype)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor | None:
        by_spread = by_mean = None
        if grads[0] is not None:
            e.open_scope()
            grad = kept(e, grads[0], self, axes, keepdim)
            by_spread = (
                _std_gradient(e, grad, self, outs[0], axes, keepdim) if std else _var_gradient(e, grad, self, axes)
            )
            e.close_scope(keep=[by_spread])
        if grads[1] is not None:
            by_mean = e.pointwise("aten.div.Scalar", expanded(e, grads[1], self, axes, keepdim))
        if by_spread is not None and by_mean is not None:
            return e.pointwise("aten.add.Tensor", by_spread, by_mean)
        return by_spread if by_mean is None else by_mean

    name = "StdMeanBackward0" if std else "VarMeanBackward0"
    return e.record(name, outs, [self], [Formula((0,), gradient)], [self, outs[0] if std else None])


@rule("var_mean")
def var_mean(
    e: Eager, self: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """Saves its input; backward as `var`, plus an expanded, divided gradient of the mean."""
    return _two(e, self, *_flags(dim, args, keepdim), std=False)


@rule("std_mean")
def std_mean(
    e: Eager, self: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """Saves its input and the deviation; backward as `std`, plus an expanded, divided gradient of the mean."""
    return _two(e, self, *_flags(dim, args, keepdim), std=True)


def onnx_axes(ctx: Context, node: Node) -> tuple[tuple[int, ...], bool]:
    """The reduced axes, all where none is named, and whether they stay with size 1."""
    axes = ctx.ints(node, 1, "axes") or tuple(range(ctx.rank(node.inputs[0])))
    return axes, bool(integer(node, "keepdims", 1))


_REDUCED = {
    "ReduceMean": "aten::mean.dim",
    "ReduceSum": "aten::sum.dim_IntList",
    "ReduceMax": "aten::amax",
    "ReduceMin": "aten::amin",
}


@translation(*_REDUCED)
def onnx_reduced(ctx: Context, node: Node) -> list[Op] | None:
    axes = ctx.ints(node, 1, "axes")
    if len(node.inputs) > 1 and node.inputs[1] and axes is None:
        return None
    if not axes and integer(node, "noop_with_empty_axes", 0):
        ctx.alias(node.outputs[0], node.inputs[0])
        return []
    return [ctx.op(node, _REDUCED[node.op], ctx.ref(node.inputs[0]), *onnx_axes(ctx, node))]


@translation("ReduceL1", "ReduceL2")
def onnx_norm(ctx: Context, node: Node) -> list[Op]:
    order = int(node.op[-1])
    return [ctx.op(node, "aten::linalg_vector_norm", ctx.ref(node.inputs[0]), order, *onnx_axes(ctx, node))]


@translation("ReduceProd")
def onnx_prod(ctx: Context, node: Node) -> list[Op] | None:
    axes = ctx.ints(node, 1, "axes")
    if axes is None or len(axes) != 1:
        return None
    keep = bool(integer(node, "keepdims", 1))
    return [ctx.op(node, "aten::prod.dim_int", ctx.ref(node.inputs[0]), axes[0], keep)]
