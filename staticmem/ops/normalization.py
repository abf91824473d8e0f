"""Normalizations. Statistics are float32 whatever the input's dtype (acc type of the CUDA kernels).

A batch norm and its activation as one op that overwrites its input: InPlaceABN.

The result alone is saved, and the backward computes the normalised input from it.

Source: inplace_abn/functions.py (`InPlaceABN`), src/inplace_abn_cuda.cu (`statistics_template`,
`backward_reduce_template`) of mapillary/inplace_abn at b50bfe9.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.eager.trace import Reduction
from staticmem.ir import dtypes
from staticmem.ir.graph import Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.arithmetic import div, mul
from staticmem.ops.casts import to_copy
from staticmem.ops.onnx import Calls, Context, Results, Shape, declare_sizes, integer, like_first, real, translation
from staticmem.ops.pointwise import end_statement, grad_of, inplace
from staticmem.ops.reduction import norm
from staticmem.ops.registry import KernelCall, Temporary, declare, function_of, rule, workspace
from staticmem.ops.views import contiguous, reshape, transpose
from staticmem.units import exactly


def _stat_dtype(input: Tensor) -> dtypes.DType:
    return dtypes.float64 if input.dtype is dtypes.float64 else dtypes.float32


def suggest_like(e: Eager, tensor: Tensor, dtype: dtypes.DType, kernel: str = "") -> Tensor:
    """`empty_like(suggest_memory_format())`: channels last where the tensor prefers it, else contiguous."""
    strides = layout.channels_last_strides(tensor.shape) if tensor.prefers_channels_last else None
    return e.empty(tensor.shape, dtype, strides, kernel)


def has_layout_of(tensor: Tensor, like: Tensor) -> bool:
    """`tensor.is_contiguous(like.suggest_memory_format())`."""
    is_contiguous = layout.is_channels_last_contiguous if like.prefers_channels_last else layout.is_contiguous
    return is_contiguous(tensor.shape, tensor.strides)


def contiguous_as(e: Eager, tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor.contiguous(like.suggest_memory_format())`: itself, or a clone in that layout."""
    if has_layout_of(tensor, like):
        return tensor
    return suggest_like(e, like, tensor.dtype, "aten.clone.default")


# what exports in training and evaluation mode have for `batch_norm`
declare(
    "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training "
    "_batch_norm_with_update_functional _batch_norm_no_update",
    kinds=("batch_norm", "norm"),
)


def _batch_norm(
    e: Eager, input: Tensor, weight: Tensor | None, bias: Tensor | None, running: Sequence[Tensor | None],
    training: bool, cudnn: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    channels = (input.shape[1],)
    kernel = "aten.cudnn_batch_norm.default" if cudnn else "aten.native_batch_norm.default"
    out = suggest_like(e, input, input.dtype, kernel)
    # In inference cuDNN's wrapper returns empty statistics, batch_norm_cuda ones of full size
    stats = [e.empty(channels if training or not cudnn else (0,), _stat_dtype(input)) for _ in range(2)]
    # cuDNN's, which is empty where no activation is fused with it; hooks of saved tensors see it
    reserve = [e.empty((0,), dtypes.uint8)] if cudnn else []

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)
        if cudnn and training:
            grad = contiguous_as(e, grad, input)
        e.kernel(kernel.replace(".default", "_backward.default"))
        by_input = suggest_like(e, input, grad.dtype)
        every = cudnn and training  # native/cudnn/BatchNorm.cpp makes all three, whoever wants them
        by_weight = e.empty(channels, weight.dtype) if weight is not None and (need[1] or every) else None
        by_bias = e.empty(channels, bias.dtype) if bias is not None and (need[2] or every) else None
        return by_input, by_weight, by_bias

    name = "CudnnBatchNormBackward0" if cudnn else "NativeBatchNormBackward0"
    saves = [input, *running, weight, *stats, *reserve]
    e.record(name, [out], [input, weight, bias], [Formula((0, 1, 2), gradients)], saves)
    return out, stats[0], stats[1]


@rule("batch_norm", kinds=("batch_norm", "norm"))
def batch_norm(
    e: Eager, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float = 0.1, eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Saves input, weight, running statistics, and the batch's mean and inverse std (float32, C each)."""
    if not e.training and running_mean is not None:
        training = False  # model.eval(); without running statistics batch norm stays in training form
    # `cudnn_enabled` in an export is that of the exporting machine (False without CUDA), not of the GPU.
    # Normalization.cpp, _batch_norm_impl_index: cuDNN for 3-D and more with weight and bias, but not for bfloat16, and
    # for float16 with float32 weights only; native otherwise. cuDNN is called with what `contiguous` gives
    cudnn = input.ndim >= 3 and bias is not None and input.shape[0] <= (880801 if training else 65535)
    if weight is None or dtypes.bfloat16 in (input.dtype, weight.dtype) or input.dtype is dtypes.float64:
        cudnn = False
    elif input.dtype is dtypes.float16:
        cudnn = cudnn and weight.dtype is dtypes.float32
    if cudnn and not has_layout_of(input, input):
        input = contiguous(e, input, layout.suggested_memory_format(input.shape, input.strides))
    return _batch_norm(e, input, weight, bias, [running_mean, running_var], training, cudnn)[0]


@rule("native_batch_norm", kinds=("batch_norm", "norm"))
def native_batch_norm(
    e: Eager, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `batch_norm` without cuDNN, which makes the same in train() and eval(); also returns the mean and the inverse
    std."""
    return _batch_norm(e, input, weight, bias, [running_mean, running_var], training, False)


@rule("instance_norm", kinds=("norm",))
def instance_norm(
    e: Eager, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, use_input_stats: bool, momentum: float = 0.1, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Batch norm over a (1, N*C, ...) view; parameters and running statistics are repeated N times first."""
    n, c = input.shape[:2]
    given = (weight, bias, running_mean, running_var)
    repeat = function_of("aten::repeat")
    weights, biases, means, variances = (None if t is None else repeat(e, t, (n,)) for t in given)
    flat = reshape(e, contiguous(e, input), (1, n * c, *input.shape[2:]))
    e.open_scope()
    out = batch_norm(e, flat, weights, biases, means, variances, use_input_stats, momentum, eps, cudnn_enabled)
    e.close_scope(keep=[out])
    for statistic in (running_mean, running_var) if use_input_stats else ():
        if statistic is not None:  # averaged over the samples, then copied into the buffer
            e.free(e.empty((c,), statistic.dtype, kernel="aten.mean.dim"))
    return reshape(e, out, input.shape)


@rule("layer_norm", kinds=("norm",), autocast="float32")
def layer_norm(
    e: Eager, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    """Saves input, weight, bias, mean and reciprocal std (float32, one each a row)."""
    return native_layer_norm(e, input, normalized_shape, weight, bias, eps)[0]


@rule("native_layer_norm", kinds=("norm",), autocast="float32")
def native_layer_norm(
    e: Eager, input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `layer_norm`; also returns the mean and the reciprocal std."""
    rows = input.ndim - (1 if isinstance(normalized_shape, int) else len(tuple(normalized_shape)))
    out = e.empty(input.shape, input.dtype, kernel="aten.native_layer_norm.default")
    e.copies(input)
    stat_shape = input.shape[:rows] + (1,) * (input.ndim - rows)
    stats = [e.empty(stat_shape, _stat_dtype(input)) for _ in range(2)]

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten.native_layer_norm_backward.default")
        e.copies(input, grad_of(grads))
        results: list[Tensor | None] = [e.empty(input.shape, input.dtype) if need[0] else None]
        for parameter, wanted in ((weight, need[1]), (bias, need[2])):
            results.append(e.empty(parameter.shape, parameter.dtype) if parameter is not None and wanted else None)
        return results

    saves = [input, weight, bias, *stats]
    e.record("NativeLayerNormBackward0", [out], [input, weight, bias], [Formula((0, 1, 2), gradients)], saves)
    return out, stats[0], stats[1]


_PARTIALS_SINCE = (2, 8)  # torch; pull request 148605 of pytorch, merged in March 2025
_PARTIAL_ROWS, _PARTIAL_COLUMNS, _PARTIAL_GRID = 32, 32, 32 * 1024


@workspace("aten.native_layer_norm_backward.default aten._fused_rms_norm_backward.default", results=2, by_card=True)
def layer_norm_partial_sums(call: KernelCall) -> list[Temporary | Reduction]:
    """Many short rows: gradients of weight and bias as partial sums of 32 rows each, and then a sum over these. The
    fused rms_norm runs the same kernels.

    aten/src/ATen/native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: more than 65,536 rows that are
    too short to fill half of the multiprocessors. Else one block of threads sums all rows of a column.
    """
    input, *parameters = call.results
    columns = layout.numel(parameters[0].shape)
    rows = layout.numel(input.shape) // max(columns, 1)
    short = columns // _PARTIAL_COLUMNS < call.multiprocessors // 2
    if call.torch < _PARTIALS_SINCE or rows <= 64 * 1024 or not short:
        return []
    blocks = min(_PARTIAL_GRID // -(-columns // _PARTIAL_COLUMNS), -(-rows // _PARTIAL_ROWS))
    if not blocks:
        return []
    nbytes = exactly(blocks * columns * parameters[0].dtype.itemsize)
    partial = Temporary(nbytes, "layer_norm backward: partial sums")
    return [*[partial for _ in parameters], Reduction((blocks, columns), (columns, 1), (0,))]


@rule("group_norm", kinds=("norm",), autocast="float32")
def group_norm(
    e: Eager, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Saves input, weight, mean and reciprocal std (N x groups, in the parameters' dtype)."""
    n, c, *rest = input.shape
    source = contiguous_as(e, input, input)
    return native_group_norm(e, source, weight, bias, n, c, layout.numel(rest), num_groups, eps)[0]


@rule("native_group_norm", kinds=("norm",), autocast="float32")
def native_group_norm(
    e: Eager, input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int,  # noqa: N803
    group: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `group_norm`; also returns the mean and the reciprocal std."""
    out = suggest_like(e, input, input.dtype, "aten.native_group_norm.default")
    dtype = weight.dtype if weight is not None else input.dtype  # float32 parameters with half inputs: mixed
    stats = [e.empty((N, group), dtype) for _ in range(2)]

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = contiguous_as(e, grad_of(grads), input)
        e.kernel("aten.native_group_norm_backward.default")
        results: list[Tensor | None] = [e.empty_like(input, grad.dtype) if need[0] else None]
        for parameter, wanted in ((weight, need[1]), (bias, need[2])):
            results.append(e.empty(parameter.shape, parameter.dtype) if parameter is not None and wanted else None)
        return results

    saves = [input, weight, *stats]
    e.record("NativeGroupNormBackward0", [out], [input, weight, bias], [Formula((0, 1, 2), gradients)], saves)
    return out, stats[0], stats[1]


@workspace("aten.native_group_norm.default aten.native_group_norm_backward.default")
def group_norm_temporaries(call: KernelCall) -> list[Temporary]:
    """Coefficients of samples, channels and groups in float32.

    aten/src/ATen/native/cuda/group_norm_kernel.cu: GroupNormKernelImplInternal has a scale and a shift (N x C);
    GroupNormBackwardKernelImplInternal has two sums (N x C) and, for the gradient of the input, coefficients of the
    groups (twice N x groups) and of the channels (N x C); in channels_last also partial sums over rows of pixels. Of
    one pixel there are no scale, shift and coefficients of the channels. A norm without parameters, whose kernels have
    fewer, is taken for one with parameters.
    """
    backward = call.kernel == "aten.native_group_norm_backward.default"
    results = call.forward or (() if backward else call.results)
    if len(results) < 2 or len(results[0].shape) < 2:
        return []
    out, mean = results[:2]
    samples, channels, *pixels = out.shape
    size = max(out.dtype.itemsize, _ACCUMULATOR)
    by_channel, by_group = samples * channels * size, layout.numel(mean.shape) * size
    area = layout.numel(pixels)
    taken: list[Temporary] = []

    def take(nbytes: int, held: bool = True) -> None:
        taken.append(Temporary(exactly(nbytes), "group_norm coefficients", held))

    if not backward:
        return [Temporary(exactly(by_channel), "group_norm coefficients")] * 2 if area > 1 else []
    take(by_channel)
    take(by_channel)
    if area > 1 and len(pixels) > 1 and layout.is_channels_last_contiguous(out.shape, out.strides):
        take(samples * channels * _closest_factor(area) * 2 * size, held=False)
    if call.results[0].shape == out.shape:  # the gradient of the input is wanted
        take(by_group)
        take(by_group)
        if area > 1:
            take(by_channel)
    return taken


_ACCUMULATOR = 4  # bytes of float32, in which half precision is summed


def _closest_factor(number: int) -> int:
    """The largest factor that is at most the root (`ClosestFactor`)."""
    factor = max(isqrt(number), 1)
    while number % factor:
        factor -= 1
    return factor


@rule("rms_norm", kinds=("norm",), autocast="float32")
def rms_norm(
    e: Eager, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Fused on CUDA from 2.9 on: saves input, weight and the reciprocal root mean square (float32, one a row)."""
    rows = input.ndim - (1 if isinstance(normalized_shape, int) else len(tuple(normalized_shape)))
    if e.torch < (2, 9):  # https://github.com/pytorch/pytorch/pull/153666
        return _composite_rms_norm(e, input, tuple(range(rows, input.ndim)), weight)
    out = e.empty(input.shape, input.dtype, kernel="aten._fused_rms_norm.default")
    e.copies(input)
    stat = e.empty(input.shape[:rows] + (1,) * (input.ndim - rows), _stat_dtype(input))

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten._fused_rms_norm_backward.default")
        e.copies(input, grad_of(grads))
        by_input = e.empty(input.shape, input.dtype) if need[0] else None
        by_weight = e.empty(weight.shape, weight.dtype) if weight is not None and need[1] else None
        return by_input, by_weight

    return e.record("FusedRmsNormBackward0", out, [input, weight], [Formula((0, 1), gradients)], [input, weight, stat])


@scoped
def _composite_rms_norm(e: Eager, input: Tensor, axes: tuple[int, ...], weight: Tensor | None) -> Tensor:
    """aten/src/ATen/native/layer_norm.cpp, `rms_norm_symint`: in float32, then as the input, times the weight."""
    mean, add_, rsqrt = (function_of(f"aten::{name}") for name in ("mean", "add_", "rsqrt"))
    wide = to_copy(e, input, _stat_dtype(input)) if input.dtype is not _stat_dtype(input) else input
    scale = rsqrt(e, add_(e, mean(e, function_of("aten::pow")(e, wide, 2), axes, True), 1e-5))
    result = mul(e, wide, scale)
    if result.dtype is not input.dtype:
        result = to_copy(e, result, input.dtype)
    return result if weight is None else mul(e, result, weight)


@rule("_weight_norm")
def weight_norm(e: Eager, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Fused on CUDA for the first and the last dimension: saves v, g and float32 norms; both gradients in one go.
    Otherwise v * (g / norm), each recorded (WeightNorm.cpp)."""
    v, g = contiguous(e, v), contiguous(e, g)
    if dim not in (0, v.ndim - 1):
        return mul(e, v, div(e, g, _norm_except(e, v, dim)))
    out = e.empty_like(v, kernel="aten._weight_norm_interface.default")
    norms = e.empty(g.shape, dtypes.float32 if g.dtype in dtypes.HALVES else g.dtype)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten._weight_norm_interface_backward.default")
        return e.empty_like(v), e.empty_like(g)

    return e.record("WeightNormInterfaceBackward0", out, [v, g], [Formula((0, 1), gradients)], [g, v, norms])


def _norm_except(e: Eager, v: Tensor, dim: int) -> Tensor:
    """`norm_except_dim` of WeightNorm.cpp: the norm over all dimensions but one; -1: over all."""
    if dim == -1:
        return norm(e, v, 2)
    if dim not in (0, v.ndim - 1):
        return transpose(e, _norm_except(e, transpose(e, v, 0, dim), 0), 0, dim)
    sizes = tuple(size if axis == dim else 1 for axis, size in enumerate(v.shape))
    flat = (v.shape[0], -1) if dim == 0 else (-1, v.shape[-1])
    copy = contiguous(e, v)
    norms = reshape(e, norm(e, reshape(e, copy, flat), 2, 1 if dim == 0 else 0), sizes)
    if copy is not v:
        end_statement(e, copy)
    return norms


@translation("BatchNormalization")
def onnx_batch_norm(ctx: Context, node: Node) -> list[Op]:
    """Statistics that the graph computes are what the TorchScript exporter writes where PyTorch has none; so are
    weights of ones and biases of zeros in constant nodes (symbolic_helper.py, `_batchnorm_helper`)."""
    x, mean, var = (ctx.ref(node.inputs[i]) for i in (0, 3, 4))
    computed = all(
        name not in ctx.net.weights and (producer := ctx.producer(name)) is not None and producer.op != "Constant"
        for name in node.inputs[3:5]
    )
    weight = _unless(ctx, node.inputs[1], 1.0, computed)
    bias = _unless(ctx, node.inputs[2], 0.0, computed)
    training = bool(integer(node, "training_mode", 0)) or integer(node, "is_test", 1) == 0
    if computed:
        args = (x, weight, bias, None, None, True, 0.0, _onnx_eps(node), True)
        return [ctx.op(node, "aten::batch_norm", *args)]
    momentum = round(1.0 - real(node, "momentum", 0.9), 6)  # ONNX weighs the old value, PyTorch the new one
    return [ctx.op(node, "aten::batch_norm", x, weight, bias, mean, var, training, momentum, _onnx_eps(node), True)]


def _constant(ctx: Context, name: str) -> bool:
    node = ctx.producer(name)
    return node is not None and node.op == "Constant" and not node.domain


def _unless(ctx: Context, name: str, number: float, written: bool) -> Ref | None:
    """A tensor, but none where it is a constant of one number, or one that the exporter wrote."""
    if name in ctx.net.weights:
        return ctx.ref(name)
    array = ctx.net.const(name)
    filled = array is not None and array.size > 0 and bool((array == number).all())
    return None if filled or (written and _constant(ctx, name)) else ctx.ref(name)


def _onnx_eps(node: Node) -> float:
    return float(f"{real(node, 'epsilon', 1e-5):.6g}")


@translation("LayerNormalization", sizes=like_first)
def onnx_layer_norm(ctx: Context, node: Node) -> list[Op] | None:
    shape = ctx.net.shape(node.inputs[0])
    if shape is None:
        return None
    axis = integer(node, "axis", -1) % max(len(shape), 1)
    args = (ctx.ref(node.inputs[0]), shape[axis:], ctx.optional(node, 1), ctx.optional(node, 2), _onnx_eps(node))
    if ctx.read.isdisjoint(node.outputs[1:]):
        return [ctx.op(node, "aten::layer_norm", *args)]
    outputs = [*node.outputs, ctx.fresh(node), ctx.fresh(node)][:3]
    return [ctx.op(node, "aten::native_layer_norm", *args, outputs=[name or ctx.fresh(node) for name in outputs])]


@translation("RMSNormalization", "SimplifiedLayerNormalization", sizes=like_first)
def onnx_rms_norm(ctx: Context, node: Node) -> list[Op] | None:
    shape = ctx.net.shape(node.inputs[0])
    if shape is None:
        return None
    axis = integer(node, "axis", -1) % max(len(shape), 1)
    weight = ctx.optional(node, 1)
    return [ctx.op(node, "aten::rms_norm", ctx.ref(node.inputs[0]), shape[axis:], weight, _onnx_eps(node))]


@translation("GroupNormalization")
def onnx_group_norm(ctx: Context, node: Node) -> list[Op]:
    groups = integer(node, "num_groups", 1)
    weight, bias = ctx.optional(node, 1), ctx.optional(node, 2)
    return [ctx.op(node, "aten::group_norm", ctx.ref(node.inputs[0]), groups, weight, bias, _onnx_eps(node))]


@translation("InstanceNormalization")
def onnx_instance_norm(ctx: Context, node: Node) -> list[Op]:
    x, weight, bias = ctx.ref(node.inputs[0]), ctx.optional(node, 1), ctx.optional(node, 2)
    return [ctx.op(node, "aten::instance_norm", x, weight, bias, None, None, True, 0.1, _onnx_eps(node), True)]


declare_sizes("GroupNorm", like_first)


def _skip_sizes(_: Node, first: Shape, *__: Shape | None) -> Results:
    return [(first, 0), None, None, (first, 0)]


@translation("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", sizes=_skip_sizes)
def onnx_skip_layer_norm(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft: (input + skip + bias), then a layer norm; the fourth output is the sum."""
    shape = ctx.net.shape(node.inputs[0])
    total = node.outputs[3] if len(node.outputs) > 3 and node.outputs[3] else ctx.fresh(node)
    simplified = node.op.startswith("SkipSimplified")
    bias_at = 3 if simplified else 4
    ops = [ctx.op(node, "aten::add.Tensor", ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1]), outputs=(total,))]
    if ctx.optional(node, bias_at) is not None:
        before = ctx.fresh(node)
        ops = [
            ctx.op(node, "aten::add.Tensor", ctx.ref(node.inputs[0]), ctx.optional(node, bias_at), outputs=(before,)),
            ctx.op(node, "aten::add.Tensor", ctx.ref(before), ctx.ref(node.inputs[1]), outputs=(total,)),
        ]
    if shape is None:
        return None
    ctx.define(total, node.inputs[0], shape)
    weight = ctx.ref(node.inputs[2])
    if simplified:
        return [*ops, ctx.op(node, "aten::rms_norm", ctx.ref(total), shape[-1:], weight, _onnx_eps(node))]
    bias = ctx.optional(node, 3)
    return [*ops, ctx.op(node, "aten::layer_norm", ctx.ref(total), shape[-1:], weight, bias, _onnx_eps(node))]


def _embedding_sizes(node: Node, ids: Shape, segments: Shape | None, table: Shape | None, *_: Shape | None) -> Results:
    if table is None:
        return []
    rows = ((*ids, table[-1]), 2)
    return [rows, (ids[:1], 0), rows]


@translation("EmbedLayerNormalization", sizes=_embedding_sizes)
def onnx_embed_layer_norm(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft EmbedLayerNormalization: tables of words, positions and segments, their sum, a layer norm."""
    tokens, token_table, positions, weight, bias = [ctx.ref(node.inputs[k]) for k in (0, 2, 3, 5, 6)]
    segments, position_ids = ctx.optional(node, 4), ctx.optional(node, 8)
    sizes, table = ctx.net.shape(node.inputs[0]), ctx.net.shape(node.inputs[2])
    if sizes is None or table is None or len(sizes) != 2:
        return None
    calls = Calls(ctx, node, like=node.inputs[2])
    shape = (*sizes, table[1])
    total = calls.call("embedding", token_table, tokens, shape=shape)
    if position_ids is not None:
        position = calls.call("embedding", positions, position_ids, shape=shape)
    else:
        position = calls.call("slice.Tensor", positions, 0, 0, sizes[1], shape=shape[1:])
    out = node.outputs[2] if len(node.outputs) > 2 else ""
    total = calls.call("add.Tensor", total, position, shape=shape, out=out if segments is None else "")
    if segments is not None:
        segment = calls.call("embedding", segments, ctx.ref(node.inputs[1]), shape=shape)
        total = calls.call("add.Tensor", total, segment, shape=shape, out=out)
    eps = float(f"{real(node, 'epsilon', 1e-12):.6g}")
    return [*calls.ops, ctx.op(node, "aten::layer_norm", total, shape[-1:], weight, bias, eps)]


@translation("LRN")
def onnx_local_response_norm(ctx: Context, node: Node) -> list[Op] | None:
    """torch.nn.functional.local_response_norm: a mean of squares over neighbouring channels."""
    shape = ctx.net.shape(node.inputs[0])
    size = integer(node, "size", 0)
    if shape is None or len(shape) != 4 or size < 1:
        return None
    x = ctx.ref(node.inputs[0])
    batch, channels, rows, columns = shape
    lifted = (batch, 1, channels, rows, columns)
    padded = (batch, 1, channels + size - 1, rows, columns)
    calls = Calls(ctx, node)
    square = calls.call("unsqueeze", calls.call("mul.Tensor", x, x, shape=shape), 1, shape=lifted)
    square = calls.call("pad", square, (0, 0, 0, 0, size // 2, (size - 1) // 2), "constant", 0.0, shape=padded)
    mean = calls.call("avg_pool3d", square, (size, 1, 1), (1, 1, 1), (0, 0, 0), False, True, shape=lifted)
    mean = calls.call("squeeze.dim", mean, 1, shape=shape)
    mean = calls.call("mul.Tensor", mean, real(node, "alpha", 1e-4), shape=shape)
    mean = calls.call("add.Tensor", mean, real(node, "bias", 1.0), shape=shape)
    power = calls.call("pow.Tensor_Scalar", mean, real(node, "beta", 0.75), shape=shape)
    return [*calls.ops, ctx.op(node, "aten::div.Tensor", x, power)]


INPLACE_ABN = "inplace_abn::inplace_abn_"
RELU = ("aten::relu", "aten::relu_")
ACTIVATIONS = (*RELU, "aten::leaky_relu", "aten::leaky_relu_", "aten::elu", "aten::elu_")  # that it can run


@rule(INPLACE_ABN, kinds=("norm",))
def inplace_abn(
    e: Eager, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None,
) -> Tensor:  # fmt: skip
    """In place: saves its result, the variance, the count of samples, weight and bias. Backward makes the normalised
    input and the gradient, each of the input's size, and two sums of C; statistics are float32 beside float16."""
    channels = (input.shape[1],)
    statistic = dtypes.float32 if input.dtype is dtypes.float16 else input.dtype
    e.empty(channels, statistic, kernel="inplace_abn.statistics.default")  # the mean
    variance = e.empty(channels, statistic)
    count = e.empty((1,), dtypes.int64)
    if running_mean is not None:
        _update(e, channels, statistic)
    out = inplace(e, input, "inplace_abn.forward.default")

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.empty_like(out, kernel="inplace_abn.backward_reduce.default")  # a variable until the function returns
        by_input = e.empty_like(out)
        by_bias, by_weight = (e.empty(channels, statistic) for _ in range(2))
        if weight is not None and need[1]:  # `dweight[weight < 0] *= -1`, where no weight is negative
            e.empty(channels, dtypes.bool_, kernel="aten.lt.Scalar")
        return e.alias(by_input, out.shape, out.strides), by_weight, by_bias

    saves = [out, variance, count, weight, bias]
    return e.record("InPlaceABNBackward", out, [input, weight, bias], [Formula((0, 1, 2), gradients)], saves)


def _update(e: Eager, channels: tuple[int, ...], statistic: dtypes.DType) -> None:
    """Running statistics: `momentum * mean`, then `momentum * var * count / (count - 1)`."""
    e.empty((1,), statistic, kernel="aten._to_copy.default")  # the count, a variable
    e.free(e.empty(channels, statistic, kernel="aten.mul.Tensor"))
    first = e.empty(channels, statistic, kernel="aten.mul.Tensor")
    second = e.empty(channels, statistic, kernel="aten.mul.Tensor")
    e.free(first)
    less = e.empty((1,), statistic, kernel="aten.sub.Tensor")
    ratio = e.empty(channels, statistic, kernel="aten.div.Tensor")
    e.free(second, less, ratio)
