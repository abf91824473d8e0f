"""Sizes of results of com.microsoft's operators, for which onnx has no inference.

Source: onnxruntime/docs/ContribOperators.md.
Only sizes: what the operators mean is `recover/onnx_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from staticmem.frontends.onnx import contrib_integers
from staticmem.ir.graph import Value
from staticmem.ir.onnx_graph import Node

Shape = tuple[int, ...]
Values = Mapping[str, Value]
Found = list["tuple[Shape, str] | None"]  # shape and the input whose dtype it has, by output

_SAME = (
    "Gelu", "FastGelu", "BiasGelu", "QuickGelu", "BiasDropout", "BiasSplitGelu", "LayerNormalization",
    "SimplifiedLayerNormalization", "RotaryEmbedding", "NhwcFusedConv", "GroupNorm", "BiasAdd", "BiasSoftmax",
    "Inverse", "Trilu", "QuantizeLinear",
)  # fmt: skip


def _shape(values: Values, name: str) -> Shape | None:
    value = values.get(name)
    return value.shape if value is not None else None


def _int(node: Node, name: str, default: int = 0) -> int:
    value = node.attrs.get(name, default)
    return value if isinstance(value, int) else default


def _skip(node: Node, values: Values) -> Found:
    shape = _shape(values, node.inputs[0])
    same = (shape, node.inputs[0]) if shape is not None else None
    return [same, None, None, same]


def _matmul(node: Node, values: Values) -> Found:
    a, b = (_shape(values, n) for n in node.inputs[:2])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return []
    a = (*a[:-2], a[-1], a[-2]) if _int(node, "transA") else a
    b = (*b[:-2], b[-1], b[-2]) if _int(node, "transB") else b
    lead = a[:-2] if len(a) >= len(b) else b[:-2]
    return [((*lead, a[-2], b[-1]), node.inputs[0])]


def _n_bits(node: Node, values: Values) -> Found:
    a = _shape(values, node.inputs[0])
    return [((*a[:-1], _int(node, "N")), node.inputs[0])] if a is not None else []


def _attention(node: Node, values: Values) -> Found:
    x, weight = (_shape(values, n) for n in node.inputs[:2])
    if x is None or weight is None:
        return []
    sizes = node.attrs.get("qkv_hidden_sizes")
    width = int(sizes[2]) if isinstance(sizes, tuple) and len(sizes) == 3 else weight[-1] // 3
    return [((*x[:2], width), node.inputs[0])]


def _multi_head(node: Node, values: Values) -> Found:
    q = _shape(values, node.inputs[0])
    v = _shape(values, node.inputs[2]) if len(node.inputs) > 2 else None
    if q is None:
        return []
    if len(q) == 5:  # packed: [B, S, heads, 3, size]
        return [((*q[:2], q[2] * q[4]), node.inputs[0])]
    heads = _int(node, "num_heads", 1)
    if v is None or len(v) == 5:
        return [(q, node.inputs[0])]
    width = v[-1] if len(v) == 3 else v[1] * v[3]
    length = v[1] if len(v) == 3 else v[2]
    size = width // max(heads, 1)
    return [((*q[:2], width), node.inputs[0]), *[((q[0], heads, length, size), node.inputs[0])] * 2]


def _grouped(node: Node, values: Values) -> Found:
    q = _shape(values, node.inputs[0])
    if q is None:
        return []
    heads, groups = _int(node, "num_heads", 1), _int(node, "kv_num_heads", 1)
    packed = not node.inputs[1]
    size = q[2] // (heads + 2 * groups) if packed else q[2] // heads
    past = _shape(values, node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else None
    length = q[1] + (past[2] if past is not None and len(past) == 4 else 0)
    cache = ((q[0], groups, length, size), node.inputs[0])
    return [((*q[:2], heads * size), node.inputs[0]), cache, cache]


def _embedding(node: Node, values: Values) -> Found:
    ids, table = _shape(values, node.inputs[0]), _shape(values, node.inputs[2])
    if ids is None or table is None:
        return []
    result = ((*ids, table[-1]), node.inputs[2])
    return [result, (ids[:1], node.inputs[0]), result]


_BY_OP: Mapping[str, Callable[[Node, Values], Found]] = {
    "SkipLayerNormalization": _skip,
    "SkipSimplifiedLayerNormalization": _skip,
    "FusedMatMul": _matmul,
    "TransposeMatMul": _matmul,
    "MatMulNBits": _n_bits,
    "Attention": _attention,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _grouped,
    "EmbedLayerNormalization": _embedding,
    **contrib_integers.BY_OP,
}


def infer(node: Node, values: Values) -> list[Value]:
    """The results whose sizes follow from the inputs'; empty for operators that are not known."""
    if not node.inputs:
        return []
    if node.op in _SAME:
        shape = _shape(values, node.inputs[0])
        found: Found = [(shape, node.inputs[0])] if shape is not None else []
    elif node.op in _BY_OP:
        found = _BY_OP[node.op](node, values)
    else:
        return []
    return [
        Value(name, values[given[1]].dtype, given[0])
        for name, given in zip(node.outputs, found, strict=False)
        if name and given is not None
    ]
