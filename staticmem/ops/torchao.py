"""Linear layers of torchao with weights in 8 or 4 bits and activations as they are: what a product makes.

They are for inference: nothing is recorded for autograd.

Sources, torchao 0.18, torchao/quantization/quantize_/workflows: int8/int8_tensor.py (`Int8Tensor`, the branch
"FP x INT8 (weight-only)" of its linear), int4/int4_tile_packed_to_4d_tensor.py (`Int4TilePackedTo4dTensor`, its
linear); PyTorch: aten/src/ATen/native/PadNd.cpp (`constant_pad_nd`), aten/src/ATen/native/cuda/int4mm.cu
(`_weight_int4pack_mm_cuda`).
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.context import Eager, scoped
from staticmem.eager.strides import contiguous_strides
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.linear import product_flops, rows_of
from staticmem.ops.registry import rule
from staticmem.ops.views import reshape
from staticmem.units import round_up

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
