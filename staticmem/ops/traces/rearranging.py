"""Padding by a number, by reflection and by repetition.

Sources: torch/_decomp/decompositions.py (`_reflection_or_replication_pad`, `_reflection_pad_backward`),
tools/autograd/derivatives.yaml (`constant_pad_nd_backward`: a pad by less than nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form


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

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [_constant(t, grads[0], tuple([-p for p in pads]), 0.0)]

    t.record(out, [self], gradient)
    return out


def _constant(t: Tracer, self: Node, pads: tuple[int, ...], value: float) -> Node:
    shape = list(self.shape)
    for k in range(len(pads) // 2):
        shape[-1 - k] += pads[2 * k] + pads[2 * k + 1]
    if min(shape, default=1) < 0:
        raise ValueError(f"padding {list(self.shape)} by {list(pads)}")
    last = layout.prefers_channels_last(self.shape, self.strides)
    strides = layout.channels_last_strides(tuple(shape)) if last else None
    return t.new("aten::constant_pad_nd", (self, pads, value), tuple(shape), self.dtype, strides)


def iota(t: Tracer, length: int, start: int = 0) -> Node:
    return t.node(
        "prims::iota", (length,), form((length,), dtypes.int64), {"start": start, "step": 1, "requires_grad": False}
    )


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
        where = iota(t, before + size + after, -before)
        inner = t.pointwise("aten::abs", t.sub(size - 1, t.pointwise("aten::abs", where)))
        return t.sub(size - 1, inner)

    out = t.cast(_padded(t, t.opmath(self), padding, index), self.dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [_reflected_back(t, grads[0], self, padding)]

    t.record(out, [self], gradient)
    return out


@traced("replication_pad1d replication_pad2d replication_pad3d")
def replication_pad(t: Tracer, self: Node, padding: Sequence[int]) -> Node:
    def index(before: int, size: int, after: int) -> Node:
        where = iota(t, before + size + after, -before)
        return t.pointwise("aten::clamp_max", t.pointwise("aten::clamp_min", where, 0), size - 1)

    out = t.cast(_padded(t, t.opmath(self), padding, index), self.dtype)
    rank = len(padding) // 2

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        target = f"aten::replication_pad{rank}d_backward"
        return [t.new(target, (grads[0], self, tuple(padding)), self.shape, self.dtype)]

    t.record(out, [self], gradient)
    return out


def _reflected_back(t: Tracer, grad: Node, self: Node, padding: Sequence[int]) -> Node:
    """`_reflection_pad_backward`: a masked index of the gradient for the middle and for each combination of borders."""
    rank = len(padding) // 2
    sizes = self.shape[-rank:]
    places = []
    for k, size in enumerate(self.shape):
        places.append(t.view(iota(t, size), [-1 if d == k else 1 for d in range(self.ndim)]))
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
            chosen = [ranges[k][1 if step == -1 else 2 if step else 0] for k, step in enumerate(steps)]
            if all(low <= high for _, (_, low, high) in chosen):  # else no padding is there
                total = t.add(total, part(chosen))
    return total
