"""Sums, means, products, variances and norms over dimensions.

Sources: tools/autograd/derivatives.yaml and FunctionsManual.cpp (`sum_backward`, `mean_backward`, `var_backward`,
`std_backward`, `norm_backward`, `prod_safe_zeros_backward`), torch/_refs for what is decomposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.strides import listed, numel
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form, reduced

Dims = Sequence[int] | int | None


def reduced_axes(self: Node, dims: tuple[int, ...]) -> list[int]:
    """Dimensions from the front, in order; all where none are named."""
    return sorted({self.dim(d) for d in dims}) if dims else list(range(self.ndim))


def restored(t: Tracer, grad: Node, self: Node, dims: tuple[int, ...], keepdim: bool) -> Node:
    """`unsqueeze_multiple`: a gradient with the dimensions that were summed."""
    if keepdim or not dims or not self.ndim:
        return grad
    if len(dims) == 1:
        return t.unsqueeze(grad, dims[0])
    for d in reduced_axes(self, dims):
        grad = t.unsqueeze(grad, d)
    return grad


def _spread(t: Tracer, grad: Node, self: Node, dims: tuple[int, ...], keepdim: bool) -> Node:
    return t.expand(restored(t, grad, self, dims, keepdim), self.shape)


def _result(
    t: Tracer, name: str, self: Node, dims: tuple[int, ...], keepdim: bool, dtype: DType, overload: str
) -> Node:
    """A reduction; all of a tensor where no dimensions are named."""
    more = {} if dtype is self.dtype else {"dtype": dtype}
    if not dims:
        shape = reduced(self.shape, range(self.ndim), keepdim)
        args: tuple[Any, ...] = (self,) if not keepdim else (self, (), True)
        target = f"aten::{name}" if not keepdim else f"aten::{name}.{overload}"
        return t.node(target, args, form(shape, dtype), more)
    shape = reduced(self.shape, reduced_axes(self, dims), keepdim)
    return t.node(f"aten::{name}.{overload}", (self, dims, keepdim), form(shape, dtype), more)


@traced("sum")
def sum_(t: Tracer, self: Node, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None) -> Node:
    given = listed(dim)
    integer = self.dtype.kind in ("int", "bool")
    out = _result(t, "sum", self, given, keepdim, dtype or (dtypes.int64 if integer else self.dtype), "dim_IntList")
    return t.derive(out, self, lambda grad: _spread(t, grad, self, given, keepdim))


@traced("mean")
def mean(t: Tracer, self: Node, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None) -> Node:
    given = listed(dim)
    out = _result(t, "mean", self, given, keepdim, dtype or self.dtype, "dim")
    count = numel([self.shape[d] for d in reduced_axes(self, given)])
    return t.derive(
        out, self, lambda grad: t.pointwise("aten::div.Scalar", _spread(t, grad, self, given, keepdim), count)
    )


@traced("nansum")
def nansum(t: Tracer, self: Node, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None) -> Node:
    given = listed(dim)
    numbers = t.where(t.pointwise("aten::isnan", self, dtype=dtypes.bool_), 0, self)
    out = _result(t, "sum", numbers, given, keepdim, dtype or self.dtype, "dim_IntList")

    def gradient(grad: Node) -> Node:
        missing = t.pointwise("aten::isnan", self, dtype=dtypes.bool_)
        counted = t.pointwise("aten::logical_not", missing, dtype=dtypes.bool_)
        return t.mul(_spread(t, grad, self, given, keepdim), counted)

    return t.derive(out, self, gradient)


@traced("count_nonzero")
def count_nonzero(t: Tracer, self: Node, dim: Dims = None) -> Node:
    given = listed(dim)
    mask = t.compare("ne", self, 0)
    shape = reduced(self.shape, reduced_axes(self, given), False)
    return t.node("aten::sum.dim_IntList", (mask, given or None), form(shape, dtypes.int64))


@traced("any")
def any_(t: Tracer, self: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    shape = reduced(self.shape, reduced_axes(self, listed(dim)), keepdim)
    if dim is None:
        return t.node("aten::any", (self,), form(shape, dtypes.bool_))
    overload = "dim" if isinstance(dim, int) else "dims"
    return t.node(f"aten::any.{overload}", (self, dim, keepdim), form(shape, dtypes.bool_))


@traced("all")
def all_(t: Tracer, self: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    """None is false."""
    wrong = t.pointwise("aten::logical_not", self, dtype=dtypes.bool_)
    whole = dim is None
    any_wrong = t.node("aten::any.dims", (wrong,), form((), dtypes.bool_)) if whole else any_(t, wrong, dim, keepdim)
    return t.pointwise("aten::logical_not", any_wrong, dtype=dtypes.bool_)


# -- variances ---------------------------------------------------------------------------------------------------------


def _moments(args: tuple[Any, ...], unbiased: bool | None, correction: Any) -> tuple[tuple[int, ...], float, Any]:
    """Dimensions, what is taken off the count, and whether dimensions are kept, of the overloads of `var`."""
    rest = list(args)
    dims: tuple[int, ...] = ()
    if rest and not isinstance(rest[0], bool):
        dims = listed(rest.pop(0))
    if unbiased is None and rest and isinstance(rest[0], bool):
        unbiased = rest.pop(0)
    keepdim = bool(rest.pop(0)) if rest else None
    if correction is None:
        correction = 1 if unbiased in (None, True) else 0
    return dims, correction, keepdim


def _var(t: Tracer, self: Node, dims: tuple[int, ...], off: float, keepdim: bool) -> Node:
    shape = reduced(self.shape, reduced_axes(self, dims), keepdim)
    how = {"correction": off, "keepdim": keepdim}
    return t.node("aten::var.correction", (self, dims or None), form(shape, self.dtype), how)


def _variance_gradient(
    t: Tracer, grad: Node, self: Node, dims: tuple[int, ...], off: float, keepdim: bool, late: bool = False
) -> Node:
    """`var_backward`; of a standard deviation the gradient gets its dimensions after the mean is taken."""
    count = numel([self.shape[d] for d in reduced_axes(self, dims)])
    if not late:
        grad = restored(t, grad, self, dims, keepdim)
    centre = _result(t, "mean", self, dims, True, self.dtype, "dim") if dims else _result(
        t, "mean", self, (), False, self.dtype, "dim"
    )  # fmt: skip
    centred = t.sub(self, centre)
    if late:
        grad = restored(t, grad, self, dims, keepdim)
    scale = 2.0 / (count - off) if count != off else math.inf
    return t.mul(t.pointwise("aten::mul.Scalar", grad, scale), centred)


def _deviation_gradient(t: Tracer, grad: Node, out: Node) -> Node:
    """Of a variance from that of its root, which is zero where the root is."""
    quotient = t.div(grad, t.pointwise("aten::mul.Scalar", out, 2))
    at_zero = t.compare("eq", out, 0)
    return t.where(at_zero, 0, quotient)


@traced("var")
def var(t: Tracer, self: Node, *args: Any, unbiased: bool | None = None, correction: Any = None,
        keepdim: bool = False) -> Node:  # fmt: skip
    dims, off, kept = _moments(args, unbiased, correction)
    keep = keepdim if kept is None else kept
    out = _var(t, self, dims, off, keep)
    return t.derive(out, self, lambda grad: _variance_gradient(t, grad, self, dims, off, keep))


@traced("std")
def std(t: Tracer, self: Node, *args: Any, unbiased: bool | None = None, correction: Any = None,
        keepdim: bool = False) -> Node:  # fmt: skip
    dims, off, kept = _moments(args, unbiased, correction)
    keep = keepdim if kept is None else kept
    out = t.cast(t.call("sqrt", _var(t, t.opmath(self), dims, off, keep)), self.dtype)

    def gradient(grad: Node) -> Node:
        by_variance = _deviation_gradient(t, grad, out)
        return _variance_gradient(t, by_variance, self, dims, off, keep, late=True)

    return t.derive(out, self, gradient)


def _both(t: Tracer, self: Node, args: tuple[Any, ...], unbiased: Any, correction: Any, keepdim: bool, root: bool,
          ) -> list[Node]:  # fmt: skip
    dims, off, kept = _moments(args, unbiased, correction)
    keep = keepdim if kept is None else kept
    one = form(reduced(self.shape, reduced_axes(self, dims), keep), self.dtype)
    how = {"correction": off, "keepdim": keep}
    variance, centre = t.several("aten::var_mean.correction", (self, dims or None), [one, one], **how)
    first = t.call("sqrt", variance) if root else variance
    count = numel([self.shape[d] for d in reduced_axes(self, dims)])

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        by_first = by_mean = None
        if grads[0] is not None:
            grad = _deviation_gradient(t, grads[0], first) if root else grads[0]
            by_first = _variance_gradient(t, grad, self, dims, off, keep, late=root)
        if grads[1] is not None:
            by_mean = t.pointwise("aten::div.Scalar", _spread(t, grads[1], self, dims, keep), count)
        if by_first is None or by_mean is None:
            return [by_first or by_mean]
        return [t.add(by_first, by_mean)]

    t.record([first, centre], [self], gradient)
    return [first, centre]


@traced("var_mean")
def var_mean(t: Tracer, self: Node, *args: Any, unbiased: Any = None, correction: Any = None,
             keepdim: bool = False) -> list[Node]:  # fmt: skip
    return _both(t, self, args, unbiased, correction, keepdim, False)


@traced("std_mean")
def std_mean(t: Tracer, self: Node, *args: Any, unbiased: Any = None, correction: Any = None,
             keepdim: bool = False) -> list[Node]:  # fmt: skip
    return _both(t, self, args, unbiased, correction, keepdim, True)


# -- norms -------------------------------------------------------------------------------------------------------------


@traced("linalg_vector_norm")
def linalg_vector_norm(
    t: Tracer, self: Node, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None
) -> Node:
    """torch/_refs/linalg, `vector_norm`, in float32 for halves."""
    dims = listed(dim)
    over = dims or tuple(range(self.ndim))
    x = t.opmath(self)
    if ord == 0 or (ord not in (1, 2) and t.needs_grad(self)):
        raise ValueError(f"the gradient of a norm of order {ord} is not traced")
    if abs(ord) == math.inf:
        out = t.reduce("aten::amax" if ord > 0 else "aten::amin", t.call("abs", x), over, keepdim)
    else:
        powers = x if ord % 2 == 0 else t.call("abs", x)
        powers = t.pointwise("aten::pow.Tensor_Scalar", powers, ord)
        total = t.sum(powers, over, keepdim) if dims or keepdim else t.node(
            "aten::sum.dim_IntList", (powers, None), form((), x.dtype)
        )  # fmt: skip
        out = t.pointwise("aten::pow.Tensor_Scalar", total, 1 / ord)
    out = t.cast(out, dtype or self.dtype)
    return t.derive(out, self, lambda grad: _norm_gradient(t, grad, self, out, ord, dims, keepdim))


def _norm_gradient(t: Tracer, grad: Node, self: Node, norm: Node, p: float, dims: tuple[int, ...], keep: bool) -> Node:
    """`norm_backward`"""
    grad, norm = restored(t, grad, self, dims, keep), restored(t, norm, self, dims, keep)
    if p == 1:
        return t.mul(t.sgn(self), grad)
    if p == 2:
        unit = _filled(t, t.div(self, norm), norm)
        return t.mul(grad, unit if layout.is_contiguous(unit.shape, unit.strides) else t.clone(unit))
    raise AssertionError(f"the gradient of a norm of order {p}")


def _filled(t: Tracer, quotient: Node, norm: Node) -> Node:
    """Zero where the norm is (`masked_fill`)."""
    return t.where(t.compare("eq", norm, 0), 0, quotient)


@traced("norm")
def norm(
    t: Tracer, self: Node, p: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None
) -> Node:
    return linalg_vector_norm(t, self, 2 if p is None else p, dim, keepdim, dtype=dtype)


def reversed_(t: Tracer, x: Node, dim: int) -> Node:
    """`flip`"""
    return t.node("prims::rev", (x, (x.dim(dim),)), form(x.shape, x.dtype))


@traced("prod")
def prod(t: Tracer, self: Node, dim: int | None = None, keepdim: bool = False, *, dtype: DType | None = None) -> Node:
    result_dtype = dtype or (dtypes.int64 if self.dtype.kind in ("int", "bool") else self.dtype)
    more = {} if result_dtype is self.dtype else {"dtype": result_dtype}
    if dim is None:
        out = t.node("aten::prod", (self,), form((), result_dtype), more)
    else:
        shape = reduced(self.shape, [self.dim(dim)], keepdim)
        out = t.node("aten::prod.dim_int", (self, dim, keepdim), form(shape, result_dtype), more)

    def gradient(grad: Node) -> Node:
        if not self.ndim:
            return grad
        if dim is None:
            flat = t.view(self, (self.numel,))
            return t.view(t.mul(grad, _product_of_others(t, flat, 0)), self.shape)
        if not keepdim:
            grad = t.unsqueeze(grad, dim)
        return t.mul(grad, _product_of_others(t, self, self.dim(dim)))

    return t.derive(out, self, gradient)


def _product_of_others(t: Tracer, x: Node, dim: int) -> Node:
    """Of all before an element times that of all behind it, which zeros do not spoil."""
    size = x.shape[dim]
    if size == 1:
        return t.full(x.shape, 1, x.dtype)
    ones = t.full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), 1, x.dtype)

    def running(rest: Node) -> Node:
        shifted = t.node("aten::cat", ((ones, rest), dim), form(x.shape, x.dtype))
        return t.node("aten::cumprod", (shifted, dim), form(x.shape, x.dtype))

    before = running(t.slice(x, dim, 0, size - 1))
    behind = reversed_(t, running(reversed_(t, t.slice(x, dim, 1, size), dim)), dim)
    return t.mul(before, behind)
