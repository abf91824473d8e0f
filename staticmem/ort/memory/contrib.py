"""Sizes of results of the runtime's own operators, which onnx's inference does not know.

Definitions: onnxruntime/docs/ContribOperators.md; the blocked layout of `com.microsoft.nchwc`:
onnxruntime/core/graph/contrib_ops/nchwc_schema_defs.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from staticmem.ir.onnx_graph import Node
from staticmem.ort.memory import contrib_quantized
from staticmem.ort.memory.graph import Dim, PlannedType
from staticmem.ort.memory.shapes import Dims, Rule, Types, gemm, integer, integers, matmul, windows

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
    **contrib_quantized.RULES,
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
