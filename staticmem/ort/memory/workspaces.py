"""What kernels on floats pack of their weights, and what they take from the arena while they run.

Source: onnxruntime/core/mlas/lib/convolve.cpp (MlasConvPrepare) and sgemm.cpp, core/providers/cpu/math (matmul.cc,
gemm.cc, hardmax.cc, softmax.cc, element_wise_ops.cc), core/providers/cpu/nn (conv_transpose.cc, lrn.cc, batch_norm.h),
core/providers/cpu/tensor (where_op.cc, upsample.cc), contrib_ops/cpu/bert/bias_gelu.cc; compared with the temporary
allocations that onnxruntime 1.32 lists (`session.collect_node_memory_stats_to_file`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.ir import dtypes
from staticmem.ir.graph import Value
from staticmem.ort.memory.graph import ExecNode
from staticmem.ort.memory.kernel import Kernel, Packing, PackRule, WorkRule, elements, float_pack, matrix

_MS = "com.microsoft"

# -- packed weights ----------------------------------------------------------------------------------------------------


def _packed_product(kernel: Kernel) -> Packing:
    """The right side of a product where it is a constant matrix of float32."""
    kind = kernel.constant(1)
    sizes = matrix(kind, 2)
    if kind is None or sizes is None or kind.dtype is not dtypes.float32:
        return Packing(0)
    rows, columns = sizes
    if kernel.node.number("transB"):
        rows, columns = columns, rows
    return Packing(float_pack(columns, rows))


def _packed_transposed(kernel: Kernel) -> Packing:
    """The filter of ConvTranspose is kept transposed, where that changes it."""
    kind = kernel.constant(1)
    sizes = matrix(kind)
    if kind is None or sizes is None or len(sizes) < 3 or kind.dtype is not dtypes.float32:
        return Packing(0)
    if sizes[0] // max(kernel.node.number("group", 1), 1) == 1 or elements(sizes[1:]) == 1:
        return Packing(0)
    return Packing(elements(sizes) * 4, within=True)


def _packed_norm(kernel: Kernel) -> Packing:
    """Scales and biases of half precision are kept as float32."""
    kinds = [kernel.constant(index) for index in (1, 2)]
    halves = [matrix(kind) for kind in kinds if kind is not None and kind.dtype is dtypes.float16]
    return Packing(sum(4 * elements(sizes) for sizes in halves if sizes is not None))


# -- convolutions ------------------------------------------------------------------------------------------------------


_CONV_BUFFER = 128 * 128  # MLAS_SGEMM_STRIDEN * MLAS_SGEMM_STRIDEK, elements for each thread
_THREAD_COMPLEXITY = 64 * 1024  # MLAS_SGEMM_THREAD_COMPLEXITY
_MAX_THREADS = 16  # MLAS_MAXIMUM_THREAD_COUNT
_COLUMN_ALIGN = 16  # MLAS_SGEMM_STRIDEN_THREAD_ALIGN


def _conv(kernel: Kernel) -> Sequence[int] | None:
    node = kernel.node
    data, weight, result = kernel.value(0), kernel.value(1), kernel.result(0)
    if data is None or weight is None or result is None or not data.shape or not weight.shape or not result.shape:
        return None
    if data.dtype is not dtypes.float32 or len(data.shape) < 3:
        return None
    rank = len(data.shape) - 2
    group = node.number("group", 1)
    if group < 1:
        return None
    channels, filters = data.shape[1] // group, weight.shape[0] // group
    window, spatial, results = weight.shape[2:], data.shape[2:], result.shape[2:]
    depth = channels * math.prod(window)
    count = math.prod(results)
    strides = node.numbers("strides", [1] * rank)
    dilations = node.numbers("dilations", [1] * rank)
    plain = all(s == 1 for s in strides) and _no_padding(node, spatial, results, window, dilations)
    if plain and depth == channels:
        return ()
    if plain and rank <= 2 and channels == 1 and all(d == 1 for d in dilations):
        height, width = (1, spatial[0]) if rank == 1 else (spatial[0], spatial[1])
        tall, wide = (1, window[0]) if rank == 1 else (window[0], window[1])
        if wide == width or (tall == height and wide == 1):
            return ()
    if filters > count:
        return (count * depth * 4,)
    if _doubled(node, rank, group, channels, filters, window, dilations):
        return ()
    images = data.shape[0] * group
    if images > 1:  # each thread has images or groups of its own
        return (min(kernel.threads, images) * _CONV_BUFFER * 4,)
    return (_threads(filters, count, depth, kernel.threads) * _CONV_BUFFER * 4,)


def _doubled(
    node: ExecNode, rank: int, group: int, channels: int, filters: int, window: Any, dilations: Sequence[int]
) -> bool:
    """Depthwise convolutions of 7 by 7 with stride 2 that double the channels have a kernel of their own
    (MlasConvAlgorithmDepthwiseMultiplier2)."""
    doubles = rank == 2 and group > 1 and channels == 1 and filters == 2 and tuple(window) == (7, 7)
    strided = tuple(node.numbers("strides", ())) == (2, 2) and tuple(node.numbers("pads", ())) == (3, 3, 3, 3)
    return doubles and strided and all(d == 1 for d in dilations)


def _no_padding(node: ExecNode, spatial: Any, results: Any, window: Any, dilations: Sequence[int]) -> bool:
    if any(node.numbers("pads", ())):
        return False
    # auto_pad: with strides of one nothing was padded where the result shrank by the reach of the kernel
    rows = zip(results, spatial, window, dilations, strict=True)
    return all(result == size - (wide - 1) * dilation for result, size, wide, dilation in rows)


def _threads(filters: int, count: int, depth: int, threads: int) -> int:
    complexity = filters * count * depth
    wanted = complexity // _THREAD_COMPLEXITY + 1 if complexity < _THREAD_COMPLEXITY * _MAX_THREADS else _MAX_THREADS
    wanted = min(wanted, threads)
    stride = math.ceil(count / wanted)
    if wanted > 1:
        stride = math.ceil(stride / _COLUMN_ALIGN) * _COLUMN_ALIGN
        if stride >= count:
            return 1
        if stride * (wanted - 1) >= count:
            return wanted - 1
    return wanted


def _conv_transpose(kernel: Kernel) -> Sequence[int] | None:
    """The columns of one image and one group."""
    data, weight = kernel.value(0), kernel.value(1)
    if data is None or weight is None or not data.shape or not weight.shape or data.dtype is not dtypes.float32:
        return None
    return (4 * elements(weight.shape[1:]) * elements(data.shape[2:]),)


# -- others ------------------------------------------------------------------------------------------------------------


def _bytes(value: Value) -> int:
    return value.dtype.nbytes(value.numel)


def _where(kernel: Kernel) -> Sequence[int] | None:
    """Both selections are made, each as large as the condition and its values need, before they are merged."""
    condition, result = kernel.value(0), kernel.result(0)
    sides = [kernel.value(1), kernel.value(2)]
    if condition is None or condition.shape is None or result is None:
        return None
    requests = []
    for side in sides:
        shape = _broadcast(condition.shape, side.shape) if side is not None and side.shape is not None else None
        if shape is None:
            return None
        requests.append(result.dtype.nbytes(elements(shape)))
    return requests


def _broadcast(first: Sequence[int], second: Sequence[int]) -> list[int] | None:
    rank = max(len(first), len(second))
    rows = zip([1] * (rank - len(first)) + list(first), [1] * (rank - len(second)) + list(second), strict=True)
    pairs = [(b if a == 1 else a, a == b or 1 in (a, b)) for a, b in rows]
    return [size for size, _ in pairs] if all(fits for _, fits in pairs) else None


def _variadic(kernel: Kernel) -> Sequence[int] | None:
    """Max, Min, Sum and Mean of three inputs have one value between; of more they come and go."""
    if len(kernel.node.inputs) < 3:
        return ()
    first, second, result = kernel.shape(0), kernel.shape(1), kernel.result(0)
    if len(kernel.node.inputs) > 3 or first is None or second is None or result is None or kernel.graph.opset < 8:
        return None
    shape = _broadcast(first, second)
    return None if shape is None else (result.dtype.nbytes(elements(shape)),)


_ONE_AXIS = 13  # the opset from which softmax takes one axis; before, it takes all behind it


def _over_an_axis(kernel: Kernel) -> Sequence[int] | None:
    """Softmax, LogSoftmax and Hardmax over another axis than the last: input and result are transposed."""
    data = kernel.value(0)
    if data is None or data.shape is None or not kernel.graph.opset:
        return None
    rank = len(data.shape)
    if kernel.graph.opset < _ONE_AXIS or kernel.node.number("axis", -1) in (-1, rank - 1):
        return ()
    return (_bytes(data), _bytes(data))


def _local_response(kernel: Kernel) -> Sequence[int] | None:
    """The scale of each element, and the squares of an image with borders of channels."""
    data = kernel.value(0)
    if data is None or data.shape is None or len(data.shape) < 3 or kernel.node.number("size") < 1:
        return None
    channels = data.shape[1] + kernel.node.number("size") - 1
    return (_bytes(data), data.dtype.nbytes(channels * elements(data.shape[2:])))


def _resize(kernel: Kernel) -> Sequence[int] | None:
    """Tables of indices and weights, two of each for every row and column of the result."""
    data, result, mode = kernel.value(0), kernel.result(0), kernel.text("mode", "nearest")
    other = kernel.node.number("antialias") or kernel.text("coordinate_transformation_mode") == "tf_crop_and_resize"
    if data is None or result is None or data.shape is None or result.shape is None or other:
        return None
    if mode in ("nearest", "cubic"):
        return ()
    rank = len(data.shape)
    if mode == "linear" and rank == 4 and data.shape[:2] == result.shape[:2] and data.shape != result.shape:
        return (16 * sum(result.shape[2:]),)
    return None


def _like_result(kernel: Kernel) -> Sequence[int] | None:
    result = kernel.result(0)
    return None if result is None else (_bytes(result),)


def _batch_norm(kernel: Kernel) -> Sequence[int] | None:
    """Statistics of the batch, in training mode."""
    scale = kernel.value(1)
    if not kernel.node.number("training_mode"):
        return ()
    return None if scale is None else (_bytes(scale),) * 2


_PRODUCTS = (("", "MatMul"), ("", "Gemm"), (_MS, "FusedMatMul"), (_MS, "FusedGemm"))

PACKED: dict[tuple[str, str], PackRule] = {
    **dict.fromkeys(_PRODUCTS, _packed_product),
    ("", "ConvTranspose"): _packed_transposed,
    ("", "LayerNormalization"): _packed_norm,
}
WORKSPACES: dict[tuple[str, str], WorkRule] = {
    ("", "Conv"): _conv,
    (_MS, "FusedConv"): _conv,
    ("", "ConvTranspose"): _conv_transpose,
    ("", "BatchNormalization"): _batch_norm,
    ("", "Where"): _where,
    (_MS, "BiasGelu"): _like_result,
    **dict.fromkeys((("", op) for op in ("Max", "Min", "Sum", "Mean")), _variadic),
    **dict.fromkeys((("", op) for op in ("Softmax", "LogSoftmax", "Hardmax")), _over_an_axis),
    ("", "LRN"): _local_response,
    ("", "Resize"): _resize,
    ("", "Upsample"): _resize,
}
