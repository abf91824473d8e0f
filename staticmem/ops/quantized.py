"""Quantised tensors: what torch.ao writes around quantised parts of a graph, and products with weights of few bits.

Source: torch/ao/quantization/fx/_decomposed.py. The scaled, rounded and clamped values between are temporaries of one
call. No gradient passes: they are made for inference. ONNX: QuantizeLinear and DequantizeLinear are these calls (QDQ);
operators on integers (ConvInteger, QLinearConv) have no ATen call and keep their names, with the sizes and types of
their definitions.
"""

from __future__ import annotations

from typing import Any

from staticmem.eager.autograd import Formula
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Arg, Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context, Results, Shape, Sizes, integer, like_first, product, translation, windows
from staticmem.ops.onnx import integers as integers_of
from staticmem.ops.pointwise import gradient_like
from staticmem.ops.registry import rule

_TORCH_AO = "quantized_decomposed::"
_SCOPES = ("tensor", "channel", "channel_group", "token")  # that one scale is of


def _dtype(given: DType | None, args: tuple[Any, ...], default: DType) -> DType:
    return given or next((a for a in args if isinstance(a, DType)), default)


@rule(" ".join(f"{_TORCH_AO}quantize_per_{scope}" for scope in _SCOPES))
def quantize(e: Eager, input: Tensor, *args: Any, dtype: DType | None = None, **_: Any) -> Tensor:
    """Integers of the given type; the scaled values are a temporary of the input's type, rounded and clamped in it."""
    scaled = e.empty_like(input, kernel="aten.mul.Tensor")
    out = e.empty_like(input, _dtype(dtype, args, dtypes.uint8), "aten._to_copy.default")
    e.free(scaled)
    return out


@rule(" ".join(f"{_TORCH_AO}dequantize_per_{scope}" for scope in _SCOPES))
def dequantize(e: Eager, input: Tensor, *args: Any, out_dtype: DType | None = None, **_: Any) -> Tensor:
    """Floating-point numbers: a converted copy, then its product with the scale."""
    dtype = out_dtype or dtypes.float32
    converted = e.empty_like(input, dtype, "aten._to_copy.default")
    out = e.empty_like(input, dtype, "aten.mul.Tensor")
    e.free(converted)
    return out


@rule(f"{_TORCH_AO}choose_qparams {_TORCH_AO}choose_qparams_symmetric")
def choose_qparams(e: Eager, input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """A scale and a zero point."""
    return e.empty((1,), dtypes.float64, kernel="aten.aminmax.default"), e.empty((1,), dtypes.int64)


# -- results of com.microsoft's operators on integers ------------------------------------------------------------------


def _broadcast_sizes(_: Node, a: Shape, a_scale: Any, a_zero: Any, b: Shape | None, *__: Any) -> Results:
    """A, its scale and zero point, B, its scale and zero point, those of C."""
    if b is None:
        return []
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    if any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return []
    return [(tuple(y if x == 1 else x for x, y in zip(a, b, strict=True)), 0)]


def _where_sizes(_: Node, condition: Shape, x: Shape | None, *others: Shape | None) -> Results:
    """Condition, X, its scale and zero point, Y, its scale and zero point."""
    y = others[2] if len(others) > 2 else None
    largest = max((shape for shape in (condition, x, y) if shape is not None), key=len)
    return [(largest, 1)] if condition in (largest, ()) else []


def _concat_sizes(node: Node, *inputs: Shape | None) -> Results:
    """Scale and zero point of the result, then each tensor with its own."""
    shapes = [shape for shape in inputs[2::3] if shape is not None]
    if not shapes or len(shapes) < len(inputs[2::3]) or len({len(shape) for shape in shapes}) > 1:
        return []
    axis = integer(node, "axis", 0) % max(len(shapes[0]), 1)
    total = sum(shape[axis] for shape in shapes)
    return [((*shapes[0][:axis], total, *shapes[0][axis + 1 :]), 2)]


def _global_pool_sizes(node: Node, x: Shape, *_: Shape | None) -> Results:
    if len(x) < 3:
        return []
    ones = (1,) * (len(x) - 2)
    return [((x[0], *ones, x[-1]) if integer(node, "channels_last", 0) else (*x[:2], *ones), 0)]


def _pool_sizes(node: Node, x: Shape, *_: Shape | None) -> Results:
    kernel = integers_of(node, "kernel_shape")
    rank = len(kernel)
    if not kernel or len(x) != rank + 2:
        return []
    last = integer(node, "channels_last", 0)
    sizes = windows(node, x[1:-1] if last else x[2:], kernel)
    return [((x[0], *sizes, x[-1]) if last else (*x[:2], *sizes), 0)]


def _mean_sizes(node: Node, x: Shape, *_: Shape | None) -> Results:
    axes = {axis % len(x) for axis in integers_of(node, "axes", tuple(range(len(x))))} if x else set()
    if integer(node, "keepdims", 1):
        return [(tuple(1 if i in axes else size for i, size in enumerate(x)), 0)]
    return [(tuple(size for i, size in enumerate(x) if i not in axes), 0)]


def _gemm_sizes(node: Node, a: Shape, a_scale: Any, a_zero: Any, b: Shape | None, *_: Any) -> Results:
    """A, scale, zero point, B, scale, zero point, C, and those of Y: without them Y is float32 like a scale."""
    if b is None or len(a) != 2 or len(b) != 2:
        return []
    rows = a[1] if integer(node, "transA", 0) else a[0]
    columns = b[0] if integer(node, "transB", 0) else b[1]
    quantized = len(node.inputs) > 8 and bool(node.inputs[8])
    return [((rows, columns), 8 if quantized else 1)]


def _product_sizes(_: Node, a: Shape, b: Shape | None, *__: Shape | None) -> Results:
    """A times B, in float32 like the scale, which is the third input."""
    if b is None or len(a) < 2 or len(b) < 2:
        return []
    return [(product(a, b), 2)]


def _attention_sizes(_: Node, x: Shape, weight: Shape | None, *__: Shape | None) -> Results:
    """Input, weight, bias, scales: the result is a third of the weight's columns wide, in float32 like the scales."""
    return [((*x[:2], weight[-1] // 3), 3)] if weight else []


def _lstm_sizes(node: Node, x: Shape, weight: Shape | None, *_: Shape | None) -> Results:
    """Results as LSTM has them, [steps, directions, batch, hidden] and the last state of each direction."""
    if weight is None or len(x) != 3 or len(weight) != 3:
        return []
    state = (weight[0], x[1], integer(node, "hidden_size", 0) or weight[2] // 4)
    return [((x[0], state[0], *state[1:]), 0), (state, 0), (state, 0)]


_INTEGERS: dict[str, Sizes | None] = {  # None: onnx infers the sizes
    **dict.fromkeys("QLinearConv QLinearMatMul ConvInteger MatMulInteger DynamicQuantizeLinear".split()),
    **dict.fromkeys("QLinearLeakyRelu QLinearSigmoid QLinearSoftmax".split(), like_first),
    **dict.fromkeys("QLinearAdd QLinearMul".split(), _broadcast_sizes),
    "QLinearWhere": _where_sizes,
    "QLinearConcat": _concat_sizes,
    "QLinearGlobalAveragePool": _global_pool_sizes,
    "QLinearAveragePool": _pool_sizes,
    "QLinearReduceMean": _mean_sizes,
    "QGemm": _gemm_sizes,
    **dict.fromkeys("MatMulIntegerToFloat DynamicQuantizeMatMul".split(), _product_sizes),
    "QAttention": _attention_sizes,
    "DynamicQuantizeLSTM": _lstm_sizes,
}


@rule(" ".join(f"onnx::{name}" for name in _INTEGERS), kinds=("integer",))
def integers(
    e: Eager, *_: Tensor, sizes: tuple[tuple[int, ...], ...], dtypes: tuple[DType, ...]
) -> Tensor | tuple[Tensor, ...]:
    """ONNX operators on integers: their results, by the definition of the operator; no gradient passes."""
    results = tuple(e.empty(size, dtype, kernel="onnx.integers") for size, dtype in zip(sizes, dtypes, strict=True))
    return results[0] if len(results) == 1 else results


@rule("com.microsoft::MatMulNBits")
def matmul_n_bits(e: Eager, a: Tensor, b: Tensor, *_: Tensor | None, columns: int) -> Tensor:
    """Saves the packed weight for the gradient of the input; the weight has none."""
    out = e.empty((*a.shape[:-1], columns), a.dtype, kernel="com.microsoft.MatMulNBits")
    gradient = gradient_like(a, "com.microsoft.MatMulNBits", a.dtype)
    return e.record("MatMulNBitsBackward", out, [a], [Formula((0,), gradient)], [b])


def _quantized_sizes(node: Node, x: Shape, *_: Shape | None) -> Results:
    return [(x, 2)] if len(node.inputs) > 2 and node.inputs[2] else []


@translation("QuantizeLinear", sizes=_quantized_sizes)
def onnx_quantize(ctx: Context, node: Node) -> list[Op]:
    point = ctx.net.values.get(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
    named = dtypes.ONNX_CODES.get(integer(node, "output_dtype", 0))
    dtype = point.dtype if point is not None else named or dtypes.uint8
    args = [ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1])]
    return [ctx.op(node, "quantized_decomposed::quantize_per_tensor", *args, kwargs={"dtype": dtype})]


@translation("DequantizeLinear", sizes=lambda _, x, *__: [(x, 1)])
def onnx_dequantize(ctx: Context, node: Node) -> list[Op]:
    scale = ctx.net.values.get(node.inputs[1])
    dtype = scale.dtype if scale is not None else dtypes.float32
    args = [ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1])]
    return [ctx.op(node, "quantized_decomposed::dequantize_per_tensor", *args, kwargs={"out_dtype": dtype})]


def _n_bits_sizes(node: Node, a: Shape, *_: Shape | None) -> Results:
    return [((*a[:-1], integer(node, "N", 0)), 0)]


@translation("MatMulNBits", sizes=_n_bits_sizes)
def onnx_matmul_n_bits(ctx: Context, node: Node) -> list[Op]:
    """com.microsoft MatMulNBits: a weight of few bits, which no gradient reaches."""
    args = [ctx.ref(name) if name else None for name in node.inputs]
    return [ctx.op(node, "com.microsoft::MatMulNBits", *args, kwargs={"columns": integer(node, "N", 0)})]


def onnx_integers(ctx: Context, node: Node) -> list[Op] | None:
    """One call that makes its results; None where their sizes are not known."""
    values = [ctx.net.values.get(name) for name in node.outputs if name]
    if any(value is None or ctx.net.shape(value.name) is None for value in values):
        return None
    results = tuple(v for v in (ctx.net.values.get(name) for name in node.outputs if name) if v is not None)
    args = [ctx.ref(name) for name in node.inputs if name]
    kwargs: dict[str, Arg] = {"sizes": tuple(v.shape or () for v in results), "dtypes": tuple(v.dtype for v in results)}
    outputs = tuple(name for name in node.outputs if name)
    return [ctx.op(node, f"onnx::{node.op}", *args, outputs=outputs, kwargs=kwargs)]


for _operator, _sizes in _INTEGERS.items():
    translation(_operator, sizes=_sizes)(onnx_integers)
