"""Normalizations. Statistics are float32 whatever the input's dtype (acc type of the CUDA kernels)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem import dtypes
from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.rules.pointwise import grad_of
from staticmem.rules.registry import rule


def _stat_dtype(input: Tensor) -> dtypes.DType:
    return dtypes.float64 if input.dtype is dtypes.float64 else dtypes.float32


def suggest_like(e: Eager, tensor: Tensor, dtype: dtypes.DType, kernel: str = "") -> Tensor:
    """`empty_like(suggest_memory_format())`: channels last where the tensor prefers it, else contiguous."""
    strides = layout.channels_last_strides(tensor.shape) if tensor.prefers_channels_last else None
    return e.empty(tensor.shape, dtype, strides, kernel)


def contiguous_as(e: Eager, tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor.contiguous(like.suggest_memory_format())`: itself, or a clone in that layout."""
    if like.prefers_channels_last:
        if layout.is_channels_last_contiguous(tensor.shape, tensor.strides):
            return tensor
        strides = layout.channels_last_strides(tensor.shape)
    else:
        if tensor.is_contiguous:
            return tensor
        strides = layout.contiguous_strides(tensor.shape)
    return e.empty(tensor.shape, tensor.dtype, strides, "aten.clone.default")


@rule("aten::batch_norm")
def batch_norm(
    e: Eager, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float = 0.1, eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Saves input, weight, running statistics, and the batch's mean and inverse std (float32, C each)."""
    if not e.training and running_mean is not None:
        training = False  # model.eval(); without running statistics batch norm stays in training form
    channels = (input.shape[1],)
    # Normalization.cpp, _batch_norm_impl_index: cuDNN for 3-D and more with weight and bias; native otherwise
    cudnn = input.ndim >= 3 and weight is not None and bias is not None and cudnn_enabled
    cudnn = cudnn and input.dtype is not dtypes.float64 and input.shape[0] <= (880801 if training else 65535)
    kernel = "aten.cudnn_batch_norm.default" if cudnn else "aten.native_batch_norm.default"
    out = suggest_like(e, input, input.dtype, kernel)
    stats = [e.empty(channels if training else (0,), _stat_dtype(input)) for _ in range(2)]

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)
        if cudnn and training:
            grad = contiguous_as(e, grad, input)
        e.kernel(kernel.replace(".default", "_backward.default"))
        by_input = suggest_like(e, input, grad.dtype)
        by_weight = e.empty(channels, weight.dtype) if weight is not None and need[1] else None
        by_bias = e.empty(channels, bias.dtype) if bias is not None and need[2] else None
        return by_input, by_weight, by_bias

    saves = [input, weight, running_mean, running_var, *stats]
    e.record("CudnnBatchNormBackward0", out, [input, weight, bias], [Formula((0, 1, 2), gradients)], saves)
    return out


@rule("aten::instance_norm")
def instance_norm(
    e: Eager, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, use_input_stats: bool, momentum: float = 0.1, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Batch norm over a (1, N*C, ...) view, weight and bias repeated N times (Normalization.cpp, instance_norm)."""
    n, c = input.shape[:2]
    source = input
    if not input.is_contiguous:
        source = e.empty(input.shape, input.dtype, kernel="aten.clone.default")
    repeated = [e.empty((n * c,), t.dtype, kernel="aten.repeat.default") for t in (weight, bias) if t is not None]
    out = e.empty(input.shape, input.dtype, kernel="aten.cudnn_batch_norm.default")
    stats = [e.empty((n * c,), _stat_dtype(input)) for _ in range(2)]

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten.cudnn_batch_norm_backward.default")
        by_input = e.empty(input.shape, input.dtype)
        results: list[Tensor | None] = [by_input]
        for parameter, wanted in ((weight, need[1]), (bias, need[2])):
            if parameter is None or not wanted:
                results.append(None)
            else:
                e.empty((n * c,), parameter.dtype)
                results.append(e.empty(parameter.shape, parameter.dtype, kernel="aten.sum.dim_IntList"))
        return results

    saves = [source, *repeated, *stats]
    e.record("InstanceNormBackward", out, [input, weight, bias], [Formula((0, 1, 2), gradients)], saves)
    return out


@rule("aten::layer_norm", autocast="float32")
def layer_norm(
    e: Eager, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    """Saves input, weight, bias, mean and reciprocal std (float32, one each a row)."""
    rows = input.ndim - (1 if isinstance(normalized_shape, int) else len(tuple(normalized_shape)))
    out = e.empty(input.shape, input.dtype, kernel="aten.native_layer_norm.default")
    stat_shape = input.shape[:rows] + (1,) * (input.ndim - rows)
    stats = [e.empty(stat_shape, _stat_dtype(input)) for _ in range(2)]

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten.native_layer_norm_backward.default")
        results: list[Tensor | None] = [e.empty(input.shape, input.dtype) if need[0] else None]
        for parameter, wanted in ((weight, need[1]), (bias, need[2])):
            results.append(e.empty(parameter.shape, parameter.dtype) if parameter is not None and wanted else None)
        return results

    saves = [input, weight, bias, *stats]
    e.record("NativeLayerNormBackward0", out, [input, weight, bias], [Formula((0, 1, 2), gradients)], saves)
    return out


@rule("aten::group_norm", autocast="float32")
def group_norm(
    e: Eager, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Saves input, weight, mean and reciprocal std (N x groups, the input's dtype)."""
    source = contiguous_as(e, input, input)
    out = suggest_like(e, source, input.dtype, "aten.native_group_norm.default")
    stats = [e.empty((input.shape[0], num_groups), input.dtype) for _ in range(2)]

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = contiguous_as(e, grad_of(grads), input)
        e.kernel("aten.native_group_norm_backward.default")
        results: list[Tensor | None] = [e.empty_like(source, grad.dtype) if need[0] else None]
        for parameter, wanted in ((weight, need[1]), (bias, need[2])):
            results.append(e.empty(parameter.shape, parameter.dtype) if parameter is not None and wanted else None)
        return results

    saves = [source, weight, *stats]
    e.record("NativeGroupNormBackward0", out, [input, weight, bias], [Formula((0, 1, 2), gradients)], saves)
    return out


@rule("aten::rms_norm", autocast="float32")
def rms_norm(
    e: Eager, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Fused on CUDA: saves input, weight and the reciprocal root mean square (float32, one a row)."""
    rows = input.ndim - (1 if isinstance(normalized_shape, int) else len(tuple(normalized_shape)))
    out = e.empty(input.shape, input.dtype, kernel="aten._fused_rms_norm.default")
    stat = e.empty(input.shape[:rows] + (1,) * (input.ndim - rows), _stat_dtype(input))

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten._fused_rms_norm_backward.default")
        by_input = e.empty(input.shape, input.dtype) if need[0] else None
        by_weight = e.empty(weight.shape, weight.dtype) if weight is not None and need[1] else None
        return by_input, by_weight

    e.record("FusedRmsNormBackward0", out, [input, weight], [Formula((0, 1), gradients)], [input, weight, stat])
    return out
