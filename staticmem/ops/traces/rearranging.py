"""Padding; shuffles of channels and pixels, which are views of more dimensions and a copy; tensors that are repeated,
turned round or moved along.

Sources: torch/_decomp/decompositions.py (`_reflection_or_replication_pad`, `_reflection_pad_backward`),
tools/autograd/derivatives.yaml (`constant_pad_nd_backward`: a pad by less than nothing), torch/_refs,
aten/src/ATen/native/Repeat.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.indexing import selected
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.views import clone, expand, flatten, unsqueeze, view
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Tracer


@traced("pad")
def pad(t: Tracer, self: Node, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Node:
    if mode == "constant":
        return constant_pad(t, self, pad, 0.0 if value is None else value)
    if mode == "reflect":
        return reflection_pad(t, self, pad)
    if mode == "replicate":
        return replication_pad(t, self, pad)
    raise ValueError(f"padding of the mode {mode} is not traced")


@traced("constant_pad_nd")
def constant_pad(t: Tracer, self: Node, pad: Sequence[int], value: float = 0.0) -> Node:
    pads = tuple(pad)
    out = _constant(t, self, pads, value)
    return t.derive(out, self, lambda grad: _constant(t, grad, tuple([-p for p in pads]), 0.0))


def _constant(t: Tracer, self: Node, pads: tuple[int, ...], value: float) -> Node:
    shape = list(self.shape)
    for k in range(len(pads) // 2):
        shape[-1 - k] += pads[2 * k] + pads[2 * k + 1]
    if min(shape, default=1) < 0:
        raise ValueError(f"padding {list(self.shape)} by {list(pads)}")
    last = layout.prefers_channels_last(self.shape, self.strides)
    strides = layout.channels_last_strides(tuple(shape)) if last else None
    return t.new("aten::constant_pad_nd", (self, pads, value), tuple(shape), self.dtype, strides)


def unsafe_index(t: Tracer, self: Node, indices: Sequence[Node | None]) -> Node:
    """`_unsafe_index.Tensor`: indices next to each other take the place of their dimensions."""
    given = [index for index in indices if index is not None]
    first = next(k for k, index in enumerate(indices) if index is not None)
    sizes = layout.broadcast_shapes(*[index.shape for index in given])
    shape = (*self.shape[:first], *sizes, *self.shape[first + len(given) :])
    return t.new("aten::_unsafe_index.Tensor", (self, tuple(indices)), shape, self.dtype)


def _padded(t: Tracer, self: Node, pads: Sequence[int], index: Callable[[int, int, int], Node]) -> Node:
    """One index after another from the first padded dimension on; on CUDA the result is contiguous."""
    rank = len(pads) // 2
    result = self
    for k in range(rank):
        axis, at = self.ndim - rank + k, 2 * (rank - 1 - k)
        places: list[Node | None] = [None] * self.ndim
        places[axis] = index(pads[at], self.shape[axis], pads[at + 1])
        result = unsafe_index(t, result, places)
    return result


@traced("reflection_pad1d reflection_pad2d reflection_pad3d")
def reflection_pad(t: Tracer, self: Node, padding: Sequence[int]) -> Node:
    def index(before: int, size: int, after: int) -> Node:
        where = t.iota(before + size + after, -before)
        inner = t.pointwise("aten::abs", t.sub(size - 1, t.pointwise("aten::abs", where)))
        return t.sub(size - 1, inner)

    out = t.cast(_padded(t, t.opmath(self), padding, index), self.dtype)
    return t.derive(out, self, lambda grad: _reflected_back(t, grad, self, padding))


@traced("replication_pad1d replication_pad2d replication_pad3d")
def replication_pad(t: Tracer, self: Node, padding: Sequence[int]) -> Node:
    def index(before: int, size: int, after: int) -> Node:
        where = t.iota(before + size + after, -before)
        return t.pointwise("aten::clamp_max", t.pointwise("aten::clamp_min", where, 0), size - 1)

    out = t.cast(_padded(t, t.opmath(self), padding, index), self.dtype)
    rank = len(padding) // 2

    def gradient(grad: Node) -> Node:
        target = f"aten::replication_pad{rank}d_backward"
        return t.new(target, (grad, self, tuple(padding)), self.shape, self.dtype)

    return t.derive(out, self, gradient)


def _reflected_back(t: Tracer, grad: Node, self: Node, padding: Sequence[int]) -> Node:
    """`_reflection_pad_backward`: a masked index of the gradient for the middle and for each combination of borders."""
    rank = len(padding) // 2
    sizes = self.shape[-rank:]
    places = []
    for k, size in enumerate(self.shape):
        places.append(t.view(t.iota(size), [-1 if d == k else 1 for d in range(self.ndim)]))
    batch, x = places[:-rank], places[-rank:]
    before = [padding[2 * (rank - 1 - k)] for k in range(rank)]
    after = [padding[2 * (rank - 1 - k) + 1] for k in range(rank)]
    center = [t.add(x[k], before[k]) for k in range(rank)]
    left = [t.sub(before[k], x[k]) for k in range(rank)]
    right = [t.sub(2 * (sizes[k] - 1) + before[k], x[k]) for k in range(rank)]

    def within(node: Node, low: int, high: int) -> Node:
        return t.pointwise(
            "aten::logical_and", t.compare("ge", node, low), t.compare("le", node, high), dtype=dtypes.bool_
        )

    ranges: list[tuple[Any, ...]] = []
    for k in range(rank):
        last = sizes[k] + before[k] + after[k] - 1
        ranges.append(
            (
                (center[k], (center[k], 0, last)),
                (left[k], (x[k], 1, before[k])),
                (right[k], (x[k], sizes[k] - after[k] - 1, sizes[k] - 2)),
            )
        )

    def part(chosen: Sequence[tuple[Node, tuple[Node, int, int]]]) -> Node:
        masks = [within(*bound) for _, bound in chosen]
        mask = masks[0]
        for other in masks[1:]:
            mask = t.pointwise("aten::logical_and", mask, other, dtype=dtypes.bool_)
        indices = (*batch, *[index for index, _ in chosen])
        return t.new("aten::_unsafe_masked_index", (grad, mask, indices, 0.0), self.shape, grad.dtype)

    middle = tuple([options[0] for options in ranges])
    total = part(middle)
    for steps in product((-1, 0, 1), repeat=rank):
        if any(steps):
            chosen = [ranges[k][{0: 0, -1: 1, 1: 2}[step]] for k, step in enumerate(steps)]
            if all(low <= high for _, (_, low, high) in chosen):  # else no padding is there
                total = t.add(total, part(chosen))
    return total


def _shuffled(t: Tracer, self: Node, factor: int) -> Node:
    *batch, channels, height, width = self.shape
    n = len(batch)
    view = t.view(self, (*batch, channels // factor**2, factor, factor, height, width))
    turned = t.permute(view, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    result = t.view(turned, (*batch, channels // factor**2, height * factor, width * factor))
    return _copied(t, result, self)


def _unshuffled(t: Tracer, self: Node, factor: int) -> Node:
    *batch, channels, height, width = self.shape
    n = len(batch)
    view = t.view(self, (*batch, channels, height // factor, factor, width // factor, factor))
    turned = t.permute(view, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    result = t.view(turned, (*batch, channels * factor**2, height // factor, width // factor))
    return _copied(t, result, self)


def _copied(t: Tracer, result: Node, like: Node) -> Node:
    """In the layout that the input suggests."""
    last = layout.prefers_channels_last(like.shape, like.strides)
    return t.clone(result, layout.channels_last_strides(result.shape) if last else None)


@traced("pixel_shuffle")
def pixel_shuffle(t: Tracer, self: Node, upscale_factor: int) -> Node:
    out = _shuffled(t, self, upscale_factor)
    return t.derive(out, self, lambda grad: _unshuffled(t, grad, upscale_factor))


@traced("pixel_unshuffle")
def pixel_unshuffle(t: Tracer, self: Node, downscale_factor: int) -> Node:
    out = _unshuffled(t, self, downscale_factor)
    return t.derive(out, self, lambda grad: _shuffled(t, grad, downscale_factor))


@traced("channel_shuffle native_channel_shuffle")
def channel_shuffle(t: Tracer, self: Node, groups: int) -> Node:
    out = _swapped(t, self, groups)
    return t.derive(out, self, lambda grad: _swapped(t, grad, self.shape[1] // groups))


def _swapped(t: Tracer, self: Node, groups: int) -> Node:
    batch, channels, *rest = self.shape
    view = t.view(self, (batch, groups, channels // groups, *rest))
    return t.view(t.permute(view, (0, 2, 1, *range(3, view.ndim))), self.shape)


@traced("repeat tile")
def repeat(t: Tracer, self: Node, repeats: Sequence[int]) -> Node:
    """`repeat_backward` sums over the repeats in a view that has them as dimensions."""
    repeats = (1,) * (self.ndim - len(repeats)) + tuple(repeats)
    missing = len(repeats) - self.ndim
    sizes = (1,) * missing + self.shape
    shape = tuple([size * times for size, times in zip(sizes, repeats, strict=True)])
    out = t.new("aten::repeat", (self, repeats), shape, self.dtype)

    def back(grad: Node) -> Node:
        if missing:
            grad = t.sum(grad, range(missing))
        apart: list[int] = []
        summed: list[int] = []
        for times, size in zip(repeats[missing:], self.shape, strict=True):
            if times != 1:
                summed.append(len(apart))
                apart.append(times)
            apart.append(size)
        return t.sum(t.view(grad, apart), summed) if summed else grad

    return t.derive(out, self, back)


@traced("repeat_interleave.self_int")
def repeat_interleave(
    t: Tracer, self: Node, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Node:
    """unsqueeze, expand, clone, flatten (`repeat_interleave_symint`, Repeat.cpp)."""
    if dim is None:
        self, dim = flatten(t, self), 0
    dim = self.dim(dim)
    wider = unsqueeze(t, self, dim + 1)
    wider = expand(t, wider, (*wider.shape[: dim + 1], repeats, *wider.shape[dim + 2 :]))
    return flatten(t, clone(t, wider, memory_format="contiguous_format"), dim, dim + 1)


@traced("flip")
def flip(t: Tracer, self: Node, dims: Sequence[int]) -> Node:
    order = tuple([self.dim(d) for d in ((dims,) if isinstance(dims, int) else dims)])
    return t.derive(_reversed(t, self, order), self, lambda grad: _reversed(t, grad, order))


def _reversed(t: Tracer, x: Node, dims: tuple[int, ...]) -> Node:
    return t.new("prims::rev", (x, dims), x.shape, x.dtype, layout.dense_like(x.shape, x.strides))


traced("fliplr")(lambda t, self: flip(t, self, (1,)))

traced("flipud")(lambda t, self: flip(t, self, (0,)))


@traced("rot90")
def rot90(t: Tracer, self: Node, k: int = 1, dims: Sequence[int] = (0, 1)) -> Node:
    """Quarter turns (TensorTransformations.cpp)."""
    first, second = (self.dim(d) for d in dims)

    def turned(x: Node, quarters: int) -> Node:
        if quarters % 4 == 0:
            return t.clone(x)
        if quarters % 4 == 2:
            return _reversed(t, x, (first, second))
        return t.transpose(_reversed(t, x, (second if quarters % 4 == 1 else first,)), first, second)

    return t.derive(turned(self, k), self, lambda grad: turned(grad, -k))


@traced("roll")
def roll(t: Tracer, self: Node, shifts: Sequence[int] | int, dims: Sequence[int] | int = ()) -> Node:
    """`roll` of torch/_refs: each dimension in turn is read at shifted positions; its backward rolls back."""
    by = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    along = (dims,) if isinstance(dims, int) else tuple(dims)
    if not along:
        return view(t, roll(t, flatten(t, self), by, (0,)), self.shape)
    if len(by) != len(along):
        raise ValueError(f"{len(by)} shifts in {len(along)} dimensions")

    def rolled(node: Node, forward: bool) -> Node:
        order = list(zip(by, along, strict=True))
        for shift, dim in order if forward else reversed(order):  # `roll_backward` turns both lists round
            node = _rolled(t, node, shift if forward else -shift, node.dim(dim))
        return node

    return t.derive(rolled(self, True), self, lambda grad: rolled(grad, False))


def _rolled(t: Tracer, self: Node, shift: int, dim: int) -> Node:
    size = self.shape[dim]
    if not self.numel:
        return t.clone(self)
    positions = t.iota(size)
    moved = t.pointwise("aten::add.Tensor", positions, (size - shift) % size)
    wrapped = t.pointwise("aten::fmod.Scalar", moved, size)
    return selected(t, self, dim, wrapped)
