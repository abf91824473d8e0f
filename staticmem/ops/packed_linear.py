"""Linear layers whose weights have few bits, as bitsandbytes and torchao have them: what products make.

Those of torchao (activations as they are) are for inference: nothing is recorded for autograd.

Sources: bitsandbytes 0.50, autograd/_functions.py (`MatMul4Bit`, `MatMul8bitLt`), nn/modules.py (`Linear4bit.forward`,
`Linear8bitLt.forward`), functional.py (`dequantize_4bit`), backends/cuda/ops.py (`gemm_4bit`, `int8_vectorwise_quant`,
`int8_mm_dequant`), backends/default/ops.py (`int8_scaled_mm`); torchao 0.18, torchao/quantization/quantize_/workflows:
int8/int8_tensor.py (`Int8Tensor`, the branch "FP x INT8 (weight-only)" of its linear),
int4/int4_tile_packed_to_4d_tensor.py (`Int4TilePackedTo4dTensor`, its linear); PyTorch: aten/src/ATen/native/PadNd.cpp
(`constant_pad_nd`), aten/src/ATen/native/cuda/int4mm.cu (`_weight_int4pack_mm_cuda`).
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.strides import contiguous_strides
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.casts import to_copy
from staticmem.ops.linear import product_flops, rows_of
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule
from staticmem.ops.views import contiguous, reshape
from staticmem.units import round_up

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


GROUP = 128  # `Int4WeightOnlyConfig.group_size`: numbers of a row that share a scale and a zero point
COLUMNS_OF_TILES = 1024  # `find_multiple(orig_in_features, 1024)` of `Int4TilePackedTo4dTensor.from_hp`
ROWS_OF_TILES = 8  # `find_multiple(orig_out_features, ntile_size)`; `int4_tile_packed_ntile` is 8 on CUDA
INNER_TILES = 8  # `inner_k_tiles` there


@rule("torchao::linear_int8", kinds=("product",), flops=product_flops(0))
@scoped
def linear_int8(
    e: Eager,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Sequence[Tensor],
    features: tuple[int, int],
) -> Tensor:
    """`mm(x, w.t().to(x.dtype)) * scale`: the weight exists in the input's type during the product; the product is a
    variable beside the scaled result. The bias is added in place. `statistics` begin with the scale of rows."""
    columns, rows = features
    count = rows_of(input, columns)
    e.open_scope()
    reshape(e, input, (-1, columns))
    e.empty((columns, rows), input.dtype, kernel="aten._to_copy.default")
    product = e.empty((count, rows), input.dtype, kernel="aten.mm.default")
    e.close_scope(keep=[product])
    e.open_scope()
    if statistics[0].dtype is not input.dtype:
        e.empty(statistics[0].shape, input.dtype, kernel="aten._to_copy.default")
    out = e.empty((count, rows), input.dtype, kernel="aten.mul.Tensor")
    e.close_scope(keep=[out])
    return reshape(e, out, (*input.shape[:-1], rows))


@rule("torchao::linear_int4", kinds=("product",), flops=product_flops(0))
@scoped
def linear_int4(
    e: Eager,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Sequence[Tensor],
    features: tuple[int, int],
) -> Tensor:
    """The input is padded to whole tiles, which copies it in any case (`constant_pad_nd` clones where there is nothing
    to pad), and the copy lives until the layer returns. No weight is unpacked to memory. The result is a view of whole
    tiles, to which the bias is added in place; the layer returns it in the type of the input."""
    columns, rows = features
    count = rows_of(input, columns)
    e.open_scope()
    flat = reshape(e, input, (-1, columns))
    if flat.dtype is not dtypes.bfloat16:
        e.empty(flat.shape, dtypes.bfloat16, kernel="aten._to_copy.default")
    copy = e.empty((count, round_up(columns, COLUMNS_OF_TILES)), dtypes.bfloat16, kernel="aten.constant_pad_nd.default")
    e.close_scope(keep=[copy])
    tiles = round_up(rows, ROWS_OF_TILES)
    out = e.empty((count, tiles), dtypes.bfloat16, kernel="aten._weight_int4pack_mm.default")
    shape = (*input.shape[:-1], rows)
    if input.dtype is not dtypes.bfloat16:
        return e.empty(shape, input.dtype, kernel="aten._to_copy.default")
    return e.alias(out, shape, (*contiguous_strides((*input.shape[:-1], tiles))[:-1], 1))
