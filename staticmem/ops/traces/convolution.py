"""Convolutions: one extern call; its backward has the bias's gradient apart (torch/_inductor/decomposition.py,
`convolution_backward`).

The result is channels last where the input or the weight is (`cudnn_conv_suggest_memory_format` of
aten/src/ATen/native/ConvUtils.h; `meta_conv` of torch/_meta_registrations.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.eager.strides import Form, Shape
from staticmem.ir.dtypes import DType
from staticmem.ops.traces.rearranging import constant_pad
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form, gradient_of

Sizes = Sequence[int]


@traced("conv1d conv2d conv3d", calls="")
def conv(
    t: Tracer, input: Node, weight: Node, bias: Node | None = None, stride: Sizes | int = 1,
    padding: Sizes | int | str = 0, dilation: Sizes | int = 1, groups: int = 1,
) -> Node:  # fmt: skip
    rank = weight.ndim - 2
    if padding == "valid":
        return convolution(t, input, weight, bias, stride, (0,), dilation, False, (0,), groups)
    if isinstance(padding, str):
        input, padding = _same(t, input, weight, each(stride, rank), each(dilation, rank))
    return convolution(t, input, weight, bias, stride, padding, dilation, False, 0, groups)


@traced("conv1d.padding conv2d.padding conv3d.padding")
def conv_by_word(
    t: Tracer, input: Node, weight: Node, bias: Node | None = None, stride: Sizes | int = 1, padding: str = "valid",
    dilation: Sizes | int = 1, groups: int = 1,
) -> Node:  # fmt: skip
    return conv(t, input, weight, bias, stride, padding, dilation, groups)


def _same(t: Tracer, input: Node, weight: Node, strides: Sizes, dilations: Sizes) -> tuple[Node, Sizes]:
    """`convolution_same` of Convolution.cpp: what is not symmetric is padded before."""
    rank = weight.ndim - 2
    left, right = [], []
    for k in range(rank):
        total = dilations[k] * (weight.shape[k + 2] - 1)
        if strides[k] > 2 and total % 2 == 1 and input.shape[k + 2] % strides[k] - 1 > 0:
            total -= 1
        left.append(total // 2)
        right.append(total - total // 2)
    if left == right:
        return input, left
    pads = [0] * (2 * rank)
    for k in range(rank):
        difference, at = right[k] - left[k], 2 * (rank - 1 - k)
        if difference > 0:
            pads[at + 1] = difference
        else:
            pads[at], left[k] = difference, right[k]
    return constant_pad(t, input, pads), left


@traced("conv_transpose1d conv_transpose2d conv_transpose3d")
def conv_transpose(
    t: Tracer, input: Node, weight: Node, bias: Node | None = None, stride: Sizes | int = 1, padding: Sizes | int = 0,
    output_padding: Sizes | int = 0, groups: int = 1, dilation: Sizes | int = 1,
) -> Node:  # fmt: skip
    return convolution(t, input, weight, bias, stride, padding, dilation, True, output_padding, groups)


@traced("convolution _convolution")
def convolution(
    t: Tracer, input: Node, weight: Node, bias: Node | None, stride: Sizes | int, padding: Sizes | int,
    dilation: Sizes | int, transposed: bool, output_padding: Sizes | int, groups: int, *flags: bool,
) -> Node:  # fmt: skip
    """A single sample without its batch is a batch of one (`batchify` of Convolution.cpp)."""
    rank = weight.ndim - 2
    outer = input
    if input.ndim == rank + 1:
        input = t.unsqueeze(outer, 0)
    places = (stride, padding, dilation, output_padding)
    strides, paddings, dilations, more = [each(value, rank) for value in places]
    written = [each(value, rank) if isinstance(value, int) else tuple(value) for value in places]
    sizes, channels = [], weight.shape[1] * groups if transposed else weight.shape[0]
    for k, (size, kernel) in enumerate(zip(input.shape[2:], weight.shape[2:], strict=True)):
        reach = dilations[k] * (kernel - 1)
        if transposed:
            sizes.append((size - 1) * strides[k] - 2 * paddings[k] + reach + more[k] + 1)
        else:
            sizes.append((size + 2 * paddings[k] - reach - 1) // strides[k] + 1)
    if input.shape[1] != (weight.shape[0] if transposed else weight.shape[1] * groups) or min(sizes, default=1) < 1:
        raise ValueError(f"a convolution of {list(input.shape)} with {list(weight.shape)}")
    last = any(layout.prefers_channels_last(node.shape, node.strides) for node in (input, weight))

    def result(shape: Shape, dtype: DType) -> Form:
        return form(shape, dtype, layout.channels_last_strides(shape) if last else None)

    args = (input, weight, bias, *written[:3], transposed, written[3], groups)
    out = t.node("aten::convolution", args, result((input.shape[0], channels, *sizes), input.dtype))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        if outer is not input:
            grad = t.unsqueeze(grad, 0)
        by_bias = t.sum(grad, (0, *range(2, grad.ndim))) if need[2] else None
        mask = (need[0], need[1], False)
        if not any(mask):
            return [None, None, by_bias]
        bias_sizes = (0,) if bias is None else bias.shape
        arguments = (grad, input, weight, bias_sizes, *written[:3], transposed, written[3], groups, mask)
        wanted = [
            result(of.shape, grad.dtype) if needed else None for of, needed in zip((input, weight), need, strict=False)
        ]
        call = t.node("aten::convolution_backward", arguments, (*wanted, None))
        each_ = [t.node("operator::getitem", (call, k), f) if f is not None else None for k, f in enumerate(wanted)]
        if outer is not input and each_[0] is not None:
            each_[0] = t.squeeze_dim(each_[0], 0)
        return [*each_, by_bias]

    if outer is not input:
        out = t.squeeze_dim(out, 0)
    return t.record(out, [outer, weight, bias], gradient)


def each(value: Sizes | int, rank: int) -> tuple[int, ...]:
    """One number for each spatial dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values
