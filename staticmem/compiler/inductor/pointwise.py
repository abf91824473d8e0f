"""Lowerings of ops that compute each element by itself, of views, and of constants.

Source: `torch/_inductor/lowering.py` of PyTorch 2.15 (`register_pointwise`, `make_pointwise`, and the views).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from staticmem.compiler.inductor.buffers import Loops, Read, Value, Weights, at_views
from staticmem.compiler.inductor.indexing import Step, Views, chain, then
from staticmem.compiler.inductor.lowering import Lowered, Lowering, rule
from staticmem.eager.strides import Shape, broadcast_shapes, numel
from staticmem.ops.tags import CHEAP_CONSTANTS, plain_pointwise
from staticmem.tracing.nodes import Argument, Node

Count: TypeAlias = "Callable[[Node], Weights]"
CALLS: dict[str, Count] = {}  # by target without overload
KEEP_TYPES = ("aten::where", "prims::convert_element_type")


def broadcast(value: Value, shape: Shape, pad: bool = True) -> Value:
    """`expand` to the shape; sizes are checked where nodes are made."""
    return value if value.shape == shape else value.view(("expand", shape), pad=pad)


def loads(values: Sequence[Value], shape: Shape, pad: bool = True) -> tuple[list[Read], dict[object, int]]:
    """What it takes to load each value, broadcast to `shape`. Only what is broadcast is asked for its strides by this:
    `make_pointwise` indexes buffers, `broadcast_tensors` makes views of them."""
    reads: list[Read] = []
    weights: dict[object, int] = {}
    for value in values:
        loaded, more = broadcast(value, shape, pad).load()
        weights.update(more)
        reads.extend(loaded)
    return reads, weights


def tensors(low: Lowering, args: Sequence[Argument]) -> list[Value]:
    return [low.value(arg) for arg in args if type(arg) is Node]


def constants(args: Sequence[Argument]) -> dict[object, int]:
    """Numbers are calls of `ops.constant`, each once."""
    return {("constant", repr(arg)): 1 for arg in args if type(arg) in (int, float, bool)}


def pointwise(low: Lowering, node: Node) -> Lowered:
    """Each element by itself: `make_pointwise`."""
    values = tensors(low, node.args)
    form = node.tensor
    reads, weights = loads(values, form.shape, low.pads)
    args = node.args
    if node.base == "aten::div" and type(args[1]) in (int, float) and args[1]:
        args = (args[0], 1.0 / args[1])  # div_prim: a product with the reciprocal
    own = CALLS.get(node.base)
    if own is None:
        weights.update(constants(args))
        weights[node] = max(1, len(values) - 1)
    else:
        weights.update(own(node))
    for value in values:  # promotion of types is a call each
        if value.dtype is not form.dtype and form.dtype.kind != "bool" and node.base not in KEEP_TYPES:
            weights["to", value.dtype, form.dtype, node] = 1
    weights.update(low.rounding(form.dtype))
    return low.pointwise(form.shape, form.dtype, reads, weights)


def computes(*targets: str) -> Callable[[Count], Count]:
    """Registers what elementwise ops compute where it is another count."""

    def register(function: Count) -> Count:
        CALLS.update(dict.fromkeys(targets, function))
        return function

    return register


def power_calls(exponent: int) -> int:
    """`pow_recursive`: products of halves."""
    if exponent < 0:
        return 1 + power_calls(-exponent)
    if exponent < 2:
        return 1 - exponent
    return power_calls(exponent // 2) + 1 + exponent % 2


@computes("aten::pow")
def power(node: Node) -> Weights:
    exponent = node.args[1]
    if type(exponent) in (int, float) and exponent == int(exponent) and abs(exponent) < 32:
        return {node: power_calls(int(exponent))}
    return {node: 1} if type(exponent) is Node or exponent == 0.5 else {node: 1, **constants(node.args)}


@computes("aten::addcmul", "aten::addcdiv")
def with_product(node: Node) -> Weights:
    """`addcmul` is one `fma` where its factor is 1; `addcdiv` a quotient and a sum."""
    value = node.kwargs.get("value", 1)
    plain = 1 if node.base == "aten::addcmul" else 2
    return {node: plain} if value == 1 else {node: 2, **constants((value,))}


computes("aten::where")(lambda node: {node: 1, **constants(node.args)})
computes("prims::fma")(lambda node: {node: 1})
rule(*plain_pointwise())(pointwise)


@rule("aten::clone", "aten::_to_copy", "aten::contiguous", "aten::lift_fresh_copy", "aten::copy")
def copied(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[1] if node.base == "aten::copy" else node.args[0])
    reads, weights = loads([value], node.shape)
    return low.pointwise(node.shape, node.tensor.dtype, reads, weights)


@rule(*CHEAP_CONSTANTS, "prims::iota", "aten::arange")
def constant(low: Lowering, node: Node) -> Lowered:
    return low.pointwise(node.shape, node.tensor.dtype, (), {node: 1})


@rule("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")
def empty(low: Lowering, node: Node) -> Lowered:
    """A buffer that no kernel writes: it stays alive as a constant would not."""
    value = low.pointwise(node.shape, node.tensor.dtype, (), {node: 1})
    buffer = low.realize(value)
    operation = buffer.operation
    assert operation is not None
    operation.inlined, operation.nop = False, True
    return value


# ---- views


def viewed(low: Lowering, node: Node, step: Step, value: Value | None = None) -> Value:
    return (value or low.value(node.args[0])).view(step, pad=low.pads)


@rule(
    "aten::view", "aten::reshape", "aten::_unsafe_view", "aten::unsqueeze", "aten::squeeze", "aten::flatten",
    "prims::squeeze", "prims::view_of",
)  # fmt: skip
def reshape(low: Lowering, node: Node) -> Lowered:
    if node.target == "aten::view.dtype":
        return reinterpreted(low, node)
    return viewed(low, node, ("reshape", node.shape))


def reinterpreted(low: Lowering, node: Node) -> Lowered:
    """Other bits: a view of the memory."""
    value = low.value(node.args[0])
    low.realize(value)
    return Value(value.box, node.shape, node.tensor.dtype, chain(value.views, ("gather", node, node.shape), ()))


@rule("aten::alias", "aten::detach", "aten::lift", "aten::lift_fresh", "aten::positive")
def alias(low: Lowering, node: Node) -> Lowered:
    return low.value(node.args[0])


@rule("aten::permute", "aten::t", "aten::transpose", "aten::numpy_T", "aten::mT")
def permute(low: Lowering, node: Node) -> Lowered:
    rank = len(node.shape)
    if node.base == "aten::permute":
        dims = [dim % rank for dim in node.args[1]]
    else:
        dims = list(range(rank))
        one, other = (node.args[1] % rank, node.args[2] % rank) if node.base == "aten::transpose" else (-2, -1)
        if rank > 1:
            dims[one], dims[other] = dims[other], dims[one]
    return viewed(low, node, ("permute", tuple(dims), node.shape))


@rule("aten::expand", "prims::broadcast_in_dim", "aten::expand_as")
def expand(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    if node.base == "prims::broadcast_in_dim":
        placed = [1] * len(node.shape)
        for dim, size in zip(node.args[2], value.shape, strict=True):
            placed[dim] = size
        value = viewed(low, node, ("reshape", tuple(placed)), value)
    loops = value.loops
    if loops is not None and loops.op_count > 30 and numel(node.shape) > numel(value.shape):
        low.realize(value)  # expand: mark_reuse(graph_reuse=False)
    return value if value.shape == node.shape else viewed(low, node, ("expand", node.shape), value)


def slice_step(value: Value, dim: int, start: int, end: int, step: int) -> Step:
    shape = list(value.shape)
    shape[dim] = max(0, -(-(end - start) // step))
    return ("slice", dim, start, step, tuple(shape))


def bound(at: int | None, size: int, default: int) -> int:
    if at is None:
        return default
    return min(max(at + size if at < 0 else at, 0), size)


@rule("aten::slice")
def slice_(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    args = [*node.args[1:], None, None, None, None][:4]
    dim = (args[0] or 0) % len(value.shape)
    size = value.shape[dim]
    start, end = bound(args[1], size, 0), bound(args[2], size, size)
    return viewed(low, node, slice_step(value, dim, start, end, args[3] or 1))


@rule("aten::glu")
def gated_half(low: Lowering, node: Node) -> Lowered:
    """One half times the sigmoid of the other."""
    value, dim = low.value(node.args[0]), node.args[1] % len(node.shape)
    size = node.shape[dim]
    reads, weights = loads([value.view(slice_step(value, dim, at, at + size, 1)) for at in (0, size)], node.shape)
    return low.pointwise(node.shape, node.tensor.dtype, reads, {**weights, ("sigmoid", node): 1, ("mul", node): 1})


@rule("aten::select")
def select(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    dim = node.args[1] % len(value.shape)
    return viewed(low, node, ("select", dim, node.args[2] % max(1, value.shape[dim]), node.shape))


@rule("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind")
def split(low: Lowering, node: Node) -> Lowered:
    """One view for each part."""
    value = low.value(node.args[0])
    form = node.form
    assert isinstance(form, tuple)
    at, parts = 0, []
    if node.base == "aten::unbind":
        dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(value.shape)
        shape = value.shape[:dim] + value.shape[dim + 1 :]
        return tuple(viewed(low, node, ("select", dim, index, shape)) for index in range(value.shape[dim]))
    dim = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % len(value.shape)
    for part in form:
        assert part is not None
        size = part.shape[dim]
        parts.append(viewed(low, node, slice_step(value, dim, at, at + size, 1)))
        at += size
    return tuple(parts)


@rule("prims::rev", "aten::flip")
def reverse(low: Lowering, node: Node) -> Lowered:
    """Loads from the end of dimensions."""
    value = low.value(node.args[0])
    loaded, weights = value.load()
    shape = node.shape
    steps: Views = tuple([("slice", dim % len(shape), shape[dim] - 1, -1, shape) for dim in node.args[1]])
    reads = [r.through(then(r.views, shape, steps)) for r in loaded]
    return low.pointwise(shape, node.tensor.dtype, reads, at_views(weights, shape, steps))


@rule("aten::diagonal", "aten::unfold", "aten::roll")
def windows(low: Lowering, node: Node) -> Lowered:
    """Views whose index is not linear in one stride a dimension, or that we do not follow."""
    value = low.value(node.args[0])
    step: Step = ("gather", (node.target, node.args[1:]), node.shape)
    return Value(value.box, node.shape, value.dtype, (*value.views, step))


@rule("aten::as_strided")
def as_strided(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    buffer = low.realize(value)
    buffer.decide(pad=low.pads)
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    step: Step = ("strided", tuple(node.args[2]), offset or 0, node.shape)
    return Value(value.box, node.shape, value.dtype, (step,))


@rule("operator::getitem")
def getitem(low: Lowering, node: Node) -> Lowered:
    parts = low.env[node.args[0]]
    assert isinstance(parts, tuple)
    return parts[node.args[1]]


# ---- reads through values


def gathered(value: Value, token: object, shape: Shape) -> tuple[list[Read], Weights]:
    """Loads of elements that other values pick."""
    loaded, weights = value.load()
    step: Step = ("gather", token, shape)
    return [r.through((*r.views, step)) for r in loaded], at_views(weights, value.shape, (step,))


@rule("aten::embedding")
def embedding(low: Lowering, node: Node) -> Lowered:
    return picked(low, node, low.value(node.args[0]), [low.value(node.args[1])], 0, (-1, len(node.shape) - 1))


@rule("aten::index", "aten::_unsafe_index", "aten::_unsafe_masked_index")
def index(low: Lowering, node: Node) -> Lowered:
    """`index_impl`: the dimensions of the indices stand where the first of them does, or in front where there is a
    dimension without an index between two of them."""
    masked = node.base == "aten::_unsafe_masked_index"
    given = node.args[2 if masked else 1]
    places = [at for at, arg in enumerate(given) if arg is not None]
    indices = [low.value(given[at]) for at in places]
    if any(value.dtype.kind == "bool" for value in indices):
        assert low.fallback is not None
        return low.fallback(low, node)
    value = low.value(node.args[0])
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    rank = len(node.shape) - (len(value.shape) - len(places))  # of the indices
    left = iter([dim for dim in range(len(node.shape)) if not first <= dim < first + rank])
    dims = tuple([-1 if at in places else next(left) for at in range(len(value.shape))])
    result = picked(low, node, value, indices, first, dims)
    if not masked:
        return result
    mask = low.value(node.args[1])
    reads, weights = loads([mask, result], node.shape)
    return low.pointwise(node.shape, node.tensor.dtype, reads, {**weights, node: 1})


@rule("aten::gather", "aten::index_select", "aten::take")
def gather(low: Lowering, node: Node) -> Lowered:
    flat = node.base == "aten::take"
    value, index = low.value(node.args[0]), low.value(node.args[1 if flat else 2])
    rank = len(value.shape)
    place = None if flat or not rank else node.args[1] % rank
    first = place or 0 if node.base == "aten::index_select" else 0
    dims = tuple([-1 if flat or dim == place else dim for dim in range(rank)])
    return picked(low, node, value, [index], first, dims)


def picked(
    low: Lowering, node: Node, value: Value, indices: Sequence[Value], first: int, dims: tuple[int, ...]
) -> Value:
    """Elements of a value at indices whose dimensions begin with the dimension `first` of the result. `dims`: for each
    dimension of the value, that of the result with the same index, or -1."""
    common = broadcast_shapes(*(one.shape for one in indices))
    indices = [broadcast(one, common, low.pads) for one in indices]
    loaded, weights = value.load()
    pick: Views = (("pick", _token(indices), dims, node.shape),)
    reads = [r.through((*r.views, *pick)) for r in loaded]
    every: dict[object, int] = dict(at_views(weights, value.shape, pick))
    after = len(node.shape) - first - len(common)
    steps: Views = (("reshape", (1,) * first + common + (1,) * after), ("expand", node.shape))
    for one in indices:  # indices that values give are no calls (`OpCounterCSE`)
        loaded, more = one.load()
        every.update(at_views(more, common, steps))
        reads.extend(r.through(then(r.views, common, steps)) for r in loaded)
    return low.pointwise(node.shape, node.tensor.dtype, reads, every)


def _token(indices: Sequence[Value]) -> object:
    """Accesses that the same values pick are the same access: those that are read, and computed in the same way. Of the
    calls the hash is enough, so that no cache of views keeps a graph."""
    loads_of = [value.load() for value in indices]
    return tuple((tuple(read.key() for read in reads), hash(frozenset(calls.items()))) for reads, calls in loads_of)


@rule("aten::repeat")
def repeat(low: Lowering, node: Node) -> Lowered:
    value = low.value(node.args[0])
    loops = value.loops
    if loops is not None and (len(loops.reads) > 4 or loops.op_count > 30):
        low.realize(value)
    reads, weights = gathered(value, "repeat", node.shape)
    return low.pointwise(node.shape, node.tensor.dtype, reads, weights)


@rule("aten::select_scatter")
def select_scatter(low: Lowering, node: Node) -> Lowered:
    """`where` it is the index: the source, else the tensor."""
    value, source = low.value(node.args[0]), low.value(node.args[1])
    dim = node.args[2] % len(node.shape)
    flat = tuple(1 if at == dim else size for at, size in enumerate(node.shape))
    reads, weights = loads([value, source.view(("reshape", flat), pad=low.pads)], node.shape)
    weights.update({("position", dim): 1, ("number", node.args[3]): 1, ("eq", node): 1, node: 1})
    return low.pointwise(node.shape, node.tensor.dtype, reads, weights)


@rule("aten::slice_scatter")
def slice_scatter(low: Lowering, node: Node) -> Lowered:
    """`where` it is in the slice: the source, else the tensor."""
    value, source = low.value(node.args[0]), low.value(node.args[1])
    args = (*node.args[2:], None, None, None, None)[:4]
    dim = (args[0] or 0) % len(value.shape)
    size, step = value.shape[dim], args[3] or 1
    start, end = bound(args[1], size, 0), bound(args[2], size, size)
    loaded, weights = source.load()
    if start == 0 and end == size and step == 1:
        return low.pointwise(node.shape, node.tensor.dtype, loaded, weights)
    move: Step = ("shift", dim, start, node.shape) if step == 1 else ("gather", ("slice", args), node.shape)
    reads = [r.through((*r.views, move)) for r in loaded]
    more, other = value.load()
    every: dict[object, int] = {**weights, **other, ("position", dim): 1, ("masked", node): 1, node: 1}
    for name, at, limit in (("ge", start, 0), ("lt", end, size)):
        if at != limit:
            every.update({("number", at): 1, (name, node): 1})
    if start and end != size:
        every["and", node] = 1
    if step != 1:
        every["every", node] = 3
    return low.pointwise(node.shape, node.tensor.dtype, [*reads, *more], every)


# ---- random numbers


@rule("prims::inductor_seeds")
def seeds(low: Lowering, node: Node) -> Lowered:
    buffer = low.new_buffer(node.shape, node.tensor.dtype, (1,))
    low.extern("inductor_seeds", (), buffer)
    return Value.of(buffer)


@rule("prims::inductor_lookup_seed")
def lookup_seed(low: Lowering, node: Node) -> Lowered:
    buffer = low.realize(low.value(node.args[0]))
    read = Read(buffer, (("select", 0, node.args[1], ()),))
    return low.pointwise((), node.tensor.dtype, [read], {node: 1})


@rule("prims::inductor_random", "prims::inductor_randint")
def random(low: Lowering, node: Node) -> Lowered:
    seed = low.value(next(arg for arg in node.args if type(arg) is Node))
    reads, weights = seed.load()
    step: Step = ("expand", node.shape)
    loops = Loops(
        node.shape, node.tensor.dtype, [r.through(chain(r.views, step, ())) for r in reads], {**weights, node: 2}
    )
    value = Value.of(loops)
    low.realize(value)
    return value
