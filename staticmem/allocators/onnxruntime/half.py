"""Which kernels of the CPU provider compute in half precision; around the others the runtime inserts casts.

Tried on onnxruntime 1.32 for x86-64, one node at a time: a kernel is missing where the saved graph has casts
(onnxruntime/core/optimizer/insert_cast_transformer.cc).
"""

from __future__ import annotations

from staticmem.allocators.onnxruntime.graph import ExecGraph, ExecNode
from staticmem.ir import dtypes

_NATIVE = """
    Identity Round Shrink Sign Shape Transpose Flatten IsNaN IsInf Clip Max Min Mod Concat Reshape Squeeze Unsqueeze
    Expand Slice Gather GatherND GatherElements ScatterND ScatterElements Split LayerNormalization
    SimplifiedLayerNormalization Compress QuantizeLinear DequantizeLinear Cast ReverseSequence
"""
NATIVE = frozenset({("", op) for op in _NATIVE.split()} | {("com.microsoft", "SkipLayerNormalization")})


def is_half(graph: ExecGraph, name: str) -> bool:
    """Whether a value has elements of half precision."""
    kind = graph.planned(name) if name else None
    return kind is not None and kind.tensor and kind.dtype is dtypes.float16


def lacks_kernel(node: ExecNode, graph: ExecGraph) -> bool:
    """Whether the runtime casts around a node: it reads half precision, and its kernel does not."""
    return (
        not node.bodies and (node.domain, node.op) not in NATIVE and any(is_half(graph, name) for name in node.inputs)
    )


def half_without_kernel(graph: ExecGraph) -> list[str]:
    """Operators of a graph and its bodies that the runtime casts around."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        if lacks_kernel(node, graph):
            found[node.op] = None
        for body in node.bodies.values():
            found.update(dict.fromkeys(half_without_kernel(body)))
    return list(found)
