"""What CPU kernels take from the arena for themselves while they run.

Source: onnxruntime/core/mlas/lib/convolve.cpp (MlasConvPrepare), core/providers/cpu/tensor/where_op.cc,
core/providers/cpu/nn/batch_norm.h, contrib_ops/cpu/bert/bias_gelu.cc; compared with the temporary allocations that
onnxruntime 1.31 lists (`session.collect_node_memory_stats_to_file`). Other kernels are taken to need nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from staticmem.allocators.onnxruntime.graph import ExecNode
from staticmem.allocators.onnxruntime.sizes import RunSizes
from staticmem.ir import dtypes

_CONV_BUFFER = 128 * 128  # MLAS_SGEMM_STRIDEN * MLAS_SGEMM_STRIDEK, elements for each thread
_THREAD_COMPLEXITY = 64 * 1024  # MLAS_SGEMM_THREAD_COMPLEXITY
_MAX_THREADS = 16  # MLAS_MAXIMUM_THREAD_COUNT
_COLUMN_ALIGN = 16  # MLAS_SGEMM_STRIDEN_THREAD_ALIGN


def workspace(threads: int) -> Callable[[ExecNode, RunSizes], Sequence[int]]:
    """A function that gives the requests of a node's kernel in bytes, for a session with so many threads."""

    def of(node: ExecNode, sizes: RunSizes) -> Sequence[int]:
        rule = _RULES.get((node.domain, node.op))
        return rule(node, sizes, threads) if rule is not None else ()

    return of


def _numbers(node: ExecNode, name: str, default: list[int]) -> list[int]:
    for attribute in node.proto.attribute:
        if attribute.name == name:
            return list(attribute.ints) or default
    return default


def _number(node: ExecNode, name: str, default: int) -> int:
    return next((int(a.i) for a in node.proto.attribute if a.name == name), default)


def _conv(node: ExecNode, sizes: RunSizes, threads: int) -> Sequence[int]:
    data, weight, result = (
        sizes.values.get(n) for n in (node.inputs[0], node.inputs[1], node.outputs[0])
    )  # fmt: skip
    if data is None or weight is None or result is None or not data.shape or not weight.shape or not result.shape:
        return ()
    if data.dtype is not dtypes.float32 or len(data.shape) < 3:
        return ()
    rank = len(data.shape) - 2
    group = _number(node, "group", 1)
    channels, filters = data.shape[1] // group, weight.shape[0] // group
    kernel, spatial, results = weight.shape[2:], data.shape[2:], result.shape[2:]
    depth = channels * math.prod(kernel)
    count = math.prod(results)
    strides = _numbers(node, "strides", [1] * rank)
    dilations = _numbers(node, "dilations", [1] * rank)
    plain = all(s == 1 for s in strides) and _no_padding(node, spatial, results, kernel, dilations)
    if plain and depth == channels:
        return ()
    if plain and rank <= 2 and channels == 1 and all(d == 1 for d in dilations):
        height, width = (1, spatial[0]) if rank == 1 else (spatial[0], spatial[1])
        tall, wide = (1, kernel[0]) if rank == 1 else (kernel[0], kernel[1])
        if wide == width or (tall == height and wide == 1):
            return ()
    if filters > count:
        return (count * depth * 4,)
    return (_threads(filters, count, depth, threads) * _CONV_BUFFER * 4,)


def _no_padding(node: ExecNode, spatial: Any, results: Any, kernel: Any, dilations: list[int]) -> bool:
    pads = _numbers(node, "pads", [])
    if any(pads):
        return False
    # auto_pad: with strides of one nothing was padded where the result shrank by the reach of the kernel
    return all(
        r == s - (k - 1) * d for r, s, k, d in zip(results, spatial, kernel, dilations, strict=True)
    )  # fmt: skip


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


def _where(node: ExecNode, sizes: RunSizes, threads: int) -> Sequence[int]:
    """Both selections are made in full before they are merged."""
    result = sizes.values.get(node.outputs[0])
    return () if result is None or result.shape is None else (result.dtype.nbytes(result.numel),) * 2


def _like_result(node: ExecNode, sizes: RunSizes, threads: int) -> Sequence[int]:
    result = sizes.values.get(node.outputs[0])
    return () if result is None or result.shape is None else (result.dtype.nbytes(result.numel),)


def _batch_norm(node: ExecNode, sizes: RunSizes, threads: int) -> Sequence[int]:
    """Statistics of the batch, in training mode."""
    scale = sizes.values.get(node.inputs[1])
    if not _number(node, "training_mode", 0) or scale is None or scale.shape is None:
        return ()
    return (scale.dtype.nbytes(scale.numel),) * 2


_RULES: dict[tuple[str, str], Callable[[ExecNode, RunSizes, int], Sequence[int]]] = {
    ("", "Conv"): _conv,
    ("com.microsoft", "FusedConv"): _conv,
    ("", "BatchNormalization"): _batch_norm,
    ("", "Where"): _where,
    ("com.microsoft", "BiasGelu"): _like_result,
}
