"""Pooling.

Sources: torch/_inductor/decomposition.py (`_max_pool_with_indices`), torch/_decomp/decompositions.py
(`max_pool2d_with_indices_backward`, `adaptive_max_pool2d`), aten/src/ATen/native/AdaptiveAveragePooling.cpp,
aten/src/ATen/native/Pool.h (sizes), aten/src/ATen/native/Pooling.cpp (one dimension as two).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.strides import Strides
from staticmem.ir import dtypes
from staticmem.ops.traces.convolution import each
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form

Sizes = Sequence[int]

_LARGEST_WINDOW = 25  # torch/_inductor/lowering.py, `should_fallback_max_pool_with_indices`


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """`pooling_output_shape`."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)
    result = span // stride + 1
    return result - 1 if ceil_mode and (result - 1) * stride >= size + padding else result


class _Window:
    """Arguments of a pooling, for each of its dimensions."""

    def __init__(self, rank: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> None:
        self.kernel = each(kernel_size, rank)
        self.stride = each(stride, rank) if stride not in (None, ()) else self.kernel
        self.padding, self.dilation = each(padding, rank), each(dilation, rank)
        self.ceil_mode, self.rank = ceil_mode, rank
        self.given_stride = self.stride if stride not in (None, ()) else ()

    def shape(self, input: Node) -> tuple[int, ...]:
        sizes = [
            pooled_size(*each, self.ceil_mode)
            for each in zip(
                input.shape[-self.rank :], self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]
        if min(sizes) < 1:
            raise ValueError(f"pooling {list(input.shape)} by {list(self.kernel)}")
        return (*input.shape[: -self.rank], *sizes)


def _like(input: Node, shape: tuple[int, ...]) -> Strides | None:
    return layout.channels_last_strides(shape) if layout.prefers_channels_last(input.shape, input.strides) else None


def _max_pool(t: Tracer, input: Node, window: _Window) -> tuple[Node, Node]:
    """The values, recorded, and the indices; windows above 25 are a call of their own."""
    shape = window.shape(input)
    values, offsets = form(shape, input.dtype, _like(input, shape)), form(shape, dtypes.int64, _like(input, shape))
    places = (window.stride, window.padding, window.dilation)
    given = (input, window.kernel, window.given_stride, window.padding, window.dilation, window.ceil_mode)
    if math.prod(window.kernel) > _LARGEST_WINDOW:
        out, indices = t.several(f"aten::max_pool{window.rank}d_with_indices", given, [values, offsets])
    else:
        args = (input, window.kernel, *places, window.ceil_mode)
        small = form(shape, dtypes.int8, _like(input, shape))
        out, offset = t.several("prims::_low_memory_max_pool_with_offsets", args, [values, small])
        size = input.shape[-window.rank :]
        indices = t.node(
            "prims::_low_memory_max_pool_offsets_to_indices", (offset, window.kernel, size, *places), offsets
        )

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        if window.rank == 2:
            return [_scattered(t, grads[0], input, indices)]
        target = f"aten::max_pool{window.rank}d_with_indices_backward"
        return [t.new(target, (grads[0], *given, indices), input.shape, input.dtype, _like(input, input.shape))]

    t.record(out, [input], gradient)
    return out, indices


def _scattered(t: Tracer, grad: Node, input: Node, indices: Node) -> Node:
    """`max_pool2d_with_indices_backward`: halves accumulate in float32."""
    batched = input.ndim == 4
    shape = input.shape if batched else (1, *input.shape)
    if not batched:
        grad, indices = t.unsqueeze(grad, 0), t.unsqueeze(indices, 0)
    maps, inner, outer = shape[0] * shape[1], math.prod(shape[2:]), math.prod(grad.shape[2:])
    zeros = t.full((maps, inner), 0, t.computes_in(grad.dtype))
    flat, places = t.view(grad, (maps, outer)), t.view(indices, (maps, outer))
    result = t.new("aten::scatter_add", (zeros, 1, places, t.opmath(flat)), (maps, inner), zeros.dtype)
    result = t.cast(t.view(result, shape), grad.dtype)
    if batched and layout.prefers_channels_last(input.shape, input.strides):
        result = t.clone(result, layout.channels_last_strides(shape))
    return result if batched else t.squeeze_dim(result, 0)


def _register_max_pool(rank: int) -> None:
    def run_with_indices(
        t: Tracer, self: Node, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Sequence[Node]:  # fmt: skip
        return _max_pool(t, self, _Window(rank, kernel_size, stride, padding, dilation, ceil_mode))

    traced(f"max_pool{rank}d_with_indices")(run_with_indices)
    traced(f"max_pool{rank}d")(lambda *args, **kwargs: run_with_indices(*args, **kwargs)[0])


_register_max_pool(2)

_register_max_pool(3)


def _as_row(t: Tracer, self: Node) -> Node:
    """[.., L] as [.., 1, L]."""
    out = t.unsqueeze(self, -2)
    return t.derive(out, self, lambda grad: t.squeeze_dim(grad, -2))


def _of_row(t: Tracer, self: Node) -> Node:
    out, axis = t.squeeze_dim(self, -2), self.dim(-2)
    return t.derive(out, self, lambda grad: t.unsqueeze(grad, axis))


def _row(value: Any, other: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return (other, *values) if values else ()


@traced("max_pool1d_with_indices")
def max_pool1d_with_indices(
    t: Tracer, self: Node, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Sequence[Node]:  # fmt: skip
    stride = () if stride is None else stride
    places = (_row(kernel_size, 1), _row(stride, 1), _row(padding, 0), _row(dilation, 1))
    pooled, indices = _max_pool(t, _as_row(t, self), _Window(2, *places, ceil_mode))
    return _of_row(t, pooled), t.squeeze_dim(indices, -2)


traced("max_pool1d")(lambda *args, **kwargs: max_pool1d_with_indices(*args, **kwargs)[0])


def _avg_pool(t: Tracer, self: Node, window: _Window, count_include_pad: bool, divisor_override: int | None) -> Node:
    shape = window.shape(self)
    args = (window.kernel, window.given_stride, window.padding, window.ceil_mode, count_include_pad, divisor_override)
    target = f"aten::avg_pool{window.rank}d"
    out = t.new(target, (self, *args), shape, self.dtype, _like(self, shape))

    def gradient(grad: Node) -> Node:
        strides = _like(self, self.shape)
        return t.new(f"{target}_backward", (grad, self, *args), self.shape, self.dtype, strides)

    return t.derive(out, self, gradient)


def _register_avg_pool(rank: int) -> None:
    def run(
        t: Tracer, self: Node, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Node:  # fmt: skip
        window = _Window(rank, kernel_size, stride, padding, 1, ceil_mode)
        return _avg_pool(t, self, window, count_include_pad, divisor_override)

    traced(f"avg_pool{rank}d")(run)


_register_avg_pool(2)

_register_avg_pool(3)


@traced("avg_pool1d")
def avg_pool1d(
    t: Tracer, self: Node, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Node:  # fmt: skip
    window = _Window(2, _row(kernel_size, 1), _row(stride or kernel_size, 1), _row(padding, 0), 1, ceil_mode)
    return _of_row(t, _avg_pool(t, _as_row(t, self), window, count_include_pad, None))


def _adaptive_avg(t: Tracer, self: Node, output_size: Sizes) -> Node:
    """The mean where one value is left, else a call of its own."""
    rank = len(output_size)
    if all(size == 1 for size in output_size):
        mean = _global_mean(t, self, tuple(range(-1, -1 - rank, -1)))
        last = self.ndim == 4 and layout.prefers_channels_last(self.shape, self.strides)
        return _in_channels_last(t, mean) if last else mean
    sizes = [size if wanted is None else wanted for size, wanted in zip(self.shape[-rank:], output_size, strict=True)]
    shape = (*self.shape[:-rank], *sizes)
    target = f"aten::_adaptive_avg_pool{rank}d"
    out = t.new(target, (self, tuple(sizes)), shape, self.dtype, _like(self, shape))

    def gradient(grad: Node) -> Node:
        strides = _like(self, self.shape)
        return t.new(f"{target}_backward", (grad, self), self.shape, self.dtype, strides)

    return t.derive(out, self, gradient)


def _in_channels_last(t: Tracer, self: Node) -> Node:
    """`as_strided_` of [N, C, 1, 1]; its backward writes the gradient into zeros of the input's storage
    (`as_strided_backward` of FunctionsManual.cpp)."""
    batch, channels = self.shape[:2]
    strides = (channels, 1, channels, channels)
    out = t.new("aten::as_strided", (self, self.shape, strides), self.shape, self.dtype, strides)

    def gradient(grad: Node) -> Node:
        for dim in (3, 2, 1, 0):
            if grad.shape[dim] == 1:
                grad = t.squeeze_dim(grad, dim)
        kept = tuple([s for size, s in zip(self.shape, strides, strict=True) if size != 1])
        flat = t.full((batch * channels,), 0, grad.dtype)
        place = t.new("aten::as_strided", (flat, grad.shape, kept, 0), grad.shape, grad.dtype, kept)
        written = t.new("aten::copy", (place, grad), grad.shape, grad.dtype, kept)
        args = (flat, written, grad.shape, kept, 0)
        flat = t.new("aten::as_strided_scatter", args, flat.shape, grad.dtype)
        back = (flat, self.shape, self.strides, 0)
        return t.new("aten::as_strided", back, self.shape, grad.dtype, self.strides)

    return t.derive(out, self, gradient)


def _global_mean(t: Tracer, self: Node, dims: Sizes) -> Node:
    out = t.reduce("aten::mean.dim", self, dims, True)
    count = self.numel // max(out.numel, 1)
    return t.derive(out, self, lambda grad: t.pointwise("aten::div.Scalar", t.expand(grad, self.shape), count))


@traced("adaptive_avg_pool2d _adaptive_avg_pool2d")
def adaptive_avg_pool2d(t: Tracer, self: Node, output_size: Any) -> Node:
    return _adaptive_avg(t, self, each(output_size, 2))


@traced("adaptive_avg_pool3d _adaptive_avg_pool3d")
def adaptive_avg_pool3d(t: Tracer, self: Node, output_size: Any) -> Node:
    return _adaptive_avg(t, self, each(output_size, 3))


@traced("adaptive_avg_pool1d")
def adaptive_avg_pool1d(t: Tracer, self: Node, output_size: Any) -> Node:
    return _of_row(t, _adaptive_avg(t, _as_row(t, self), _row(output_size, 1)))


@traced("adaptive_max_pool2d")
def adaptive_max_pool2d(t: Tracer, self: Node, output_size: Any) -> Sequence[Node]:
    """amax for one value, a max pool where sizes divide."""
    sizes = each(output_size, 2)
    height, width = self.shape[-2:]
    if sizes == (1, 1):
        out = t.reduce("aten::amax", self, (-2, -1), True)
        flat = t.view(self, (*self.shape[:-2], height * width))
        indices = t.new("aten::argmax", (flat, -1), self.shape[:-2], dtypes.int64)
        indices = t.unsqueeze(t.unsqueeze(indices, -1), -1)
    elif height % sizes[0] == 0 and width % sizes[1] == 0:
        grad_enabled, t.grad_enabled = t.grad_enabled, False
        kernel = (height // sizes[0], width // sizes[1])
        out, indices = _max_pool(t, self, _Window(2, kernel, kernel, 0, 1, False))
        t.grad_enabled = grad_enabled
    else:
        shape = (*self.shape[:-2], *sizes)
        forms = [form(shape, dtype, _like(self, shape)) for dtype in (self.dtype, dtypes.int64)]
        out, indices = t.several("aten::adaptive_max_pool2d", (self, sizes), forms)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        target = "aten::adaptive_max_pool2d_backward"
        return [t.new(target, (grads[0], self, indices), self.shape, self.dtype, _like(self, self.shape))]

    t.record(out, [self], gradient)
    return out, indices


@traced("adaptive_max_pool1d")
def adaptive_max_pool1d(t: Tracer, self: Node, output_size: Any) -> Sequence[Node]:
    out, indices = adaptive_max_pool2d(t, _as_row(t, self), _row(output_size, 1))
    indices = t.squeeze_dim(indices, -2)  # C++ evaluates the last element of the tuple first
    return _of_row(t, out), indices
