"""Linear layers of bitsandbytes, whose weights have 4 or 8 bits: what their forward and backward make beside results.

Sources: bitsandbytes 0.50, autograd/_functions.py (`MatMul4Bit`, `MatMul8bitLt`), nn/modules.py (`Linear4bit.forward`,
`Linear8bitLt.forward`), functional.py (`dequantize_4bit`), backends/cuda/ops.py (`gemm_4bit`, `int8_vectorwise_quant`,
`int8_mm_dequant`), backends/default/ops.py (`int8_scaled_mm`).
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.casts import to_copy
from staticmem.ops.linear import product_flops, rows_of
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule
from staticmem.ops.views import contiguous, reshape

FUSED_ROWS = 4  # `_GEMM_4BIT_CUSTOM_FLOOR_M`: up to so many rows one kernel reads the packed weight on every card


@rule("bitsandbytes::linear_4bit", kinds=("product",), flops=product_flops(0))
@scoped
def linear_4bit(
    e: Eager,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Sequence[Tensor],
    features: tuple[int, int],
    dtype: DType,
) -> Tensor:
    """Casts the input to the compute type and the result back; saves nothing.

    The weight exists in the compute type while a product reads it, in forward and in backward; up to 4 rows the forward
    reads the packed one. `features` are those of the input and of the result, `statistics` begin with absmax.
    """
    columns, rows = features
    count = rows_of(input, columns)
    x = input if input.dtype is dtype else to_copy(e, input, dtype)
    if count > FUSED_ROWS:  # `_dequant_linear_fallback`
        if statistics[0].dtype is dtypes.uint8:  # it adds the offset out of place
            e.empty(statistics[0].shape, dtypes.float32, kernel="aten.add.Tensor")
        weight_of(e, statistics, (rows, columns), dtype)
    out = e.empty((*x.shape[:-1], rows), dtype, kernel="bitsandbytes.gemm_4bit.default")

    def by_input(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        weight_of(e, statistics, (rows, columns), dtype)
        return e.empty(x.shape, grad_of(grads).dtype, kernel="aten.mm.default")

    e.record("MatMul4BitBackward", out, [x], [Formula((0,), by_input)])  # the packed weight is an attribute of `ctx`
    return out if input.dtype is dtype else to_copy(e, out, input.dtype)


def weight_of(e: Eager, statistics: Sequence[Tensor], shape: tuple[int, int], dtype: DType) -> Tensor:
    """The dequantised weight: absmax first, in float32 where it has 8 bits itself."""
    if statistics[0].dtype is dtypes.uint8:
        e.empty(statistics[0].shape, dtypes.float32, kernel="bitsandbytes.dequantize_blockwise.default")
    return e.empty(shape, dtype, kernel="bitsandbytes.dequantize_4bit.default")


@rule("bitsandbytes::linear_8bit", kinds=("product", "keeps_on_ctx"), flops=product_flops(0))
@scoped
def linear_8bit(
    e: Eager,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Sequence[Tensor],
    features: tuple[int, int],
    dtype: DType,
) -> Tensor:
    """Quantises the input row by row, multiplies in int32, and keeps the input as an attribute of `ctx`, which no
    checkpoint takes over and which lives as long as the graph. The node casts the weight.

    The columns of outliers, which the data decide, are not counted.
    """
    columns, rows = features
    count = rows_of(input, columns)
    flat = reshape(e, input, (-1, columns))
    e.open_scope()
    half = flat if flat.dtype is dtypes.float16 else e.empty(flat.shape, dtypes.float16, kernel="aten._to_copy.default")
    scales = e.empty((count,), dtypes.float32, kernel="bitsandbytes.int8_vectorwise_quant.default")
    small = e.empty(flat.shape, dtypes.int8, kernel="bitsandbytes.int8_vectorwise_quant.default")
    e.empty(half.shape, dtypes.float16, kernel="aten.abs.default")
    e.empty(half.shape, dtypes.bool_, kernel="aten.ge.Scalar")
    e.close_scope(keep=[scales, small])
    e.open_scope()
    e.empty((count, rows), dtypes.int32, kernel="bitsandbytes.int8_linear_matmul.default")
    out = e.empty((count, rows), dtypes.float16, kernel="bitsandbytes.int8_mm_dequant.default")
    if input.dtype is not dtypes.float16:
        out = e.empty((count, rows), input.dtype, kernel="aten._to_copy.default")
    e.close_scope(keep=[out])

    def by_input(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        incoming = grad_of(grads)
        if not incoming.is_contiguous:
            contiguous(e, incoming)
        e.empty((rows, columns), input.dtype, kernel="aten._to_copy.default")
        return e.empty((count, columns), input.dtype, kernel="aten.mm.default")

    e.record("MatMul8bitLtBackward", out, [flat], [Formula((0,), by_input)])
    if e.needs_grad(flat):
        e.keep_on_ctx(flat)
    return reshape(e, out, (*input.shape[:-1], rows))
