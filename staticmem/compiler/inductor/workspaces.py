"""What the workspaces of extern kernels follow from: the convolutions of a plan, with their layouts."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.strides import Form, channels_last_strides, form_of, is_channels_last_contiguous
from staticmem.eager.trace import Convolution
from staticmem.tracing.nodes import Node

_FORWARD, _BACKWARD = "aten::convolution", "aten::convolution_backward"


def kernel_reads(call: Node | None, results: Sequence[Form]) -> tuple[Convolution, ...]:
    """The convolution that an extern kernel runs, where it runs one and allocates what is `made`.

    Inductor brings the operands of a convolution into the layout of its results (`require_channels_last` of
    torch/_inductor/kernel/conv.py).
    """
    return (
        (_convolution(call, results),) if results and call is not None and call.target in (_FORWARD, _BACKWARD) else ()
    )


def _convolution(node: Node, results: Sequence[Form]) -> Convolution:
    last = any(len(f.shape) == 4 and is_channels_last_contiguous(f.shape, f.strides) for f in results)
    if node.target == _FORWARD:
        (x, weight), result, gradients = [arg.tensor for arg in node.args[:2]], node.tensor, None
        numbers = node.args[3:]
    else:
        result, x, weight = [arg.tensor for arg in node.args[:3]]
        numbers, mask = node.args[4:], node.args[10]
        gradients = (bool(mask[0]), bool(mask[1]))
    if last:
        x, weight, result = _in_channels_last(x), _in_channels_last(weight), _in_channels_last(result)
    stride, padding, dilation, transposed, _, groups = numbers[:6]
    return Convolution(x, weight, result, tuple(stride), tuple(padding), tuple(dilation), groups, transposed, gradients)


def _in_channels_last(form: Form) -> Form:
    if len(form.shape) != 4:
        return form
    return form_of(form.shape, channels_last_strides(form.shape), form.dtype)
