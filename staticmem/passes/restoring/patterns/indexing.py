"""Slices that together are one call."""

from __future__ import annotations

from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.passes.restoring.patterns.matcher import Matcher

_Range = tuple[str, int, int, int]  # input, axis, start, end

_MOST_PARTS = 64  # of a chunk: more slices than any code takes a tensor apart in
_STEPS = 16  # rolls in one another, at most: names may form a circle in a damaged file


def _range(m: Matcher, node: Node) -> _Range | None:
    """A slice of step 1 along one axis."""
    starts, ends = m.ctx.ints(node, 1, "starts"), m.ctx.ints(node, 2, "ends")
    axes, steps = m.ctx.ints(node, 3, "axes"), m.ctx.ints(node, 4)
    shape = m.net.shape(node.inputs[0])
    if starts is None or ends is None or shape is None or len(starts) != 1 or (steps or (1,)) != (1,):
        return None
    axis = (axes or (0,))[0] % len(shape)
    start, end, _ = slice(starts[0], ends[0]).indices(shape[axis])
    return node.inputs[0], axis, start, end


def roll(m: Matcher, node: Node) -> bool:
    """cat(x[k:], x[:k]) along one axis, or along several one after the other."""
    one_roll = _one_roll(m, node)
    if one_roll is None:
        return False
    reader = m.readers.get(node.outputs[0], [])
    for slice_ in reader:
        after = m.reader(slice_.outputs[0], "Concat") if slice_.op == "Slice" else None
        if after is not None and _one_roll(m, after) is not None:
            return False  # the last one takes the whole chain
    shifts: list[int] = []
    dims: list[int] = []
    nodes: list[Node] = []
    current, step = node, one_roll
    while True:
        x, axis, start, parts = step
        shifts.insert(0, -start)
        dims.insert(0, axis)
        nodes += [*parts, *([current] if current is not node else [])]
        before = m.maker(x, "Concat")
        inner = _one_roll(m, before) if before is not None else None
        if len(dims) == _STEPS or before is None or inner is None or any(r not in parts for r in m.readers[x]):
            break
        current, step = before, inner
    args: tuple[Arg, ...] = (m.ctx.ref(x), tuple(shifts), tuple(dims))
    return m.take(node, [m.op(node, "aten::roll", *args)], *nodes)


def _one_roll(m: Matcher, node: Node) -> tuple[str, int, int, list[Node]] | None:
    if node.op != "Concat" or len(node.inputs) != 2:
        return None
    parts = [m.inner(name, "Slice") for name in node.inputs]
    if parts[0] is None or parts[1] is None:
        return None
    a, b = _range(m, parts[0]), _range(m, parts[1])
    if a is None or b is None or a[:2] != b[:2]:
        return None
    shape = m.net.shape(a[0])
    axis = node.attrs.get("axis", 0)
    if shape is None or not isinstance(axis, int) or axis % len(shape) != a[1]:
        return None
    if b[2] != 0 or a[2] != b[3] or a[3] != shape[a[1]] or not 0 < a[2] < a[3]:
        return None
    return a[0], a[1], a[2], [parts[0], parts[1]]


def chunk(m: Matcher, node: Node) -> bool:
    """Slices of one module that cover an axis in equal parts, each of which starts at the very tensor at which the one
    before it ends: so PyTorch writes `chunk` (symbolic_opset11.py, `prim_constant_chunk`), while slices of the code
    have numbers of their own, whatever parts they take."""
    first = _range(m, node)
    if first is None or first[2] != 0 or first[3] == 0 or len(node.inputs) < 3:
        return False
    x, axis, _, size = first
    total = (m.net.shape(x) or (0,))[axis]
    if total == size or total % size or total // size > _MOST_PARTS:
        return False
    starts = {r.inputs[1]: r for r in m.readers.get(x, ()) if r.op == "Slice" and len(r.inputs) > 2}
    parts = [node]
    while len(parts) * size < total:
        end = parts[-1].inputs[2]
        after = starts.get(end) if end else None
        if after is None or not m.free(after) or m.frames(after) != m.frames(node):
            return False
        begin = len(parts) * size
        if _range(m, after) != (x, axis, begin, begin + size):
            return False
        parts.append(after)
    outputs = tuple(p.outputs[0] for p in parts)
    args: tuple[Arg, ...] = (m.ctx.ref(x), len(parts), axis)
    root = min(parts, key=lambda part: m.index[id(part)])  # nodes may be in another order than they were written in
    return m.take(root, [m.op(node, "aten::chunk", *args, outputs=outputs)], *[p for p in parts if p is not root])


def write(m: Matcher, node: Node) -> bool:
    """ScatterND is an assignment to an index: into a tensor that the model made itself, or a copy of another."""
    if node.op != "ScatterND" or node.attrs.get("reduction", "none") != "none":
        return False
    data = node.inputs[0]
    own = data in m.net.weights or data in m.net.inputs
    later = [r for r in m.readers.get(data, ()) if r is not node and m.index.get(id(r), 0) > m.index[id(node)]]
    shape = m.net.shape(data)
    if (later and not own) or shape is None:
        return False
    ops: list[Op] = []
    base = m.ctx.ref(data)
    if own:  # it was cloned before, which leaves no node
        name = m.ctx.fresh(node)
        m.ctx.define(name, data, shape)
        ops.append(m.op(node, "aten::clone", base, outputs=(name,)))
        rows = m.net.ints(node.inputs[1]) or ()
        base = Ref(name)
        if rows and rows == tuple(range(rows[0], rows[0] + len(rows))) and node.inputs[2] in m.net.consts:
            part = m.ctx.fresh(node)
            ops.append(m.op(node, "aten::slice.Tensor", base, 0, rows[0], rows[0] + len(rows), outputs=(part,)))
            ops.append(m.op(node, "aten::fill_.Scalar", Ref(part), 0.0, outputs=(f"{part}:",)))
            m.ctx.alias(node.outputs[0], name)
            return m.take(node, ops)
    elif data in m.net.consts or m.maker(data, "Constant") is not None:
        # made by ConstantOfShape and small enough to be known, or by the code of a trace: a tensor all the same
        name = m.ctx.fresh(node)
        m.ctx.define(name, data, shape)
        value = m.net.values.get(data)
        dtype = value.dtype if value is not None else None
        ops.append(m.op(node, "aten::zeros", shape, outputs=(name,), kwargs={"dtype": dtype}))
        base = Ref(name)
    update: Arg = m.ctx.arg(node.inputs[2])
    whole = base
    if node.inputs[2] in m.net.consts:
        ops.append(m.op(node, "aten::fill_.Scalar", base, 0.0))
    elif m.net.shape(node.inputs[2]) == shape:  # every element is written: `x[:, :] = y`
        ops.append(m.op(node, "aten::copy_", base, update))
    elif (slices := _slices(m, node, shape)) is not None:
        for axis, start, end in slices:
            part = m.ctx.fresh(node)
            ops.append(m.op(node, "aten::slice.Tensor", base, axis, start, end, outputs=(part,)))
            base = Ref(part)
        ops.append(m.op(node, "aten::copy_", base, update, outputs=(f"{base.name}:",)))
        m.ctx.alias(node.outputs[0], whole.name)
    else:
        ops.extend(_index_put(m, node, base, update))
    return m.take(node, ops)


def _index_put(m: Matcher, node: Node, base: Arg, update: Arg) -> list[Op]:
    """The last dimension of ScatterND's indices is a tuple of positions: one index tensor for each, as views."""
    indices = m.net.shape(node.inputs[1])
    index = m.ctx.ref(node.inputs[1])
    if indices is None or indices[-1] == 1:
        return [m.op(node, "aten::index_put_", base, (index,), update)]
    names = [m.ctx.fresh(node) for _ in range(indices[-1])]
    ops = [m.op(node, "aten::select.int", index, -1, i, outputs=(name,)) for i, name in enumerate(names)]
    return [*ops, m.op(node, "aten::index_put_", base, tuple(Ref(name) for name in names), update)]


def _slices(m: Matcher, node: Node, shape: tuple[int, ...]) -> list[tuple[int, int, int]] | None:
    """`x[:, :, 1:, 1:] = y`, as axis, start and end: indices that are joined from one range along each axis, expanded
    to all of them (symbolic_opset11.py, `index_put`). Where a slice starts matters to no size: the end is taken."""
    joined, written = m.maker(node.inputs[1], "Concat"), m.net.shape(node.inputs[2])
    if joined is None or written is None or len(written) != len(shape) or len(joined.inputs) < 2:
        return None
    count = len(joined.inputs)
    if count > len(shape) or written[count:] != shape[count:]:
        return None
    ranges = []
    for axis, name in enumerate(joined.inputs):
        lifted = m.maker(name, "Unsqueeze")
        grid = m.maker(lifted.inputs[0], "Expand") if lifted is not None else None
        along = (written[axis], *(1,) * (count - axis - 1))
        if grid is None or m.net.shape(grid.inputs[0]) != along or not _is_range(m, grid.inputs[0]):
            return None
        if written[axis] != shape[axis]:
            ranges.append((axis, shape[axis] - written[axis], shape[axis]))
    return ranges


def _is_range(m: Matcher, name: str) -> bool:
    for _ in range(6):
        node = m.maker(name, "Range", "Slice", "Reshape", "Cast")
        if node is None:
            numbers = m.net.ints(name) or (0, 0)
            return numbers == tuple(range(numbers[0], numbers[0] + len(numbers)))
        if node.op == "Range":
            return True
        name = node.inputs[0]
    return False
