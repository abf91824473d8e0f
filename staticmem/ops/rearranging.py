"""Copies with elements repeated, reversed, shifted, shuffled or padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.indexing import index_select
from staticmem.ops.onnx import Context, integer, real, text, translation
from staticmem.ops.pointwise import grad_of, gradient_like
from staticmem.ops.registry import rule
from staticmem.ops.views import clone, expand, flatten, reshape, reshape_raw, unsqueeze


@rule("repeat tile")
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

    return e.record("RepeatBackward0", out, [self], [Formula((0,), gradient)])


@rule("repeat_interleave")
def repeat_interleave(
    e: Eager, self: Tensor, repeats: Any, dim: int | None = None, output_size: int | None = None
) -> Tensor:
    """An integer count: unsqueeze, expand, clone and flatten (Repeat.cpp). Counts in a tensor: a selection by indices
    that are made of them, of `output_size`."""
    source = reshape(e, self, (self.numel,)) if dim is None else self
    axis = source.dim(dim if dim is not None else 0)
    if not isinstance(repeats, int):
        if output_size is None:
            raise ValueError("repeat_interleave by a tensor without output_size has a size that only its values tell")
        index = e.empty((output_size,), dtypes.int64, kernel="aten.repeat_interleave.Tensor")
        return index_select(e, source, axis, index)
    wide = unsqueeze(e, source, axis + 1)
    wide = expand(e, wide, (*source.shape[: axis + 1], repeats, *source.shape[axis + 1 :]))
    return flatten(e, clone(e, wide, contiguous=True), axis, axis + 1)


@rule("flip")
def flip(e: Eager, self: Tensor, dims: Any) -> Tensor:
    """A new tensor in the input's layout; so is its gradient."""
    out = e.empty_like(self, kernel="aten.flip.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty_like(grad_of(grads), kernel="aten.flip.default")

    return e.record("FlipBackward0", out, [self], [Formula((0,), gradient)])


@rule("rot90")
def rot90(e: Eager, self: Tensor, k: int = 1, dims: Any = (0, 1)) -> Tensor:
    """A flip, transposed for odd turns (TensorTransformations.cpp); backward turns back."""
    k %= 4
    order = list(range(self.ndim))
    a, b = (self.dim(d) for d in dims)
    if k % 2:
        order[a], order[b] = order[b], order[a]

    def turned(e: Eager, source: Tensor) -> Tensor:
        rotated = e.empty_like(source, kernel="aten.rot90.default")
        return e.alias(rotated, tuple(rotated.shape[d] for d in order), tuple(rotated.strides[d] for d in order))

    out = turned(e, self)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return turned(e, grad_of(grads))

    return e.record("Rot90Backward0", out, [self], [Formula((0,), gradient)])


@rule("roll")
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

    return e.record("RollBackward0", out, [self], [Formula((0,), gradient)])


def _copied(e: Eager, self: Tensor, shape: tuple[int, ...], name: str, reverse: str) -> Tensor:
    out = e.empty(shape, self.dtype, kernel=f"aten.{name}.default")
    gradient = gradient_like(self, f"aten.{reverse}.default")
    return e.record(f"{name.title().replace('_', '')}Backward0", out, [self], [Formula((0,), gradient)])


@rule("pixel_shuffle", kinds=("enlarging",))
def pixel_shuffle(e: Eager, self: Tensor, upscale_factor: int) -> Tensor:
    """A copy in the new shape; backward makes the reverse copy."""
    n, c, h, w = self.shape
    r = upscale_factor
    return _copied(e, self, (n, c // r**2, h * r, w * r), "pixel_shuffle", "pixel_unshuffle")


@rule("pixel_unshuffle")
def pixel_unshuffle(e: Eager, self: Tensor, downscale_factor: int) -> Tensor:
    """A copy in the new shape; backward makes the reverse copy."""
    n, c, h, w = self.shape
    r = downscale_factor
    return _copied(e, self, (n, c * r**2, h // r, w // r), "pixel_unshuffle", "pixel_shuffle")


@rule("channel_shuffle")
def channel_shuffle(e: Eager, self: Tensor, groups: int) -> Tensor:
    """A copy; backward shuffles back, which is another copy."""
    return _copied(e, self, self.shape, "channel_shuffle", "channel_shuffle")


@rule("fliplr flipud")
def fliplr(e: Eager, self: Tensor) -> Tensor:
    """As `flip`."""
    return flip(e, self, (1 if self.ndim > 1 else 0,))


def _padded(self: Tensor, pad: Sequence[int]) -> list[int]:
    sizes = list(self.shape)
    for i in range(len(pad) // 2):
        sizes[self.ndim - 1 - i] += pad[2 * i] + pad[2 * i + 1]
    return sizes


@rule("constant_pad_nd")
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

    return e.record("ConstantPadNdBackward0", out, [self], [Formula((0,), gradient)])


@rule("reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d")
def mirror_pad(e: Eager, self: Tensor, padding: Any) -> Tensor:
    """A new contiguous tensor, saves its input; backward makes one tensor of the input's size."""
    out = e.empty(_padded(self, padding), self.dtype, kernel="aten.reflection_pad2d.default")
    gradient = gradient_like(self, "aten.reflection_pad2d_backward.default", self.dtype)
    return e.record("ReflectionPad2DBackward0", out, [self], [Formula((0,), gradient)], [self])


@rule("pad")
def pad(e: Eager, self: Tensor, pad: Any, mode: Any = "constant", value: Any = None) -> Tensor:
    """By the mode: as `constant_pad_nd`, `reflection_pad`; circular is a new tensor whose backward is one copy."""
    if mode == "constant":
        return constant_pad_nd(e, self, pad, value)
    if mode != "circular":
        return mirror_pad(e, self, pad)
    out = e.empty(_padded(self, pad), self.dtype, kernel="aten.new_empty.default")
    e.record("CircularPadBackward", out, [self], [Formula((0,), gradient_like(self, "aten.slice_backward.default"))])
    return out


@translation("Tile")
def onnx_tile(ctx: Context, node: Node) -> list[Op] | None:
    repeats = ctx.ints(node, 1, "repeats")
    return None if repeats is None else [ctx.op(node, "aten::repeat", ctx.ref(node.inputs[0]), repeats)]


@translation("Pad")
def onnx_pad(ctx: Context, node: Node) -> list[Op] | None:
    pads = ctx.ints(node, 1, "pads")
    rank = ctx.rank(node.inputs[0])
    if pads is None:
        return None
    axes = ctx.ints(node, 3)
    full = list(pads)
    if axes is not None:
        full = [0] * 2 * rank
        for position, axis in enumerate(axes):
            full[axis % rank], full[axis % rank + rank] = pads[position], pads[position + len(axes)]
    count = len(full) // 2
    order = [p for axis in reversed(range(count)) for p in (full[axis], full[axis + count])]
    mode = {"edge": "replicate", "wrap": "circular"}.get(text(node, "mode", "constant"), text(node, "mode", "constant"))
    while len(order) > 2 and mode != "constant" and order[-2:] == [0, 0]:
        order = order[:-2]
    while len(order) > 4 and order[-2:] == [0, 0] and len(order) > 2 * (count - 1):
        order = order[:-2]
    value = ctx.number(node, 2)
    if mode != "constant":
        return [ctx.op(node, "aten::pad", ctx.ref(node.inputs[0]), tuple(order), mode)]
    fill = real(node, "value", 0.0) if value is None else value
    return [ctx.op(node, "aten::pad", ctx.ref(node.inputs[0]), tuple(order), "constant", fill)]


@translation("DepthToSpace")
def onnx_depth_to_space(ctx: Context, node: Node) -> list[Op] | None:
    """`pixel_shuffle` is the mode CRD: channels before positions."""
    if text(node, "mode", "DCR") != "CRD":
        return None
    return [ctx.op(node, "aten::pixel_shuffle", ctx.ref(node.inputs[0]), integer(node, "blocksize", 2))]
