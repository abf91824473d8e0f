"""Writes to places that a tensor of indices names, and what reads from them.

Sources: tools/autograd/derivatives.yaml, torch/_decomp/decompositions.py (`index_add`, `index_copy`, `index_fill`),
torch/_inductor/decomposition.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, gradient_of


def _like(self: Node) -> layout.Strides:
    return layout.dense_like(self.shape, self.strides)


def scattered(t: Tracer, target: str, self: Node, *args: Any, **kwargs: Any) -> Node:
    """The layout of `self`."""
    return t.new(target, (self, *args), self.shape, self.dtype, _like(self), **kwargs)


def gathered(t: Tracer, self: Node, dim: int, index: Node) -> Node:
    return t.new("aten::gather", (self, dim, index), index.shape, self.dtype)


@traced("scatter.src scatter.value")
def scatter(t: Tracer, self: Node, dim: int, index: Node, src: Any) -> Node:
    source = src if isinstance(src, Node) else None
    out = scattered(t, f"aten::scatter.{'value' if source is None else 'src'}", self, dim, index, src)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        by_self = scattered(t, "aten::scatter.value", grad, dim, index, 0) if need[0] else None
        by_source = gathered(t, grad, dim, index) if source is not None and need[1] else None
        return [by_self, by_source]

    return t.record(out, [self, source], gradient)


def _added(t: Tracer, out: Node, self: Node, source: Node, by_source: Any) -> Node:
    return t.derive_each(out, [self, source], (0, lambda grad: grad), (1, lambda grad: by_source(grad)))


@traced("scatter_add")
def scatter_add(t: Tracer, self: Node, dim: int, index: Node, src: Node) -> Node:
    out = scattered(t, "aten::scatter_add", self, dim, index, src)
    return _added(t, out, self, src, lambda grad: gathered(t, grad, dim, index))


@traced("scatter_reduce.two")
def scatter_reduce(
    t: Tracer, self: Node, dim: int, index: Node, src: Node, reduce: str, *, include_self: bool = True
) -> Node:
    if t.needs_grad(self, src) and (reduce != "sum" or not include_self):
        raise ValueError(f"the gradient of scatter_reduce by {reduce} is not traced")
    more = {} if include_self else {"include_self": False}
    out = scattered(t, "aten::scatter_reduce.two", self, dim, index, src, reduce, **more)
    return _added(t, out, self, src, lambda grad: gathered(t, grad, dim, index))


def _indices(self: Node, dim: int, index: Node) -> tuple[Node | None, ...]:
    return (*[None] * self.dim(dim), index)


def _read(t: Tracer, self: Node, dim: int, index: Node, shape: Sequence[int]) -> Node:
    return t.new("aten::index.Tensor", (self, _indices(self, dim, index)), tuple(shape), self.dtype)


def _put(t: Tracer, self: Node, indices: Sequence[Any], values: Node, accumulate: bool = False) -> Node:
    more = (accumulate,) if accumulate else ()
    return scattered(t, "aten::index_put", self, tuple(indices), values, *more)


@traced("index_add")
def index_add(t: Tracer, self: Node, dim: int, index: Node, source: Node, *, alpha: float = 1) -> Node:
    """bfloat16 stays a call of its own."""
    if self.dtype is dtypes.bfloat16:
        more = {} if alpha == 1 else {"alpha": alpha}
        out = scattered(t, "aten::index_add", self, dim, index, source, **more)
    else:
        values = source if alpha == 1 else t.mul(source, alpha)
        out = _put(t, self, _indices(self, dim, index), values, True)

    def by_source(grad: Node) -> Node:
        read = _read(t, grad, dim, index, source.shape)
        read = t.new("aten::expand", (read, source.shape), source.shape, read.dtype, read.strides)
        return read if alpha == 1 else t.pointwise("aten::mul.Scalar", read, alpha)

    return _added(t, out, self, source, by_source)


def _expanded_zero(t: Tracer, self: Node, dim: int, index: Node, value: float) -> Node:
    shape = (*self.shape[: self.dim(dim)], index.numel, *self.shape[self.dim(dim) + 1 :])
    return t.expand(t.full((), value, self.dtype), shape)


@traced("index_copy")
def index_copy(t: Tracer, self: Node, dim: int, index: Node, source: Node) -> Node:
    indices = _indices(self, dim, index)
    out = _put(t, self, indices, source)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        by_self = by_source = None
        if need[0]:
            by_self = _put(t, grad, indices, _expanded_zero(t, grad, dim, index, 0))
        if need[1]:
            read = _read(t, grad, dim, index, source.shape)
            by_source = t.new("aten::expand", (read, source.shape), source.shape, read.dtype, read.strides)
        return [by_self, by_source]

    return t.record(out, [self, source], gradient)


@traced("index_fill.int_Scalar")
def index_fill(t: Tracer, self: Node, dim: int, index: Node, value: float) -> Node:
    indices = _indices(self, dim, index)
    out = _put(t, self, indices, _expanded_zero(t, self, dim, index, value))
    return t.derive(out, self, lambda grad: _put(t, grad, indices, _expanded_zero(t, grad, dim, index, 0)))


@traced("index_put")
def index_put(t: Tracer, self: Node, indices: Sequence[Any], values: Node, accumulate: bool = False) -> Node:
    """Booleans as indices have sizes in the data."""
    if any(isinstance(i, Node) and i.dtype.kind == "bool" for i in indices) and t.needs_grad(values):
        raise ValueError("the gradient of values at a mask is not traced")
    out = _put(t, self, indices, values, accumulate)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        by_self = by_values = None
        if need[0]:
            zeros = None if accumulate else t.full(values.shape, 0, values.dtype)
            by_self = grad if zeros is None else _put(t, grad, indices, zeros)
        if need[1]:
            by_values = _read_many(t, grad, indices)
        return [by_self, by_values]

    return t.record(out, [self, values], gradient)


def _read_many(t: Tracer, self: Node, indices: Sequence[Any]) -> Node:
    """`index.Tensor`: its sizes are those of the indices in the place of their dimensions, in front where they are
    apart."""
    given = [k for k, index in enumerate(indices) if index is not None]
    shape = layout.broadcast_shapes(*[indices[k].shape for k in given])
    rest = [size for k, size in enumerate(self.shape) if k not in given]
    first = given[0] if given[-1] - given[0] == len(given) - 1 else 0
    sizes = (*rest[:first], *shape, *rest[first:])
    return t.new("aten::index.Tensor", (self, tuple(indices)), sizes, self.dtype)


@traced("slice_scatter")
def slice_scatter(
    t: Tracer, self: Node, src: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Node:
    size = self.shape[dim]
    first, last = 0 if start is None else start, size if end is None else end
    low = min(max(first + size if first < 0 else first, 0), size)
    high = min(max(last + size if last < 0 else last, low), size)
    out = scattered(t, "aten::slice_scatter", self, src, dim, start, end, step)

    def by_self(grad: Node) -> Node:
        zeros = t.full(src.shape, 0, grad.dtype)
        return scattered(t, "aten::slice_scatter", grad, zeros, dim, start, end, step)

    return t.derive_each(out, [self, src], (0, by_self), (1, lambda grad: t.slice(grad, dim, low, high, step)))


@traced("select_scatter")
def select_scatter(t: Tracer, self: Node, src: Node, dim: int, index: int) -> Node:
    out = scattered(t, "aten::select_scatter", self, src, dim, index)

    def by_self(grad: Node) -> Node:
        return scattered(t, "aten::select_scatter", grad, t.full(src.shape, 0, grad.dtype), dim, index)

    return t.derive_each(out, [self, src], (0, by_self), (1, lambda grad: t.select(grad, dim, index)))
