"""Operators that the CPU provider has no kernel for in the element type that they are given: it refuses the session.

Tried on onnxruntime 1.32 for x86-64 with the operators of opset 21, one node at a time;
onnxruntime/docs/OperatorKernels.md lists the same. Left out: operators that ONNX defines by others, which the runtime
writes out where a kernel is missing, and float16, around which it casts (`half.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from staticmem.errors import ModelFileError
from staticmem.ir import dtypes
from staticmem.ort.memory.graph import ExecGraph, ExecNode

_DOUBLE = """
    Acos Acosh Asin Asinh Atan Atanh AveragePool Col2Im Conv ConvTranspose Cosh Det Erf GlobalAveragePool GlobalLpPool
    GlobalMaxPool Hardmax InstanceNormalization LRN LpPool MaxRoiPool MaxUnpool Mean Multinomial Sinh Tan
"""
_BFLOAT16 = """
    Abs Add ArgMax ArgMin BatchNormalization Ceil Col2Im CumSum DFT DepthToSpace Div Equal Erf Exp Expand Floor Gemm
    Greater Hardmax LRN Less Log MatMul Max Mean Min Mod Mul Neg NonZero Pow Reciprocal ReduceL2 ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Sigmoid Size SpaceToDepth Sqrt STFT Sub Sum Tanh Tile
    Trilu Where
"""
MISSING = {dtypes.float64: frozenset(_DOUBLE.split()), dtypes.bfloat16: frozenset(_BFLOAT16.split())}


def check_kernels(graph: ExecGraph) -> None:
    """Refuses a graph with a node that the CPU provider cannot run, as the runtime does when it makes the session.

    Raises:
        ModelFileError: no kernel computes in the node's element type (SM502).
    """
    for node, within in _all_nodes(graph):
        kinds = [within.planned(name) for name in node.inputs if name]
        for kind in kinds:
            if node.domain or kind is None or not kind.tensor or node.op not in MISSING.get(kind.dtype, ()):
                continue
            raise ModelFileError(
                f"the ONNX Runtime has no CPU kernel for {node.op} in {kind.dtype.name}",
                f"It would refuse the session because of node '{node.label}'.",
                "Export the model in float32 or float16, or choose another --provider.",
                code="SM502",
            )


def _all_nodes(graph: ExecGraph) -> Iterator[tuple[ExecNode, ExecGraph]]:
    for node in graph.nodes:
        yield node, graph
        for body in node.bodies.values():
            yield from _all_nodes(body)
