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
from staticmem.eager.strides import contiguous_strides, numel
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.casts import to_copy
from staticmem.ops.linear import product_flops, rows_of
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import KernelCall, Temporary, rule, workspace
from staticmem.ops.views import contiguous, reshape
from staticmem.units import Band, round_up

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


# -- layers that are recorded with the packed weights of a checkpoint (`recording.packed_layers`) --------------------
#
# Sources: transformers 5.24, integrations/finegrained_fp8.py (`fp8_linear`, `FP8LinearFunction`,
# `FP8GroupedMatmulFunction`, `_dequantize_fp8_weight`) and deepgemm.py (`deepgemm_fp8_fp4_linear`); kernels-community,
# finegrained-fp8 (matmul.py, grouped.py: nothing but the result) and gpt-oss-triton-kernels (matmul_ogs.py,
# `init_allocation`; routing.py); gptqmodel 7.7, nn_modules/qlinear/marlin.py and torch.py.

WHOLE_AT_ONCE = 1 << 30  # bytes of experts that are unpacked together: `dequant_budget_bytes`
_FP8_LINEAR, _WORD_LINEAR = "packed.fp8_linear", "packed.word_linear"
_MADE_WHOLE = ("gptq-torch",)  # whose products read the whole weight in any case


@rule("packed::linear", kinds=("product",), flops=product_flops(0))
@scoped
def packed_linear(
    e: Eager,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    beside: Sequence[Tensor],
    features: Sequence[int],
    kernel: str,
) -> Tensor:
    """The result alone where a kernel reads the packed weight, to which a bias is added in place.

    In training the layers of fp8 save packed tensors, and make the weight in the backward. Those of GPTQ and AWQ make
    it in the forward, as no fused kernel of gptqmodel trains (`SUPPORTS_TRAINING`): GPTQ in PyTorch's code, where
    autograd saves it, AWQ for a moment, and again in the backward (`AwqGemmFn`).
    """
    columns, rows = features
    of_blocks, of_gptq = kernel.startswith("fp8"), kernel.startswith("gptq")
    trains = e.needs_grad(input)
    whole = None
    if kernel in _MADE_WHOLE or (trains and not of_blocks):
        whole = e.empty((columns, rows), input.dtype, kernel="packed.dequantize")
    name = _FP8_LINEAR if of_blocks else _WORD_LINEAR
    name = "aten.mm.default" if whole is not None else name
    e.kernel(name)
    out = e.empty((*input.shape[:-1], rows), input.dtype)
    e.empty((0, columns), input.dtype)  # no memory: the workspace of the kernel reads it

    def by_input(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        if of_blocks:
            unpacked(e, (rows, columns), beside[0].shape, grad.dtype)
        elif not of_gptq:
            e.empty((columns, rows), input.dtype, kernel="packed.dequantize")
        return e.empty(input.shape, grad.dtype, kernel="aten.mm.default")

    saved = [whole] if of_gptq else [weight, beside[0]]
    return e.record("PackedLinearBackward", out, [input], [Formula((0,), by_input)], saved)


def unpacked(e: Eager, shape: tuple[int, ...], scale: Sequence[int], dtype: DType) -> Tensor:
    """`_dequantize_fp8_weight`: the scales in the type of the gradient, and repeated for the rows of their blocks."""
    e.empty(scale, dtype, kernel="aten._to_copy.default")
    weight = e.empty(shape, dtype, kernel="aten._to_copy.default")
    if len(scale) > 1:
        e.empty((*shape[:-1], scale[-1]), dtype, kernel="aten.repeat_interleave.self_int")
    return weight


@workspace(_FP8_LINEAR, results=2)
def quantized_input(call: KernelCall) -> list[Temporary]:
    """DeepGEMM reads a copy of its input in 8 bits, with a float32 for 128 numbers; it runs on Hopper and Blackwell
    where a CUDA toolkit is installed (`is_deepgemm_loadable`), else the kernel rounds the input as it reads it."""
    numbers = _inputs(call)
    return [Temporary(Band(0, 0, numbers + 4 * -(-numbers // GROUP)), "input in 8 bits")]


@workspace(_WORD_LINEAR, results=2)
def whole_weight(call: KernelCall) -> list[Temporary]:
    """The weight, where gptqmodel has not compiled Marlin and takes its code in PyTorch or Triton."""
    out, inner = call.results
    return [Temporary(Band(0, 0, out.shape[-1] * inner.shape[-1] * out.dtype.itemsize), "unpacked weight")]


def _inputs(call: KernelCall) -> int:
    out, inner = call.results
    return numel(out.shape[:-1]) * inner.shape[-1]


@rule("packed::grouped", kinds=("product",), flops=product_flops(0))
@scoped
def packed_grouped(e: Eager, input: Tensor, weight: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
    """Rows of experts by their packed weights. The backward unpacks as many experts at once as are in 1 GiB."""
    experts, rows, columns = weight.shape
    out = e.empty((input.shape[0], rows), input.dtype, kernel="packed.grouped")

    def by_input(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        if not grad.is_contiguous:
            contiguous(e, grad)
        together = min(experts, max(1, WHOLE_AT_ONCE // (rows * columns * grad.dtype.itemsize)))
        result = e.empty(input.shape, grad.dtype, kernel="aten.new_zeros.default") if together < experts else None
        unpacked(e, (together, rows, columns), (together, *scale.shape[1:]), grad.dtype)
        product = e.empty(input.shape, grad.dtype, kernel="aten._grouped_mm.default")
        return product if result is None else result

    return e.record("PackedGroupedBackward", out, [input], [Formula((0,), by_input)], [weight, scale, offsets])


@rule("packed::experts", kinds=("product",))
@scoped
def packed_experts(
    e: Eager, input: Tensor, logits: Tensor, up: Sequence[Tensor], down: Sequence[Tensor], sizes: Sequence[int]
) -> Tensor:
    """Experts of mxfp4: indices of the rows that go to each, the gated product, and the rows of all experts before they
    are added for each token, in one buffer with the result where the kernel scatters them itself (`fused_scatter`)."""
    experts, chosen, width = sizes
    rows = input.shape[0] * chosen
    e.empty((rows,), logits.dtype, kernel="packed.routing")
    for _ in range(2):  # where each row is from, and where it goes
        e.empty((rows,), dtypes.int32, kernel="packed.routing")
    e.empty((experts,), dtypes.int32, kernel="packed.routing")
    e.empty((rows, width), input.dtype, kernel="packed.matmul_ogs")
    e.empty((rows, input.shape[1]), input.dtype, kernel="packed.matmul_ogs")
    return e.empty(input.shape, input.dtype, kernel="packed.matmul_ogs")
