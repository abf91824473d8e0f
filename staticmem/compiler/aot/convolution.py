"""Convolutions: one extern call; its backward has the bias's gradient apart (torch/_inductor/decomposition.py,
`convolution_backward`)."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.compiler.aot.registry import traced
from staticmem.compiler.aot.tracer import Gradients, Tracer, form
from staticmem.compiler.nodes import Node


@traced("conv1d conv2d conv3d")
def conv(
    t: Tracer, input: Node, weight: Node, bias: Node | None = None, stride: Sequence[int] | int = 1,
    padding: Sequence[int] | int | str = 0, dilation: Sequence[int] | int = 1, groups: int = 1,
) -> Node:  # fmt: skip
    rank = input.ndim - 2
    strides, dilations = _each(stride, rank), _each(dilation, rank)
    assert not isinstance(padding, str), "padding by a word is for the one who completes this file"
    paddings = _each(padding, rank)
    sizes = [
        (size + 2 * p - d * (kernel - 1) - 1) // s + 1
        for size, kernel, s, p, d in zip(input.shape[2:], weight.shape[2:], strides, paddings, dilations, strict=True)
    ]
    args = (input, weight, bias, strides, paddings, dilations, False, (0,) * rank, groups)
    out = t.new("aten::convolution", args, (input.shape[0], weight.shape[0], *sizes), input.dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        by_bias = t.sum(grad, (0, *range(2, grad.ndim))) if need[2] else None
        sizes_of_bias = None if bias is None else bias.shape
        mask = (need[0], need[1], False)
        arguments = (grad, input, weight, sizes_of_bias, strides, paddings, dilations, False, (0,) * rank, groups, mask)
        forms = [
            form(of.shape, of.dtype) if wanted else None for of, wanted in zip((input, weight), need, strict=False)
        ]
        call = t.node("aten::convolution_backward", arguments, (*forms, None))
        each = [t.node("operator::getitem", (call, k), f) if f is not None else None for k, f in enumerate(forms)]
        return [*each, by_bias]

    t.record(out, [input, weight, bias], gradient)
    return out


def _each(value: Sequence[int] | int, rank: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values
