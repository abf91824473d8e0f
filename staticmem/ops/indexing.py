"""Indexing, gathering and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, result_type
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.dynamic import masked_index
from staticmem.ops.joining import cat
from staticmem.ops.pointwise import grad_of, inplace, sub
from staticmem.ops.registry import rule
from staticmem.ops.views import expand, narrow, reshape


def _zeros_like(self: Tensor, kernel: str = "aten.zeros.default") -> Any:
    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, grad_of(grads).dtype, kernel=kernel)

    return gradient


@rule("aten::embedding")
def embedding(
    e: Eager, weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Saves indices; the gradient is dense, of the table's size."""
    out = e.empty((*indices.shape, *weight.shape[1:]), weight.dtype, kernel="aten.embedding.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(weight.shape, grad_of(grads).dtype, kernel="aten.embedding_dense_backward.default")

    e.record("EmbeddingBackward0", out, [weight], [Formula((0,), gradient)], [indices])
    return out


@rule("aten::index")
def index(e: Eager, self: Tensor, indices: Sequence[Tensor | None], *, size: int | None = None) -> Tensor:
    """Saves indices; backward makes zeros of the input's size and accumulates into them. A mask is turned into
    positions first, at most all of them."""
    indices = masked_index(e, self, indices, size)
    given = [(i, t) for i, t in enumerate(indices) if t is not None]
    picked = layout.broadcast_shapes(*(t.shape for _, t in given))
    used = [i for i, _ in given]
    adjacent = used == list(range(used[0], used[0] + len(used)))
    rest = [s for i, s in enumerate(self.shape) if i not in used]
    at = used[0] if adjacent else 0
    out = e.empty((*rest[:at], *picked, *rest[at:]), self.dtype, kernel="aten.index.Tensor")
    e.record(
        "IndexBackward0",
        out,
        [self],
        [Formula((0,), _zeros_like(self, "aten.new_zeros.default"))],
        [t for _, t in given],
    )
    return out


@rule("aten::_unsafe_index")
def unsafe_index(e: Eager, self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """As `index` without checks; backward makes zeros of the input's size and a copy with the gradient put in."""
    out = index(e, self, indices)
    node = out.grad_fn
    if node is not None:

        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            e.empty(self.shape, grad_of(grads).dtype, kernel="aten.new_zeros.default")
            return e.empty(self.shape, grad_of(grads).dtype, kernel="aten._unsafe_index_put.default")

        node.name, node.formulas = "UnsafeIndexBackward0", [Formula((0,), gradient)]
    return out


@rule("aten::index_select")
def index_select(e: Eager, self: Tensor, dim: int, index: Tensor) -> Tensor:
    """Saves the index; backward makes zeros of the input's size and adds into them."""
    axis = self.dim(dim)
    shape = tuple(index.numel if i == axis else s for i, s in enumerate(self.shape))
    out = e.empty(shape, self.dtype, kernel="aten.index_select.default")
    e.record("IndexSelectBackward0", out, [self], [Formula((0,), _zeros_like(self))], [index])
    return out


@rule("aten::gather")
def gather(e: Eager, self: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    """Saves its input and the index; backward scatters into zeros of the input's size."""
    out = e.empty(index.shape, self.dtype, kernel="aten.gather.default")
    formula = Formula((0,), _zeros_like(self, "aten.new_zeros.default"))
    e.record("GatherBackward0", out, [self], [formula], [self, index])
    return out


@rule("aten::take_along_dim")
def take_along_dim(e: Eager, self: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """As `gather`, after both are broadcast over the other dimensions and indices are wrapped, which is a copy."""
    if dim is None:
        return gather(e, reshape(e, self, (self.numel,)), 0, reshape(e, indices, (indices.numel,)))
    axis = self.dim(dim)

    def target(tensor: Tensor) -> layout.Shape:
        other = layout.broadcast_shapes(*((*t.shape[:axis], 1, *t.shape[axis + 1 :]) for t in (self, indices)))
        return (*other[:axis], tensor.shape[axis], *other[axis + 1 :])

    wide, index = expand(e, self, target(self)), expand(e, indices, target(indices))
    return gather(e, wide, axis, e.pointwise("aten.remainder.Scalar", index))


@rule("aten::bucketize")
def bucketize(e: Eager, self: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Integer positions without gradient."""
    return e.empty(self.shape, dtypes.int32 if out_int32 else dtypes.int64, kernel="aten.bucketize.Tensor")


@rule("aten::searchsorted")
def searchsorted(
    e: Eager, sorted_sequence: Tensor, self: Tensor, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Integer positions without gradient."""
    return e.empty(self.shape, dtypes.int32 if out_int32 else dtypes.int64, kernel="aten.searchsorted.Tensor")


@rule("aten::where")
def where(e: Eager, condition: Tensor, self: Any = None, other: Any = None) -> Tensor:
    """Saves the condition; each gradient is one tensor of the result's size. A number becomes a 0-dim tensor."""
    operands = []
    for value in (self, other):
        if isinstance(value, Tensor):
            operands.append(value)
        else:
            like = self if isinstance(self, Tensor) else other if isinstance(other, Tensor) else None
            dtype = like.dtype if like is not None else dtypes.float32
            operands.append(e.empty((), dtype, kernel="aten.scalar_tensor.default"))
    a, b = operands
    out = e.pointwise("aten.where.self", condition, a, b, dtype=result_type([a, b]))

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        return e.pointwise("aten.where.self", condition, grad, dtype=grad.dtype)

    e.record("WhereBackward0", out, [a, b], [Formula((1,), gradient), Formula((0,), gradient)], [condition])
    return out


@rule("aten::masked_fill")
def masked_fill(e: Eager, self: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Saves the mask; result and gradient are contiguous masked copies."""
    shape = layout.broadcast_shapes(self.shape, mask.shape)
    out = e.empty(shape, self.dtype, kernel="aten.masked_fill.Scalar")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(shape, grad_of(grads).dtype, kernel="aten.masked_fill.Scalar")

    e.record("MaskedFillBackward0", out, [self], [Formula((0,), gradient)], [mask])
    return out


@rule("aten::masked_fill_")
def masked_fill_(e: Eager, self: Tensor, mask: Tensor, value: Any) -> Tensor:
    """In place; saves the mask; the gradient is one masked copy."""
    out = inplace(e, self, "aten.masked_fill_.Scalar")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, grad_of(grads).dtype, kernel="aten.masked_fill.Scalar")

    e.record("MaskedFillBackward0", out, [self], [Formula((0,), gradient)], [mask])
    return out


@rule("aten::tril", "aten::triu")
def tril(e: Eager, self: Tensor, diagonal: int = 0) -> Tensor:
    """A new contiguous tensor; so is its gradient."""
    out = e.empty(self.shape, self.dtype, kernel="aten.tril.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, grad_of(grads).dtype, kernel="aten.tril.default")

    e.record("TrilBackward0", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::diff")
def diff(
    e: Eager, self: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """A difference of two narrowed views, after a cat with what is prepended or appended."""
    parts = [t for t in (prepend, self, append) if t is not None]
    source = cat(e, parts, dim) if len(parts) > 1 else self
    axis = source.dim(dim)
    for _ in range(n):
        length = source.shape[axis] - 1
        before = narrow(e, source, axis, 0, length)  # C++ evaluates the second operand first
        source = sub(e, narrow(e, source, axis, 1, length), before)
    return source


@rule("aten::one_hot")
def one_hot(e: Eager, self: Tensor, num_classes: int = -1) -> Tensor:
    """int64 of one more dimension, without gradient."""
    return e.empty((*self.shape, num_classes), dtypes.int64, kernel="aten.zeros.default")


@rule("aten::meshgrid")
def meshgrid(e: Eager, tensors: Sequence[Tensor], indexing: Any = "ij") -> list[Tensor]:
    """Expanded views; `xy` indexing swaps the first two tensors and transposes the results."""
    if indexing == "xy" and len(tensors) > 1:
        first, second, *rest = meshgrid(e, (tensors[1], tensors[0], *tensors[2:]))
        return [second, first, *rest]
    shape = tuple(t.numel for t in tensors)
    views = []
    for i, tensor in enumerate(tensors):
        view = reshape(e, tensor, tuple(s if j == i else 1 for j, s in enumerate(shape)))
        views.append(expand(e, view, shape))
    return views
