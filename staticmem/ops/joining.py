"""Joining and splitting along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, result_type
from staticmem.eager.tensor import Tensor
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule
from staticmem.ops.views import make_view, reshape, reshape_raw, slice_, unsqueeze


@rule("aten::cat", "aten::concat", "aten::concatenate")
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

    e.record("CatBackward0", out, given, [Formula(tuple(range(len(given))), gradients)])
    return out


@rule("aten::stack")
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

    e.record("StackBackward0", out, list(tensors), [Formula(tuple(range(len(tensors))), gradients)])
    return out


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

    e.record("SplitBackward0", outs, [self], [Formula((0,), gradient)])
    return outs


@rule("aten::split", "aten::split_with_sizes", kinds=("split", "view"))
def split(e: Eager, self: Tensor, split_size: Any = None, dim: int = 0, *, split_sizes: Any = None) -> list[Tensor]:
    """Views; backward joins the gradients into one tensor of the input's size, zeros for missing ones."""
    axis = self.dim(dim)
    size = split_size if split_size is not None else split_sizes
    if isinstance(size, int):
        total = self.shape[axis]
        size = [min(size, total - i) for i in range(0, total, size)]
    return _split(e, self, list(size), axis)


@rule("aten::chunk", kinds=("split", "view"))
def chunk(e: Eager, self: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    """As `split`."""
    axis = self.dim(dim)
    size = -(-self.shape[axis] // chunks)
    return split(e, self, max(size, 1), axis)


@rule("aten::tensor_split", kinds=("split", "view"))
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


@rule("aten::unbind", kinds=("split", "view"))
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

    e.record("UnbindBackward0", outs, [self], [Formula((0,), gradient)])
    return outs


@rule("aten::repeat", "aten::tile")
def repeat(e: Eager, self: Tensor, repeats: Any) -> Tensor:
    """A copy; backward reshapes (a view where strides allow) and sums over the repetitions."""
    counts = list(repeats)
    counts = [1] * (self.ndim - len(counts)) + counts
    padded = (1,) * (len(counts) - self.ndim) + self.shape
    shape = tuple(s * n for s, n in zip(padded, counts, strict=True))
    out = e.empty(shape, self.dtype, kernel="aten.repeat.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        lead = len(counts) - self.ndim
        for dim in range(1, lead + 1):  # new dimensions are summed away one by one
            grad = e.empty(shape[dim:], grad.dtype, kernel="aten.sum.dim_IntList")
        if all(n == 1 for n in counts[lead:]):
            return grad
        split: list[int] = []
        for count, size in zip(counts[lead:], self.shape, strict=True):
            split += [size] if count == 1 else [count, size]
        reshape_raw(e, grad, tuple(split))
        return e.empty(self.shape, grad.dtype, kernel="aten.sum.dim_IntList")

    e.record("RepeatBackward0", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::repeat_interleave")
def repeat_interleave(e: Eager, self: Tensor, repeats: Any, dim: int | None = None, **_: Any) -> Tensor:
    """An integer count: unsqueeze, expand, clone and flatten (Repeat.cpp)."""
    if not isinstance(repeats, int):
        raise ValueError("repeat_interleave by a tensor has a size that only its values tell")
    from staticmem.ops.views import clone, expand, flatten

    source = reshape(e, self, (self.numel,)) if dim is None else self
    axis = source.dim(dim if dim is not None else 0)
    wide = unsqueeze(e, source, axis + 1)
    wide = expand(e, wide, (*source.shape[: axis + 1], repeats, *source.shape[axis + 1 :]))
    return flatten(e, clone(e, wide, contiguous=True), axis, axis + 1)


@rule("aten::flip")
def flip(e: Eager, self: Tensor, dims: Any) -> Tensor:
    """A new tensor in the input's layout; so is its gradient."""
    out = e.empty_like(self, kernel="aten.flip.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty_like(grad_of(grads), kernel="aten.flip.default")

    e.record("FlipBackward0", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::rot90")
def rot90(e: Eager, self: Tensor, k: int = 1, dims: Any = (0, 1)) -> Tensor:
    """A flip, transposed for odd turns (TensorTransformations.cpp); backward turns back."""
    k %= 4
    order = list(range(self.ndim))
    a, b = (self.dim(d) for d in dims)
    if k % 2:
        order[a], order[b] = order[b], order[a]

    def turned(e: Eager, source: Tensor) -> Tensor:
        made = e.empty_like(source, kernel="aten.rot90.default")
        return e.alias(made, tuple(made.shape[d] for d in order), tuple(made.strides[d] for d in order))

    out = turned(e, self)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return turned(e, grad_of(grads))

    e.record("Rot90Backward0", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::roll")
def roll(e: Eager, self: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    """A new contiguous tensor, one a dimension that is rolled; so is its gradient."""
    if dims == ():
        return reshape(e, roll(e, reshape(e, self, (self.numel,)), shifts, 0), self.shape)
    count = 1 if isinstance(dims, int) else len(dims)

    def rolled(e: Eager, source: Tensor) -> Tensor:
        return [e.empty(source.shape, source.dtype, kernel="aten.roll.default") for _ in range(count)][-1]

    out = rolled(e, self)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return rolled(e, grad_of(grads))

    e.record("RollBackward0", out, [self], [Formula((0,), gradient)])
    return out


def _copied(e: Eager, self: Tensor, shape: tuple[int, ...], name: str, reverse: str) -> Tensor:
    out = e.empty(shape, self.dtype, kernel=f"aten.{name}.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, grad_of(grads).dtype, kernel=f"aten.{reverse}.default")

    e.record(f"{name.title().replace('_', '')}Backward0", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::pixel_shuffle")
def pixel_shuffle(e: Eager, self: Tensor, upscale_factor: int) -> Tensor:
    """A copy in the new shape; backward makes the reverse copy."""
    n, c, h, w = self.shape
    r = upscale_factor
    return _copied(e, self, (n, c // r**2, h * r, w * r), "pixel_shuffle", "pixel_unshuffle")


@rule("aten::pixel_unshuffle")
def pixel_unshuffle(e: Eager, self: Tensor, downscale_factor: int) -> Tensor:
    """A copy in the new shape; backward makes the reverse copy."""
    n, c, h, w = self.shape
    r = downscale_factor
    return _copied(e, self, (n, c * r**2, h // r, w // r), "pixel_unshuffle", "pixel_shuffle")


@rule("aten::channel_shuffle")
def channel_shuffle(e: Eager, self: Tensor, groups: int) -> Tensor:
    """A copy; backward shuffles back, which is another copy."""
    return _copied(e, self, self.shape, "channel_shuffle", "channel_shuffle")


__all__ = ["cat", "chunk", "make_view", "split", "stack", "unbind"]
