"""Convolutions out of a graph's ops: sizes, layout and precision as cuDNN gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from staticmem.devices.conv import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    FORWARD,
    ITEMSIZE,
    Convolution,
    precision_of,
    transposed,
)
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Arg, Graph, Op, Ref

_PLAIN = ("aten::conv1d", "aten::conv2d", "aten::conv3d")
_TRANSPOSED = ("aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d")
_ANY = ("aten::convolution", "aten::_convolution")
CONVOLUTIONS = frozenset((*_PLAIN, *_TRANSPOSED, *_ANY))

Shape = tuple[int, ...]

# names of arguments in the order of the ATen schema
_NAMES = {
    **dict.fromkeys(_PLAIN, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
    **dict.fromkeys(
        _TRANSPOSED, ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    ),
    **dict.fromkeys(
        _ANY,
        ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups"),
    ),
}  # fmt: skip


def shapes_of(graph: Graph) -> dict[str, Shape]:
    """Sizes of every value that the graph states."""
    shapes: dict[str, Shape] = {}
    values = [*graph.inputs, *graph.constant_values.values(), *graph.values.values()]
    values += [p.value for p in (*graph.parameters, *graph.buffers)]
    for value in values:
        if value.shape is not None:
            shapes[value.name] = value.shape
    return shapes


def _arguments(op: Op) -> dict[str, Arg]:
    given = dict(zip(_NAMES[op.base], op.args, strict=False))
    given.update(op.kwargs)
    return given


def _numbers(value: Arg, rank: int, default: int) -> tuple[int, ...] | None:
    """An int or a list of one or `rank` ints; None for what is not known before running."""
    if value is None:
        value = default
    if isinstance(value, int):
        return (value,) * rank
    if not isinstance(value, tuple):
        return None
    numbers = tuple(v for v in value if isinstance(v, int))
    if len(numbers) == 1:
        return numbers * rank
    return numbers if len(numbers) == rank == len(value) else None


def operands(op: Op) -> tuple[str, str] | None:
    """Names of input and weight."""
    given = _arguments(op)
    x, w = given.get("input"), given.get("weight")
    return (x.name, w.name) if isinstance(x, Ref) and isinstance(w, Ref) else None


def convolution(
    op: Op, x: Shape, w: Shape, y: Shape, dtype: DType, channels_last: bool, allow_tf32: bool = True
) -> Convolution | None:
    """The forward pass of an op, or None where its numbers are not those of a cuDNN convolution.

    `x`, `w`, `y` are the sizes of the op's input, weight and result. A 1-D convolution runs as a 2-D one of height 1
    (aten/src/ATen/native/Convolution.cpp, view1d_as_2d). A transposed one is the data gradient of the convolution from
    its result to its input.
    """
    given = _arguments(op)
    is_transposed = op.base in _TRANSPOSED or given.get("transposed") is True
    rank = len(w) - 2
    if rank < 1 or dtype.name not in ITEMSIZE:
        return None
    if len(x) == rank + 1:
        x, y = (1, *x), (1, *y)
    groups = given.get("groups", 1)
    stride, dilation = _numbers(given.get("stride"), rank, 1), _numbers(given.get("dilation"), rank, 1)
    padding = _padding(given.get("padding"), rank, dilation, w)
    if stride is None or dilation is None or padding is None or not isinstance(groups, int):
        return None
    if is_transposed:
        x, y = y, x
    if rank == 1:
        x, w, y = ((s[0], s[1], 1, *s[2:]) for s in (x, w, y))
        stride, dilation, padding = (1, *stride), (1, *dilation), (0, *padding)
    if 0 in (*x, *w, *y):
        return None
    try:
        conv = Convolution(
            FORWARD, precision_of(dtype.name, allow_tf32), channels_last and rank == 2, x, w, stride, padding, dilation,
            groups,
        )  # fmt: skip
    except ValueError:
        return None
    return transposed(conv) if is_transposed else conv


def _padding(value: Arg, rank: int, dilation: tuple[int, ...] | None, w: Shape) -> tuple[int, ...] | None:
    """`same` pads what is uneven outside of the convolution (`_convolution_same`); the rest is symmetric."""
    if value == "valid":
        return (0,) * rank
    if value == "same" and dilation is not None:
        return tuple(d * (k - 1) // 2 for d, k in zip(dilation, w[2:], strict=True))
    return _numbers(value, rank, 0)


def of_pass(forward: Convolution, direction: str) -> Convolution:
    """A pass of the op whose forward is given: a transposed op's forward is already the data gradient."""
    if forward.direction == FORWARD:
        return forward.for_pass(direction)
    return forward.for_pass({FORWARD: BACKWARD_DATA, BACKWARD_DATA: FORWARD}.get(direction, BACKWARD_FILTER))


# -- layout ----------------------------------------------------------------------------------------------------------

# Ops whose result has the layout of their first input: elementwise ones (TensorIterator) and the norms and pools that
# allocate with `suggest_memory_format`.
_FOLLOWS = frozenset(
    f"aten::{name}"
    for name in (
        "relu", "relu_", "gelu", "silu", "silu_", "hardswish", "hardswish_", "hardtanh", "hardtanh_", "sigmoid", "tanh",
        "leaky_relu", "leaky_relu_", "mish", "elu", "add", "add_", "mul", "mul_", "sub", "div", "dropout", "clone",
        "batch_norm", "_native_batch_norm_legit_no_training", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d",
        "upsample_nearest2d", "upsample_bilinear2d", "pad", "constant_pad_nd", "to", "_to_copy", "cat", "hardsigmoid",
        "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "feature_dropout", "relu6", "sqrt", "exp",
    )
)  # fmt: skip
_TO_LAST = (0, 3, 1, 2)


def channels_last_values(graph: Graph, shapes: Mapping[str, Shape], everywhere: bool = False) -> frozenset[str]:
    """Names of 4-D values that lie in channels_last: from a permuted tensor on, or all with `everywhere`.

    `model.to(memory_format=torch.channels_last)` with inputs in it is `everywhere`. Without, a network comes there by
    permuting (N, H, W, C) to (N, C, H, W), as ConvNeXt does around its norms; convolutions hand it on
    (aten/src/ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format).
    """
    if everywhere:
        return frozenset(name for name, shape in shapes.items() if len(shape) == 4)
    last: set[str] = set()
    for op in graph.ops:
        names = op.refs()
        source = names[0] if names else ""
        if op.base == "aten::permute":
            order = next((a for a in op.args[1:] if isinstance(a, tuple)), op.kwargs.get("dims"))
            if order in (_TO_LAST, (0, -1, 1, 2)) and source not in last:
                last.update(op.outputs)
        elif op.base in CONVOLUTIONS:
            if any(name in last for name in names[:2]):
                last.update(op.outputs)
        elif op.base in _FOLLOWS and _layout_source(names, shapes, last):
            last.update(op.outputs)
    return frozenset(last)


def _layout_source(names: Sequence[str], shapes: Mapping[str, Shape], last: set[str]) -> bool:
    """Whether the first 4-D input lies in channels_last."""
    for name in names:
        if name in last:
            return True
        shape = shapes.get(name)
        if shape is not None and len(shape) == 4 and shape[0] > 1 and 1 not in shape[1:]:
            return False
    return False


def tensors(op: Op, argument: int) -> list[str]:
    """Names of the tensors in a positional argument: one, or those of a list."""
    if argument >= len(op.args):
        return []
    value = op.args[argument]
    return [a.name for a in (value if isinstance(value, tuple) else (value,)) if isinstance(a, Ref)]


def numel(shape: Shape) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
