"""Tensors that no tensor decides: constants, ranges, random numbers, which are the tracer's; and dropout.

An export in training mode is run for inference as `model.eval()` has it: nothing is dropped.

Sources: torch/_refs (`arange`, `linspace`, `eye`), torch/_inductor/decomposition.py, torch/_decomp/decompositions.py
(`native_dropout`, `bernoulli`), aten/src/ATen/native/Dropout.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.strides import Strides
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.factories import tril_sizes, triu_sizes
from staticmem.ops.traces.arithmetic import mul
from staticmem.ops.traces.casts import to
from staticmem.ops.traces.joining import concatenated, stacked
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form, gradient_of


def _kind(value: Any) -> DType:
    if isinstance(value, bool):
        return dtypes.bool_
    return dtypes.int64 if isinstance(value, int) else dtypes.float32


@traced("zeros")
def zeros(t: Tracer, size: Sequence[int], *, dtype: DType | None = None, **_: Any) -> Node:
    return t.full(tuple(size), 0, dtype or dtypes.float32)


@traced("ones")
def ones(t: Tracer, size: Sequence[int], *, dtype: DType | None = None, **_: Any) -> Node:
    return t.full(tuple(size), 1, dtype or dtypes.float32)


@traced("full")
def full(t: Tracer, size: Sequence[int], fill_value: Any, *, dtype: DType | None = None, **_: Any) -> Node:
    return t.full(tuple(size), fill_value, dtype or _kind(fill_value))


@traced("scalar_tensor")
def scalar_tensor(t: Tracer, s: Any, *, dtype: DType | None = None, **_: Any) -> Node:
    return t.full((), s, dtype or dtypes.float32)


@traced("zeros_like")
def zeros_like(t: Tracer, self: Node, *, dtype: DType | None = None, **more: Any) -> Node:
    return _like(t, self, 0, dtype, more)


@traced("ones_like")
def ones_like(t: Tracer, self: Node, *, dtype: DType | None = None, **more: Any) -> Node:
    return _like(t, self, 1, dtype, more)


@traced("full_like")
def full_like(t: Tracer, self: Node, fill_value: Any, *, dtype: DType | None = None, **more: Any) -> Node:
    return _like(t, self, fill_value, dtype, more)


def _like(t: Tracer, self: Node, value: Any, dtype: DType | None, more: dict[str, Any]) -> Node:
    """In the order of memory; in a memory format that is asked for, a full tensor that is brought to it
    (torch/_decomp/decompositions.py, `full_like`)."""
    asked = more.get("memory_format")
    if asked in (None, "preserve_format"):
        return t.full_like(self, value, dtype)
    out = t.full(self.shape, value, dtype or self.dtype)
    return to(t, out, out.dtype, memory_format=asked)


@traced("new_zeros")
def new_zeros(t: Tracer, self: Node, size: Sequence[int], *, dtype: DType | None = None, **_: Any) -> Node:
    return t.full(tuple(size), 0, dtype or self.dtype)


@traced("new_ones")
def new_ones(t: Tracer, self: Node, size: Sequence[int], *, dtype: DType | None = None, **_: Any) -> Node:
    return t.full(tuple(size), 1, dtype or self.dtype)


@traced("new_full")
def new_full(t: Tracer, self: Node, size: Sequence[int], fill_value: Any, *, dtype: DType | None = None,
             **_: Any) -> Node:  # fmt: skip
    return t.full(tuple(size), fill_value, dtype or self.dtype)


def _empty(t: Tracer, shape: Sequence[int], dtype: DType, strides: Strides | None = None) -> Node:
    return t.node("aten::empty.memory_format", (tuple(shape),), form(shape, dtype, strides), {"dtype": dtype})


@traced("empty")
def empty(t: Tracer, size: Sequence[int], *, dtype: DType | None = None, **_: Any) -> Node:
    return _empty(t, size, dtype or dtypes.float32)


@traced("new_empty")
def new_empty(t: Tracer, self: Node, size: Sequence[int], *, dtype: DType | None = None, **_: Any) -> Node:
    return _empty(t, size, dtype or self.dtype)


@traced("empty_like")
def empty_like(t: Tracer, self: Node, *, dtype: DType | None = None, **more: Any) -> Node:
    """In the order of memory, and a view; or in a memory format."""
    asked = more.get("memory_format")
    strides = layout.in_memory_format(self.shape, self.strides, asked)
    if asked not in (None, "preserve_format") or layout.is_contiguous(self.shape, strides):
        return _empty(t, self.shape, dtype or self.dtype, strides)
    order = sorted(range(self.ndim), key=lambda d: -strides[d])
    dense = _empty(t, [self.shape[d] for d in order], dtype or self.dtype)
    return t.permute(dense, [order.index(d) for d in range(self.ndim)])


def iota(t: Tracer, length: int, start: int = 0, step: int = 1, dtype: DType = dtypes.int64) -> Node:
    how = {"start": start, "step": step, "dtype": dtype, "requires_grad": False}
    return t.node("prims::iota", (length,), form((length,), dtype), how)


@traced("arange arange.start arange.start_step")
def arange(t: Tracer, start: Any, end: Any = None, step: Any = 1, *, dtype: DType | None = None, **_: Any) -> Node:
    """Integers, of which fractions are made."""
    if end is None:
        start, end = 0, start
    whole = not any(isinstance(value, float) for value in (start, end, step))
    dtype = dtype or (dtypes.int64 if whole else dtypes.float32)
    length = math.ceil((end - start) / step)
    if dtype.kind == "int" or whole:
        steps = iota(t, length, int(start), int(step), dtype if dtype.kind == "int" else dtypes.int64)
        return t.cast(steps, dtype) if dtype.kind != "int" else steps
    index = t.cast(iota(t, length), dtypes.float32 if dtype is not dtypes.float64 else dtype)
    return t.cast(t.add(t.mul(index, step), start), dtype)


@traced("linspace")
def linspace(t: Tracer, start: float, end: float, steps: int, *, dtype: DType | None = None, **_: Any) -> Node:
    dtype = dtype or dtypes.float32
    if steps < 2:
        return t.full((steps,), start, dtype)
    index = iota(t, steps)
    size = (end - start) / (steps - 1)
    first_half = t.compare("lt", index, steps / 2)
    rising = t.add(t.mul(t.cast(index, dtype), size), start)
    rest = t.cast(t.sub(steps - 1, index), dtype)
    return t.where(first_half, rising, t.sub(end, t.mul(rest, size)))


@traced("eye eye.m")
def eye(t: Tracer, n: int, m: int | None = None, *, dtype: DType | None = None, **_: Any) -> Node:
    m = n if m is None else m
    dtype_of_range = dtypes.int16 if max(n, m) <= 32767 else dtypes.int32
    if max(n, m) <= 127:  # `_strength_reduce_integer`
        dtype_of_range = dtypes.uint8
    rows, columns = iota(t, n, dtype=dtype_of_range), iota(t, m, dtype=dtype_of_range)
    same = t.compare("eq", t.unsqueeze(rows, -1), columns)
    return t.cast(same, dtype or dtypes.float32)


@traced("tril_indices")
def tril_indices(t: Tracer, row: int, col: int, offset: int = 0, *, dtype: DType | None = None, **_: Any) -> Node:
    """Rows and columns of a lower triangle: a trapezoid, and a rectangle below it."""
    dtype = dtype or dtypes.int64
    trapezoid, rectangle, first_row = tril_sizes(row, col, offset)
    below = max(0, -offset)
    at = _counted(t, trapezoid)
    b = first_row - 0.5
    root = t.pointwise("aten::sqrt", t.add(t.mul(at, 2), b * b))
    rows = t.pointwise("aten::floor", t.add(root, -b))
    columns = _columns(t, at, t.add(rows, 2 * first_row - 1), rows)
    top = t.cast(t.add(rows, below), dtype), t.cast(columns, dtype)
    index = iota(t, rectangle, dtype=dtype)
    bottom = t.add(_whole_quotient(t, index, col), col - first_row + 1 + below), _remainder(t, index, col)
    return stacked(t, [_joined(t, *parts) for parts in zip(top, bottom, strict=True)], 0)


@traced("triu_indices")
def triu_indices(t: Tracer, row: int, col: int, offset: int = 0, *, dtype: DType | None = None, **_: Any) -> Node:
    """Rows and columns of an upper triangle: a rectangle, and a trapezoid below it."""
    dtype = dtype or dtypes.int64
    trapezoid, rectangle, first_row = triu_sizes(row, col, offset)
    index = iota(t, rectangle, dtype=dtype)
    top = _whole_quotient(t, index, col), _remainder(t, index, col)
    at = _counted(t, trapezoid)
    b = -0.5 - first_row
    root = t.pointwise("aten::sqrt", t.sub(b * b, t.mul(at, 2)))
    rows = t.pointwise("aten::floor", t.sub(-b, root))
    columns = _columns(t, at, t.sub(2 * first_row - 1, rows), rows)
    whole_rows, whole_columns = t.cast(rows, dtype), t.cast(columns, dtype)
    if col:
        whole_rows = t.add(whole_rows, rectangle // col)
    bottom = whole_rows, t.add(whole_columns, max(0, offset))
    return stacked(t, [_joined(t, *parts) for parts in zip(top, bottom, strict=True)], 0)


def _counted(t: Tracer, length: int) -> Node:
    """`arange` in float64: from 0 by steps of 1, as written."""
    return t.cast(t.add(t.mul(iota(t, length), 1), 0), dtypes.float64)


def _columns(t: Tracer, at: Node, before: Node, rows: Node) -> Node:
    """The place in its row: `at` less what the rows above have."""
    return t.pointwise("aten::floor", t.sub(at, t.mul(t.mul(before, rows), 0.5)))


def _whole_quotient(t: Tracer, index: Node, by: int) -> Node:
    return t.pointwise("aten::div.Tensor_mode", index, by, rounding_mode="floor")


def _remainder(t: Tracer, index: Node, by: int) -> Node:
    return t.pointwise("aten::remainder.Scalar", index, by)


def _joined(t: Tracer, one: Node, other: Node) -> Node:
    """`cat`; an empty part does not count."""
    parts = [part for part in (one, other) if part.shape != (0,)]
    return concatenated(t, parts, 0) if len(parts) > 1 else t.clone((parts or [one])[0])


# -- random numbers ----------------------------------------------------------------------------------------------------


@traced("rand")
def rand(t: Tracer, size: Sequence[int], *, dtype: DType | None = None, **_: Any) -> Node:
    return t.random(tuple(size), dtype or dtypes.float32)


@traced("randn")
def randn(t: Tracer, size: Sequence[int], *, dtype: DType | None = None, **_: Any) -> Node:
    return t.random(tuple(size), dtype or dtypes.float32, "randn")


@traced("rand_like")
def rand_like(t: Tracer, self: Node, *, dtype: DType | None = None, **_: Any) -> Node:
    return drawn_like(t, self, dtype or self.dtype, "rand")


@traced("randn_like")
def randn_like(t: Tracer, self: Node, *, dtype: DType | None = None, **_: Any) -> Node:
    return drawn_like(t, self, dtype or self.dtype, "randn")


def drawn_like(t: Tracer, like: Node, dtype: DType, mode: str) -> Node:
    """Drawn contiguous in the order of memory, then permuted (torch/_inductor/decomposition.py, `_rand_like`)."""
    strides = layout.dense_like(like.shape, like.strides)
    if layout.is_contiguous(like.shape, strides):
        return t.random(like.shape, dtype, mode)
    order = sorted(range(like.ndim), key=lambda d: -strides[d])
    drawn = t.random(tuple([like.shape[d] for d in order]), dtype, mode)
    return t.permute(drawn, [order.index(d) for d in range(like.ndim)])


@traced("randint randint.low")
def randint(t: Tracer, *args: Any, dtype: DType | None = None, **_: Any) -> Node:
    *bounds, size = args
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return t.random_integers(low, high, tuple(size), dtype or dtypes.int64)


@traced("randperm")
def randperm(t: Tracer, n: int, *, dtype: DType | None = None, **_: Any) -> Node:
    return t.node("aten::randperm", (n,), form((n,), dtype or dtypes.int64), {"dtype": dtype or dtypes.int64})


@traced("fill.Scalar fill_.Scalar zero zero_")
def fill(t: Tracer, self: Node, value: float = 0) -> Node:
    """One number everywhere; nothing flows back."""
    out = t.full_like(self, value)
    return t.derive(out, self, lambda grad: t.zeros_like(grad))


def _drawn(t: Tracer, like: Node, dtype: DType) -> Node:
    """`rand_like`: drawn contiguous in the order of memory, then permuted and copied (torch/_inductor/decomposition.py,
    `_rand_like`)."""
    order = sorted(range(like.ndim), key=lambda d: -like.strides[d])
    drawn = t.random(tuple([like.shape[d] for d in order]), dtype)
    if order == sorted(order):
        return drawn
    view = t.permute(drawn, [order.index(d) for d in range(like.ndim)])
    return t.clone(view, view.strides)


@traced("dropout", calls="native_dropout")
def dropout(t: Tracer, input: Node, p: float, train: bool) -> Node:
    return native_dropout(t, input, p, train)[0]


@traced("dropout_")
def dropout_(t: Tracer, input: Node, p: float, train: bool) -> Node:
    """Not fused: noise, and a product."""
    if not train or not t.training or p == 0:
        return input
    return mul(t, input, t.pointwise("aten::div.Scalar", _noise(t, input, p, False), 1 - p))


@traced("native_dropout")
def native_dropout(t: Tracer, input: Node, p: float, train: bool | None = True) -> list[Node]:
    if not train or not t.training or p == 0:
        return [input]
    if p == 1:
        scale, out = 0.0, t.full(input.shape, 0, input.dtype)
        mask = t.full(input.shape, False, dtypes.bool_)
    else:
        scale = 1.0 / (1.0 - p)
        mask = t.compare("gt", _drawn(t, input, input.dtype), p)
        out = t.mul(t.mul(mask, input), scale)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        """`native_dropout_backward`."""
        grad = gradient_of(grads)
        result = t.mul(grad, t.mul(t.cast(mask, grad.dtype), scale))
        last = layout.prefers_channels_last(grad.shape, grad.strides)
        return [t.clone(result, layout.channels_last_strides(grad.shape) if last else None)]

    t.record(out, [input], gradient)
    return [out, mask]


@traced("bernoulli.p")
def bernoulli_p(t: Tracer, self: Node, p: float, *, generator: Any = None) -> Node:
    """Drawn as float32 in the input's sizes; `bernoulli_` casts the result."""
    return _without_gradient(t, t.compare("lt", _drawn(t, self, dtypes.float32), p), self)


def _without_gradient(t: Tracer, out: Node, self: Node) -> Node:
    """derivatives.yaml: zeros."""
    return t.derive(out, self, lambda grad: t.zeros_like(grad))


@traced("bernoulli")
def bernoulli(t: Tracer, self: Node, p: Any = None, *, generator: Any = None) -> Node:
    out = t.compare("lt", _drawn(t, self, dtypes.float32), self if p is None else p)
    return _without_gradient(t, t.cast(out, self.dtype), self)


def _noise(t: Tracer, input: Node, p: float, features: bool) -> Node:
    """1 where a value stays; one number for each map of features, or for each value."""
    shape = (*input.shape[:2], *[1] * (input.ndim - 2))
    drawn = t.random(shape) if features else _drawn(t, input, dtypes.float32)
    return t.cast(t.compare("lt", drawn, 1 - p), input.dtype)


@traced("feature_dropout")
def feature_dropout(t: Tracer, input: Node, p: float, train: bool) -> Node:
    if not train or not t.training or p == 0:
        return input
    return mul(t, input, t.pointwise("aten::div.Scalar", _noise(t, input, p, True), 1 - p))


@traced("alpha_dropout")
def alpha_dropout(t: Tracer, input: Node, p: float, train: bool) -> Node:
    return _alpha(t, input, p, train, False)


@traced("feature_alpha_dropout")
def feature_alpha_dropout(t: Tracer, input: Node, p: float, train: bool) -> Node:
    return _alpha(t, input, p, train, True)


def _alpha(t: Tracer, input: Node, p: float, train: bool, features: bool) -> Node:
    """`_dropout` with `alpha_dropout` of Dropout.cpp: keeps mean and variance of SELU."""
    if not train or not t.training or p == 0:
        return input
    noise = _noise(t, input, p, features)
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    shift = t.pointwise("aten::mul.Scalar", t.pointwise("aten::add.Scalar", noise, -1), alpha * a)
    shift = t.pointwise("aten::add.Scalar", shift, alpha * a * p)
    kept = mul(t, input, t.pointwise("aten::mul.Scalar", noise, a))
    out = t.add(kept, shift)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        return grads

    return t.record(out, [kept], gradient)
