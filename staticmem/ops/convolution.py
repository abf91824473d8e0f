"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule
from staticmem.ops.views import squeeze, unsqueeze


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
    spatial = []
    stride, dilation = pair(stride, rank), pair(dilation, rank)
    kernel = weight.shape[2:]
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilation, strict=True)]
    else:
        total = [2 * p for p in pair(padding, rank)]
    numbers = (stride, tuple([t // 2 for t in total]), dilation, groups, transposed)
    extra = pair(output_padding, rank)
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
    e.convolves(input, weight, out, *numbers)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten.convolution_backward.default")
        grad = grad_of(grads)
        by_input = by_weight = by_bias = None
        if need[0]:
            by_input = e.empty(input.shape, grad.dtype, _memory_strides(e, input.shape, input, weight))
        if need[1]:
            by_weight = e.empty(weight.shape, grad.dtype, _memory_strides(e, weight.shape, input, weight))
        e.convolves(input, weight, grad, *numbers, gradients=(need[0], need[1]))
        if need[2]:
            assert bias is not None
            by_bias = e.empty(bias.shape, grad.dtype)
            e.reduces(grad, [axis for axis in range(grad.ndim) if axis != 1])
        return by_input, by_weight, by_bias

    e.record("ConvolutionBackward0", out, [input, weight, bias], [Formula((0, 1, 2), gradients)], [input, weight])
    return squeeze(e, out, 0) if unbatched else out


@rule("aten::conv1d", "aten::conv2d", "aten::conv3d", kinds=("convolution",), autocast="half")
def conv(
    e: Eager, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Saves input and weight, both always; backward makes input, weight and bias gradients in one call."""
    return convolution(e, input, weight, bias, stride, padding, dilation, False, 0, groups)


@rule(
    "aten::conv_transpose1d",
    "aten::conv_transpose2d",
    "aten::conv_transpose3d",
    kinds=("convolution",),
    autocast="half",
)
def conv_transpose(
    e: Eager, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Tensor:  # fmt: skip
    """Saves input and weight, both always; backward makes input, weight and bias gradients in one call."""
    return convolution(e, input, weight, bias, stride, padding, dilation, True, output_padding, groups)


@rule("aten::convolution", "aten::_convolution", kinds=("convolution",), autocast="half")
def aten_convolution(
    e: Eager, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, *_: Any,
) -> Tensor:  # fmt: skip
    """Saves input and weight, both always; backward makes input, weight and bias gradients in one call."""
    return convolution(e, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
