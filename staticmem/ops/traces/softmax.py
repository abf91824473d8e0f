"""Softmax and its logarithm, contiguous, in float32 for half precision; sums of exponentials; running sums, products.

Sources: torch/_decomp/decompositions.py (`_softmax`, `_log_softmax`, `_log_softmax_backward_data`),
torch/_inductor/decomposition.py (`_softmax_backward_data`), tools/autograd/FunctionsManual.cpp (`logsumexp_backward`,
`cumprod_backward`).
"""

from __future__ import annotations

import math
from typing import Any

from staticmem.eager.strides import listed
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.traces.casts import to_copy
from staticmem.ops.traces.reduction import Dims, restored, reversed_
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Tracer, form, reduced


def _input(t: Tracer, self: Node, dtype: DType | None) -> Node:
    """`softmax` converts first, but where a half becomes float32: CUDA's kernel reads halves (`half_to_float`), and
    the decomposition converts."""
    if dtype is not None and dtype is not self.dtype:
        self = to_copy(t, self, dtype)
    return self


@traced("softmax")
def softmax(t: Tracer, self: Node, dim: int, dtype: DType | None = None) -> Node:
    return softmax_(t, _input(t, self, dtype), dim, False)


def softmax_forward(t: Tracer, self: Node, dim: int, half_to_float: bool = False) -> Node:
    """Its nodes, which autograd does not see one by one."""
    self.dim(dim)  # it is checked, and stays as it was given
    wide = t.opmath(t.contiguous(self))
    shifted = t.pointwise("aten::sub.Tensor", wide, t.reduce("aten::amax", wide, (dim,), True))
    powers = t.pointwise("aten::exp", shifted)
    out = t.pointwise("aten::div.Tensor", powers, t.sum(powers, (dim,), True))
    return out if half_to_float else t.cast(out, self.dtype)


@traced("_softmax")
def softmax_(t: Tracer, self: Node, dim: int, half_to_float: bool) -> Node:
    out = softmax_forward(t, self, dim, half_to_float)
    return t.derive(out, self, lambda grad: softmax_gradient(t, grad, out, dim, self.dtype))


def softmax_gradient(t: Tracer, grad: Node, out: Node, dim: int, dtype: DType) -> Node:
    """`_softmax_backward_data`, under `pw_cast_for_opmath`."""
    grad, wide = t.opmath(grad), t.opmath(out)
    product = t.pointwise("aten::mul.Tensor", grad, wide)
    total = t.sum(product, (dim,), True)
    result = t.pointwise("prims::fma", t.pointwise("aten::neg", wide), total, product)
    return t.cast(t.contiguous(result), dtype)


@traced("log_softmax special_log_softmax")
def log_softmax(t: Tracer, self: Node, dim: int, dtype: DType | None = None) -> Node:
    return log_softmax_(t, _input(t, self, dtype), dim, False)


@traced("_log_softmax")
def log_softmax_(t: Tracer, self: Node, dim: int, half_to_float: bool) -> Node:
    self.dim(dim)  # it is checked, and stays as it was given
    wide = t.opmath(t.contiguous(self))
    shifted = t.pointwise("aten::sub.Tensor", wide, t.reduce("aten::amax", wide, (dim,), True))
    total = t.pointwise("aten::log", t.sum(t.pointwise("aten::exp", shifted), (dim,), True))
    out = t.pointwise("aten::sub.Tensor", shifted, total)
    if not half_to_float:
        out = t.cast(out, self.dtype)

    def gradient(grad: Node) -> Node:
        grad = t.opmath(grad)
        product = t.pointwise("aten::mul.Tensor", t.pointwise("aten::exp", t.opmath(out)), t.sum(grad, (dim,), True))
        return t.cast(t.pointwise("aten::sub.Tensor", grad, product), self.dtype)

    return t.derive(out, self, gradient)


@traced("logsumexp special_logsumexp")
def logsumexp(t: Tracer, self: Node, dim: Dims, keepdim: bool = False) -> Node:
    """torch/_refs: the largest is taken off first, unless it is infinite."""
    dims = listed(dim)
    x = t.opmath(self)
    largest = t.reduce("aten::amax", x, dims, True)
    infinite = t.compare("eq", t.call("abs", largest), math.inf)
    largest = t.where(infinite, 0, largest)
    back = largest if keepdim else t.squeeze(largest, dims)
    powers = t.call("exp", t.sub(x, largest))
    out = t.cast(t.add(t.call("log", t.sum(powers, dims, keepdim)), back), self.dtype)

    def gradient(grad: Node) -> Node:
        grad = restored(t, grad, self, dims, keepdim)
        result = restored(t, out, self, dims, keepdim)
        return t.mul(grad, t.call("exp", t.sub(self, result)))

    return t.derive(out, self, gradient)


@traced("cumsum")
def cumsum(t: Tracer, self: Node, dim: int, *, dtype: Any = None) -> Node:
    """Its gradient is the sum from the other end."""
    integer = self.dtype.kind in ("int", "bool")
    result_dtype = dtype or (dtypes.int64 if integer else self.dtype)

    def summed(x: Node, dtype: Any) -> Node:
        more = {} if dtype is x.dtype else {"dtype": dtype}
        return t.node("aten::cumsum", (x, dim), form(x.shape, dtype), more)

    out = summed(self, result_dtype)

    def gradient(grad: Node) -> Node:
        if grad.shape[self.dim(dim)] == 1 if self.ndim else True:
            return grad
        return reversed_(t, summed(reversed_(t, grad, dim), grad.dtype), dim)

    return t.derive(out, self, gradient)


@traced("cumprod")
def cumprod(t: Tracer, self: Node, dim: int, *, dtype: Any = None) -> Node:
    result_dtype = dtype or (dtypes.int64 if self.dtype.kind in ("int", "bool") else self.dtype)
    more = {} if result_dtype is self.dtype else {"dtype": result_dtype}
    out = t.node("aten::cumprod", (self, dim), form(self.shape, result_dtype), more)
    return t.derive(out, self, lambda grad: grad if not self.ndim else _gradient_of_running(t, grad, self, out, dim))


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
