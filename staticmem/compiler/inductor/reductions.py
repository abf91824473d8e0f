"""Lowerings of reductions: always a buffer, in two layers where a card would have too little to do.

Source: `torch/_inductor/ir.py` (`Reduction.num_splits`, `create`, `create_multilayer`, `WelfordReduction`),
`torch/_inductor/choices.py` (`reduction_split_factor`), `torch/_inductor/lowering.py` of PyTorch 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from staticmem.compiler.inductor.buffers import SPLIT_SCAN, Loops, Read, Value, Weights, at_views
from staticmem.compiler.inductor.indexing import Step, Views, chain, new_shape, then
from staticmem.compiler.inductor.lowering import Lowered, Lowering, rule
from staticmem.compiler.inductor.pointwise import loads
from staticmem.eager.strides import Shape, Strides, listed, numel
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.tracing.nodes import Node

UNROLLED_BELOW = 8  # config.unroll_reductions_threshold
# DeviceProperties of an H100 (CUDA: cudaGetDeviceProperties); they decide how many partial sums there are
PROCESSORS, THREADS_PER_PROCESSOR, WARP = 132, 2048, 32
ELEMENTS_PER_THREAD = 512  # reduction_split_factor: max_elements_per_thread
SORTED_AT_MOST = 512  # ir.py, Sort.create: max_rblock
TWO_STEP_FROM, TWO_STEP_UP_TO = 1024, 32768  # config.triton.use_two_step_variance_*


@lru_cache(1 << 12)
def nearest_divisor(number: int, target: int) -> int:
    best = 1
    divisors = []
    at = 1
    while at * at <= number:
        if number % at == 0:
            divisors += [at, number // at]
        at += 1
    for divisor in sorted(divisors):
        if abs(divisor - target) < abs(best - target):
            best = divisor
    return best


@lru_cache(1 << 12)
def split_factor(reduced: int, outputs: int, inner: bool) -> int:
    """Into how many parts a reduction of `reduced` elements for each of `outputs` is cut (`reduction_split_factor`)."""
    device_min = WARP * PROCESSORS * THREADS_PER_PROCESSOR
    device_max = ELEMENTS_PER_THREAD * PROCESSORS * THREADS_PER_PROCESSOR
    threads = WARP * 8
    if inner:
        if outputs >= 2 * PROCESSORS or reduced <= inner_threshold(outputs):
            return 1
        if reduced * outputs <= device_min:
            size = WARP
        elif reduced * outputs < device_max:
            blocks = PROCESSORS * THREADS_PER_PROCESSOR // (2 * threads)
            blocks = -(-blocks // outputs)
            size = -(-reduced // (threads * blocks))
            near = nearest_divisor(reduced, size)
            if abs(near - size) < 30:
                size = max(near, WARP)
        else:
            near = nearest_divisor(reduced, ELEMENTS_PER_THREAD)
            size = near if abs(near - ELEMENTS_PER_THREAD) < 50 else ELEMENTS_PER_THREAD
        return -(-reduced // (size * threads))
    values, blocks_of = 4, -(-outputs // 128)
    if reduced * outputs < device_min:
        size = WARP
    elif reduced * outputs < device_max:
        blocks = -(-(PROCESSORS * THREADS_PER_PROCESSOR // threads) // blocks_of)
        size = -(-reduced // (values * blocks))
        near = nearest_divisor(reduced, size)
        if abs(near - size) < 20:
            size = max(near, WARP)
    else:
        near = nearest_divisor(reduced, ELEMENTS_PER_THREAD)
        size = near if abs(near - ELEMENTS_PER_THREAD) < 50 else ELEMENTS_PER_THREAD
    return -(-reduced // (values * size))


def inner_threshold(outputs: int) -> int:
    """`_inner_reduction_no_split_threshold`."""
    return 8192


def splits(low: Lowering, outer: Shape, reduced: Shape, reads: Sequence[Read], type_: str) -> int:
    """How many parts (`Reduction.num_splits`)."""
    count, outputs = numel(reduced), numel(outer)
    if type_.startswith("arg"):
        return 1
    if outputs == 1:
        return split_factor(count, outputs, True)
    if count <= 32 or outputs >= PROCESSORS * 2 * 32:
        return 1
    rank = len(outer)
    full: list[Strides] = []
    partial: list[Strides] = []
    for read in reads:
        used = read.dependence()
        whole = all(moves for moves, size in zip(used, (*outer, *reduced), strict=True) if size > 1)
        if whole or any(used[rank:]):
            if read.buffer.number >= 0:
                read.buffer.decide()
            (full if whole else partial).append(read.hints()[rank:])
    rows = full or partial
    if not rows:
        return 1
    along = sum(1 for row in rows if all(s != 1 for s, n in zip(row, reduced, strict=True) if n > 1))
    return split_factor(count, outputs, len(rows) - along > along)


def reduce(
    low: Lowering,
    value: Value,
    dims: Sequence[int],
    keepdim: bool,
    dtype: DType,
    type_: str,
    node: object,
    outputs: int = 1,
) -> list[Value]:
    """One value for each of `outputs` buffers of a reduction, with the shape that it has in ATen."""
    rank = len(value.shape)
    dims = sorted({dim % rank for dim in dims}) if dims and rank else list(range(rank))
    kept = [dim for dim in range(rank) if dim not in dims]
    reads, weights = value.load()
    if not type_.startswith("welford"):
        dims = in_memory_order(low, value, dims, type_)
    # sizes of the result, then those that are summed
    order = (*kept, *dims)
    outer = tuple(value.shape[dim] for dim in kept)
    inner = tuple(value.shape[dim] for dim in dims)
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(value.shape)) if keepdim else outer
    count = numel(inner)
    every = {**weights, node: 1}
    if keepdim:
        loops_shape = (*shape, *inner)
        permute: Step = ("permute", order, (*outer, *inner))
        moved = [
            r.through(chain(chain(r.views, permute, value.shape), ("reshape", loops_shape), (*outer, *inner)))
            for r in reads
        ]
        outer = shape
    else:
        permute = ("permute", order, (*outer, *inner))
        moved = [r.through(chain(r.views, permute, value.shape)) for r in reads]
    unrolled = count < UNROLLED_BELOW and not type_.startswith("welford") and type_ != "online_softmax"
    if count <= 1 or unrolled:
        views: tuple[Step, ...] = chain((), permute, value.shape)
        if keepdim:
            views = chain(views, ("reshape", (*outer, *inner)), new_shape(permute))
        return [unroll(outer, inner, moved, at_views(weights, value.shape, views), dtype, node)] * outputs
    return layers(low, outer, inner, moved, every, dtype, type_, outputs, 0)


def in_memory_order(low: Lowering, value: Value, dims: list[int], type_: str) -> list[int]:
    """The dimensions of a reduction of a whole tensor in parts: what is dense in memory goes last. The tensor gets a
    buffer for that, which the reduction, made before, does not read (`check_for_split_dense_dim_reindexing`)."""
    reduced = tuple(value.shape[dim] for dim in dims)
    if numel(reduced) != numel(value.shape) or splits(low, (), reduced, (), type_) <= 1:
        return dims
    computed = value.buffer is None
    low.realize(value).decide()
    placed = value.strides()
    if placed is None or (computed and value.views):
        return dims
    dense = next((at for at, stride in enumerate(placed[0][:-1]) if stride == 1), None)
    if dense is None or dense >= len(dims):
        return dims
    return [*dims[:dense], *dims[dense + 1 :], dims[dense]]


def unroll(outer: Shape, inner: Shape, reads: Sequence[Read], weights: Weights, dtype: DType, node: object) -> Value:
    """A short reduction is written out."""
    every: list[Read] = []
    count = max(1, numel(inner))
    terms: dict[object, int] = {}
    for at in range(numel(inner)):
        steps: Views = ()
        shape, rest = (*outer, *inner), at
        for size in reversed(inner):
            index, rest = rest % size, rest // size
            steps = (*steps, ("select", len(shape) - 1, index, shape[:-1]))
            shape = shape[:-1]
        terms.update(at_views(weights, (*outer, *inner), steps))
        every += [read.through(then(read.views, (*outer, *inner), steps)) for read in reads]
    if count > 1:
        terms["unrolled", node] = count - 1
    return Value.of(Loops(outer, dtype, every, terms))


def layers(
    low: Lowering,
    outer: Shape,
    inner: Shape,
    reads: Sequence[Read],
    weights: Weights,
    dtype: DType,
    type_: str,
    outputs: int,
    depth: int,
) -> list[Value]:
    parts = splits(low, outer, inner, reads, type_) if depth < 8 else 1
    if parts > 1:
        count = numel(inner)
        block = -(-count // parts)
        wide: list[Read] = []
        for read in reads:
            views = chain(read.views, ("reshape", (*outer, count)), (*outer, *inner))
            if block * parts == count:
                views = chain(views, ("reshape", (*outer, parts, block)), (*outer, count))
            else:
                views = (*views, ("split", block, (*outer, parts, block)))
            wide.append(read.through(views))
        between = dtype if dtype.bits >= 32 or dtype.kind != "float" else dtypes.float32
        if type_ == "online_softmax":
            first = direct(low, (*outer, parts), (block,), wide, weights, between, type_, outputs)
        else:
            first = layers(low, (*outer, parts), (block,), wide, weights, between, type_, outputs, depth + 1)
        again = [Read(low.realize(value), value.views) for value in first]
        combine: Weights = {("combine", id(first[0].box)): 1}
        if outputs == 1 or type_ == "online_softmax":
            return direct(low, outer, (parts,), again, combine, dtype, type_, outputs)
        return layers(low, outer, (parts,), again, combine, dtype, "welford_combine", outputs, depth + 1)
    return direct(low, outer, inner, reads, weights, dtype, type_, outputs)


def direct(
    low: Lowering,
    outer: Shape,
    inner: Shape,
    reads: Sequence[Read],
    weights: Weights,
    dtype: DType,
    type_: str,
    outputs: int,
) -> list[Value]:
    values = []
    for _ in range(outputs):
        value = Value.of(Loops(outer, dtype, reads, weights, reduction=type_, loops=(*outer, *inner)))
        low.realize(value)
        values.append(value)
    return values


def dims_of(node: Node, at: int = 1) -> tuple[int, ...]:
    dims = node.args[at] if len(node.args) > at else node.kwargs.get("dim")
    return listed(dims)


def keeps(node: Node, at: int = 2) -> bool:
    return bool(node.args[at] if len(node.args) > at else node.kwargs.get("keepdim", False))


@rule("aten::sum", "aten::prod", "aten::amax", "aten::amin", "aten::any", "aten::all", "prims::sum", "aten::argmax",
      "aten::argmin", "prims::xor_sum")  # fmt: skip
def plain(low: Lowering, node: Node) -> Lowered:
    type_ = node.target.split("::")[1].split(".")[0]
    has_dims = node.target not in ("aten::sum", "aten::prod", "aten::any", "aten::all")
    dims = dims_of(node) if has_dims else ()
    return reduce(low, low.value(node.args[0]), dims, has_dims and keeps(node), node.tensor.dtype, type_, node)[0]


@rule("aten::mean")
def mean(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    dtype = node.tensor.dtype
    wide = dtypes.float32 if dtype.bits < 32 else dtype
    total = reduce(low, value, dims_of(node), keeps(node), wide, "sum", node)[0]
    reads, weights = loads([total], node.shape)
    every = {**weights, ("mean", node): 2 + (wide is not dtype), **low.rounding(dtype)}
    return low.pointwise(node.shape, dtype, reads, every)


@rule("aten::var_mean", "aten::var", "prims::var")
def var_mean(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    pair = node.form if isinstance(node.form, tuple) else (node.form,)
    form = pair[0]
    assert form is not None
    narrow = value.dtype.bits < 32
    wide = dtypes.float32 if narrow else value.dtype
    dims = dims_of(node)
    rank = len(value.shape)
    count = numel([value.shape[dim % rank] for dim in dims] if dims else value.shape)
    keep = bool(node.kwargs.get("keepdim", keeps(node, 3)))
    if _two_steps(value, count, form.shape):  # var_mean_sum_
        total = reduce(low, value, dims, True, wide, "sum", ("mean", node))[0]
        reads, weights = loads([total], total.shape)
        mean_value = low.pointwise(total.shape, wide, reads, {**weights, ("divide", node, count): 2})
        if len(pair) > 1:
            low.realize(mean_value)
        reads, weights = loads([value, mean_value], value.shape)
        squares = low.pointwise(value.shape, wide, reads, {**weights, ("square", node): 2})
        second = reduce(low, squares, dims, keep, wide, "sum", ("var", node))[0]
        mean_value = mean_value.view(("reshape", form.shape))
        scaled = 2
    else:
        mean_value, second, _ = reduce(low, value, dims, keep, wide, "welford_reduce", node, 3)
        # scale_fn: the correction, the count, zero, their difference, `maximum`, the quotient
        scaled = 6 if node.kwargs.get("correction", 1) else 5
    reads, weights = loads([second], form.shape)
    var = low.pointwise(form.shape, form.dtype, reads, {**weights, ("scale", node): scaled + narrow})
    if len(pair) == 1:
        return var
    low.realize(mean_value)
    if narrow:
        reads, weights = loads([mean_value], form.shape)
        mean_value = low.pointwise(form.shape, form.dtype, reads, {**weights, ("cast", node): 1})
    return var, mean_value


def _two_steps(value: Value, count: int, shape: Shape) -> bool:
    """`use_two_step_variance` on CUDA."""
    outputs = numel(shape)
    half = value.dtype in dtypes.HALVES
    if count > (TWO_STEP_UP_TO if half else UNROLLED_BELOW) or outputs == 1:
        return False
    return not (half and UNROLLED_BELOW < count < TWO_STEP_FROM)


@rule("prims::prepare_softmax_online")
def softmax_online(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    dims = (node.args[1],)
    count = value.shape[node.args[1] % len(value.shape)]
    if count >= UNROLLED_BELOW:
        pair = reduce(low, value, dims, True, value.dtype, "online_softmax", node, 2)
        return pair[0], pair[1]
    top = reduce(low, value, dims, True, value.dtype, "amax", ("amax", node))[0]
    reads, weights = loads([value, top], value.shape)
    # the graph has the same difference and exponential again behind this: they are computed once
    sub = next(user for part in low.users[node] for user in low.users[part] if user.target == "aten::sub.Tensor")
    exp = next(user for user in low.users[sub] if user.target == "aten::exp")
    terms = low.pointwise(value.shape, value.dtype, reads, {**weights, sub: 1, exp: 1})
    return top, reduce(low, terms, dims, True, value.dtype, "sum", node)[0]


@rule("aten::cumsum", "aten::cumprod", "aten::logcumsumexp")
def scan(low: Lowering, node: Node) -> Lowered:
    """A `Scan` has a buffer, and a result for each element of the rows that it follows; long ones are cut into parts
    (`SplitScan`)."""
    value = low.value(node.args[0])
    reads, weights = loads([value], node.shape)
    rank = len(node.shape)
    along = dims_of(node)[0] % max(1, rank)
    if not rank or node.shape[along] <= 1:
        return low.pointwise(node.shape, node.tensor.dtype, reads, {**weights, node: 1})
    outer = tuple([size for dim, size in enumerate(node.shape) if dim != along])
    inner = (node.shape[along],)
    permute: Step = ("permute", (*[dim for dim in range(rank) if dim != along], along), (*outer, *inner))
    turned = [read.through(chain(read.views, permute, node.shape)) for read in reads]
    type_ = SPLIT_SCAN if splits(low, outer, inner, turned, "scan") > 1 else "scan"
    result = Value.of(Loops(node.shape, node.tensor.dtype, reads, {**weights, node: 1}, reduction=type_, along=along))
    low.realize(result)
    return result


@rule("aten::sort")
def sort(low: Lowering, node: Node) -> Lowered:
    """Short rows are sorted in a kernel of Inductor's own (`Sort`), which has positions in 16 bits; they are cast where
    they are read."""
    value = low.value(node.args[0])
    along = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else -1)
    if not value.shape or not 1 < value.shape[along] <= SORTED_AT_MOST:
        assert low.fallback is not None
        return low.fallback(low, node)
    reads, weights = loads([value], value.shape)
    results = []
    for dtype in (value.dtype, dtypes.int16):
        loops = Loops(value.shape, dtype, reads, {**weights, node: 1}, reduction="sort", along=along % len(value.shape))
        results.append(Value.of(loops))
        low.realize(results[-1])
    values, positions = results
    reads, weights = loads([positions], value.shape)
    return values, low.pointwise(value.shape, dtypes.int64, reads, {**weights, ("cast", node): 1})


@rule("aten::max", "aten::min")
def extremum(low: Lowering, node: Node) -> Lowered:
    if isinstance(node.form, tuple):
        value = low.value(node.args[0])
        first, second = node.form
        assert first is not None and second is not None  # noqa: PT018
        dims, keep = dims_of(node), keeps(node)
        one = reduce(low, value, dims, keep, first.dtype, "amax", ("max", node))[0]
        other = reduce(low, value, dims, keep, second.dtype, "argmax", ("argmax", node))[0]
        return one, other
    if len(node.args) > 1:
        from staticmem.compiler.inductor.pointwise import pointwise

        return pointwise(low, node)
    return reduce(low, low.value(node.args[0]), (), False, node.tensor.dtype, "amax", node)[0]
