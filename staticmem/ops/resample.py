"""Interpolation and sampling on grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context, integer, text, translation
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule


def _upsample(
    e: Eager, name: str, input: Tensor, output_size: Any, args: Sequence[Any], factors: Any, suggested: bool
) -> Tensor:
    if output_size is None:
        factors = factors or next(a for a in args if isinstance(a, tuple))
        output_size = tuple(int(s * f) for s, f in zip(input.shape[2:], factors, strict=True))
    shape = (*input.shape[:2], *output_size)
    strides = layout.channels_last_strides(shape) if input.prefers_channels_last else None
    out = e.empty(shape, input.dtype, strides, f"aten.{name}.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        like = layout.channels_last_strides(input.shape) if input.prefers_channels_last and suggested else None
        return e.empty(input.shape, input.dtype, like, f"aten.{name}_backward.default")

    return e.record("UpsampleBackward1", out, [input], [Formula((0,), gradient)])


def _resampling(name: str) -> None:
    cubic = "bicubic" in name  # UpSample.cpp: upsample_bicubic2d_backward sets no format

    def upsample(
        e: Eager, input: Tensor, output_size: Any = None, *args: Any, scale_factors: Any = None, **_: Any
    ) -> Tensor:
        return _upsample(e, name, input, output_size, args, scale_factors, not cubic)

    upsample.__doc__ = f"Saves sizes only; backward makes one {'contiguous ' * cubic}tensor of the input's size."
    rule(name, kinds=("enlarging",), autocast="float32")(upsample)


for _name in (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
):  # fmt: skip
    _resampling(_name)


@rule("grid_sampler grid_sampler_2d grid_sampler_3d", autocast="promote")
def grid_sampler(e: Eager, input: Tensor, grid: Tensor, *_: Any) -> Tensor:
    """Saves input and grid; backward makes the grid's gradient always, the input's where it is needed."""
    if input.shape[0] != grid.shape[0]:
        raise ValueError(f"{input.shape[0]} images do not fit {grid.shape[0]} grids")
    out = e.empty((*input.shape[:2], *grid.shape[1:-1]), input.dtype, kernel="aten.grid_sampler_2d.default")

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten.grid_sampler_2d_backward.default")
        by_input = e.empty(input.shape, input.dtype) if need[0] else None
        return by_input, e.empty(grid.shape, grid.dtype)

    return e.record("GridSampler2DBackward0", out, [input, grid], [Formula((0, 1), gradients)], [grid, input])


@rule("affine_grid_generator")
def affine_grid_generator(e: Eager, theta: Tensor, size: Any, align_corners: bool = False) -> Tensor:
    """Saves sizes; backward makes the base grid again (a coordinate more than the result) and a batched product.

    The base grid of the forward is inside of the kernel.
    """
    n, _, *spatial = (int(s) for s in size)
    if theta.shape[0] != n:
        raise ValueError(f"{theta.shape[0]} transformations do not fit a grid for {n}")
    out = e.empty((n, *spatial, len(spatial)), theta.dtype, kernel="aten.affine_grid_generator.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        e.empty((n, *spatial, len(spatial) + 1), grad.dtype, kernel="aten.empty.memory_format")
        for length in reversed(spatial):
            line = e.empty((length,), grad.dtype, kernel="aten.linspace.default")
            if not align_corners:
                scaled = e.empty((length,), grad.dtype, kernel="aten.mul.Scalar")
                unscaled, line = line, e.empty((length,), grad.dtype, kernel="aten.div.Scalar")
                e.free(scaled, unscaled)
            e.free(line)
        product = e.empty((n, len(spatial) + 1, len(spatial)), grad.dtype, kernel="aten.bmm.default")
        shape, (batch, row, column) = (n, len(spatial), len(spatial) + 1), product.strides
        return e.alias(product, shape, (batch, column, row))

    return e.record("AffineGridGeneratorBackward0", out, [theta], [Formula((0,), gradient)])


_LINEAR = {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}


@translation("Resize", "Upsample")
def onnx_resize(ctx: Context, node: Node) -> list[Op] | None:
    before, after = ctx.net.shape(node.inputs[0]), ctx.net.shape(node.outputs[0])
    if before is None or after is None or len(before) != len(after) or not 3 <= len(after) <= 5:
        return None
    sizes, count = after[2:], len(after) - 2
    corners = text(node, "coordinate_transformation_mode", "half_pixel") == "align_corners"
    mode = text(node, "mode", "nearest")
    x = ctx.ref(node.inputs[0])
    if mode == "nearest":
        return [ctx.op(node, f"aten::upsample_nearest{count}d.vec", x, sizes, None)]
    if mode == "linear":
        return [ctx.op(node, f"aten::upsample_{_LINEAR[count]}.vec", x, sizes, corners, None)]
    return [ctx.op(node, "aten::upsample_bicubic2d.vec", x, sizes, corners, None)] if count == 2 else None


@translation("GridSample")
def onnx_grid_sample(ctx: Context, node: Node) -> list[Op]:
    x, grid = ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1])
    return [ctx.op(node, "aten::grid_sampler", x, grid, 0, 0, bool(integer(node, "align_corners", 0)))]
