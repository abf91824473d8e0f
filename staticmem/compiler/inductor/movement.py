"""Lowerings of what moves elements: concatenation, padding, pooling, scatter, and writes into inputs.

Source: `torch/_inductor/lowering.py` (`cat`, `pointwise_cat`, `constant_pad_nd`, pooling, `scatter_reduce_`,
`index_put_impl_`, `mutate_to`) and `torch/_inductor/ir.py` (`ConcatKernel`, `MutationLayout`) of PyTorch 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.compiler.inductor import layout
from staticmem.compiler.inductor.buffers import Buffer, Loops, Operation, Read, Value
from staticmem.compiler.inductor.indexing import Step, new_shape
from staticmem.compiler.inductor.lowering import Lowered, Lowering, rule
from staticmem.compiler.inductor.pointwise import gathered, loads
from staticmem.compiler.inductor.post_grad import is_pointwise_use
from staticmem.compiler.nodes import Node
from staticmem.eager.strides import Shape, channels_last_strides, contiguous_strides, is_channels_last_contiguous, numel
from staticmem.ir import dtypes

COMPLEX_INPUTS = 8  # config.max_complex_pointwise_cat_inputs
SIMPLE_INPUTS = 8  # config.max_pointwise_cat_inputs
SIMPLE_OPS = 2  # lowering.py, cat: MAX_SIMPLE_OP_COUNT
WINDOW = 25  # elements of a window that is written out

# ---- concatenation


@rule("aten::cat")
def cat(low: Lowering, node: Node) -> Lowered:
    args = [arg for arg in node.args[0] if arg.shape != (0,)] or list(node.args[0][:1])
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % max(1, len(node.shape))
    values = []
    for arg in args:
        value = low.value(arg)
        if value.dtype is not node.tensor.dtype:
            reads, weights = loads([value], value.shape)
            value = low.pointwise(value.shape, node.tensor.dtype, reads, {**weights, ("cast", arg): 1})
        values.append(value)
    if len(values) == 1:
        reads, weights = loads(values, node.shape)
        return low.pointwise(node.shape, node.tensor.dtype, reads, weights)
    if _as_pointwise(low, node, args, values):
        return pointwise_cat(low, node, values, dim)
    return concat(low, node, values, dim)


def _copied(value: Value) -> bool:
    """It cannot be computed in its place in the result (`should_lower_cat_input`)."""
    buffer = value.buffer
    return buffer is None or not can_realize_into(buffer)


def can_realize_into(buffer: Buffer) -> bool:
    return buffer.flexible and not buffer.fresh and buffer.into is None


def _reduces(value: Value) -> bool:
    data = value.box.data
    if isinstance(data, Buffer):
        return _is_reduction(data)
    return any(_is_reduction(read.buffer) for read in data.reads)


def _is_reduction(buffer: Buffer) -> bool:
    operation = buffer.operation
    return operation is not None and operation.loops is not None and bool(operation.loops.reduction)


def _as_pointwise(low: Lowering, node: Node, args: Sequence[Node], values: Sequence[Value]) -> bool:
    def ops(value: Value) -> int:
        return value.loops.op_count if value.loops is not None else 0

    if len(values) > COMPLEX_INPUTS and not (
        len(values) <= SIMPLE_INPUTS and all(ops(value) <= SIMPLE_OPS for value in values)
    ):
        return False
    users = low.users[node]
    uses = node not in low.returned and all(
        is_pointwise_use(user, low.users, low.returned, ("aten::cat", "aten::constant_pad_nd")) for user in users
    )
    copied = [_copied(value) for value in values]
    for arg, value in zip(args, values, strict=True):
        readers = low.users[arg]
        if len(readers) + (arg in low.returned) <= 1:
            continue
        if (
            any(is_pointwise_use(user, low.users, low.returned) for user in readers if user is not node)
            or value.loops is not None
        ):
            return False
    return (any(copied) and uses) or (all(copied) and not any(_reduces(value) for value in values))


def pointwise_cat(low: Lowering, node: Node, values: Sequence[Value], dim: int) -> Value:
    reads: list[Read] = []
    weights: dict[object, int] = {node: 6 * len(values)}
    at = 0
    for value in values:
        found, more = value.load()
        step: Step = ("shift", dim, at, node.shape)
        reads.extend(Read(r.buffer, (*r.views, step)) for r in found)
        weights.update(more)
        at += value.shape[dim]
    return low.pointwise(node.shape, node.tensor.dtype, reads, weights)


def concat(low: Lowering, node: Node, values: Sequence[Value], dim: int) -> Value:
    """`ConcatKernel`: a buffer, and each input is computed into its part, or copied there."""
    dtype = node.tensor.dtype
    strides = (
        layout.pad_strides(node.shape, contiguous_strides(node.shape), dtype)
        if low.pads
        else contiguous_strides(node.shape)
    )
    for value in values:
        buffer, found = value.buffer, value.strides()
        if buffer is not None and not buffer.flexible and found and is_channels_last_contiguous(value.shape, found[0]):
            strides = channels_last_strides(node.shape)
            break
    whole = Buffer(0, node.shape, dtype, strides, what=node.target, op=node.op)
    parts, at = [], 0
    for value in values:
        step: Step = ("slice", dim, at, 1, value.shape)
        at += value.shape[dim]
        parts.append(realize_into(low, value, whole, (step,)))
    whole.number = len(low.buffers)
    low.buffers.append(whole)
    low.add(Operation(len(low.operations), whole, parts, nop=True, what=node.target, op=node.op))
    return Value.of(whole)


def realize_into(low: Lowering, value: Value, whole: Buffer, views: tuple[Step, ...]) -> Buffer:
    if not value.views:
        buffer = low.realize(value)
        if can_realize_into(buffer):
            buffer.into, buffer.into_views, buffer.flexible = whole, views, False
            return buffer
    reads, weights = value.load()
    buffer = low.compute(Loops(value.shape, value.dtype, reads, weights))
    buffer.into, buffer.into_views, buffer.flexible = whole, views, False
    return buffer


@rule("aten::constant_pad_nd", "aten::pad")
def pad(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    reads, weights = value.load()
    steps: list[Step] = []
    every: dict[object, int] = {**weights, ("masked", node): 1}
    for at, size in enumerate(value.shape):
        back = 2 * (len(value.shape) - 1 - at)
        before, after = (*node.args[1], *(0,) * (2 * len(value.shape)))[back : back + 2]
        if before or after:
            steps.append(("shift", at, before, (*value.shape[:at], size + before + after, *value.shape[at + 1 :])))
            every.update({("mask", node, at): 4 if before and after else 2})
    steps.append(("expand", node.shape))
    moved = [Read(r.buffer, (*r.views, *steps[:-1], ("shift", 0, 0, node.shape))) for r in reads]
    return low.pointwise(node.shape, node.tensor.dtype, moved, every)


# ---- pooling


def window_reads(
    value: Value, shape: Shape, kernel: Sequence[int], what: object
) -> tuple[list[Read], dict[object, int]]:
    found, weights = value.load()
    count = numel(tuple(kernel))
    steps: list[Step] = [("gather", (what, at), shape) for at in range(count)]
    reads = [Read(r.buffer, (*r.views, step)) for step in steps for r in found]
    return reads, {("window", key): n * count for key, n in weights.items()}


def pair(value: int | Sequence[int], rank: int = 2) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * rank
    found = tuple(value)
    return found * rank if len(found) == 1 else found


@rule("prims::_low_memory_max_pool_with_offsets")
def max_pool(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    low.realize_hint(value)
    assert isinstance(node.form, tuple)
    out, offsets = node.form[0], node.form[1]
    assert out is not None and offsets is not None  # noqa: PT018
    kernel = pair(node.args[1])
    count = numel(kernel)
    made = []
    for form, cost in ((out, 1), (offsets, 4)):
        reads, weights = window_reads(value, form.shape, kernel, ("pool", node.args[1:5]))
        made.append(low.pointwise(form.shape, form.dtype, reads, {**weights, ("pool", node): cost * count + 4}))
    return tuple(made)


@rule("prims::_low_memory_max_pool_offsets_to_indices")
def offsets_to_indices(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    reads, weights = loads([value], node.shape)
    return low.pointwise(node.shape, node.tensor.dtype, reads, {**weights, node: 3})


@rule("aten::avg_pool2d", "aten::avg_pool3d", "aten::avg_pool1d")
def avg_pool(low: Lowering, node: Node) -> Lowered:
    rank = int(node.base[-2])
    kernel = pair(node.args[1], rank)
    stride = pair(node.args[2], rank) if len(node.args) > 2 and node.args[2] else kernel
    if numel(kernel) > WINDOW and kernel != stride:
        assert low.fallback is not None
        return low.fallback(low, node)
    value = low.value(node.args[0])
    low.realize_hint(value)
    return mean_of_windows(low, node, value, kernel)


@rule("aten::_adaptive_avg_pool2d")
def adaptive_avg_pool(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    low.realize_hint(value)
    (height, width), (rows, columns) = value.shape[-2:], node.shape[-2:]
    if (height, width) == (rows, columns):
        return low.pointwise(node.shape, node.tensor.dtype, *value.load())
    if height % rows == 0 and width % columns == 0:
        return mean_of_windows(low, node, value, (height // rows, width // columns))
    kernel = (-(-(height + rows - 1) // rows), -(-(width + columns - 1) // columns))
    if numel(kernel) > WINDOW:
        assert low.fallback is not None
        return low.fallback(low, node)
    reads, weights = window_reads(value, node.shape, kernel, ("adaptive", kernel))
    return low.pointwise(node.shape, node.tensor.dtype, reads, {**weights, node: 4 * numel(kernel)})


def mean_of_windows(low: Lowering, node: Node, value: Value, kernel: tuple[int, ...]) -> Value:
    """`_avg_poolnd`: short windows are written out, others are a reduction."""
    dtype, count = node.tensor.dtype, numel(kernel)
    if count <= WINDOW:
        reads, weights = window_reads(value, node.shape, kernel, ("pool", node.args[1:]))
        return low.pointwise(node.shape, dtype, reads, {**weights, node: count + 2})
    loops = (*node.shape, *kernel)
    elements, cost = gathered(value, ("pool", node.args[1:]), loops)
    wide = dtypes.float32 if dtype.bits < 32 else dtype
    made = Value.of(Loops(node.shape, wide, elements, {**cost, node: 1}, reduction="sum", loops=loops))
    low.realize(made)
    sums, cost = made.load()
    return low.pointwise(node.shape, dtype, sums, {**cost, ("divide", node): 2})


@rule("aten::avg_pool2d_backward")
def avg_pool_backward(low: Lowering, node: Node) -> Lowered:
    grad = low.value(node.args[0])
    low.realize_hint(grad)
    kernel = pair(node.args[2])
    stride = pair(node.args[3]) if node.args[3] else kernel
    window = [
        max(max(at // s - max(0, (at - k) // s), 1) for at in range(k * 2)) for k, s in zip(kernel, stride, strict=True)
    ]
    if numel(tuple(window)) > WINDOW:
        assert low.fallback is not None
        return low.fallback(low, node)
    reads, more = window_reads(grad, node.shape, window, ("pool_backward", node.args[2:]))
    return low.pointwise(node.shape, node.tensor.dtype, reads, {**more, node: 20 * numel(tuple(window))})


@rule("aten::upsample_nearest2d", "aten::_upsample_nearest_exact2d", "aten::upsample_nearest1d",
      "aten::upsample_nearest3d")  # fmt: skip
def upsample(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    low.realize_hint(value)
    reads, weights = gathered(value, "upsample", node.shape)
    return low.pointwise(node.shape, node.tensor.dtype, reads, {**weights, node: 8})


@rule("aten::upsample_nearest2d_backward")
def upsample_backward(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    low.realize_hint(value)
    kernel = [-(-a // b) for a, b in zip(value.shape[-2:], node.shape[-2:], strict=True)]
    reads, weights = window_reads(value, node.shape, kernel, "upsample")
    return low.pointwise(node.shape, node.tensor.dtype, reads, {**weights, node: numel(tuple(kernel))})


# ---- writes


def write_into(low: Lowering, target: Buffer, loops: Loops) -> None:
    """A computation that writes into a buffer that is there (`MutationLayout`)."""
    buffer = low.compute(loops, target.strides)
    buffer.mutates = target
    operation = buffer.operation
    assert operation is not None
    operation.inlined = False


@rule("aten::scatter_add", "aten::scatter", "aten::scatter_reduce", "aten::index_put", "aten::_unsafe_index_put",
      "aten::_unsafe_masked_index_put_accumulate", "aten::index_add", "aten::as_strided_scatter",
      "aten::index_put_", "aten::scatter_add_", "aten::scatter_")  # fmt: skip
def scatter(low: Lowering, node: Node) -> Lowered:
    """The tensor is copied unless it can be computed in its place, and values are written into the copy."""
    value = low.value(node.args[0])
    accumulates = node.base in (
        "aten::scatter_add",
        "aten::index_put",
        "aten::index_add",
        "aten::_unsafe_masked_index_put_accumulate",
    )
    if accumulates and value.dtype is dtypes.bfloat16 and _needs_fallback(node):
        assert low.fallback is not None
        return low.fallback(low, node)
    if not node.base.endswith("_"):
        value = Value.of(Loops(value.shape, value.dtype, *value.load()))
    target = low.realize(value)
    low.overwrite(target)
    target.freeze(pad=low.pads)  # MutationLayout: the target has fixed strides
    sources: list[Read] = []
    weights: dict[object, int] = {node: 4}
    shape: Shape | None = None
    for arg in node.inputs[1:]:
        read = low.value(arg)
        found, more = read.load()
        sources.extend(found)
        weights.update(more)
        if shape is None or numel(read.shape) > numel(shape):
            shape = read.shape
    step: Step = ("gather", "values", shape or ())
    moved = [r if new == shape else Read(r.buffer, (*r.views, step)) for r in sources for new in [_shape(r)]]
    write_into(low, target, Loops(target.shape, target.dtype, moved, weights, loops=shape or (), linear=False))
    return value


def _needs_fallback(node: Node) -> bool:
    """`needs_fallback_due_to_atomic_add_limitations`: int64, bool and bfloat16 before compute capability 9.0; the
    figures are those of an H100, which has them."""
    return node.tensor.dtype in (dtypes.int64, dtypes.bool_)


def _shape(read: Read) -> Shape:
    return new_shape(read.views[-1]) if read.views else read.buffer.shape


@rule("aten::copy_")
def copy_(low: Lowering, node: Node) -> Lowered:
    """A buffer of the module takes a new value."""
    target = low.value(node.args[0])
    source = low.value(node.args[1])
    if source.dtype is not target.dtype or source.shape != target.shape:
        reads, weights = loads([source], target.shape)
        source = low.pointwise(target.shape, target.dtype, reads, weights)
    buffer = target.buffer
    assert buffer is not None
    low.overwrite(buffer)
    low.realize_hint(source)
    write_into(low, buffer, Loops(target.shape, target.dtype, *source.load(), linear=not target.views))
    return target
