"""Sizes of results of the runtime's own operators, which onnx's inference does not know.

Definitions: onnxruntime/docs/ContribOperators.md; the blocked layout of `com.microsoft.nchwc`:
onnxruntime/core/graph/contrib_ops/nchwc_schema_defs.cc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from staticmem.allocators.onnxruntime.graph import Dim, PlannedType
from staticmem.ir.onnx_graph import Node

Types = Sequence[PlannedType | None]
Rule = Callable[[Node, Types], Types]  # of the results, from those of the inputs
Dims = tuple[Dim, ...]

NCHWC = "com.microsoft.nchwc"
BLOCK = "block"  # an attribute that `with_block` adds to nodes of the blocked layout


def _ints(node: Node, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = node.attrs.get(name)
    return tuple(int(v) for v in value) if isinstance(value, tuple) and value else default


def _int(node: Node, name: str, default: int) -> int:
    value = node.attrs.get(name, default)
    return value if isinstance(value, int) else default


def _same(node: Node, inputs: Types) -> Types:
    return [inputs[0]]


def _skip_norm(node: Node, inputs: Types) -> Types:
    data = inputs[0]
    mean = None
    if data is not None and data.dims:
        mean = PlannedType(data.dtype, (*data.dims[:-1], 1))
    return [data, mean, mean, data]


def _norm(node: Node, inputs: Types) -> Types:
    data = inputs[0]
    if data is None or data.dims is None:
        return [None]
    axis = _int(node, "axis", -1) % max(len(data.dims), 1)
    mean = PlannedType(data.dtype, (*data.dims[:axis], *(1,) * (len(data.dims) - axis)))
    return [data, mean, mean]


# -- one result, whose dimensions follow from those of the first inputs ------------------------------------------------


def _of_dims(rule: Callable[..., Dims | None], count: int) -> Rule:
    """The rule for types; the result has the first input's dtype, and is unknown where a rank is."""

    def result(node: Node, inputs: Types) -> Types:
        known = [kind.dims for kind in inputs[:count] if kind is not None and kind.dims is not None]
        dims = rule(node, *known) if len(known) == count else None
        return [PlannedType(inputs[0].dtype, dims) if inputs[0] is not None and dims is not None else None]

    return result


def _conv(node: Node, data: Dims, weight: Dims) -> Dims:
    return (data[0], weight[0], *_windows(node, data[2:], weight[2:]))


def _windows(node: Node, sizes: Dims, kernel: Dims) -> Dims:
    rank = len(sizes)
    strides, dilations = _ints(node, "strides", (1,) * rank), _ints(node, "dilations", (1,) * rank)
    pads = _ints(node, "pads", (0,) * (2 * rank))
    auto = node.attrs.get("auto_pad", "NOTSET")
    result: list[Dim] = []
    for axis, size in enumerate(sizes):
        window = kernel[axis]
        if not isinstance(size, int) or not isinstance(window, int):
            result.append(None)
            continue
        reach = (window - 1) * dilations[axis] + 1
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            result.append(math.ceil(size / strides[axis]))
            continue
        padded = size + (0 if auto == "VALID" else pads[axis] + pads[axis + rank])
        if _int(node, "ceil_mode", 0):
            count = math.ceil((padded - reach) / strides[axis]) + 1
            if (count - 1) * strides[axis] >= size + pads[axis]:
                count -= 1
            result.append(count)
        else:
            result.append((padded - reach) // strides[axis] + 1)
    return tuple(result)


def _pool(node: Node, data: Dims) -> Dims:
    return (*data[:2], *_windows(node, data[2:], _ints(node, "kernel_shape", ()) or data[2:]))


def _global_pool(node: Node, data: Dims) -> Dims:
    return (*data[:2], *(1,) * (len(data) - 2))


def _matmul(node: Node, a: Dims, b: Dims) -> Dims | None:
    if not a or not b:
        return None
    if _int(node, "transA", 0) and len(a) > 1:
        a = (*a[:-2], a[-1], a[-2])
    if _int(node, "transB", 0) and len(b) > 1:
        b = (*b[:-2], b[-1], b[-2])
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return (*_broadcast(a[:-2], b[:-2]), *rows, *columns)


def _broadcast(a: Dims, b: Dims) -> Dims:
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(_broad(x, y) for x, y in zip(left, right, strict=True))


def _broad(x: Dim, y: Dim) -> Dim:
    if x == 1 or x == y:
        return y
    if y == 1 or isinstance(x, int):
        return x
    return y if isinstance(y, int) and y > 1 else None


def _gemm(node: Node, a: Dims, b: Dims) -> Dims:
    return (a[1 if _int(node, "transA", 0) else 0], b[0 if _int(node, "transB", 0) else 1])


def block_size(weights: Sequence[PlannedType | None]) -> int:
    """Channels in a block, from the weights of blocked convolutions: 16 with AVX-512, 8 with AVX2
    (MlasNchwcGetBlockSize of core/mlas/lib/snchwc.cpp). The runtime pads the filters to whole blocks."""
    known = [w.dims[0] for w in weights if w is not None and w.dims]
    return 16 if all(isinstance(n, int) and n % 16 == 0 for n in known) else 8


def with_block(node: Node, block: int) -> Node:
    """A node that knows the block of its graph."""
    return replace(node, attrs={**node.attrs, BLOCK: block}) if node.domain == NCHWC else node


def _reorder_input(node: Node, shape: Dims) -> Dims:
    if _int(node, "channels_last", 0):
        shape = (shape[0], shape[-1], *shape[1:-1])
    channels, block = shape[1], _int(node, BLOCK, 16)
    padded = -(-channels // block) * block if isinstance(channels, int) else None
    return (shape[0], padded, *shape[2:])


def _reorder_output(node: Node, shape: Dims) -> Dims:
    channels: Dim = _int(node, "channels", 0) or shape[1]
    if _int(node, "channels_last", 0):
        return (shape[0], *shape[2:], channels)
    return (shape[0], channels, *shape[2:])


def _upsample(node: Node, data: Dims) -> Dims | None:
    scales = _ints(node, "scales", ())
    if len(scales) != len(data):
        return None
    return tuple(s * k if isinstance(s, int) else s if k == 1 else None for s, k in zip(data, scales, strict=True))


CONTRIB: dict[tuple[str, str], Rule] = {
    **{("com.microsoft", op): _same for op in ("Gelu", "BiasGelu", "FastGelu", "QuickGelu", "BiasSoftmax")},
    ("com.microsoft", "FusedConv"): _of_dims(_conv, 2),
    ("com.microsoft", "FusedMatMul"): _of_dims(_matmul, 2),
    ("com.microsoft", "TransposeMatMul"): _of_dims(_matmul, 2),
    ("com.microsoft", "FusedGemm"): _of_dims(_gemm, 2),
    ("com.microsoft", "SkipLayerNormalization"): _skip_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_norm,
    ("", "SimplifiedLayerNormalization"): _norm,
    (NCHWC, "Conv"): _of_dims(_conv, 2),
    (NCHWC, "MaxPool"): _of_dims(_pool, 1),
    (NCHWC, "AveragePool"): _of_dims(_pool, 1),
    (NCHWC, "GlobalMaxPool"): _of_dims(_global_pool, 1),
    (NCHWC, "GlobalAveragePool"): _of_dims(_global_pool, 1),
    (NCHWC, "ReorderInput"): _of_dims(_reorder_input, 1),
    (NCHWC, "ReorderOutput"): _of_dims(_reorder_output, 1),
    (NCHWC, "Upsample"): _of_dims(_upsample, 1),
}
