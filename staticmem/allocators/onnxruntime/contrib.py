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

Inputs = Sequence[PlannedType | None]
Result = Sequence[PlannedType | None]
Dims = tuple[Dim, ...]

NCHWC = "com.microsoft.nchwc"
BLOCK = "block"  # an attribute that `with_block` adds to nodes of the blocked layout


def _same(node: Node, inputs: Inputs) -> Result:
    return [inputs[0]]


def _ints(node: Node, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = node.attrs.get(name)
    return tuple(int(v) for v in value) if isinstance(value, tuple) and value else default


def _int(node: Node, name: str, default: int) -> int:
    value = node.attrs.get(name, default)
    return value if isinstance(value, int) else default


def _conv(node: Node, inputs: Inputs) -> Result:
    data, weight = inputs[0], inputs[1]
    if data is None or weight is None or data.dims is None or weight.dims is None:
        return [None]
    kernel = weight.dims[2:]
    return [PlannedType(data.dtype, (data.dims[0], weight.dims[0], *_windows(node, data.dims[2:], kernel)))]


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


def _pool(node: Node, inputs: Inputs) -> Result:
    data = inputs[0]
    if data is None or data.dims is None:
        return [None]
    kernel = _ints(node, "kernel_shape", ()) or data.dims[2:]
    return [PlannedType(data.dtype, (*data.dims[:2], *_windows(node, data.dims[2:], kernel)))]


def _global_pool(node: Node, inputs: Inputs) -> Result:
    data = inputs[0]
    if data is None or data.dims is None:
        return [None]
    return [PlannedType(data.dtype, (*data.dims[:2], *(1,) * (len(data.dims) - 2)))]


def _matmul(node: Node, inputs: Inputs) -> Result:
    first, second = inputs[0], inputs[1]
    if first is None or second is None or not first.dims or not second.dims:
        return [None]
    a, b = first.dims, second.dims
    if _int(node, "transA", 0) and len(a) > 1:
        a = (*a[:-2], a[-1], a[-2])
    if _int(node, "transB", 0) and len(b) > 1:
        b = (*b[:-2], b[-1], b[-2])
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return [PlannedType(first.dtype, (*_broadcast(a[:-2], b[:-2]), *rows, *columns))]


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


def _gemm(node: Node, inputs: Inputs) -> Result:
    first, second = inputs[0], inputs[1]
    if first is None or second is None or first.dims is None or second.dims is None:
        return [None]
    rows = first.dims[1 if _int(node, "transA", 0) else 0]
    columns = second.dims[0 if _int(node, "transB", 0) else 1]
    return [PlannedType(first.dtype, (rows, columns))]


def _skip_norm(node: Node, inputs: Inputs) -> Result:
    data = inputs[0]
    mean = None
    if data is not None and data.dims:
        mean = PlannedType(data.dtype, (*data.dims[:-1], 1))
    return [data, mean, mean, data]


def _norm(node: Node, inputs: Inputs) -> Result:
    data = inputs[0]
    if data is None or data.dims is None:
        return [None]
    axis = _int(node, "axis", -1) % max(len(data.dims), 1)
    mean = PlannedType(data.dtype, (*data.dims[:axis], *(1,) * (len(data.dims) - axis)))
    return [data, mean, mean]


def block_size(weights: Sequence[PlannedType | None]) -> int:
    """Channels in a block, from the weights of blocked convolutions: 16 with AVX-512, 8 with AVX2
    (MlasNchwcGetBlockSize of core/mlas/lib/snchwc.cpp). The runtime pads the filters to whole blocks."""
    known = [w.dims[0] for w in weights if w is not None and w.dims]
    return 16 if all(isinstance(n, int) and n % 16 == 0 for n in known) else 8


def _reorder_input(node: Node, inputs: Inputs) -> Result:
    data = inputs[0]
    if data is None or data.dims is None:
        return [None]
    shape = data.dims
    if _int(node, "channels_last", 0):
        shape = (shape[0], shape[-1], *shape[1:-1])
    channels, block = shape[1], _int(node, BLOCK, 16)
    padded = -(-channels // block) * block if isinstance(channels, int) else None
    return [PlannedType(data.dtype, (shape[0], padded, *shape[2:]))]


def _reorder_output(node: Node, inputs: Inputs) -> Result:
    data = inputs[0]
    if data is None or data.dims is None:
        return [None]
    channels: Dim = _int(node, "channels", 0) or data.dims[1]
    if _int(node, "channels_last", 0):
        return [PlannedType(data.dtype, (data.dims[0], *data.dims[2:], channels))]
    return [PlannedType(data.dtype, (data.dims[0], channels, *data.dims[2:]))]


def _upsample(node: Node, inputs: Inputs) -> Result:
    data = inputs[0]
    scales = _ints(node, "scales", ())
    if data is None or data.dims is None or len(scales) != len(data.dims):
        return [None]
    return [PlannedType(data.dtype, tuple(_times(s, k) for s, k in zip(data.dims, scales, strict=True)))]


def _times(size: Dim, factor: int) -> Dim:
    if isinstance(size, int):
        return size * factor
    return size if factor == 1 else None


def with_block(node: Node, block: int) -> Node:
    """A node that knows the block of its graph."""
    return replace(node, attrs={**node.attrs, BLOCK: block}) if node.domain == NCHWC else node


Rule = Callable[[Node, Inputs], Result]

CONTRIB: dict[tuple[str, str], Rule] = {
    **{("com.microsoft", op): _same for op in ("Gelu", "BiasGelu", "FastGelu", "QuickGelu", "BiasSoftmax")},
    ("com.microsoft", "FusedConv"): _conv,
    ("com.microsoft", "FusedMatMul"): _matmul,
    ("com.microsoft", "TransposeMatMul"): _matmul,
    ("com.microsoft", "FusedGemm"): _gemm,
    ("com.microsoft", "SkipLayerNormalization"): _skip_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_norm,
    ("", "SimplifiedLayerNormalization"): _norm,
    (NCHWC, "Conv"): _conv,
    (NCHWC, "MaxPool"): _pool,
    (NCHWC, "AveragePool"): _pool,
    (NCHWC, "GlobalMaxPool"): _global_pool,
    (NCHWC, "GlobalAveragePool"): _global_pool,
    (NCHWC, "ReorderInput"): _reorder_input,
    (NCHWC, "ReorderOutput"): _reorder_output,
    (NCHWC, "Upsample"): _upsample,
}
