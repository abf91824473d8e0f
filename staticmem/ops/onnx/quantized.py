"""Quantised graphs (QDQ), local response normalisation, and selections whose size is in the data.

QuantizeLinear and DequantizeLinear are what torch.ao writes as `quantized_decomposed`. Operators on integers
(ConvInteger, QLinearConv) have no ATen call: they keep their names, with the sizes and types of their definitions.
"""

from __future__ import annotations

import math

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx.context import Context, Rule, integer, real


def quantize(ctx: Context, node: Node) -> list[Op]:
    point = ctx.net.values.get(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
    named = dtypes.ONNX_CODES.get(integer(node, "output_dtype", 0))
    dtype = point.dtype if point is not None else named or dtypes.uint8
    args = [ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1])]
    return [ctx.op(node, "quantized_decomposed::quantize_per_tensor", *args, kwargs={"dtype": dtype})]


def dequantize(ctx: Context, node: Node) -> list[Op]:
    scale = ctx.net.values.get(node.inputs[1])
    dtype = scale.dtype if scale is not None else dtypes.float32
    args = [ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1])]
    return [ctx.op(node, "quantized_decomposed::dequantize_per_tensor", *args, kwargs={"out_dtype": dtype})]


def local_response_norm(ctx: Context, node: Node) -> list[Op] | None:
    """torch.nn.functional.local_response_norm: a mean of squares over neighbouring channels."""
    shape = ctx.net.shape(node.inputs[0])
    size = integer(node, "size", 0)
    if shape is None or len(shape) != 4 or size < 1:
        return None
    x = ctx.ref(node.inputs[0])
    batch, channels, rows, columns = shape
    lifted = (batch, 1, channels, rows, columns)
    padded = (batch, 1, channels + size - 1, rows, columns)
    ops: list[Op] = []

    def call(target: str, *args: Arg, sizes: tuple[int, ...]) -> Ref:
        name = ctx.fresh(node)
        ctx.define(name, node.inputs[0], sizes)
        ops.append(ctx.op(node, f"aten::{target}", *args, outputs=(name,)))
        return Ref(name)

    square = call("unsqueeze", call("mul.Tensor", x, x, sizes=shape), 1, sizes=lifted)
    square = call("pad", square, (0, 0, 0, 0, size // 2, (size - 1) // 2), "constant", 0.0, sizes=padded)
    mean = call("avg_pool3d", square, (size, 1, 1), (1, 1, 1), (0, 0, 0), False, True, sizes=lifted)
    mean = call("squeeze.dim", mean, 1, sizes=shape)
    mean = call("mul.Tensor", mean, real(node, "alpha", 1e-4), sizes=shape)
    mean = call("add.Tensor", mean, real(node, "bias", 1.0), sizes=shape)
    power = call("pow.Tensor_Scalar", mean, real(node, "beta", 0.75), sizes=shape)
    return [*ops, ctx.op(node, "aten::div.Tensor", x, power)]


def non_zero(ctx: Context, node: Node) -> list[Op] | None:
    """[rank, n] positions: the transposed view of PyTorch's; n is at most the number of elements."""
    shape, result = ctx.net.shape(node.inputs[0]), ctx.net.shape(node.outputs[0])
    if shape is None:
        return None
    count = result[1] if result is not None else math.prod(shape)
    name = ctx.fresh(node)
    ctx.define(name, node.outputs[0], (count, len(shape)))
    kwargs: dict[str, Arg] = {"size": count}
    return [
        ctx.op(node, "aten::nonzero", ctx.ref(node.inputs[0]), outputs=(name,), kwargs=kwargs),
        ctx.op(node, "aten::t", Ref(name)),
    ]


def matmul_n_bits(ctx: Context, node: Node) -> list[Op]:
    """com.microsoft MatMulNBits: a weight of few bits, which no gradient reaches."""
    args = [ctx.ref(name) if name else None for name in node.inputs]
    return [ctx.op(node, "com.microsoft::MatMulNBits", *args, kwargs={"columns": integer(node, "N", 0)})]


INTEGERS = (
    "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QLinearAdd", "QLinearMul",
    "QLinearWhere", "QLinearConcat", "QLinearGlobalAveragePool", "QLinearAveragePool", "QLinearReduceMean",
    "QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax", "QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
    "QAttention",
)  # fmt: skip


def integers(ctx: Context, node: Node) -> list[Op] | None:
    """One call that makes its results; None where their sizes are not known."""
    values = [ctx.net.values.get(name) for name in node.outputs if name]
    if any(value is None or ctx.net.shape(value.name) is None for value in values):
        return None
    made = tuple(v for v in (ctx.net.values.get(name) for name in node.outputs if name) if v is not None)
    args = [ctx.ref(name) for name in node.inputs if name]
    kwargs: dict[str, Arg] = {"sizes": tuple(v.shape or () for v in made), "dtypes": tuple(v.dtype for v in made)}
    outputs = tuple(name for name in node.outputs if name)
    return [ctx.op(node, f"onnx::{node.op}", *args, outputs=outputs, kwargs=kwargs)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(INTEGERS, integers),
    "QuantizeLinear": quantize,
    "DequantizeLinear": dequantize,
    "LRN": local_response_norm,
    "NonZero": non_zero,
    "MatMulNBits": matmul_n_bits,
}
