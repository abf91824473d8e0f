"""Products over dimensions, and from one end to each element.

Source: tools/autograd/FunctionsManual.cpp (`prod_safe_zeros_backward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.sorting import reversed_
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form, reduced


@traced("prod")
def prod(t: Tracer, self: Node, dim: int | None = None, keepdim: bool = False, *, dtype: DType | None = None) -> Node:
    result_dtype = dtype or (dtypes.int64 if self.dtype.kind in ("int", "bool") else self.dtype)
    more = {} if result_dtype is self.dtype else {"dtype": result_dtype}
    if dim is None:
        out = t.node("aten::prod", (self,), form((), result_dtype), more)
    else:
        shape = reduced(self.shape, [self.dim(dim)], keepdim)
        out = t.node("aten::prod.dim_int", (self, dim, keepdim), form(shape, result_dtype), more)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        if not self.ndim:
            return [grad]
        if dim is None:
            flat = t.view(self, (self.numel,))
            return [t.view(t.mul(grad, _product_of_others(t, flat, 0)), self.shape)]
        if not keepdim:
            grad = t.unsqueeze(grad, dim)
        return [t.mul(grad, _product_of_others(t, self, self.dim(dim)))]

    t.record(out, [self], gradient)
    return out


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


@traced("cumprod")
def cumprod(t: Tracer, self: Node, dim: int, *, dtype: Any = None) -> Node:
    result_dtype = dtype or (dtypes.int64 if self.dtype.kind in ("int", "bool") else self.dtype)
    more = {} if result_dtype is self.dtype else {"dtype": result_dtype}
    out = t.node("aten::cumprod", (self, dim), form(self.shape, result_dtype), more)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [grads[0] if not self.ndim else _gradient_of_running(t, grads[0], self, out, dim)]

    t.record(out, [self], gradient)
    return out


def _gradient_of_running(t: Tracer, grad: Node, x: Node, out: Node, dim: int) -> Node:
    """`cumprod_backward`: before the first zero of each row, at it, and behind it, where the gradient is zero."""

    def boolean(name: str, *args: Any) -> Node:
        return t.pointwise(f"aten::{name}", *args, dtype=dtypes.bool_)

    product = t.mul(out, grad)
    zero = t.compare("eq", x, 0)
    nothing = t.full(x.shape, 0, x.dtype)
    zeros = t.node("aten::cumsum", (zero, dim), form(x.shape, dtypes.int64))
    before = t.compare("eq", zeros, 0)
    terms = t.where(boolean("bitwise_not", before), 0.0, product)
    sums = t.node("aten::cumsum", (reversed_(t, terms, dim), dim), form(x.shape, grad.dtype))
    divided = t.where(before, t.div(reversed_(t, sums, dim), x), nothing)
    # between the first zero and the second
    between = t.compare("eq", zeros, 1)
    one = reduced(x.shape, [x.dim(dim)], True)
    _, first = t.several("aten::max.dim", (between, dim, True), [form(one, dtypes.bool_), form(one, dtypes.int64)])
    marks = t.new("aten::scatter.value", (t.full(x.shape, False, dtypes.bool_), dim, first, 1), x.shape, dtypes.bool_)
    at_first = boolean("logical_and", marks, between)
    behind = boolean("bitwise_and.Tensor", between, boolean("bitwise_not", at_first))
    factors = t.where(boolean("bitwise_not", behind), 1.0, x)
    after = t.node("aten::cumprod", (factors, dim), form(x.shape, x.dtype))
    weights = t.where(t.compare("ne", zeros, 1), 0.0, grad)
    previous = t.pointwise("aten::relu", t.pointwise("aten::sub.Scalar", first, 1))
    ahead = t.new("aten::gather", (out, dim, previous), one, x.dtype)
    ahead = t.where(t.compare("eq", first, 0), 1.0, ahead)
    total = t.mul(t.sum(t.mul(after, weights), [dim], True), ahead)
    return t.where(at_first, total, divided)
