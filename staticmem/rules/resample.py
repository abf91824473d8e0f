"""Up- and down-sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.rules.registry import rule


def _upsample(e: Eager, input: Tensor, output_size: Any, args: Sequence[Any], factors: Any, cubic: bool) -> Tensor:
    if output_size is None:
        factors = factors or next(a for a in args if isinstance(a, tuple))
        output_size = tuple(int(s * f) for s, f in zip(input.shape[2:], factors, strict=True))
    shape = (*input.shape[:2], *output_size)
    strides = layout.channels_last_strides(shape) if input.prefers_channels_last else None
    out = e.empty(shape, input.dtype, strides, "aten.upsample_bilinear2d.vec")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        last = input.prefers_channels_last and not cubic  # UpSample.cpp: upsample_bicubic2d_backward sets no format
        like = layout.channels_last_strides(input.shape) if last else None
        return e.empty(input.shape, input.dtype, like, "aten.upsample_bilinear2d_backward.vec")

    e.record("UpsampleBackward1", out, [input], [Formula((0,), gradient)])
    return out


@rule(
    "aten::upsample_nearest1d", "aten::upsample_nearest2d", "aten::upsample_nearest3d", "aten::upsample_linear1d",
    "aten::upsample_bilinear2d", "aten::upsample_trilinear3d", "aten::_upsample_nearest_exact1d",
    "aten::_upsample_nearest_exact2d", "aten::_upsample_nearest_exact3d", "aten::_upsample_bilinear2d_aa",
    autocast="float32",
)  # fmt: skip
def upsample(
    e: Eager, input: Tensor, output_size: Any = None, *args: Any, scale_factors: Any = None, **_: Any
) -> Tensor:
    """Saves sizes only; backward makes one tensor of the input's size."""
    return _upsample(e, input, output_size, args, scale_factors, False)


@rule("aten::upsample_bicubic2d", "aten::_upsample_bicubic2d_aa", autocast="float32")
def upsample_bicubic(
    e: Eager, input: Tensor, output_size: Any = None, *args: Any, scale_factors: Any = None, **_: Any
) -> Tensor:
    """Saves sizes only; backward makes one contiguous tensor of the input's size."""
    return _upsample(e, input, output_size, args, scale_factors, True)


@rule("aten::grid_sampler", "aten::grid_sampler_2d", "aten::grid_sampler_3d", autocast="promote")
def grid_sampler(e: Eager, input: Tensor, grid: Tensor, *_: Any) -> Tensor:
    """Saves input and grid; backward makes the grid's gradient always, the input's where it is needed."""
    out = e.empty((*input.shape[:2], *grid.shape[1:-1]), input.dtype, kernel="aten.grid_sampler_2d.default")

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten.grid_sampler_2d_backward.default")
        by_input = e.empty(input.shape, input.dtype) if need[0] else None
        return by_input, e.empty(grid.shape, grid.dtype)

    e.record("GridSampler2DBackward0", out, [input, grid], [Formula((0, 1), gradients)], [input, grid])
    return out
