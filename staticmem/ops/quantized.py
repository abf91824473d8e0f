"""Quantised tensors: what torch.ao writes around quantised parts of a graph, and products with weights of few bits.

Source: torch/ao/quantization/fx/_decomposed.py. The scaled, rounded and clamped values between are temporaries of one
call. No gradient passes: they are made for inference.
"""

from __future__ import annotations

from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.registry import rule

_Q = "quantized_decomposed::"


def _dtype(given: DType | None, args: tuple[Any, ...], default: DType) -> DType:
    return given or next((a for a in args if isinstance(a, DType)), default)


@rule(f"{_Q}quantize_per_tensor", f"{_Q}quantize_per_channel", f"{_Q}quantize_per_channel_group",
      f"{_Q}quantize_per_token")  # fmt: skip
def quantize(e: Eager, input: Tensor, *args: Any, dtype: DType | None = None, **_: Any) -> Tensor:
    """Integers of the given type; the scaled values are a temporary of the input's type, rounded and clamped in it."""
    scaled = e.empty_like(input, kernel="aten.mul.Tensor")
    out = e.empty_like(input, _dtype(dtype, args, dtypes.uint8), "aten._to_copy.default")
    e.free(scaled)
    return out


@rule(f"{_Q}dequantize_per_tensor", f"{_Q}dequantize_per_channel", f"{_Q}dequantize_per_channel_group",
      f"{_Q}dequantize_per_token")  # fmt: skip
def dequantize(e: Eager, input: Tensor, *args: Any, out_dtype: DType | None = None, **_: Any) -> Tensor:
    """Floating-point numbers: a converted copy, then its product with the scale."""
    dtype = out_dtype or dtypes.float32
    converted = e.empty_like(input, dtype, "aten._to_copy.default")
    out = e.empty_like(input, dtype, "aten.mul.Tensor")
    e.free(converted)
    return out


@rule(f"{_Q}choose_qparams", f"{_Q}choose_qparams_symmetric")
def choose_qparams(e: Eager, input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """A scale and a zero point."""
    return e.empty((1,), dtypes.float64, kernel="aten.aminmax.default"), e.empty((1,), dtypes.int64)


@rule("onnx::QLinearConv", "onnx::QLinearMatMul", "onnx::ConvInteger", "onnx::MatMulInteger",
      "onnx::DynamicQuantizeLinear", "onnx::QLinearAdd", "onnx::QLinearMul", "onnx::QLinearWhere",
      "onnx::QLinearConcat", "onnx::QLinearGlobalAveragePool", "onnx::QLinearAveragePool", "onnx::QLinearReduceMean",
      "onnx::QLinearLeakyRelu", "onnx::QLinearSigmoid", "onnx::QLinearSoftmax", "onnx::QGemm",
      "onnx::MatMulIntegerToFloat", "onnx::DynamicQuantizeMatMul", "onnx::QAttention")  # fmt: skip
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

    def gradient(e: Eager, grads: Grads, need: Any) -> Tensor:
        return e.empty(a.shape, a.dtype, kernel="com.microsoft.MatMulNBits")

    e.record("MatMulNBitsBackward", out, [a], [Formula((0,), gradient)], [b])
    return out
