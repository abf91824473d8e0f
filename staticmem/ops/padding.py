"""Padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule


def _padded(self: Tensor, pad: Sequence[int]) -> list[int]:
    sizes = list(self.shape)
    for i in range(len(pad) // 2):
        sizes[self.ndim - 1 - i] += pad[2 * i] + pad[2 * i + 1]
    return sizes


@rule("aten::constant_pad_nd")
def constant_pad_nd(e: Eager, self: Tensor, pad: Any, value: Any = 0) -> Tensor:
    """A new tensor, saves nothing; backward pads by the negative: a clone of the inner part."""
    if all(p <= 0 for p in pad):  # PadNd.cpp: a clone of the narrowed input
        inner = e.alias(self, tuple(_padded(self, pad)), self.strides)
        out = e.empty_like(inner, kernel="aten.constant_pad_nd.default")
    else:
        sizes = tuple(_padded(self, pad))
        strides = layout.channels_last_strides(sizes) if self.prefers_channels_last else None
        out = e.empty(sizes, self.dtype, strides, "aten.constant_pad_nd.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        if any(p < 0 for p in pad):
            strides = layout.channels_last_strides(self.shape) if grad.prefers_channels_last else None
            return e.empty(self.shape, grad.dtype, strides, "aten.constant_pad_nd.default")
        inner = e.alias(grad, self.shape, grad.strides)
        return e.empty_like(inner, kernel="aten.constant_pad_nd.default")

    e.record("ConstantPadNdBackward0", out, [self], [Formula((0,), gradient)])
    return out


@rule(
    "aten::reflection_pad1d", "aten::reflection_pad2d", "aten::reflection_pad3d", "aten::replication_pad1d",
    "aten::replication_pad2d", "aten::replication_pad3d",
)  # fmt: skip
def mirror_pad(e: Eager, self: Tensor, padding: Any) -> Tensor:
    """A new contiguous tensor, saves its input; backward makes one tensor of the input's size."""
    out = e.empty(_padded(self, padding), self.dtype, kernel="aten.reflection_pad2d.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, self.dtype, kernel="aten.reflection_pad2d_backward.default")

    e.record("ReflectionPad2DBackward0", out, [self], [Formula((0,), gradient)], [self])
    return out


@rule("aten::pad")
def pad(e: Eager, self: Tensor, pad: Any, mode: Any = "constant", value: Any = None) -> Tensor:
    """By the mode: as `constant_pad_nd`, `reflection_pad`; circular is a new tensor whose backward is one copy."""
    if mode == "constant":
        return constant_pad_nd(e, self, pad, value)
    if mode != "circular":
        return mirror_pad(e, self, pad)
    out = e.empty(_padded(self, pad), self.dtype, kernel="aten.new_empty.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, grad_of(grads).dtype, kernel="aten.slice_backward.default")

    e.record("CircularPadBackward", out, [self], [Formula((0,), gradient)])
    return out
