"""Sizes of results of the runtime's own operators, which onnx's inference does not know.

Definitions: onnxruntime/docs/ContribOperators.md; the blocked layout of `com.microsoft.nchwc`:
onnxruntime/core/graph/contrib_ops/nchwc_schema_defs.cc.

Sizes of results of the runtime's own operators on bytes.

Definitions: onnxruntime/docs/ContribOperators.md, onnxruntime/core/graph/contrib_ops/quantization_defs.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from staticmem.ir import dtypes
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import integer
from staticmem.ort.memory.graph import Dim, PlannedType
from staticmem.ort.memory.shapes import Dims, Rule, Types, broadcast, gemm, integers, matmul, text, windows

_MS = "com.microsoft"


def _dims(inputs: Types, index: int) -> Dims | None:
    kind = inputs[index] if index < len(inputs) else None
    return None if kind is None else kind.dims


def _typed(inputs: Types, index: int, dims: Dims | None) -> Types:
    """One result with the element type of an input."""
    kind = inputs[index] if index < len(inputs) else None
    return [replace(kind, dims=dims) if kind is not None else None]


def _same_bytes(node: Node, inputs: Types) -> Types:
    return [inputs[0]]


def _both(node: Node, inputs: Types) -> Types:
    first, second = _dims(inputs, 0), _dims(inputs, 3)
    return _typed(inputs, 0, broadcast(first, second) if first is not None and second is not None else None)


def _joined(node: Node, inputs: Types) -> Types:
    """QLinearConcat: scale and zero point of the result, then three inputs for each part."""
    parts = [_dims(inputs, index) for index in range(2, len(inputs), 3)]
    first = parts[0] if parts else None
    if first is None or not first:
        return _typed(inputs, 1, None)
    axis = integer(node, "axis", 0) % len(first)
    sizes = [part[axis] if part is not None and len(part) == len(first) else None for part in parts]
    total = sum(size for size in sizes if isinstance(size, int)) if all(isinstance(s, int) for s in sizes) else None
    return _typed(inputs, 1, (*first[:axis], total, *first[axis + 1 :]))


def _spatial(node: Node, data: Dims, rule: Callable[[Dims], Dims], channels: Dim) -> Dims:
    """The sizes of an image whose channels are last or second."""
    if integer(node, "channels_last", 0):
        return (data[0], *rule(data[1:-1]), channels)
    return (data[0], channels, *rule(data[2:]))


def _quantized_conv(node: Node, inputs: Types) -> Types:
    data, weight = _dims(inputs, 0), _dims(inputs, 3)
    if data is None or weight is None or len(data) != len(weight) or len(data) < 3:
        return _typed(inputs, 7, None)
    return _typed(inputs, 7, _spatial(node, data, lambda sizes: windows(node, sizes, weight[2:]), weight[0]))


def _channels(node: Node, data: Dims) -> Dim:
    return data[-1] if integer(node, "channels_last", 0) else data[1]


def _quantized_pool(node: Node, inputs: Types) -> Types:
    data, kernel = _dims(inputs, 0), node.attrs.get("kernel_shape")
    if data is None or len(data) < 3 or not isinstance(kernel, tuple):
        return _typed(inputs, 0, None)
    sizes = tuple(int(k) for k in kernel)
    return _typed(inputs, 0, _spatial(node, data, lambda dims: windows(node, dims, sizes), _channels(node, data)))


def _quantized_global_pool(node: Node, inputs: Types) -> Types:
    data = _dims(inputs, 0)
    if data is None or len(data) < 3:
        return _typed(inputs, 0, None)
    return _typed(inputs, 0, _spatial(node, data, lambda dims: (1,) * len(dims), _channels(node, data)))


def _floats(rule: Callable[[Dims, Dims], Dims | None]) -> Rule:
    """A product of inputs 0 and 1 that gives floats."""

    def result(node: Node, inputs: Types) -> Types:
        first, second = _dims(inputs, 0), _dims(inputs, 1)
        dims = rule(first, second) if first is not None and second is not None else None
        return [PlannedType(dtypes.float32, dims)]

    return result


def _quant_gemm(node: Node, inputs: Types) -> Types:
    first, second = _dims(inputs, 0), _dims(inputs, 3)
    matrices = first is not None and second is not None and len(first) == len(second) == 2
    dims = gemm(node, first, second) if matrices and first is not None and second is not None else None
    if len(inputs) > 8 and inputs[8] is not None:
        return _typed(inputs, 8, dims)
    return [PlannedType(dtypes.float32, dims)]


def _lstm(node: Node, inputs: Types) -> Types:
    data, hidden = _dims(inputs, 0), integer(node, "hidden_size", 0)
    if data is None or len(data) != 3 or not hidden:
        return [None, None, None]
    directions = 2 if text(node, "direction") == "bidirectional" else 1
    state = PlannedType(dtypes.float32, (directions, data[1], hidden))
    return [PlannedType(dtypes.float32, (data[0], directions, data[1], hidden)), state, state]


def _plain_matmul(first: Dims, second: Dims) -> Dims | None:
    return matmul(None, first, second)


_SAME: Sequence[str] = ("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax")
RULES: dict[tuple[str, str], Rule] = {
    **{(_MS, op): _same_bytes for op in _SAME},
    (_MS, "QLinearAdd"): _both,
    (_MS, "QLinearMul"): _both,
    (_MS, "QLinearConcat"): _joined,
    (_MS, "QLinearConv"): _quantized_conv,
    (_MS, "QLinearAveragePool"): _quantized_pool,
    (_MS, "QLinearGlobalAveragePool"): _quantized_global_pool,
    (_MS, "QGemm"): _quant_gemm,
    (_MS, "DynamicQuantizeMatMul"): _floats(_plain_matmul),
    (_MS, "MatMulIntegerToFloat"): _floats(_plain_matmul),
    (_MS, "DynamicQuantizeLSTM"): _lstm,
}


NCHWC = "com.microsoft.nchwc"
BLOCK = "block"  # an attribute that `with_block` adds to nodes of the blocked layout


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
    axis = integer(node, "axis", -1) % max(len(data.dims), 1)
    mean = PlannedType(data.dtype, (*data.dims[:axis], *(1,) * (len(data.dims) - axis)))
    return [data, mean, mean]


# -- one result, whose dimensions follow from those of the first inputs ------------------------------------------------


def _of_dims(rule: Callable[..., Dims | None], count: int) -> Rule:
    """The rule for types; the result has the first input's dtype, and is unknown where a rank is."""

    def result(node: Node, inputs: Types) -> Types:
        shapes = [kind.dims for kind in inputs[:count] if kind is not None and kind.dims is not None]
        dims = rule(node, *shapes) if len(shapes) == count else None
        return [PlannedType(inputs[0].dtype, dims) if inputs[0] is not None and dims is not None else None]

    return result


def _conv(node: Node, data: Dims, weight: Dims) -> Dims:
    return (data[0], weight[0], *windows(node, data[2:], weight[2:]))


def _pool(node: Node, data: Dims) -> Dims:
    return (*data[:2], *windows(node, data[2:], integers(node, "kernel_shape", ()) or data[2:]))


def _global_pool(node: Node, data: Dims) -> Dims:
    return (*data[:2], *(1,) * (len(data) - 2))


def block_size(weights: Sequence[PlannedType | None]) -> int:
    """Channels in a block, from the weights of blocked convolutions: 16 with AVX-512, 8 with AVX2
    (MlasNchwcGetBlockSize of core/mlas/lib/snchwc.cpp). The runtime pads the filters to whole blocks."""
    channels = [w.dims[0] for w in weights if w is not None and w.dims]
    return 16 if all(isinstance(n, int) and n % 16 == 0 for n in channels) else 8


def with_block(node: Node, block: int) -> Node:
    """A node that knows the block of its graph."""
    return replace(node, attrs={**node.attrs, BLOCK: block}) if node.domain == NCHWC else node


def _reorder_input(node: Node, shape: Dims) -> Dims:
    if integer(node, "channels_last", 0):
        shape = (shape[0], shape[-1], *shape[1:-1])
    channels, block = shape[1], integer(node, BLOCK, 16)
    padded = -(-channels // block) * block if isinstance(channels, int) else None
    return (shape[0], padded, *shape[2:])


def _reorder_output(node: Node, shape: Dims) -> Dims:
    channels: Dim = integer(node, "channels", 0) or shape[1]
    if integer(node, "channels_last", 0):
        return (shape[0], *shape[2:], channels)
    return (shape[0], channels, *shape[2:])


def _upsample(node: Node, data: Dims) -> Dims | None:
    scales = integers(node, "scales", ())
    if len(scales) != len(data):
        return None
    return tuple(s * k if isinstance(s, int) else None for s, k in zip(data, scales, strict=True))


def _blockwise(node: Node, data: Dims) -> Dims | None:
    return (*data[:-1], integer(node, "N", 0)) if data else None


def _attention(node: Node, data: Dims, weight: Dims) -> Dims | None:
    """Attention with one size for query, key and value; its weight has all three."""
    wide = weight[-1] if weight else None
    if len(data) != 3 or not isinstance(wide, int) or wide % 3 or "qkv_hidden_sizes" in node.attrs:
        return None
    return (*data[:2], wide // 3)


CONTRIB: dict[tuple[str, str], Rule] = {
    **RULES,
    **{("com.microsoft", op): _same for op in ("Gelu", "BiasGelu", "FastGelu", "QuickGelu", "BiasSoftmax")},
    ("com.microsoft", "FusedConv"): _of_dims(_conv, 2),
    ("com.microsoft", "FusedMatMul"): _of_dims(matmul, 2),
    ("com.microsoft", "TransposeMatMul"): _of_dims(matmul, 2),
    ("com.microsoft", "FusedGemm"): _of_dims(gemm, 2),
    ("com.microsoft", "SkipLayerNormalization"): _skip_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_norm,
    ("com.microsoft", "MatMulNBits"): _of_dims(_blockwise, 1),
    ("com.microsoft", "Attention"): _of_dims(_attention, 2),
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
