"""Where the runtime keeps initializers, and the copies that kernels pack for themselves.

Source: onnxruntime/core/framework/session_state_utils.cc and graph.cc (initializers of more than 127 bytes are used
where they were loaded, smaller ones are copied into memory reserved in the arena),
core/mlas/lib/sgemm.cpp (MlasGemmPackBSize: the packed right side of a product), core/providers/cpu/math/matmul.cc and
gemm.cc (which weights are packed). Reserved bytes at the start of a session equal these sums on onnxruntime 1.31.
On CUDA initializers are one block on the device; that is read from the source and not verified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from staticmem.allocators.onnxruntime.graph import ExecGraph, ExecNode, PlannedType
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
    for sizes, used in _levels(graph):
        for name, kind in sizes.initializers.items():
            if name not in used:
                continue
            size = nbytes(kind)
            if provider == "cuda":
                arena += math.ceil(size / _DEVICE_ALIGNMENT) * _DEVICE_ALIGNMENT
            elif size <= SMALL:
                arena += size
            else:
                outside += size
        if prepacking and provider == "cpu":
            packed += sum(_pack(node, sizes) for node in sizes.nodes)
    return WeightBytes(arena, packed, outside)


def nbytes(kind: PlannedType) -> int:
    """Bytes of an initializer."""
    count = 1
    for dim in kind.dims or ():
        count *= dim if isinstance(dim, int) else 0
    return kind.dtype.nbytes(count)


def _levels(graph: ExecGraph) -> list[tuple[ExecGraph, set[str]]]:
    """Every graph and body with the names that it or its bodies read."""
    found: list[tuple[ExecGraph, set[str]]] = []
    used = set(graph.outputs)
    for node in graph.nodes:
        used.update(node.inputs)
        used.update(node.implicit)
        for body in node.bodies.values():
            found.extend(_levels(body))
    return [(graph, used), *found]


def _pack(node: ExecNode, graph: ExecGraph) -> int:
    if (node.domain, node.op) not in _PACKED or len(node.inputs) < 2:
        return 0
    kind = graph.initializers.get(node.inputs[1])
    if kind is None or kind.dtype is not dtypes.float32 or kind.dims is None or len(kind.dims) != 2:
        return 0
    rows, columns = kind.dims
    if not isinstance(rows, int) or not isinstance(columns, int):
        return 0
    if any(a.name == "transB" and a.i for a in node.proto.attribute):
        rows, columns = columns, rows
    size = math.ceil(columns / _PACK_COLUMNS) * _PACK_COLUMNS * rows * 4
    return math.ceil(size / _PACK_ALIGNMENT) * _PACK_ALIGNMENT
