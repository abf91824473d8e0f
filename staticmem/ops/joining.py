"""Joining tensors, and splitting one into views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, result_type
from staticmem.eager.strides import broadcast_shapes
from staticmem.eager.tensor import Tensor
from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.casts import copy_
from staticmem.ops.onnx import Context, integer, translation
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule
from staticmem.ops.views import at_least, expand, narrow, reshape, select, slice_


@rule("cat", aliases="concat concatenate")
def cat(e: Eager, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Saves sizes; the gradient of each input is a narrow view of the incoming one (cast where dtypes differ)."""
    given = list(tensors)
    tensors = [t for t in given if t.shape != (0,)] or given
    first = tensors[0]
    axis = first.dim(dim)
    total = sum(t.shape[axis] for t in tensors)
    shape = tuple(total if i == axis else s for i, s in enumerate(first.shape))
    for other in tensors:
        if len(other.shape) != len(shape) or any(
            s != t for i, (s, t) in enumerate(zip(other.shape, shape, strict=True)) if i != axis
        ):
            raise ValueError(f"cat of {[list(t.shape) for t in tensors]} along {axis}")
    # TensorShape.cpp, cat_compute_output_memory_format: the common suggestion of all, else contiguous
    strides = layout.channels_last_strides(shape) if all(t.prefers_channels_last for t in tensors) else None
    out = e.empty(shape, result_type(tensors), strides, "aten.cat.default")

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)
        results: list[Tensor | None] = []
        for tensor, wanted in zip(given, need, strict=True):
            if not wanted:
                results.append(None)
            elif tensor.shape == (0,):  # legacy: an empty 1-D tensor joins anything
                results.append(e.empty((0,), tensor.dtype, kernel="aten.zeros.default"))
            else:
                results.append(e.to_dtype(e.alias(grad, tensor.shape, grad.strides), tensor.dtype))
        return results

    return e.record("CatBackward0", out, given, [Formula(tuple(range(len(given))), gradients)])


@rule("pad_sequence")
def pad_sequence(
    e: Eager, sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:  # fmt: skip
    """Fills a tensor and copies each sequence into it (PackedSequence.cpp)."""
    first, longest = sequences[0], max(s.shape[0] for s in sequences)
    sizes = (len(sequences), longest) if batch_first else (longest, len(sequences))
    out = e.empty((*sizes, *first.shape[1:]), first.dtype, kernel="aten.full.default")
    for index, sequence in enumerate(sequences):
        length = sequence.shape[0]
        start = longest - length if padding_side == "left" else 0
        if batch_first:
            place = narrow(e, select(e, out, 0, index), 0, start, length)
        else:
            place = select(e, narrow(e, out, 0, start, length), 1, index)
        copy_(e, place, sequence)
    return out


@rule("stack")
def stack(e: Eager, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Saves nothing; the gradient of each input is a view of the incoming one (unbind)."""
    first = tensors[0]
    axis = dim + first.ndim + 1 if dim < 0 else dim
    shape = (*first.shape[:axis], len(tensors), *first.shape[axis:])
    out = e.empty(shape, result_type(tensors), kernel="aten.stack.default")

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)
        strides = grad.strides[:axis] + grad.strides[axis + 1 :]
        return [e.alias(grad, t.shape, strides) if wanted else None for t, wanted in zip(tensors, need, strict=True)]

    return e.record("StackBackward0", out, list(tensors), [Formula(tuple(range(len(tensors))), gradients)])


def _stacked(dims: int, axis: int) -> Callable[..., Tensor]:
    def run(e: Eager, tensors: Sequence[Tensor]) -> Tensor:
        """Views of at least so many dimensions, and `cat`."""
        parts = [at_least(e, t, dims) for t in tensors]
        return cat(e, parts, 0 if parts[0].ndim == 1 else axis)

    return run


rule("hstack")(_stacked(1, 1))

rule("vstack", aliases="row_stack")(_stacked(2, 0))

rule("dstack")(_stacked(3, 2))


@rule("column_stack")
def column_stack(e: Eager, tensors: Sequence[Tensor]) -> Tensor:
    """Columns are views of vectors; then `cat`."""
    return cat(e, [reshape(e, t, (t.numel, 1)) if t.ndim <= 1 else t for t in tensors], 1)


@rule("broadcast_tensors", kinds=("expanded", "view"))
def broadcast_tensors(e: Eager, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Expanded views."""
    shape = broadcast_shapes(*(t.shape for t in tensors))
    return [expand(e, t, shape) for t in tensors]


@rule("meshgrid")
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


def _split(e: Eager, self: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
    outs = [e.alias(self, tuple(n if i == axis else s for i, s in enumerate(self.shape)), self.strides) for n in sizes]

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        # split_with_sizes_backward: zeros for parts without a gradient, then one cat
        dtype = next(g.dtype for g in grads if g is not None)
        for part, grad in zip(outs, grads, strict=True):
            if grad is None:
                e.empty(part.shape, dtype, kernel="aten.zeros.default")
        last = all(g is not None and g.prefers_channels_last for g in grads)
        strides = layout.channels_last_strides(self.shape) if last else None
        return e.empty(self.shape, dtype, strides, "aten.cat.default")

    return e.record("SplitBackward0", outs, [self], [Formula((0,), gradient)])


@rule("split unsafe_split split_with_sizes unsafe_split_with_sizes", kinds=("split", "view"))
def split(e: Eager, self: Tensor, split_size: Any = None, dim: int = 0, *, split_sizes: Any = None) -> list[Tensor]:
    """Views; backward joins the gradients into one tensor of the input's size, zeros for missing ones."""
    axis = self.dim(dim)
    size = split_size if split_size is not None else split_sizes
    if isinstance(size, int):
        total = self.shape[axis]
        size = [min(size, total - i) for i in range(0, total, size)]
    if min(size, default=0) < 0:
        raise ValueError(f"parts of {list(size)}")
    return _split(e, self, list(size), axis)


@rule("chunk unsafe_chunk", kinds=("split", "view"))
def chunk(e: Eager, self: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    """As `split`."""
    axis = self.dim(dim)
    size = -(-self.shape[axis] // chunks)
    return split(e, self, max(size, 1), axis)


@rule("tensor_split", kinds=("split", "view"))
def tensor_split(e: Eager, self: Tensor, indices_or_sections: Any, dim: int = 0) -> list[Tensor]:
    """Slices: each part's backward makes zeros of the input's size, which are added up."""
    axis = self.dim(dim)
    total = self.shape[axis]
    if isinstance(indices_or_sections, int):
        base, extra = divmod(total, indices_or_sections)
        sizes = [base + (1 if i < extra else 0) for i in range(indices_or_sections)]
    else:
        edges = [0, *indices_or_sections, total]
        sizes = [b - a for a, b in pairwise(edges)]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [slice_(e, self, axis, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@rule("unbind", kinds=("split", "view"))
def unbind(e: Eager, self: Tensor, dim: int = 0) -> list[Tensor]:
    """Views; backward stacks the gradients into one tensor of the input's size, expanded zeros for missing ones."""
    axis = self.dim(dim)
    shape, strides = self.shape[:axis] + self.shape[axis + 1 :], self.strides[:axis] + self.strides[axis + 1 :]
    outs = [e.alias(self, shape, strides) for _ in range(self.shape[axis])]

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        dtype = next(g.dtype for g in grads if g is not None)
        for grad in grads:
            if grad is None:  # a scalar, expanded
                e.empty((), dtype, kernel="aten.zeros.default")
        return e.empty(self.shape, dtype, kernel="aten.stack.default")

    return e.record("UnbindBackward0", outs, [self], [Formula((0,), gradient)])


@translation("Concat")
def onnx_concat(ctx: Context, node: Node) -> list[Op]:
    parts = tuple(ctx.ref(n) for n in node.inputs if n)
    return [ctx.op(node, "aten::cat", parts, integer(node, "axis", 0))]


@translation("Split")
def onnx_split(ctx: Context, node: Node) -> list[Op] | None:
    axis, shape = integer(node, "axis", 0), ctx.net.shape(node.inputs[0])
    outputs = tuple(n or ctx.fresh(node) for n in node.outputs)
    sizes = ctx.ints(node, 1, "split")
    x = ctx.ref(node.inputs[0])
    if sizes is None:
        if shape is None or not outputs:
            return None
        size = -(-shape[axis % len(shape)] // len(outputs))
        if not size:  # parts of nothing
            return [ctx.op(node, "aten::split_with_sizes", x, (0,) * len(outputs), axis, outputs=outputs)]
        return [ctx.op(node, "aten::split.Tensor", x, size, axis, outputs=outputs)]
    if len(set(sizes[:-1])) <= 1 and 0 < sizes[-1] <= sizes[0] and len(sizes) == len(outputs):
        return [ctx.op(node, "aten::split.Tensor", x, sizes[0], axis, outputs=outputs)]
    return [ctx.op(node, "aten::split_with_sizes", x, sizes, axis, outputs=outputs)]
