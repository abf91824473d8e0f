"""Sizes of results of the runtime's own operators on bytes.

Definitions: onnxruntime/docs/ContribOperators.md, onnxruntime/core/graph/contrib_ops/quantization_defs.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from staticmem.ir import dtypes
from staticmem.ir.onnx_graph import Node
from staticmem.ort.memory.graph import Dim, PlannedType
from staticmem.ort.memory.shapes import Dims, Rule, Types, broadcast, gemm, integer, matmul, text, windows

_MS = "com.microsoft"


def _dims(inputs: Types, index: int) -> Dims | None:
    kind = inputs[index] if index < len(inputs) else None
    return None if kind is None else kind.dims


def _typed(inputs: Types, index: int, dims: Dims | None) -> Types:
    """One result with the element type of an input."""
    kind = inputs[index] if index < len(inputs) else None
    return [replace(kind, dims=dims) if kind is not None else None]


def _same(node: Node, inputs: Types) -> Types:
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


def _conv(node: Node, inputs: Types) -> Types:
    data, weight = _dims(inputs, 0), _dims(inputs, 3)
    if data is None or weight is None or len(data) != len(weight) or len(data) < 3:
        return _typed(inputs, 7, None)
    return _typed(inputs, 7, _spatial(node, data, lambda sizes: windows(node, sizes, weight[2:]), weight[0]))


def _channels(node: Node, data: Dims) -> Dim:
    return data[-1] if integer(node, "channels_last", 0) else data[1]


def _pool(node: Node, inputs: Types) -> Types:
    data, kernel = _dims(inputs, 0), node.attrs.get("kernel_shape")
    if data is None or len(data) < 3 or not isinstance(kernel, tuple):
        return _typed(inputs, 0, None)
    sizes = tuple(int(k) for k in kernel)
    return _typed(inputs, 0, _spatial(node, data, lambda dims: windows(node, dims, sizes), _channels(node, data)))


def _global_pool(node: Node, inputs: Types) -> Types:
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
    **{(_MS, op): _same for op in _SAME},
    (_MS, "QLinearAdd"): _both,
    (_MS, "QLinearMul"): _both,
    (_MS, "QLinearConcat"): _joined,
    (_MS, "QLinearConv"): _conv,
    (_MS, "QLinearAveragePool"): _pool,
    (_MS, "QLinearGlobalAveragePool"): _global_pool,
    (_MS, "QGemm"): _quant_gemm,
    (_MS, "DynamicQuantizeMatMul"): _floats(_plain_matmul),
    (_MS, "MatMulIntegerToFloat"): _floats(_plain_matmul),
    (_MS, "DynamicQuantizeLSTM"): _lstm,
}
