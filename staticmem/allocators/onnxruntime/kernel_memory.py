"""What a session needs beside values: initializers, the copies that kernels pack of them, and what CPU kernels take
from the arena while they run.

Source of initializers: onnxruntime/core/framework/session_state_utils.cc and graph.cc (those of more than 127 bytes are
used where they were loaded, smaller ones are copied into memory reserved in the arena), core/mlas/lib/sgemm.cpp
(MlasGemmPackBSize: the packed right side of a product), core/providers/cpu/math/matmul.cc and gemm.cc (which weights
are packed). Reserved bytes at the start of a session equal these sums on onnxruntime 1.31. On CUDA initializers are one
block on the device; that is read from the source and not verified.

Source of workspaces: onnxruntime/core/mlas/lib/convolve.cpp (MlasConvPrepare), core/providers/cpu/tensor/where_op.cc,
core/providers/cpu/nn/batch_norm.h, contrib_ops/cpu/bert/bias_gelu.cc; compared with the temporary allocations that
onnxruntime 1.31 lists (`session.collect_node_memory_stats_to_file`). Other kernels are taken to need nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from staticmem.allocators.onnxruntime.graph import ExecGraph, ExecNode
from staticmem.allocators.onnxruntime.sizes import RunSizes
from staticmem.ir import dtypes

SMALL = 127  # bytes; kSmallTensorExternalDataThreshold of core/graph/graph.h
_PACK_COLUMNS = 16  # MLAS_SGEMM_STRIDEN_THREAD_ALIGN
_PACK_ALIGNMENT = 64  # MlasGetPreferredBufferAlignment
_DEVICE_ALIGNMENT = 256  # kAllocAlignment

# operators whose second input is packed where it is a constant matrix of float32
_PACKED = {("", "MatMul"), ("", "Gemm"), ("com.microsoft", "FusedMatMul"), ("com.microsoft", "FusedGemm")}


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of initializers: `arena` are those reserved in the provider's arena, `packed` the copies that kernels made
    there, `outside` those in ordinary memory."""

    arena: int
    packed: int
    outside: int

    @property
    def reserved(self) -> int:
        """What the arena holds for weights."""
        return self.arena + self.packed


def weight_bytes(graph: ExecGraph, provider: str = "cpu", prepacking: bool = True) -> WeightBytes:
    """Bytes of a session's initializers, bodies included, each counted once. Initializers that nothing reads are
    dropped, as the runtime drops them."""
    arena = packed = outside = 0
    for level, used in _levels(graph):
        for name, kind in level.initializers.items():
            if name not in used:
                continue
            size = kind.dtype.nbytes(math.prod(dim if isinstance(dim, int) else 0 for dim in kind.dims or ()))
            if provider == "cuda":
                arena += math.ceil(size / _DEVICE_ALIGNMENT) * _DEVICE_ALIGNMENT
            elif size <= SMALL:
                arena += size
            else:
                outside += size
        if prepacking and provider == "cpu":
            packed += sum(_packed_bytes(node, level) for node in level.nodes)
    return WeightBytes(arena, packed, outside)


def _levels(graph: ExecGraph) -> list[tuple[ExecGraph, set[str]]]:
    """Every graph and body with the names that it or its bodies read."""
    used = set(graph.outputs)
    levels = [(graph, used)]
    for node in graph.nodes:
        used.update(node.inputs, node.implicit)
        for body in node.bodies.values():
            levels += _levels(body)
    return levels


def _packed_bytes(node: ExecNode, graph: ExecGraph) -> int:
    if (node.domain, node.op) not in _PACKED or len(node.inputs) < 2:
        return 0
    kind = graph.initializers.get(node.inputs[1])
    if kind is None or kind.dtype is not dtypes.float32 or kind.dims is None or len(kind.dims) != 2:
        return 0
    rows, columns = kind.dims
    if not isinstance(rows, int) or not isinstance(columns, int):
        return 0
    if node.number("transB"):
        rows, columns = columns, rows
    size = math.ceil(columns / _PACK_COLUMNS) * _PACK_COLUMNS * rows * 4
    return math.ceil(size / _PACK_ALIGNMENT) * _PACK_ALIGNMENT


# -- workspaces of CPU kernels ----------------------------------------------------------------------------------------


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


def _conv(node: ExecNode, sizes: RunSizes, threads: int) -> Sequence[int]:
    data, weight, result = (sizes.values.get(name) for name in (*node.inputs[:2], node.outputs[0]))
    if data is None or weight is None or result is None or not data.shape or not weight.shape or not result.shape:
        return ()
    if data.dtype is not dtypes.float32 or len(data.shape) < 3:
        return ()
    rank = len(data.shape) - 2
    group = node.number("group", 1)
    channels, filters = data.shape[1] // group, weight.shape[0] // group
    kernel, spatial, results = weight.shape[2:], data.shape[2:], result.shape[2:]
    depth = channels * math.prod(kernel)
    count = math.prod(results)
    strides = node.numbers("strides", [1] * rank)
    dilations = node.numbers("dilations", [1] * rank)
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


def _no_padding(node: ExecNode, spatial: Any, results: Any, kernel: Any, dilations: Sequence[int]) -> bool:
    if any(node.numbers("pads", ())):
        return False
    # auto_pad: with strides of one nothing was padded where the result shrank by the reach of the kernel
    rows = zip(results, spatial, kernel, dilations, strict=True)
    return all(result == size - (window - 1) * dilation for result, size, window, dilation in rows)


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


def _like(name: str, sizes: RunSizes, count: int = 1) -> Sequence[int]:
    """So many buffers of a value's size."""
    value = sizes.values.get(name)
    return () if value is None or value.shape is None else (value.dtype.nbytes(value.numel),) * count


def _where(node: ExecNode, sizes: RunSizes, threads: int) -> Sequence[int]:
    """Both selections are made in full before they are merged."""
    return _like(node.outputs[0], sizes, 2)


def _like_result(node: ExecNode, sizes: RunSizes, threads: int) -> Sequence[int]:
    return _like(node.outputs[0], sizes)


def _batch_norm(node: ExecNode, sizes: RunSizes, threads: int) -> Sequence[int]:
    """Statistics of the batch, in training mode."""
    return _like(node.inputs[1], sizes, 2) if node.number("training_mode") else ()


_RULES: dict[tuple[str, str], Callable[[ExecNode, RunSizes, int], Sequence[int]]] = {
    ("", "Conv"): _conv,
    ("com.microsoft", "FusedConv"): _conv,
    ("", "BatchNormalization"): _batch_norm,
    ("", "Where"): _where,
    ("com.microsoft", "BiasGelu"): _like_result,
}
