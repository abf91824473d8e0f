"""Lowerings of what Inductor leaves to extern kernels: products, convolutions, attention, and all it does not know.

Source: `torch/_inductor/kernel/mm.py`, `bmm.py`, `conv.py`, `torch/_inductor/lowering.py` (`fallback_handler`,
`sdpa_constraint`) and `torch/_inductor/ir.py` (`ExternKernelOut`, `FallbackKernel`) of PyTorch 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.compiler.inductor import layout
from staticmem.compiler.inductor.buffers import Buffer, Value
from staticmem.compiler.inductor.lowering import Lowered, Lowering, rule
from staticmem.compiler.inductor.pointwise import broadcast, loads
from staticmem.eager.strides import (
    Form,
    Shape,
    Strides,
    channels_last_strides,
    contiguous_strides,
    prefers_channels_last,
)
from staticmem.tracing.nodes import Argument, Node

ALIGNMENT = 8  # sdpa_constraint, in elements
DOT_LENGTH = 32  # kernel/bmm.py: _BMM_DOT_K_DECOMPOSE_THRESHOLD; for products of one row and one column


def kernel_name(node: Node) -> str:
    return node.target.replace("::", ".") + ("" if "." in node.target else ".default")


def buffers_of(values: Sequence[Value]) -> list[Buffer]:
    buffers = []
    for value in values:
        buffer = value.buffer
        assert buffer is not None
        buffers.append(buffer)
    return buffers


@rule("aten::mm", "aten::bmm", "aten::_int_mm")
def product(low: Lowering, node: Node) -> Lowered:
    """Written into a buffer that the wrapper allocates (`out=`)."""
    one, other = low.value(node.args[0]), low.value(node.args[1])
    if (
        node.base == "aten::bmm"
        and one.shape[1] == 1
        and other.shape[2] == 1
        and one.shape[2] <= DOT_LENGTH
        and one.dtype is other.dtype
    ):
        return dot(low, node, one, other)
    inputs = [low.realize_input(one), low.realize_input(other)]
    return out_kernel(low, node, inputs)


def dot(low: Lowering, node: Node, one: Value, other: Value) -> Value:
    """Products of one row and one column are sums of ours."""
    from staticmem.compiler.inductor.reductions import reduce

    one = one.view(("reshape", (*one.shape, 1)))
    other = other.view(("reshape", (other.shape[0], 1, *other.shape[1:])))
    shape = (one.shape[0], one.shape[1], one.shape[2], other.shape[3])
    reads, weights = loads([one, other], shape)
    value = low.pointwise(shape, node.tensor.dtype, reads, {**weights, ("mul", node): 1})
    return reduce(low, value, (2,), False, node.tensor.dtype, "sum", node)[0]


def out_kernel(low: Lowering, node: Node, inputs: Sequence[Value]) -> Value:
    form = node.tensor
    buffer = low.new_buffer(form.shape, form.dtype, contiguous_strides(form.shape))
    low.extern(kernel_name(node), buffers_of(inputs), buffer)
    return Value.of(buffer)


@rule("aten::addmm", "aten::baddbmm")
def add_product(low: Lowering, node: Node) -> Lowered:
    bias, one, other = (low.value(arg) for arg in node.args[:3])
    inputs = [low.realize_input(one), low.realize_input(other)]
    low.realize_input(broadcast(bias, node.shape, low.pads))
    return out_kernel(low, node, [low.realize_input(bias), *inputs])


# ---- convolutions


@rule("aten::convolution")
def convolution(low: Lowering, node: Node) -> Lowered:
    x, weight = low.value(node.args[0]), low.value(node.args[1])
    bias = None if node.args[2] is None else low.value(node.args[2])
    form = node.tensor
    rank = len(form.shape)
    if not low.layout_opt:  # constrain_conv_to_fx_strides
        x, weight = low.as_in_eager(x, node.args[0]), low.as_in_eager(weight, node.args[1])
        bias = bias and low.as_in_eager(bias, node.args[2])
    low.realize(x)
    low.realize(weight)
    if low.layout_opt and rank == 4:
        x, weight = low.channels_last(x), low.channels_last(weight)
        strides = channels_last_strides(form.shape)
    else:
        strides = convolution_strides(low, form, x, weight)
        order = layout.stride_order(strides)
        x, weight = low.require(x, order=order), low.require(weight, order=order)
    buffer = low.new_buffer(form.shape, form.dtype, strides, fresh=True)
    low.extern(kernel_name(node), buffers_of([x, weight]), buffer)
    value = Value.of(buffer)
    if bias is None:
        return value
    view = bias.view(("reshape", (form.shape[1],) + (1,) * (rank - 2)), pad=low.pads)
    reads, weights = loads([value, view], form.shape)
    return low.pointwise(form.shape, form.dtype, reads, {**weights, node: 1, **low.rounding(form.dtype)})


def convolution_strides(low: Lowering, form: Form, *operands: Value) -> Strides:
    """cuDNN's result is channels last where an operand is (`cudnn_conv_suggest_memory_format`)."""
    for value in operands:
        placed = value.strides()
        if placed and prefers_channels_last(value.shape, placed[0]):
            return channels_last_strides(form.shape)
    return contiguous_strides(form.shape)


@rule("aten::convolution_backward")
def convolution_backward(low: Lowering, node: Node) -> Lowered:
    values = [low.value(arg) for arg in node.args[:3]]
    rank = len(values[0].shape)
    if not low.layout_opt:  # constrain_conv_bwd_to_fx_strides
        values = [low.as_in_eager(value, arg) for value, arg in zip(values, node.args, strict=False)]
    for value in (values[1], values[2], values[0]):
        low.realize(value)
    last = low.layout_opt and rank == 4
    mask = node.args[10]
    grad, x, weight = values
    if last:
        if mask[1]:
            x, grad = low.channels_last(x), low.channels_last(grad)
        if mask[0]:
            grad, weight = low.channels_last(grad), low.channels_last(weight)
    else:  # in the order of the gradients that the kernel makes (kernel/conv.py, `convolution_backward_lowering`)
        if mask[1]:
            last = gradients_in_channels_last(x, weight)
            order = gradient_order(weight.shape, last)
            x, grad = low.require(x, order=order), low.require(grad, order=order)
        last = gradients_in_channels_last(x, weight)
        if mask[0]:
            order = gradient_order(x.shape, last)
            grad, weight = low.require(grad, order=order), low.require(weight, order=order)
    return several(low, node, [grad, x, weight], channels_last=last and rank == 4)


def gradients_in_channels_last(x: Value, weight: Value) -> bool:
    return any((placed := v.strides()) is not None and prefers_channels_last(v.shape, placed[0]) for v in (x, weight))


def gradient_order(shape: Shape, last: bool) -> tuple[int, ...]:
    """The order of a gradient of this shape; of dimensions with equal strides the inner one comes first (`argsort` of
    utils.py), so that one of a depthwise weight, whose second dimension is 1, is no channels last."""
    strides = channels_last_strides(shape) if last else contiguous_strides(shape)
    ranks = [0] * len(shape)
    for rank, dim in enumerate(sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim))):
        ranks[dim] = rank
    return tuple(ranks)


# ---- attention

ATTENTION = (
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
    "_flash_attention_forward _flash_attention_backward _efficient_attention_forward _efficient_attention_backward "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_fused_attention_overrideable_backward"
).split()


@rule(*(f"aten::{name}" for name in ATTENTION))
def attention(low: Lowering, node: Node) -> Lowered:
    """Operands keep their strides where those are aligned (`sdpa_constraint`)."""
    values = []
    done: dict[tuple[int, object], Value] = {}
    for at, arg in enumerate(node.args):
        if type(arg) is not Node:
            continue
        value = low.value(arg)
        key = (id(value), at if at in (0, 5) else None)
        if key not in done:
            done[key] = _constrained(low, node, at, arg, value)
        values.append(done[key])
    values += [low.realize_input(low.value(arg)) for arg in node.kwargs.values() if type(arg) is Node]
    return several(low, node, values)


def _constrained(low: Lowering, node: Node, at: int, arg: Node, value: Value) -> Value:
    if len(value.shape) not in (3, 4):
        return low.realize_input(value)
    placed = value.strides()
    if placed is not None and _aligned(value.shape, placed[0]):
        return low.realize_input(value)
    strides = low.strides_of(arg)
    if node.target == "aten::_scaled_dot_product_efficient_attention" and at == 3:
        return low.require(value, exact=_bias_strides(value.shape, strides, placed[0] if placed else None))
    order: tuple[int, ...] = layout.stride_order(strides)
    if order and order[-1] != 0:
        order = tuple(reversed(range(len(value.shape))))
    if node.target == "aten::_scaled_dot_product_efficient_attention_backward" and at in (0, 5):
        order = (3, 1, 2, 0)
    return low.require(value, order=order)


def _aligned(shape: Shape, strides: Strides) -> bool:
    """`is_aligned_realized_tensor`: the last dimension is dense, the others begin at multiples of 8 elements."""
    outer = all(size <= 1 or stride % ALIGNMENT == 0 for size, stride in zip(shape[:-1], strides[:-1], strict=True))
    return (strides[-1] == 1 or shape[-1] <= 1) and outer


def _bias_strides(shape: Shape, strides: Strides, have: Strides | None) -> Strides:
    """The bias of attention is padded to the alignment; expanded dimensions stay so where they can."""
    out = [-1] * len(shape)
    out[-1] = step = 1
    for dim in range(len(shape) - 2, -1, -1):
        if out[dim + 1] != 0:
            step *= shape[dim + 1]
        expanded = strides[dim] == 0 or (have is not None and have[dim] == 0)
        if expanded and out[dim + 1] % ALIGNMENT == 0:
            out[dim] = 0
            continue
        step = -(-step // ALIGNMENT) * ALIGNMENT
        out[dim] = step
    return tuple(out)


# ---- fallbacks


def several(low: Lowering, node: Node, values: Sequence[Value], *, channels_last: bool = False) -> Lowered:
    """An extern kernel that allocates its results itself (`FallbackKernel`); several come as a tuple."""
    inputs = [low.realize_input(value) for value in values]
    for buffer in buffers_of(inputs):
        buffer.decide(pad=low.pads)

    def strides(form: Form) -> Strides:
        if channels_last and len(form.shape) in (4, 5):
            return channels_last_strides(form.shape)
        return form.strides

    form = node.form
    if isinstance(form, Form):
        buffer = low.new_buffer(form.shape, form.dtype, strides(form), fresh=True)
        low.extern(kernel_name(node), buffers_of(inputs), buffer)
        return Value.of(buffer)
    assert form is not None
    some = next((part for part in form if isinstance(part, Form)), None)
    if some is None:
        return tuple(None for _ in form)
    packed = low.new_buffer((), some.dtype, (), fresh=True)
    packed.without_tensor = True
    call = low.extern(kernel_name(node), buffers_of(inputs), packed)
    parts: list[Value | None] = []
    for part in form:
        if not isinstance(part, Form):
            parts.append(None)
            continue
        buffer = low.new_buffer(part.shape, part.dtype, strides(part), fresh=True)
        low.extern("", [packed], buffer, part_of=call)
        parts.append(Value.of(buffer))
    return tuple(parts)


def argument_values(low: Lowering, args: Sequence[Argument]) -> list[Value]:
    values: list[Value] = []
    for arg in args:
        if type(arg) is Node:
            value = low.env[arg]
            if isinstance(value, Value):
                values.append(value)
            elif isinstance(value, tuple):
                values.extend(part for part in value if part is not None)
        elif type(arg) is tuple:
            values.extend(argument_values(low, arg))
    return values


def fallback(low: Lowering, node: Node) -> Lowered:
    """An op without lowering: an extern kernel with results of its own; in the backward its inputs are contiguous."""
    if node.form is None:
        low.extern(kernel_name(node), buffers_of([low.realize_input(v) for v in argument_values(low, node.args)]),
                   _no_tensor(low)).side_effects = True  # fmt: skip
        return None
    values = argument_values(low, (*node.args, *node.kwargs.values()))
    if low.backward and node.base.startswith("aten::"):
        values = [low.require(v, order=tuple(reversed(range(len(v.shape))))) for v in values]
    return several(low, node, values)


def _no_tensor(low: Lowering) -> Buffer:
    from staticmem.ir import dtypes

    buffer = low.new_buffer((), dtypes.uint8, (), fresh=True)
    buffer.without_tensor = True
    return buffer
