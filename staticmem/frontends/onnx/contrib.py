"""Sizes of results of com.microsoft's operators, for which onnx has no inference.

Source: onnxruntime/docs/ContribOperators.md. What the operators mean is in `ops.onnx`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from staticmem.ir.graph import Value
from staticmem.ir.onnx_graph import Node

Shape = tuple[int, ...]
Values = Mapping[str, Value]
Found = list["tuple[Shape, str] | None"]  # shape and the input whose dtype it has, by output


_SAME = (
    "Gelu", "FastGelu", "BiasGelu", "QuickGelu", "BiasDropout", "BiasSplitGelu", "LayerNormalization",
    "SimplifiedLayerNormalization", "RotaryEmbedding", "NhwcFusedConv", "GroupNorm", "BiasAdd", "BiasSoftmax",
    "Inverse", "Trilu", "QuantizeLinear", "QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax",
)  # fmt: skip


def _shape(values: Values, node: Node, position: int) -> Shape | None:
    name = node.inputs[position] if position < len(node.inputs) else ""
    value = values.get(name)
    return value.shape if value is not None else None


def _int(node: Node, name: str, default: int = 0) -> int:
    value = node.attrs.get(name, default)
    return value if isinstance(value, int) else default


def _skip(node: Node, values: Values) -> Found:
    shape = _shape(values, node, 0)
    same = (shape, node.inputs[0]) if shape is not None else None
    return [same, None, None, same]


def _matmul(node: Node, values: Values) -> Found:
    a, b = (_shape(values, node, i) for i in range(2))
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return []
    a = (*a[:-2], a[-1], a[-2]) if _int(node, "transA") else a
    b = (*b[:-2], b[-1], b[-2]) if _int(node, "transB") else b
    lead = a[:-2] if len(a) >= len(b) else b[:-2]
    return [((*lead, a[-2], b[-1]), node.inputs[0])]


def _n_bits(node: Node, values: Values) -> Found:
    a = _shape(values, node, 0)
    return [((*a[:-1], _int(node, "N")), node.inputs[0])] if a is not None else []


def _attention(node: Node, values: Values) -> Found:
    x, weight = (_shape(values, node, i) for i in range(2))
    if x is None or weight is None:
        return []
    sizes = node.attrs.get("qkv_hidden_sizes")
    width = int(sizes[2]) if isinstance(sizes, tuple) and len(sizes) == 3 else weight[-1] // 3
    return [((*x[:2], width), node.inputs[0])]


def _multi_head(node: Node, values: Values) -> Found:
    q = _shape(values, node, 0)
    v = _shape(values, node, 2)
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
    q = _shape(values, node, 0)
    if q is None:
        return []
    heads, groups = _int(node, "num_heads", 1), _int(node, "kv_num_heads", 1)
    packed = not node.inputs[1]
    size = q[2] // (heads + 2 * groups) if packed else q[2] // heads
    past = _shape(values, node, 3)
    length = q[1] + (past[2] if past is not None and len(past) == 4 else 0)
    cache = ((q[0], groups, length, size), node.inputs[0])
    return [((*q[:2], heads * size), node.inputs[0]), cache, cache]


def _embedding(node: Node, values: Values) -> Found:
    ids, table = _shape(values, node, 0), _shape(values, node, 2)
    if ids is None or table is None:
        return []
    result = ((*ids, table[-1]), node.inputs[2])
    return [result, (ids[:1], node.inputs[0]), result]


def _ints(node: Node, name: str, default: Shape) -> Shape:
    given = node.attrs.get(name, default)
    return (
        tuple(int(i) for i in given)
        if isinstance(given, tuple)
        else (int(given),)
        if isinstance(given, int)
        else default
    )


def _pair(node: Node, values: Values) -> Found:
    """QLinearAdd, QLinearMul: A, its scale and zero point, B, its ones, those of C; broadcast."""
    a, b = _shape(values, node, 0), _shape(values, node, 3)
    if a is None or b is None:
        return []
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    if any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return []
    return [(tuple(y if x == 1 else x for x, y in zip(a, b, strict=True)), node.inputs[0])]


def _where(node: Node, values: Values) -> Found:
    condition, x = _shape(values, node, 0), _shape(values, node, 1)
    largest = max((s for s in (condition, x, _shape(values, node, 4)) if s is not None), key=len, default=None)
    return [(largest, node.inputs[1])] if largest is not None and condition in (largest, ()) else []


def _joined(node: Node, values: Values) -> Found:
    """QLinearConcat: scale and zero point of the result, then each tensor with its own."""
    shapes = [_shape(values, node, i) for i in range(2, len(node.inputs), 3)]
    known = [s for s in shapes if s is not None]
    if not known or len(known) < len(shapes) or len({len(s) for s in known}) > 1:
        return []
    axis = _int(node, "axis") % max(len(known[0]), 1)
    total = sum(s[axis] for s in known)
    return [((*known[0][:axis], total, *known[0][axis + 1 :]), node.inputs[2])]


def _global_pool(node: Node, values: Values) -> Found:
    x = _shape(values, node, 0)
    if x is None or len(x) < 3:
        return []
    ones = (1,) * (len(x) - 2)
    return [((x[0], *ones, x[-1]) if _int(node, "channels_last") else (*x[:2], *ones), node.inputs[0])]


def _pool(node: Node, values: Values) -> Found:
    x = _shape(values, node, 0)
    kernel = _ints(node, "kernel_shape", ())
    if x is None or not kernel or len(x) != len(kernel) + 2:
        return []
    last = _int(node, "channels_last")
    sizes = x[1:-1] if last else x[2:]
    strides, pads = _ints(node, "strides", (1,) * len(kernel)), _ints(node, "pads", (0,) * 2 * len(kernel))
    auto = node.attrs.get("auto_pad", "NOTSET")
    out = []
    for i, (size, k) in enumerate(zip(sizes, kernel, strict=True)):
        if isinstance(auto, str) and auto.startswith("SAME"):
            out.append(-(-size // strides[i]))
            continue
        room = size + pads[i] + pads[i + len(kernel)] - k
        out.append((-(-room // strides[i]) if _int(node, "ceil_mode") else room // strides[i]) + 1)
    return [((x[0], *out, x[-1]) if last else (*x[:2], *out), node.inputs[0])]


def _mean(node: Node, values: Values) -> Found:
    x = _shape(values, node, 0)
    if x is None:
        return []
    axes = {a % len(x) for a in _ints(node, "axes", tuple(range(len(x))))} if x else set()
    if _int(node, "keepdims", 1):
        return [(tuple(1 if i in axes else size for i, size in enumerate(x)), node.inputs[0])]
    return [(tuple(size for i, size in enumerate(x) if i not in axes), node.inputs[0])]


def _gemm(node: Node, values: Values) -> Found:
    """QGemm: A, scale, zero point, B, scale, zero point, C, and those of Y: without them Y is float32."""
    a, b = _shape(values, node, 0), _shape(values, node, 3)
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return []
    rows = a[1] if _int(node, "transA") else a[0]
    columns = b[0] if _int(node, "transB") else b[1]
    quantised = len(node.inputs) > 8 and bool(node.inputs[8])
    return [((rows, columns), node.inputs[8] if quantised else node.inputs[1])]


def _product(weight: int, scale: int) -> Callable[[Node, Values], Found]:
    """A times B, in float32 like a scale."""

    def sizes(node: Node, values: Values) -> Found:
        a, b = _shape(values, node, 0), _shape(values, node, weight)
        if a is None or b is None or len(a) < 2 or len(b) < 2:
            return []
        lead = a[:-2] if len(a) >= len(b) else b[:-2]
        return [((*lead, a[-2], b[-1]), node.inputs[scale])]

    return sizes


def _quantized_attention(node: Node, values: Values) -> Found:
    """QAttention: input, weight, bias, scales: the result is a third of the weight's columns wide, like the bias."""
    x, weight = _shape(values, node, 0), _shape(values, node, 1)
    return [((*x[:2], weight[-1] // 3), node.inputs[3])] if x is not None and weight else []


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
    "QLinearAdd": _pair,
    "QLinearMul": _pair,
    "QLinearWhere": _where,
    "QLinearConcat": _joined,
    "QLinearGlobalAveragePool": _global_pool,
    "QLinearAveragePool": _pool,
    "QLinearReduceMean": _mean,
    "QGemm": _gemm,
    "MatMulIntegerToFloat": _product(1, 2),
    "DynamicQuantizeMatMul": _product(1, 2),
    "QAttention": _quantized_attention,
}


def infer(node: Node, values: Values) -> list[Value]:
    """The results whose sizes follow from the inputs'; empty for operators that are not known."""
    if not node.inputs:
        return []
    if node.op in _SAME:
        shape = _shape(values, node, 0)
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
