"""Joining tensors (cat, stack), and splitting one into views; the gradient of one is the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.views import expand, select, slice_, unsqueeze, view
from staticmem.tracing.nodes import GETITEM, Node
from staticmem.tracing.tracer import Gradients, Tracer, form, promoted


def concatenated(t: Tracer, tensors: Sequence[Node], dim: int) -> Node:
    """One node, channels last where all operands suggest it (`cat_compute_output_memory_format` of TensorShape.cpp)."""
    first = tensors[0]
    axis = first.dim(dim)
    total = sum(node.shape[axis] for node in tensors)
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    last = all(layout.prefers_channels_last(node.shape, node.strides) for node in tensors)
    strides = layout.channels_last_strides(shape) if last else None
    return t.new("aten::cat", (tuple(tensors), dim), shape, promoted(tensors), strides)


@traced("cat")
def cat(t: Tracer, tensors: Sequence[Node], dim: int = 0) -> Node:
    """Empty tensors do not count, and copies of one tensor are an expanded view of it (`cat` of
    torch/_inductor/decomposition.py). Gradients are slices."""
    used = [node for node in tensors if node.shape != (0,)]
    if not used:
        used = list(tensors[:1])
    axis = used[0].dim(dim)
    kept = [node for node in used if node.shape[axis] != 0] or used[:1]
    if len(kept) == 1:
        only, dtype = kept[0], promoted(tensors)
        out = t.clone(only, layout.dense_like(only.shape, only.strides)) if dtype is only.dtype else t.cast(only, dtype)
    elif all(node is kept[0] for node in kept):
        out = _repeated(t, kept[0], axis, len(kept))
    else:
        out = concatenated(t, kept, dim)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad, start = grads[0], 0
        assert grad is not None
        results: list[Node | None] = []
        for node, wanted in zip(tensors, need, strict=True):
            if node.shape == (0,):
                results.append(t.full((0,), 0, node.dtype) if wanted else None)
                continue
            end = start + node.shape[axis]
            results.append(t.slice(grad, axis, start, end) if wanted else None)
            start = end
        return results

    return t.record(out, list(tensors), gradient)


def _repeated(t: Tracer, self: Node, axis: int, times: int) -> Node:
    shape = list(self.shape)
    shape.insert(axis, times)
    view = t.expand(t.unsqueeze(self, axis), shape)
    joined = (*self.shape[:axis], times * self.shape[axis], *self.shape[axis + 1 :])
    return t.clone(t.view(view, joined))


@traced("stack")
def stack(t: Tracer, tensors: Sequence[Node], dim: int = 0) -> Node:
    """A cat and a view of it; over a new last dimension a cat of unsqueezed tensors (torch/_refs, `stack`)."""
    out = stacked(t, tensors, dim)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [t.select(grads[0], dim, k) if wanted else None for k, wanted in enumerate(need)]

    return t.record(out, list(tensors), gradient)


def stacked(t: Tracer, tensors: Sequence[Node], dim: int) -> Node:
    first = tensors[0]
    axis = dim + first.ndim + 1 if dim < 0 else dim
    if axis == first.ndim:
        return concatenated(t, [t.unsqueeze(node, axis) for node in tensors], dim)
    shape = list(first.shape)
    shape.insert(axis, len(tensors))
    return t.view(concatenated(t, tensors, axis), shape)


@traced("split unsafe_split")
def split(t: Tracer, self: Node, split_size: Any, dim: int = 0) -> list[Node]:
    axis = self.dim(dim)
    if isinstance(split_size, tuple):
        return split_with_sizes(t, self, split_size, dim)
    size, step = self.shape[axis], max(split_size, 1)
    sizes = [min(step, size - start) for start in range(0, size, step)] or [0]
    return _split(t, "aten::split.Tensor", self, split_size, sizes, dim)


@traced("split.sizes split_with_sizes unsafe_split_with_sizes")
def split_with_sizes(t: Tracer, self: Node, split_sizes: Sequence[int], dim: int = 0) -> list[Node]:
    return _split(t, "aten::split_with_sizes", self, split_sizes, split_sizes, dim)


@traced("chunk unsafe_chunk")
def chunk(t: Tracer, self: Node, chunks: int, dim: int = 0) -> list[Node]:
    """A split into parts of the size rounded up, so there can be fewer than `chunks`."""
    size = self.shape[self.dim(dim)]
    return split(t, self, -(-size // chunks), dim)


def _split(t: Tracer, target: str, self: Node, given: Any, sizes: Sequence[int], dim: int) -> list[Node]:
    axis = self.dim(dim)
    shapes = [(*self.shape[:axis], size, *self.shape[axis + 1 :]) for size in sizes]
    outs = _parts(t, target, (self, given, dim), [form(shape, self.dtype, self.strides) for shape in shapes])

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        dtype = next(grad.dtype for grad in grads if grad is not None)
        given = [
            grad if grad is not None else t.full(shape, 0, dtype) for grad, shape in zip(grads, shapes, strict=True)
        ]
        return [concatenated(t, given, axis)]

    return t.record(outs, [self], gradient)


def _parts(t: Tracer, target: str, args: tuple[Any, ...], forms: Sequence[Any]) -> list[Node]:
    call = t.node(target, args, tuple(forms))
    return [t.node(GETITEM, (call, k), part) for k, part in enumerate(forms)]


@traced("unbind")
def unbind(t: Tracer, self: Node, dim: int = 0) -> list[Node]:
    axis = self.dim(dim)
    shape, strides = self.shape[:axis] + self.shape[axis + 1 :], self.strides[:axis] + self.strides[axis + 1 :]
    outs = _parts(t, "aten::unbind.int", (self, dim), [form(shape, self.dtype, strides)] * self.shape[axis])

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        dtype = next(grad.dtype for grad in grads if grad is not None)
        given = [grad if grad is not None else t.expand(t.full((), 0, dtype), shape) for grad in grads]
        return [stacked(t, given, dim)]

    return t.record(outs, [self], gradient)


@traced("unbind.__iter__")
def iterate(t: Tracer, self: Node, dim: int = 0) -> list[Node]:
    """`q, k, v = tensor`: Dynamo takes one index after the other (`TensorVariable.unpack_var_sequence` of
    torch/_dynamo/variables/tensor.py), where eager code makes one unbind."""
    return [select(t, self, dim, index) for index in range(self.shape[self.dim(dim)])]


@traced("hstack")
def hstack(t: Tracer, tensors: Sequence[Node]) -> Node:
    rows = [_at_least(t, node, 1) for node in tensors]
    return cat(t, rows, 0 if rows[0].ndim == 1 else 1)


@traced("vstack")
def vstack(t: Tracer, tensors: Sequence[Node]) -> Node:
    return cat(t, [_at_least(t, node, 2) for node in tensors], 0)


@traced("dstack")
def dstack(t: Tracer, tensors: Sequence[Node]) -> Node:
    return cat(t, [_at_least(t, node, 3) for node in tensors], 2)


def _at_least(t: Tracer, self: Node, dims: int) -> Node:
    """TensorTransformations.cpp, `atleast_2d`, `atleast_3d`: a third dimension comes last."""
    if self.ndim == 0:
        return view(t, self, (1,) * dims)
    if self.ndim == 1 and dims > 1:
        self = unsqueeze(t, self, 0)
    return unsqueeze(t, self, -1) if self.ndim == 2 and dims == 3 else self


@traced("meshgrid")
def meshgrid(t: Tracer, tensors: Sequence[Node], *, indexing: str = "ij") -> list[Node]:
    if indexing == "xy" and len(tensors) > 1:  # the first two change places
        second, first, *rest = meshgrid(t, [tensors[1], tensors[0], *tensors[2:]])
        return [first, second, *rest]
    sizes = [x.numel for x in tensors]
    shapes = [[size if k == d else 1 for d in range(len(sizes))] for k, size in enumerate(sizes)]
    return [expand(t, view(t, x, shape), sizes) for x, shape in zip(tensors, shapes, strict=True)]


@traced("column_stack")
def column_stack(t: Tracer, tensors: Sequence[Node]) -> Node:
    return cat(t, [x if x.ndim > 1 else view(t, x, (x.numel, 1)) for x in tensors], 1)


@traced("broadcast_tensors")
def broadcast_tensors(t: Tracer, tensors: Sequence[Node]) -> list[Node]:
    shape = layout.broadcast_shapes(*[tensor.shape for tensor in tensors])
    return [expand(t, tensor, shape) for tensor in tensors]


@traced("tensor_split")
def tensor_split(t: Tracer, self: Node, sections: int | Sequence[int], dim: int = 0) -> list[Node]:
    """Slices (`tensor_split_sections`, TensorShape.cpp)."""
    size = self.shape[self.dim(dim)]
    if isinstance(sections, int):
        if sections < 1:
            raise ValueError(f"{sections} sections")
        small, longer = divmod(size, sections)
        ends = [k * small + min(k, longer) for k in range(1, sections + 1)]
    else:
        ends = [*sections, size]
    return [slice_(t, self, dim, start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
