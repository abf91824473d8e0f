"""Convolutions, pools and resizing."""

from __future__ import annotations

from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx.context import Context, Rule, integer, integers, text

_CONVOLUTIONS = {1: "aten::conv1d", 2: "aten::conv2d", 3: "aten::conv3d"}


def _pads(ctx: Context, node: Node, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Begin and end pads of the spatial axes; `auto_pad` is worked out from sizes."""
    count = len(kernel)
    pads = integers(node, "pads", (0,) * 2 * count)
    mode = text(node, "auto_pad", "NOTSET")
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        return pads if len(pads) == 2 * count else (0,) * 2 * count
    shape = ctx.net.shape(node.inputs[0])
    strides = integers(node, "strides", (1,) * count)
    dilations = integers(node, "dilations", (1,) * count)
    if shape is None or len(shape) < count:
        return (0,) * 2 * count
    begin, end = [], []
    for size, k, s, d in zip(shape[-count:], kernel, strides, dilations, strict=False):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begin.append(small if mode == "SAME_UPPER" else large)
        end.append(large if mode == "SAME_UPPER" else small)
    return (*begin, *end)


def _padded(ctx: Context, node: Node, pads: tuple[int, ...], value: float) -> tuple[list[Op], Arg, tuple[int, ...]]:
    """PyTorch pads symmetrically inside the op, everything else by a `pad` before it."""
    count = len(pads) // 2
    if pads[:count] == pads[count:]:
        return [], ctx.ref(node.inputs[0]), pads[:count]
    name = ctx.fresh(node)
    shape = ctx.net.shape(node.inputs[0])
    order = tuple(p for axis in reversed(range(count)) for p in (pads[axis], pads[axis + count]))
    if shape is not None:
        sizes = tuple(s + pads[i] + pads[i + count] for i, s in enumerate(shape[-count:]))
        ctx.define(name, node.inputs[0], (*shape[:-count], *sizes))
    pad = ctx.op(node, "aten::pad", ctx.ref(node.inputs[0]), order, "constant", value, outputs=(name,))
    return [pad], Ref(name), (0,) * count


def conv(ctx: Context, node: Node) -> list[Op] | None:
    known = ctx.geometry.get(id(node.attrs))
    if known is not None:
        target, tail = known[1], known[2]
        return [ctx.op(node, target, ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1]), ctx.optional(node, 2), *tail)]
    kernel = integers(node, "kernel_shape")
    weight = ctx.net.shape(node.inputs[1])
    if not kernel and weight is not None:
        kernel = weight[2:]
    count = len(kernel)
    if not 1 <= count <= 3:
        return None
    ops, x, padding = _padded(ctx, node, _pads(ctx, node, kernel), 0.0)
    tail = (
        integers(node, "strides", (1,) * count),
        padding,
        integers(node, "dilations", (1,) * count),
        integer(node, "group", 1),
    )
    target = _CONVOLUTIONS[count]
    if not ops and "kernel_shape" in node.attrs and text(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        ctx.geometry[id(node.attrs)] = (node.attrs, target, tail)
    return [*ops, ctx.op(node, target, x, ctx.ref(node.inputs[1]), ctx.optional(node, 2), *tail)]


def conv_transpose(ctx: Context, node: Node) -> list[Op] | None:
    weight = ctx.net.shape(node.inputs[1])
    count = len(weight) - 2 if weight is not None else len(integers(node, "kernel_shape"))
    if not 1 <= count <= 3:
        return None
    if "output_shape" in node.attrs or node.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None  # sizes that ONNX works out backwards; PyTorch has no such call
    pads = integers(node, "pads", (0,) * 2 * count)
    return [
        ctx.op(
            node,
            f"aten::conv_transpose{count}d" + (".input" if count > 1 else ""),
            ctx.ref(node.inputs[0]),
            ctx.ref(node.inputs[1]),
            ctx.optional(node, 2),
            integers(node, "strides", (1,) * count),
            pads[:count],
            integers(node, "output_padding", (0,) * count),
            integer(node, "group", 1),
            integers(node, "dilations", (1,) * count),
        )
    ]


def max_pool(ctx: Context, node: Node) -> list[Op] | None:
    kernel = integers(node, "kernel_shape")
    count = len(kernel)
    if not 1 <= count <= 3:
        return None
    ops, x, padding = _padded(ctx, node, _pads(ctx, node, kernel), float("-inf"))
    args: tuple[Arg, ...] = (
        x,
        kernel,
        integers(node, "strides", (1,) * count),
        padding,
        integers(node, "dilations", (1,) * count),
        bool(integer(node, "ceil_mode", 0)),
    )
    if len(node.outputs) > 1 and node.outputs[1]:
        return [*ops, ctx.op(node, f"aten::max_pool{count}d_with_indices", *args, outputs=node.outputs[:2])]
    return [*ops, ctx.op(node, f"aten::max_pool{count}d", *args)]


def average_pool(ctx: Context, node: Node) -> list[Op] | None:
    kernel = integers(node, "kernel_shape")
    count = len(kernel)
    if not 1 <= count <= 3:
        return None
    if set(integers(node, "dilations", (1,))) != {1}:
        return None  # PyTorch's average pooling has no dilation
    pads = _pads(ctx, node, kernel)
    sizes = ctx.net.shape(node.outputs[0])
    if set(kernel) == {1} and not any(pads) and sizes is not None:
        # what adaptive_avg_pool becomes where the sizes are already right
        return [ctx.op(node, f"aten::adaptive_avg_pool{count}d", ctx.ref(node.inputs[0]), sizes[-count:])]
    ops, x, padding = _padded(ctx, node, pads, 0.0)
    args: list[Arg] = [x, kernel, integers(node, "strides", (1,) * count), padding]
    args += [bool(integer(node, "ceil_mode", 0)), bool(integer(node, "count_include_pad", 0))]
    return [*ops, ctx.op(node, f"aten::avg_pool{count}d", *args)]


def global_average_pool(ctx: Context, node: Node) -> list[Op] | None:
    count = ctx.rank(node.inputs[0]) - 2
    if not 1 <= count <= 3:
        return None
    return [ctx.op(node, f"aten::adaptive_avg_pool{count}d", ctx.ref(node.inputs[0]), (1,) * count)]


def global_max_pool(ctx: Context, node: Node) -> list[Op] | None:
    count = ctx.rank(node.inputs[0]) - 2
    if not 1 <= count <= 3:
        return None
    outputs = (node.outputs[0], ctx.fresh(node))
    return [ctx.op(node, f"aten::adaptive_max_pool{count}d", ctx.ref(node.inputs[0]), (1,) * count, outputs=outputs)]


_LINEAR = {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}


def resize(ctx: Context, node: Node) -> list[Op] | None:
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


def grid_sample(ctx: Context, node: Node) -> list[Op]:
    x, grid = ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1])
    return [ctx.op(node, "aten::grid_sampler", x, grid, 0, 0, bool(integer(node, "align_corners", 0)))]


def shuffle(up: bool) -> Rule:
    target = "aten::pixel_shuffle" if up else "aten::pixel_unshuffle"

    def rule(ctx: Context, node: Node) -> list[Op] | None:
        if up and text(node, "mode", "DCR") != "CRD":
            return None
        return [ctx.op(node, target, ctx.ref(node.inputs[0]), integer(node, "blocksize", 2))]

    return rule


RULES: dict[str, Rule] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "GlobalAveragePool": global_average_pool,
    "GlobalMaxPool": global_max_pool,
    "Resize": resize,
    "Upsample": resize,
    "GridSample": grid_sample,
    "DepthToSpace": shuffle(True),
}
