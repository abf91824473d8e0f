"""Convolutions, and windows as columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.eager.trace import Convolution, Copies
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context, Results, Shape, declare_sizes, integer, integers, text, translation, windows
from staticmem.ops.pointwise import grad_of, gradient_like
from staticmem.ops.registry import Shapes, rule, size_of
from staticmem.ops.views import contiguous, squeeze, unsqueeze


def pair(value: Any, rank: int) -> tuple[int, ...]:
    """An int or a list of one or `rank` ints as `rank` ints."""
    if isinstance(value, int):
        return (value,) * rank
    values = tuple(value)
    return values * rank if len(values) == 1 else values


def _memory_strides(e: Eager, shape: tuple[int, ...], *deciders: Tensor) -> layout.Strides | None:
    """cuDNN's layout: channels last if input or weight prefers it (aten/src/ATen/native/ConvUtils.h)."""
    if len(shape) == 4 and any(t.prefers_channels_last for t in deciders):
        return layout.channels_last_strides(shape)
    return None


def _copies(e: Eager, out: Tensor, *tensors: Tensor) -> None:
    """Inputs and gradients are made contiguous in the memory format of the result.

    aten/src/ATen/native/Convolution.cpp, `_convolution`: `input.contiguous(backend_memory_format)`, and
    `convolution_backward` likewise. The copy of a weight comes behind the result and is too small to matter.
    """
    contiguous_in = layout.is_channels_last_contiguous if out.prefers_channels_last else layout.is_contiguous
    nbytes = [t.nbytes for t in tensors if not contiguous_in(t.shape, t.strides)]
    if nbytes:
        e.reads(Copies(tuple(nbytes)))


def convolution(
    e: Eager,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    """Saves input and weight, both always; backward makes all wanted gradients in one call."""
    rank = weight.ndim - 2
    unbatched = input.ndim == rank + 1
    if unbatched:
        input = unsqueeze(e, input, 0)
    if e.torch < (1, 11) and not input.prefers_channels_last:
        # `_convolution` made it contiguous above autograd, which saved the copy, until convolution had a derivative of
        # its own (https://github.com/pytorch/pytorch/pull/69584)
        input = contiguous(e, input)
    spatial = []
    stride, dilation = pair(stride, rank), pair(dilation, rank)
    kernel = weight.shape[2:]
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilation, strict=True)]
    else:
        total = [2 * p for p in pair(padding, rank)]
    numbers = (stride, tuple([t // 2 for t in total]), dilation, groups, transposed)
    extra = pair(output_padding, rank)
    if min((*stride, *dilation), default=1) < 1:  # `ConvParams::check`, aten/src/ATen/native/Convolution.cpp
        raise ValueError(f"stride {list(stride)} and dilation {list(dilation)} of a convolution must be positive")
    for size, k, s, p, d, o in zip(input.shape[2:], kernel, stride, total, dilation, extra, strict=True):
        if transposed:
            spatial.append((size - 1) * s - p + d * (k - 1) + o + 1)
        else:
            spatial.append((size + p - d * (k - 1) - 1) // s + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    if input.shape[1] != expected:
        raise ValueError(f"convolution expects {expected} input channels, got {input.shape[1]}")
    if min(spatial, default=1) < 1:
        raise ValueError(f"convolution output would be {spatial}: the input is smaller than the kernel")
    shape = (input.shape[0], channels, *spatial)
    out = e.empty(shape, input.dtype, _memory_strides(e, shape, input, weight), "aten.convolution.default")
    e.reads(Convolution(input.form, weight.form, out.form, *numbers))
    _copies(e, out, input)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten.convolution_backward.default")
        grad = grad_of(grads)
        by_input = by_weight = by_bias = None
        if need[0]:
            by_input = e.empty(input.shape, grad.dtype, _memory_strides(e, input.shape, input, weight))
        if need[1]:
            by_weight = e.empty(weight.shape, grad.dtype, _memory_strides(e, weight.shape, input, weight))
        e.reads(Convolution(input.form, weight.form, grad.form, *numbers, gradients=(need[0], need[1])))
        _copies(e, out, grad, *((input,) if need[1] else ()))
        if need[2]:
            assert bias is not None
            by_bias = e.empty(bias.shape, grad.dtype)
            e.reduces(grad, [axis for axis in range(grad.ndim) if axis != 1])
        return by_input, by_weight, by_bias

    e.record("ConvolutionBackward0", out, [input, weight, bias], [Formula((0, 1, 2), gradients)], [input, weight])
    return squeeze(e, out, 0) if unbatched else out


def convolution_flops(op: Op, args: Sequence[Arg], shapes: Shapes) -> int:
    """result x (input channels of a group x kernel); of a transposed one, input x the same of the output."""
    x, w = size_of(args[0], shapes), size_of(args[1], shapes)
    transposed = "transpose" in op.base or (op.base == "aten::convolution" and len(args) > 6 and args[6] is True)
    return 2 * prod(w[1:]) * prod(x if transposed else shapes[op.outputs[0]])


@rule("conv1d conv2d conv3d", kinds=("convolution",), autocast="half", flops=convolution_flops)
def conv(
    e: Eager, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Saves input and weight, both always; backward makes input, weight and bias gradients in one call."""
    return convolution(e, input, weight, bias, stride, padding, dilation, False, 0, groups)


@rule(
    "conv_transpose1d conv_transpose2d conv_transpose3d",
    kinds=("convolution", "enlarging"),
    autocast="half",
    flops=convolution_flops,
)
def conv_transpose(
    e: Eager, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Tensor:  # fmt: skip
    """Saves input and weight, both always; backward makes input, weight and bias gradients in one call."""
    return convolution(e, input, weight, bias, stride, padding, dilation, True, output_padding, groups)


@rule("convolution _convolution", kinds=("convolution",), autocast="half", flops=convolution_flops)
def aten_convolution(
    e: Eager, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, *_: Any,
) -> Tensor:  # fmt: skip
    """Saves input and weight, both always; backward makes input, weight and bias gradients in one call."""
    return convolution(e, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _windows(size: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _moved(e: Eager, self: Tensor, shape: tuple[int, ...], name: str, reverse: str) -> Tensor:
    out = e.empty(shape, self.dtype, kernel=f"aten.{name}.default")
    e.record(f"{name.title()}Backward0", out, [self], [Formula((0,), gradient_like(self, f"aten.{reverse}.default"))])
    return out


@rule("im2col")
def im2col(e: Eager, self: Tensor, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    """Saves nothing; backward makes one tensor of the input's size."""
    rows, columns = map(_windows, self.shape[-2:], kernel_size, dilation, padding, stride)
    channels = self.shape[-3] * kernel_size[0] * kernel_size[1]
    return _moved(e, self, (*self.shape[:-3], channels, rows * columns), "im2col", "col2im")


@rule("col2im")
def col2im(
    e: Eager, self: Tensor, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> Tensor:
    """Saves nothing; backward makes one tensor of the input's size."""
    channels = self.shape[-2] // (kernel_size[0] * kernel_size[1])
    return _moved(e, self, (*self.shape[:-2], channels, *output_size), "col2im", "im2col")


_CONVOLUTIONS = {1: "aten::conv1d", 2: "aten::conv2d", 3: "aten::conv3d"}


def onnx_pads(ctx: Context, node: Node, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Begin and end pads of the spatial axes; `auto_pad` is worked out from sizes."""
    count = len(kernel)
    pads = integers(node, "pads", (0,) * 2 * count)
    mode = text(node, "auto_pad", "NOTSET")
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        return pads if len(pads) == 2 * count else (0,) * 2 * count
    shape = ctx.net.shape(node.inputs[0])
    strides = integers(node, "strides", (1,) * count)
    dilations = integers(node, "dilations", (1,) * count)
    if shape is None or len(shape) < count:
        return (0,) * 2 * count
    begin, end = [], []
    for size, k, s, d in zip(shape[-count:], kernel, strides, dilations, strict=False):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begin.append(small if mode == "SAME_UPPER" else large)
        end.append(large if mode == "SAME_UPPER" else small)
    return (*begin, *end)


def onnx_padded(ctx: Context, node: Node, pads: tuple[int, ...], value: float) -> tuple[list[Op], Arg, tuple[int, ...]]:
    """PyTorch pads symmetrically inside the op, everything else by a `pad` before it."""
    count = len(pads) // 2
    if pads[:count] == pads[count:]:
        return [], ctx.ref(node.inputs[0]), pads[:count]
    name = ctx.fresh(node)
    shape = ctx.net.shape(node.inputs[0])
    order = tuple(p for axis in reversed(range(count)) for p in (pads[axis], pads[axis + count]))
    if shape is not None:
        sizes = tuple(s + pads[i] + pads[i + count] for i, s in enumerate(shape[-count:]))
        ctx.define(name, node.inputs[0], (*shape[:-count], *sizes))
    pad = ctx.op(node, "aten::pad", ctx.ref(node.inputs[0]), order, "constant", value, outputs=(name,))
    return [pad], Ref(name), (0,) * count


@translation("Conv")
def onnx_conv(ctx: Context, node: Node) -> list[Op] | None:
    geometry = ctx.geometry.get(id(node.attrs))
    if geometry is not None:
        target, tail = geometry[1], geometry[2]
        return [ctx.op(node, target, ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1]), ctx.optional(node, 2), *tail)]
    kernel = integers(node, "kernel_shape")
    weight = ctx.net.shape(node.inputs[1])
    if not kernel and weight is not None:
        kernel = weight[2:]
    count = len(kernel)
    if not 1 <= count <= 3:
        return None
    ops, x, padding = onnx_padded(ctx, node, onnx_pads(ctx, node, kernel), 0.0)
    tail = (
        integers(node, "strides", (1,) * count),
        padding,
        integers(node, "dilations", (1,) * count),
        integer(node, "group", 1),
    )
    target = _CONVOLUTIONS[count]
    if not ops and "kernel_shape" in node.attrs and text(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        ctx.geometry[id(node.attrs)] = (node.attrs, target, tail)
    return [*ops, ctx.op(node, target, x, ctx.ref(node.inputs[1]), ctx.optional(node, 2), *tail)]


@translation("ConvTranspose")
def onnx_conv_transpose(ctx: Context, node: Node) -> list[Op] | None:
    weight = ctx.net.shape(node.inputs[1])
    count = len(weight) - 2 if weight is not None else len(integers(node, "kernel_shape"))
    if not 1 <= count <= 3:
        return None
    if "output_shape" in node.attrs or node.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None  # sizes that ONNX works out backwards; PyTorch has no such call
    pads = integers(node, "pads", (0,) * 2 * count)
    return [
        ctx.op(
            node,
            f"aten::conv_transpose{count}d" + (".input" if count > 1 else ""),
            ctx.ref(node.inputs[0]),
            ctx.ref(node.inputs[1]),
            ctx.optional(node, 2),
            integers(node, "strides", (1,) * count),
            pads[:count],
            integers(node, "output_padding", (0,) * count),
            integer(node, "group", 1),
            integers(node, "dilations", (1,) * count),
        )
    ]


def _fused_sizes(node: Node, x: Shape, weight: Shape | None, *_: Shape | None) -> Results:
    """X, W and B, also of the operator whose X has its channels last: its W has them where Conv has
    (`convPoolShapeInferenceNhwc`, core/graph/contrib_ops/nhwc_schema_defs.cc of the ONNX Runtime)."""
    if weight is None or len(weight) != len(x):
        return []
    last = node.op == "NhwcFusedConv"
    sizes = windows(node, x[1:-1] if last else x[2:], weight[2:])
    return [((x[0], *sizes, weight[0]) if last else (x[0], weight[0], *sizes), 0)]


declare_sizes("NhwcFusedConv FusedConv", _fused_sizes)
