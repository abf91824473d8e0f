"""Embeddings, indexing by tensors of positions, and masks (torch/_decomp/decompositions.py, torch/_refs).

The gradient of a table is zeros that the gradients of its rows are added to: one buffer of its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.arithmetic import sub
from staticmem.ops.traces.factories import iota
from staticmem.ops.traces.joining import cat
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.scattering import gathered, scattered
from staticmem.ops.traces.views import expand, slice_
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Tracer


@traced("embedding")
def embedding(
    t: Tracer, weight: Node, indices: Node, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Node:  # fmt: skip
    """The call stays as it is; its backward is decomposed (`embedding_dense_backward`)."""
    given = (weight, indices, padding_idx, scale_grad_by_freq, sparse)
    kept = next((k for k in range(4, 1, -1) if given[k] != (-1, False, False)[k - 2]), 1)
    out = t.new("aten::embedding", given[: kept + 1], (*indices.shape, *weight.shape[1:]), weight.dtype)

    def back(grad: Node) -> Node:
        if sparse or scale_grad_by_freq:
            raise ValueError("gradients of a table that are sparse or divided by frequencies are not traced")
        dtype, rows = grad.dtype, weight.shape[0]
        grad = t.opmath(grad)
        positions = t.cast(indices, dtypes.int64)
        valid = _both(t, _compared(t, "ge", positions, 0), _compared(t, "lt", positions, rows))
        mask = _both(t, valid, _compared(t, "ne", positions, padding_idx))
        while mask.ndim < grad.ndim:
            mask = t.unsqueeze(mask, -1)
        zeros = t.full((rows, *grad.shape[indices.ndim :]), 0, grad.dtype)
        target = "aten::_unsafe_masked_index_put_accumulate"
        return t.cast(t.new(target, (zeros, mask, (positions,), grad), zeros.shape, grad.dtype), dtype)

    return t.derive(out, weight, back)


def _compared(t: Tracer, name: str, node: Node, value: float) -> Node:
    return t.pointwise(f"aten::{name}.Scalar", node, value, dtype=dtypes.bool_)


def _both(t: Tracer, a: Node, b: Node) -> Node:
    return t.pointwise("aten::bitwise_and.Tensor", a, b)


def index_form(self: Node, indices: Sequence[Node | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of `self[indices]` (`meta_index_Tensor` of torch/_meta_registrations.py).

    Raises:
        ValueError: a mask, whose result has a size that is in the data.
    """
    picked = [index for index in indices if index is not None]
    if any(index.dtype in (dtypes.bool_, dtypes.int8, dtypes.uint8) for index in picked):
        raise ValueError("a mask as an index gives sizes that are in the data")
    if not picked or len(indices) > self.ndim:
        raise ValueError(f"{len(indices)} indices of a tensor with {self.ndim} dimensions")
    shape = layout.broadcast_shapes(*[index.shape for index in picked])
    used = [k for k, index in enumerate(indices) if index is not None]
    rest = [k for k in range(self.ndim) if k not in used]
    before = [k for k in rest if k < used[0]] if used[-1] - used[0] == len(used) - 1 else []
    after = [k for k in rest if k not in before]
    sizes = (*[self.shape[k] for k in before], *shape, *[self.shape[k] for k in after])
    repeated = (*[self.strides[k] for k in before], *(0,) * len(shape), *[self.strides[k] for k in after])
    return sizes, layout.pointwise_strides(sizes, ((sizes, repeated),)) if self.numel else repeated


@traced("index")
def index(t: Tracer, self: Node, indices: Sequence[Node | None], *, size: int | None = None) -> Node:
    return _index(t, "aten::index.Tensor", self, indices)


@traced("_unsafe_index")
def unsafe_index(t: Tracer, self: Node, indices: Sequence[Node | None]) -> Node:
    return _index(t, "aten::_unsafe_index.Tensor", self, indices)


def _index(t: Tracer, target: str, self: Node, indices: Sequence[Node | None]) -> Node:
    shape, strides = index_form(self, indices)
    out = t.new(target, (self, tuple(indices)), shape, self.dtype, strides)

    def back(grad: Node) -> Node:
        zeros = t.full(self.shape, 0, self.dtype)
        return t.new("aten::index_put", (zeros, tuple(indices), grad, True), self.shape, self.dtype)

    return t.derive(out, self, back)


@traced("index_select")
def index_select(t: Tracer, self: Node, dim: int, index: Node) -> Node:
    dim = self.dim(dim)
    if index.ndim > 1 or not self.ndim:
        raise ValueError("index_select takes positions in one dimension, of a tensor that has one")
    out = selected(t, self, dim, index if index.ndim else t.unsqueeze(index, 0))

    def back(grad: Node) -> Node:
        """`index_add` into zeros."""
        zeros = t.full(self.shape, 0, grad.dtype)
        at = index if index.ndim else t.unsqueeze(index, 0)
        return t.new("aten::index_put", (zeros, (*(None,) * dim, at), grad, True), self.shape, grad.dtype)

    return t.derive(out, self, back)


def selected(t: Tracer, self: Node, dim: int, positions: Node) -> Node:
    """`index_select` of torch/_refs: an index, in the memory format of its input."""
    indices = (*(None,) * dim, positions)
    shape, strides = index_form(self, indices)
    out = t.new("aten::index.Tensor", (self, indices), shape, self.dtype, strides)
    last = layout.prefers_channels_last(self.shape, self.strides)
    if (layout.is_channels_last_contiguous if last else layout.is_contiguous)(shape, strides):
        return out
    return t.clone(out, (layout.channels_last_strides if last else layout.contiguous_strides)(shape))


def _triangle(t: Tracer, self: Node, compare: str, diagonal: int) -> Node:
    columns = t.unsqueeze(t.iota(self.shape[-1]), -2)
    rows = t.unsqueeze(t.iota(self.shape[-2]), -1)
    mask = _compared(t, compare, t.pointwise("aten::sub.Tensor", columns, rows), diagonal)
    if self.dtype is dtypes.bool_:
        out = t.pointwise("aten::logical_and", mask, self, dtype=dtypes.bool_)
    else:
        out = t.pointwise("aten::where.self", mask, self, t.full((), 0, self.dtype), dtype=self.dtype)
    return out if layout.is_contiguous(out.shape, out.strides) else t.clone(out)


@traced("tril")
def tril(t: Tracer, self: Node, diagonal: int = 0) -> Node:
    return t.derive(_triangle(t, self, "le", diagonal), self, lambda grad: _triangle(t, grad, "le", diagonal))


@traced("triu")
def triu(t: Tracer, self: Node, diagonal: int = 0) -> Node:
    return t.derive(_triangle(t, self, "ge", diagonal), self, lambda grad: _triangle(t, grad, "ge", diagonal))


@traced("one_hot")
def one_hot(t: Tracer, self: Node, num_classes: int = -1) -> Node:
    if num_classes < 1:
        raise ValueError("a one-hot encoding whose classes the data count breaks the graph")
    column = t.unsqueeze(self, -1)
    return t.cast(t.compare("eq", column, iota(t, num_classes)), dtypes.int64)


@traced("diff")
def diff(t: Tracer, self: Node, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Node:
    if self.dtype.kind == "bool":
        raise ValueError("a difference of booleans is not traced")
    if prepend is not None or append is not None:
        self = cat(t, [x for x in (prepend, self, append) if x is not None], dim)
    for _ in range(n):
        size = self.shape[self.dim(dim)]
        before = slice_(t, self, dim, 0, size - 1)
        self = sub(t, slice_(t, self, dim, 1, size), before)
    return self


@traced("gather")
def gather(t: Tracer, self: Node, dim: int, index: Node, *, sparse_grad: bool = False) -> Node:
    out = gathered(t, self, dim, index)

    def gradient(grad: Node) -> Node:
        zeros = t.full(self.shape, 0, grad.dtype)
        return scattered(t, "aten::scatter_add", zeros, dim, index, grad)

    return t.derive(out, self, gradient)


@traced("take_along_dim")
def take_along_dim(t: Tracer, self: Node, indices: Node, dim: int | None = None) -> Node:
    """Both broadcast along the other dimensions; positions count from the end below zero."""
    if dim is None:
        raise ValueError("take_along_dim of all elements is not traced")
    axis = self.dim(dim)
    sizes = layout.broadcast_shapes(
        (*self.shape[:axis], 1, *self.shape[axis + 1 :]), (*indices.shape[:axis], 1, *indices.shape[axis + 1 :])
    )
    of_index, of_self = list(sizes), list(sizes)
    of_index[axis], of_self[axis] = indices.shape[axis], self.shape[axis]
    index = expand(t, indices, of_index)
    source = expand(t, self, of_self)
    index = t.pointwise("aten::remainder.Scalar", index, self.shape[axis])
    return gather(t, source, dim, index)
