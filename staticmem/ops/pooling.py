"""Pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.convolution import onnx_padded, onnx_pads, pair
from staticmem.ops.onnx import Context, integer, integers, translation
from staticmem.ops.reduction import mean
from staticmem.ops.registry import rule
from staticmem.ops.views import as_strided


def _formatted(e: Eager, shape: tuple[int, ...], like: Tensor, dtype: dtypes.DType, kernel: str = "") -> Tensor:
    strides = layout.channels_last_strides(shape) if like.prefers_channels_last else None
    return e.empty(shape, dtype, strides, kernel)


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """`pooling_output_shape` of aten/src/ATen/native/Pool.h."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    out = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (out - 1) * stride >= size + padding:
        out -= 1  # the last window must start inside the input or its left padding
    if out < 1:
        raise ValueError(f"pooling output would be {out}: the input is smaller than the kernel")
    return out


def _pool_shape(
    input: Tensor, rank: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[int, ...]:
    kernel = pair(kernel_size, rank)
    strides = pair(stride, rank) if stride is not None and stride != () else kernel
    lead = input.ndim - rank
    spatial = (
        pooled_size(*args, ceil_mode)
        for args in zip(input.shape[lead:], kernel, strides, pair(padding, rank), pair(dilation, rank), strict=True)
    )
    return (*input.shape[:lead], *spatial)


@rule("max_pool2d max_pool3d max_pool1d")
def max_pool(
    e: Eager, self: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """Saves its input and int64 indices of the output's shape (also made, then dropped, in inference)."""
    return max_pool_with_indices(e, self, kernel_size, stride, padding, dilation, ceil_mode)[0]


@rule("max_pool2d_with_indices max_pool3d_with_indices max_pool1d_with_indices")
def max_pool_with_indices(
    e: Eager, self: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Saves its input and int64 indices of the output's shape."""
    rank = self.ndim - 2 if isinstance(kernel_size, int) else len(tuple(kernel_size))
    shape = _pool_shape(self, rank, kernel_size, stride, padding, dilation, ceil_mode)
    out = _formatted(e, shape, self, self.dtype, f"aten.max_pool{rank}d_with_indices.default")
    indices = _formatted(e, shape, self, dtypes.int64)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return _formatted(e, self.shape, self, self.dtype, f"aten.max_pool{rank}d_with_indices_backward.default")

    e.record("MaxPool2DWithIndicesBackward0", [out, indices], [self], [Formula((0,), gradient)], [self, indices])
    indices.grad_fn, indices.requires_grad = None, False
    return out, indices


@rule("avg_pool1d avg_pool2d avg_pool3d")
def avg_pool(
    e: Eager, self: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Saves its input."""
    rank = self.ndim - 2 if isinstance(kernel_size, int) else len(tuple(kernel_size))
    shape = _pool_shape(self, rank, kernel_size, stride, padding, 1, ceil_mode)
    out = _formatted(e, shape, self, self.dtype, f"aten.avg_pool{rank}d.default")
    return e.record(
        "AvgPool2DBackward0", out, [self], [_full_gradient(self, f"aten.avg_pool{rank}d_backward.default")], [self]
    )


def _full_gradient(self: Tensor, kernel: str) -> Formula:
    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return _formatted(e, self.shape, self, self.dtype, kernel)

    return Formula((0,), gradient)


@rule("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d")
def adaptive_avg_pool(e: Eager, self: Tensor, output_size: Any) -> Tensor:
    """Output (1, 1) is a mean over height and width; otherwise saves its input."""
    given = (output_size,) if isinstance(output_size, int) else tuple(output_size)
    lead = self.ndim - len(given)
    target = tuple(self.shape[lead + i] if size is None else size for i, size in enumerate(given))
    if all(size == 1 for size in target):  # AdaptiveAveragePooling.cpp; channels last keeps its layout by as_strided_
        out = mean(e, self, tuple(range(lead, self.ndim)), True)
        if self.prefers_channels_last:
            return as_strided(e, out, out.shape, layout.channels_last_strides(out.shape))
        return out
    kernel = f"aten._adaptive_avg_pool{len(target)}d"
    out = _formatted(e, (*self.shape[:lead], *target), self, self.dtype, f"{kernel}.default")
    e.record("AdaptiveAvgPool2DBackward0", out, [self], [_full_gradient(self, f"{kernel}_backward.default")], [self])
    return out


@rule("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d")
def adaptive_max_pool(e: Eager, self: Tensor, output_size: Any) -> tuple[Tensor, Tensor]:
    """Saves its input and int64 indices of the output's shape."""
    given = (output_size,) if isinstance(output_size, int) else tuple(output_size)
    shape = (*self.shape[: self.ndim - len(given)], *given)
    out = _formatted(e, shape, self, self.dtype, "aten.adaptive_max_pool2d.default")
    indices = _formatted(e, shape, self, dtypes.int64)
    formula = _full_gradient(self, "aten.adaptive_max_pool2d_backward.default")
    e.record("AdaptiveMaxPool2DBackward0", [out, indices], [self], [formula], [self, indices])
    return out, indices


@translation("MaxPool")
def onnx_max_pool(ctx: Context, node: Node) -> list[Op] | None:
    kernel = integers(node, "kernel_shape")
    count = len(kernel)
    if not 1 <= count <= 3:
        return None
    ops, x, padding = onnx_padded(ctx, node, onnx_pads(ctx, node, kernel), float("-inf"))
    args: tuple[Arg, ...] = (
        x,
        kernel,
        integers(node, "strides", (1,) * count),
        padding,
        integers(node, "dilations", (1,) * count),
        bool(integer(node, "ceil_mode", 0)),
    )
    if len(node.outputs) > 1 and node.outputs[1]:
        return [*ops, ctx.op(node, f"aten::max_pool{count}d_with_indices", *args, outputs=node.outputs[:2])]
    return [*ops, ctx.op(node, f"aten::max_pool{count}d", *args)]


@translation("AveragePool")
def onnx_average_pool(ctx: Context, node: Node) -> list[Op] | None:
    kernel = integers(node, "kernel_shape")
    count = len(kernel)
    # PyTorch's average pooling has no dilation
    if not 1 <= count <= 3 or set(integers(node, "dilations", (1,))) != {1}:
        return None
    pads = onnx_pads(ctx, node, kernel)
    sizes = ctx.net.shape(node.outputs[0])
    if set(kernel) == {1} and not any(pads) and sizes is not None:
        # what adaptive_avg_pool becomes where the sizes are already right
        return [ctx.op(node, f"aten::adaptive_avg_pool{count}d", ctx.ref(node.inputs[0]), sizes[-count:])]
    ops, x, padding = onnx_padded(ctx, node, pads, 0.0)
    args: list[Arg] = [x, kernel, integers(node, "strides", (1,) * count), padding]
    args += [bool(integer(node, "ceil_mode", 0)), bool(integer(node, "count_include_pad", 0))]
    return [*ops, ctx.op(node, f"aten::avg_pool{count}d", *args)]


@translation("GlobalAveragePool")
def onnx_global_average_pool(ctx: Context, node: Node) -> list[Op] | None:
    count = ctx.rank(node.inputs[0]) - 2
    if not 1 <= count <= 3:
        return None
    return [ctx.op(node, f"aten::adaptive_avg_pool{count}d", ctx.ref(node.inputs[0]), (1,) * count)]


@translation("GlobalMaxPool")
def onnx_global_max_pool(ctx: Context, node: Node) -> list[Op] | None:
    count = ctx.rank(node.inputs[0]) - 2
    if not 1 <= count <= 3:
        return None
    outputs = (node.outputs[0], ctx.fresh(node))
    return [ctx.op(node, f"aten::adaptive_max_pool{count}d", ctx.ref(node.inputs[0]), (1,) * count, outputs=outputs)]
