"""Views, joins, indexing and what makes tensors from sizes."""

from __future__ import annotations

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx.context import Context, Rule, integer, integers, real, text


def reshape(ctx: Context, node: Node) -> list[Op] | None:
    sizes = ctx.net.shape(node.outputs[0])
    if sizes is None:
        known = ctx.ints(node, 1, "shape")
        if known is None or known.count(-1) > 1 or 0 in known:
            return None
        sizes = known
    return [ctx.op(node, "aten::reshape", ctx.ref(node.inputs[0]), sizes)]


def flatten(ctx: Context, node: Node) -> list[Op] | None:
    rank, axis = ctx.rank(node.inputs[0]), integer(node, "axis", 1)
    axis = axis + rank if axis < 0 else axis
    if axis == 1 and rank > 1:
        return [ctx.op(node, "aten::flatten.using_ints", ctx.ref(node.inputs[0]), 1)]
    return reshape(ctx, node) if ctx.net.shape(node.outputs[0]) is not None else None


def transpose(ctx: Context, node: Node) -> list[Op]:
    rank = ctx.rank(node.inputs[0])
    perm = integers(node, "perm", tuple(reversed(range(rank))))
    moved = [axis for axis, source in enumerate(perm) if axis != source]
    x = ctx.ref(node.inputs[0])
    if len(moved) == 2:
        if len(perm) == 2:
            return [ctx.op(node, "aten::t", x)]
        return [ctx.op(node, "aten::transpose.int", x, moved[0], moved[1])]
    return [ctx.op(node, "aten::permute", x, perm)]


def _steps(ctx: Context, node: Node, target: str, axes: tuple[int, ...], sizes: list[tuple[int, ...]]) -> list[Op]:
    """One op an axis, as PyTorch has no call for several."""
    ops: list[Op] = []
    x = ctx.ref(node.inputs[0])
    for position, axis in enumerate(axes):
        last = position == len(axes) - 1
        name = node.outputs[0] if last else ctx.fresh(node)
        if not last:
            ctx.define(name, node.inputs[0], sizes[position])
        ops.append(ctx.op(node, target, x, axis, outputs=(name,)))
        x = Ref(name)
    return ops


def unsqueeze(ctx: Context, node: Node) -> list[Op] | None:
    axes = ctx.ints(node, 1, "axes")
    shape = ctx.net.shape(node.inputs[0])
    if axes is None or shape is None:
        return None
    rank = len(shape) + len(axes)
    ordered = tuple(sorted(a % rank for a in axes))
    sizes: list[tuple[int, ...]] = []
    current = shape
    for axis in ordered:
        current = (*current[:axis], 1, *current[axis:])
        sizes.append(current)
    return _steps(ctx, node, "aten::unsqueeze", ordered, sizes)


def squeeze(ctx: Context, node: Node) -> list[Op] | None:
    axes = ctx.ints(node, 1, "axes")
    shape = ctx.net.shape(node.inputs[0])
    if shape is None:
        return None
    if axes is None:
        return [ctx.op(node, "aten::squeeze", ctx.ref(node.inputs[0]))]
    ordered = tuple(sorted((a % len(shape) for a in axes), reverse=True))
    sizes: list[tuple[int, ...]] = []
    current = shape
    for axis in ordered:
        current = (*current[:axis], *current[axis + 1 :])
        sizes.append(current)
    return _steps(ctx, node, "aten::squeeze.dim", ordered, sizes)


def concat(ctx: Context, node: Node) -> list[Op]:
    parts = tuple(ctx.ref(n) for n in node.inputs if n)
    return [ctx.op(node, "aten::cat", parts, integer(node, "axis", 0))]


def split(ctx: Context, node: Node) -> list[Op] | None:
    axis, shape = integer(node, "axis", 0), ctx.net.shape(node.inputs[0])
    outputs = tuple(n or ctx.fresh(node) for n in node.outputs)
    sizes = ctx.ints(node, 1, "split")
    x = ctx.ref(node.inputs[0])
    if sizes is None:
        if shape is None or not outputs:
            return None
        size = -(-shape[axis % len(shape)] // len(outputs))
        return [ctx.op(node, "aten::split.Tensor", x, size, axis, outputs=outputs)]
    if len(set(sizes[:-1])) <= 1 and 0 < sizes[-1] <= sizes[0] and len(sizes) == len(outputs):
        return [ctx.op(node, "aten::split.Tensor", x, sizes[0], axis, outputs=outputs)]
    return [ctx.op(node, "aten::split_with_sizes", x, sizes, axis, outputs=outputs)]


def slices(ctx: Context, node: Node) -> list[Op] | None:
    starts, ends = ctx.ints(node, 1, "starts"), ctx.ints(node, 2, "ends")
    shape = ctx.net.shape(node.inputs[0])
    if starts is None or ends is None or shape is None:
        return None
    axes = ctx.ints(node, 3, "axes") or tuple(range(len(starts)))
    steps = ctx.ints(node, 4) or (1,) * len(starts)
    ops: list[Op] = []
    x, current = ctx.ref(node.inputs[0]), list(shape)
    for position, (start, end, axis, step) in enumerate(zip(starts, ends, axes, steps, strict=False)):
        last = position == len(starts) - 1
        name = node.outputs[0] if last else ctx.fresh(node)
        axis %= len(shape)
        kept = len(range(*slice(start, end, step).indices(current[axis]))) if step else 0
        current[axis] = kept
        if not last:
            ctx.define(name, node.inputs[0], tuple(current))
        if step < 0:  # PyTorch has no negative steps: flip copies
            ops.append(ctx.op(node, "aten::flip", x, (axis,), outputs=(name,)))
        else:
            bounds: tuple[Arg, ...] = (axis, start, end) if step == 1 else (axis, start, end, step)
            ops.append(ctx.op(node, "aten::slice.Tensor", x, *bounds, outputs=(name,)))
        x = Ref(name)
    return ops


def gather(ctx: Context, node: Node) -> list[Op] | None:
    axis, rank = integer(node, "axis", 0), ctx.rank(node.inputs[0])
    index = ctx.net.const(node.inputs[1])
    x = ctx.ref(node.inputs[0])
    if index is not None and index.ndim == 0:
        return [ctx.op(node, "aten::select.int", x, axis, int(index))]
    weight = node.inputs[0] in ctx.net.weights and rank == 2 and axis == 0
    leaf = node.inputs[0].rpartition(".")[2]
    if weight and (leaf == "weight" or not ctx.net.producer.startswith("pytorch") or "." not in node.inputs[0]):
        return [ctx.op(node, "aten::embedding", x, ctx.ref(node.inputs[1]))]
    if ctx.rank(node.inputs[1]) == 1:
        if axis == 0 and weight:
            return [ctx.op(node, "aten::index.Tensor", x, (ctx.ref(node.inputs[1]),))]
        return [ctx.op(node, "aten::index_select", x, axis, ctx.ref(node.inputs[1]))]
    indices: tuple[Arg, ...] = (*(None,) * (axis % max(rank, 1)), ctx.ref(node.inputs[1]))
    return [ctx.op(node, "aten::index.Tensor", x, indices)]


def gather_elements(ctx: Context, node: Node) -> list[Op]:
    x, index = ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1])
    return [ctx.op(node, "aten::gather", x, integer(node, "axis", 0), index)]


def scatter_elements(ctx: Context, node: Node) -> list[Op]:
    x, index, source = (ctx.ref(n) for n in node.inputs[:3])
    target = "aten::scatter_add" if text(node, "reduction", "none") == "add" else "aten::scatter.src"
    return [ctx.op(node, target, x, integer(node, "axis", 0), index, source)]


def expand(ctx: Context, node: Node) -> list[Op] | None:
    sizes = ctx.net.shape(node.outputs[0]) or ctx.ints(node, 1)
    return None if sizes is None else [ctx.op(node, "aten::expand", ctx.ref(node.inputs[0]), sizes)]


def tile(ctx: Context, node: Node) -> list[Op] | None:
    repeats = ctx.ints(node, 1, "repeats")
    return None if repeats is None else [ctx.op(node, "aten::repeat", ctx.ref(node.inputs[0]), repeats)]


def pad(ctx: Context, node: Node) -> list[Op] | None:
    pads = ctx.ints(node, 1, "pads")
    rank = ctx.rank(node.inputs[0])
    if pads is None:
        return None
    axes = ctx.ints(node, 3)
    full = list(pads)
    if axes is not None:
        full = [0] * 2 * rank
        for position, axis in enumerate(axes):
            full[axis % rank], full[axis % rank + rank] = pads[position], pads[position + len(axes)]
    count = len(full) // 2
    order = [p for axis in reversed(range(count)) for p in (full[axis], full[axis + count])]
    mode = {"edge": "replicate", "wrap": "circular"}.get(text(node, "mode", "constant"), text(node, "mode", "constant"))
    while len(order) > 2 and mode != "constant" and order[-2:] == [0, 0]:
        order = order[:-2]
    while len(order) > 4 and order[-2:] == [0, 0] and len(order) > 2 * (count - 1):
        order = order[:-2]
    value = ctx.number(node, 2)
    if mode != "constant":
        return [ctx.op(node, "aten::pad", ctx.ref(node.inputs[0]), tuple(order), mode)]
    fill = real(node, "value", 0.0) if value is None else value
    return [ctx.op(node, "aten::pad", ctx.ref(node.inputs[0]), tuple(order), "constant", fill)]


def identity(ctx: Context, node: Node) -> list[Op]:
    ctx.alias(node.outputs[0], node.inputs[0])
    return []


def filled(ctx: Context, node: Node) -> list[Op] | None:
    sizes = ctx.net.ints(node.inputs[0])
    value = ctx.net.values.get(node.outputs[0])
    if sizes is None:
        return None
    dtype = value.dtype if value is not None else dtypes.float32
    fill = node.attrs.get("value")
    number: Arg = 0
    if fill is not None and not isinstance(fill, (int, float, str, tuple)) and hasattr(fill, "reshape"):
        number = float(fill.reshape(-1)[0])
    return [ctx.op(node, "aten::full", sizes, number, kwargs={"dtype": dtype})]


def arange(ctx: Context, node: Node) -> list[Op] | None:
    start, end, step = (ctx.number(node, i) for i in range(3))
    value = ctx.net.values.get(node.outputs[0])
    if start is None or end is None or step is None or value is None:
        return None
    return [ctx.op(node, "aten::arange.start_step", start, end, step, kwargs={"dtype": value.dtype})]


def trilu(ctx: Context, node: Node) -> list[Op]:
    k = ctx.number(node, 1)
    target = "aten::triu" if integer(node, "upper", 1) else "aten::tril"
    return [ctx.op(node, target, ctx.ref(node.inputs[0]), int(k or 0))]


def one_hot(ctx: Context, node: Node) -> list[Op] | None:
    depth = ctx.number(node, 1)
    return None if depth is None else [ctx.op(node, "aten::one_hot", ctx.ref(node.inputs[0]), int(depth))]


RULES: dict[str, Rule] = {
    "Reshape": reshape,
    "Flatten": flatten,
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "Concat": concat,
    "Split": split,
    "Slice": slices,
    "Gather": gather,
    "GatherElements": gather_elements,
    "ScatterElements": scatter_elements,
    "Expand": expand,
    "Tile": tile,
    "Pad": pad,
    "Identity": identity,
    "ConstantOfShape": filled,
    "Range": arange,
    "Trilu": trilu,
    "OneHot": one_hot,
}
