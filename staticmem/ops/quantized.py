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
from staticmem.ops.onnx import Context, integer, translation
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


_INTEGERS = (
    "QLinearConv QLinearMatMul ConvInteger MatMulInteger DynamicQuantizeLinear QLinearAdd QLinearMul QLinearWhere "
    "QLinearConcat QLinearGlobalAveragePool QLinearAveragePool QLinearReduceMean QLinearLeakyRelu QLinearSigmoid "
    "QLinearSoftmax QGemm MatMulIntegerToFloat DynamicQuantizeMatMul QAttention"
).split()


@rule(" ".join(f"onnx::{name}" for name in _INTEGERS), kinds=("integer",))
def integers(
    e: Eager, *_: Tensor, sizes: tuple[tuple[int, ...], ...], dtypes: tuple[DType, ...]
) -> Tensor | tuple[Tensor, ...]:
    """ONNX operators on integers: their results, by the definition of the operator; no gradient passes."""
    made = tuple(e.empty(size, dtype, kernel="onnx.integers") for size, dtype in zip(sizes, dtypes, strict=True))
    return made[0] if len(made) == 1 else made


@rule("com.microsoft::MatMulNBits")
def matmul_n_bits(e: Eager, a: Tensor, b: Tensor, *_: Tensor | None, columns: int) -> Tensor:
    """Saves the packed weight for the gradient of the input; the weight has none."""
    out = e.empty((*a.shape[:-1], columns), a.dtype, kernel="com.microsoft.MatMulNBits")
    gradient = gradient_like(a, "com.microsoft.MatMulNBits", a.dtype)
    e.record("MatMulNBitsBackward", out, [a], [Formula((0,), gradient)], [b])
    return out


@translation("QuantizeLinear")
def onnx_quantize(ctx: Context, node: Node) -> list[Op]:
    point = ctx.net.values.get(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
    named = dtypes.ONNX_CODES.get(integer(node, "output_dtype", 0))
    dtype = point.dtype if point is not None else named or dtypes.uint8
    args = [ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1])]
    return [ctx.op(node, "quantized_decomposed::quantize_per_tensor", *args, kwargs={"dtype": dtype})]


@translation("DequantizeLinear")
def onnx_dequantize(ctx: Context, node: Node) -> list[Op]:
    scale = ctx.net.values.get(node.inputs[1])
    dtype = scale.dtype if scale is not None else dtypes.float32
    args = [ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1])]
    return [ctx.op(node, "quantized_decomposed::dequantize_per_tensor", *args, kwargs={"out_dtype": dtype})]


@translation("MatMulNBits")
def onnx_matmul_n_bits(ctx: Context, node: Node) -> list[Op]:
    """com.microsoft MatMulNBits: a weight of few bits, which no gradient reaches."""
    args = [ctx.ref(name) if name else None for name in node.inputs]
    return [ctx.op(node, "com.microsoft::MatMulNBits", *args, kwargs={"columns": integer(node, "N", 0)})]


@translation(*_INTEGERS)
def onnx_integers(ctx: Context, node: Node) -> list[Op] | None:
    """One call that makes its results; None where their sizes are not known."""
    values = [ctx.net.values.get(name) for name in node.outputs if name]
    if any(value is None or ctx.net.shape(value.name) is None for value in values):
        return None
    made = tuple(v for v in (ctx.net.values.get(name) for name in node.outputs if name) if v is not None)
    args = [ctx.ref(name) for name in node.inputs if name]
    kwargs: dict[str, Arg] = {"sizes": tuple(v.shape or () for v in made), "dtypes": tuple(v.dtype for v in made)}
    outputs = tuple(name for name in node.outputs if name)
    return [ctx.op(node, f"onnx::{node.op}", *args, outputs=outputs, kwargs=kwargs)]
