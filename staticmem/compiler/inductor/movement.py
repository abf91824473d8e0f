"""Lowerings of what moves elements: concatenation, padding, pooling, scatter, and writes into inputs.

Source: `torch/_inductor/lowering.py` (`cat`, `pointwise_cat`, `constant_pad_nd`, pooling, `scatter_reduce_`,
`index_put_impl_`, `mutate_to`) and `torch/_inductor/ir.py` (`ConcatKernel`, `MutationLayout`) of PyTorch 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from staticmem.compiler.inductor import layout
from staticmem.compiler.inductor.buffers import Buffer, Loops, Operation, Read, Value, at_views
from staticmem.compiler.inductor.indexing import Step, Views, new_shape, then
from staticmem.compiler.inductor.lowering import Lowered, Lowering, rule
from staticmem.compiler.inductor.pointwise import gathered, loads
from staticmem.compiler.inductor.post_grad import is_pointwise_use
from staticmem.eager.strides import Shape, channels_last_strides, contiguous_strides, is_channels_last_contiguous, numel
from staticmem.ir import dtypes
from staticmem.tracing.nodes import Node

COMPLEX_INPUTS = 8  # config.max_complex_pointwise_cat_inputs
SIMPLE_INPUTS = 8  # config.max_pointwise_cat_inputs
SIMPLE_OPS = 2  # lowering.py, cat: MAX_SIMPLE_OP_COUNT
WINDOW = 25  # elements of a window from which it is no longer written out
WINDOW_OF_VOLUMES = 125  # lowering.py, avg_pool3d_backward

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
    if _lower_as_pointwise(low, node, args, values):
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


def _lower_as_pointwise(low: Lowering, node: Node, args: Sequence[Node], values: Sequence[Value]) -> bool:
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
    weights: dict[object, int] = {node: 6 * len(values) - 1}
    at = 0
    for value in values:
        loaded, more = value.load()
        step: Step = ("part", dim, at, node.shape)
        reads.extend(r.through((*r.views, step)) for r in loaded)
        weights.update(at_views(more, value.shape, (step,)))
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
        buffer, placed = value.buffer, value.strides()
        if (
            buffer is not None
            and not buffer.flexible
            and placed
            and is_channels_last_contiguous(value.shape, placed[0])
        ):
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
    moved = [r.through((*r.views, *steps[:-1], ("shift", 0, 0, node.shape))) for r in reads]
    return low.pointwise(node.shape, node.tensor.dtype, moved, every)


# ---- pooling


def window(
    value: Value,
    shape: Shape,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1, 1),
) -> tuple[list[Read], dict[object, int]]:
    """Loads of each element of windows over the last dimensions."""
    loaded, weights = value.load()
    rank = len(kernel)
    reads: list[Read] = []
    every: dict[object, int] = {}
    for at in product(*map(range, kernel)):
        steps: Views = ()
        sizes = list(value.shape)
        for dim in range(-rank, 0):
            sizes[dim] = shape[dim]
            start = at[dim] * dilation[dim] - padding[dim]
            steps = (*steps, ("slice", dim % len(sizes), start, stride[dim], tuple(sizes)))
        reads += [r.through(then(r.views, value.shape, steps)) for r in loaded]
        every.update(at_views(weights, value.shape, steps))
    return reads, every


def picks(value: Value, shape: Shape, count: int, what: object, rank: int = 2) -> tuple[list[Read], dict[object, int]]:
    """Loads of `count` elements each, whose indices in the last dimensions are computed; of what is the same in all of
    them, one."""
    loaded, weights = value.load()
    reads: list[Read] = []
    for r in loaded:
        if any(r.hints()[-rank:]):
            reads += [r.through((*r.views, ("gather", (what, at), shape))) for at in range(count)]
        else:
            first: Views = ()
            sizes = value.shape
            for dim in range(len(shape) - rank, len(shape)):
                sizes = (*sizes[:dim], 1, *sizes[dim + 1 :])
                first = (*first, ("slice", dim, 0, 1, sizes))
            reads.append(r.through(then(r.views, value.shape, (*first, ("expand", shape)))))
    distinct = count if len(reads) > len(loaded) else 1
    return reads, {("window", key): n * distinct for key, n in weights.items()}


def pair(value: int | Sequence[int], rank: int = 2) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * rank
    sizes = tuple(value)
    return sizes * rank if len(sizes) == 1 else sizes


def bounded(kernel: Sequence[int], sizes: Shape) -> int:
    """What it takes to leave out elements beyond an edge (`constant_boundary_condition`): the index of each step in a
    dimension is compared with both ends, and each element is masked."""
    count = sum(4 * k for k in kernel) + 1 + len(set(sizes))
    for dims in range(2, len(kernel) + 1):
        count += numel(tuple(kernel[:dims]))
    return count + numel(tuple(kernel))


def beyond_edges(
    value: Value, shape: Shape, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> bool:
    """Some windows reach beyond an edge."""
    rank = len(kernel)
    ends = zip(value.shape[-rank:], shape[-rank:], kernel, stride, strict=True)
    return any(padding) or any((out - 1) * step + k > size for size, out, k, step in ends)


@rule("prims::_low_memory_max_pool_with_offsets")
def max_pool(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    low.realize_hint(value)
    assert isinstance(node.form, tuple)
    out, offsets = node.form[0], node.form[1]
    assert out is not None and offsets is not None  # noqa: PT018
    kernel, stride, padding, dilation = map(tuple, node.args[1:5])
    count, rank = numel(kernel), len(kernel)
    shape = out.shape
    edges = beyond_edges(value, shape, kernel, stride, padding) or any(step > 1 for step in dilation)
    masks: dict[object, int] = {("masked", node): bounded(kernel, value.shape[-rank:])} if edges else {}
    if count >= WINDOW:
        elements, weights = gathered(value, ("pool", node.args[1:5]), (*shape, *kernel))
        every = {**weights, **masks, node: 1}
        return tuple(
            pooled(low, Loops(shape, form.dtype, elements, every, reduction=kind, loops=(*shape, *kernel)))
            for form, kind in ((out, "max"), (offsets, "argmax"))
        )
    reads, weights = window(value, shape, kernel, stride, padding, dilation)
    # argmax: the index of each element, 13 calls for each pair (`get_reduction_combine_fn`), and a cast
    calls = count - 1, count + 13 * (count - 1) + 1
    return tuple(
        low.pointwise(shape, form.dtype, reads, {**weights, **masks, ("pool", at, node): own})
        for at, (form, own) in enumerate(zip((out, offsets), calls, strict=True))
    )


def pooled(low: Lowering, loops: Loops) -> Value:
    """A window that is too large to be written out is a reduction."""
    result = Value.of(loops)
    low.realize(result)
    return result


@rule("prims::_low_memory_max_pool_offsets_to_indices")
def offsets_to_indices(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    reads, weights = loads([value], node.shape)
    return low.pointwise(node.shape, node.tensor.dtype, reads, {**weights, node: 1})


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
    padding = pair(node.args[3], rank) if len(node.args) > 3 and node.args[3] else (0,) * rank
    return mean_of_windows(low, node, value, kernel, stride, padding)


@rule("aten::_adaptive_avg_pool2d")
def adaptive_avg_pool(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    low.realize_hint(value)
    (height, width), (rows, columns) = value.shape[-2:], node.shape[-2:]
    if (height, width) == (rows, columns):
        return low.pointwise(node.shape, node.tensor.dtype, *value.load())
    if height % rows == 0 and width % columns == 0:
        kernel = (height // rows, width // columns)
        return mean_of_windows(low, node, value, kernel, kernel, (0, 0))
    kernel = (-(-(height + rows - 1) // rows), -(-(width + columns - 1) // columns))
    if numel(kernel) > WINDOW:
        assert low.fallback is not None
        return low.fallback(low, node)
    reads, weights = picks(value, node.shape, numel(kernel), ("adaptive", kernel))
    return low.pointwise(node.shape, node.tensor.dtype, reads, {**weights, node: 4 * numel(kernel)})


def mean_of_windows(
    low: Lowering, node: Node, value: Value, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]
) -> Value:
    """`_avg_poolnd`: short windows are written out, others are a reduction."""
    dtype, count, rank = node.tensor.dtype, numel(kernel), len(kernel)
    wide = dtypes.float32 if dtype.bits < 32 else dtype
    edges = beyond_edges(value, node.shape, kernel, stride, padding)
    own: dict[object, int] = {("masked", node): bounded(kernel, value.shape[-rank:])} if edges else {}
    divisor = node.args[6] if len(node.args) > 6 and node.base != "aten::_adaptive_avg_pool2d" else None
    # a product with a number; else a quotient by sizes of windows, an index of each dimension multiplied
    last = {("divide", node): (2 if divisor or not edges else 2 * rank) + (wide is not dtype), **low.rounding(dtype)}
    if count < WINDOW:
        reads, weights = window(value, node.shape, kernel, stride, padding)
        return low.pointwise(node.shape, dtype, reads, {**weights, **own, node: count - 1, **last})
    loops = (*node.shape, *kernel)
    elements, cost = gathered(value, ("pool", node.args[1:]), loops)
    windows_sum = pooled(low, Loops(node.shape, wide, elements, {**cost, **own, node: 1}, reduction="sum", loops=loops))
    sums, cost = windows_sum.load()
    return low.pointwise(node.shape, dtype, sums, {**cost, **last})


@rule("aten::avg_pool2d_backward", "aten::avg_pool3d_backward")
def avg_pool_backward(low: Lowering, node: Node) -> Lowered:
    grad = low.value(node.args[0])
    low.realize_hint(grad)
    rank = int(node.base[len("aten::avg_pool")])
    kernel = pair(node.args[2], rank)
    stride = pair(node.args[3], rank) if node.args[3] else kernel
    windows = [
        max(max(at // s - max(0, (at - k) // s), 1) for at in range(k * 2)) for k, s in zip(kernel, stride, strict=True)
    ]
    count = numel(tuple(windows))
    if count > (WINDOW if rank == 2 else WINDOW_OF_VOLUMES):
        assert low.fallback is not None
        return low.fallback(low, node)
    reads, more = picks(grad, node.shape, count, ("pool_backward", node.args[2:]), rank)
    # first and last window of an element in each dimension; each window's index and bounds, masks, quotients and sums
    calls = 4 * rank + 1 + len(set(grad.shape[-rank:])) + max(2, *windows) - 1 + rank + 3 * sum(windows) + 1
    calls += sum(numel(tuple(windows[:dims])) for dims in range(2, rank + 1))
    calls += (count if len(reads) > 1 else 1) + 2 * count - 1
    if not node.args[6] and node.args[7] is None and (any(pair(node.args[4], rank)) or node.args[5]):
        calls += 4 * rank + 5 * sum(windows) + 3 * count  # compute_pool_size_without_padding
    return low.pointwise(node.shape, node.tensor.dtype, reads, {**more, node: calls})


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
    reads, weights = picks(value, node.shape, numel(tuple(kernel)), "upsample")
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
        loaded, more = read.load()
        sources.extend(loaded)
        weights.update(more)
        if shape is None or numel(read.shape) > numel(shape):
            shape = read.shape
    step: Step = ("gather", "values", shape or ())
    moved = [r if new == shape else r.through((*r.views, step)) for r in sources for new in [_shape(r)]]
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
