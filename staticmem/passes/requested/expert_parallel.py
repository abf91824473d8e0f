"""Expert parallelism: a rank has a share of each layer's experts, and tokens go to the experts' ranks and back.

Around the products of a layer's experts, rows are exchanged as torchtitan's `AllToAllTokenDispatcher` does it: an
all-to-all of the counts and one of the rows, rows by rank put in the order of experts, and the reverse. Everything
else of the layer is the model's own code.

How many rows a rank gets is decided by the router. Balanced, it gets as many as it sends. At worst every token of every
rank goes to experts of this one: top-k takes an expert once, so that a token comes at most min(k, experts of the rank)
times.

Source: torchtitan at b5bcd76, torchtitan/models/common/token_dispatcher.py (`AllToAllTokenDispatcher.dispatch`,
`_permute`, `_unpermute`, `combine`) and moe.py (`RoutedExperts.forward`, `GroupedExperts.forward`).

Context parallelism: a rank has a part of the sequence, and attention is PyTorch's ring attention.

Sizes of inputs are those of a part already (`parallel.strategies.context`), so that all other ops are those of a step
with a shorter sequence. `torch.distributed.tensor.experimental.context_parallel` takes the place of
`scaled_dot_product_attention` alone, and its load balancer asks for a causal mask that is no tensor.

Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py of PyTorch 2.13 (`context_parallel`,
`_scaled_dot_product_ring_efficient_attention` and its like: "attn_bias is not supported yet",
`_templated_ring_attention`: "Load balancing requires `is_causal=True`").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from staticmem.errors import UsageError
from staticmem.ir.graph import NO_KWARGS, Arg, Graph, Note, Op, Parameter, Ref
from staticmem.ops import kinds_of
from staticmem.ops.registry import RING_ATTENTION, argument
from staticmem.passes.edit import names_of, unused_name, with_named_ops
from staticmem.passes.restoring.masks import FALLBACK, GROUPED
from staticmem.scenario.strategies import ContextShare, ExpertShare

_PRODUCTS = (GROUPED, FALLBACK)
_GATHERS = ("aten::index", "aten::index_select")


@dataclass(frozen=True)
class _Layer:
    """One call of the experts of a layer. Positions are indices of ops of the graph."""

    rows: str  # the tokens of this rank by expert, once for each choice
    counts: str  # how many there are for each expert
    gather: int  # makes the rows
    offsets: int  # sums the counts
    inside: tuple[int, ...]  # what experts make of the rows; the last is the result
    choices: int  # experts a token


def split_experts(graph: Graph, share: ExpertShare) -> tuple[Graph, Sequence[Note]]:
    """The graph of a rank.

    Raises:
        UsageError: there are no routed experts, or none that can be divided so.
    """
    layers = _layers(graph)
    weights = expert_parameters(graph)
    if not layers:
        raise _refused(share, "The model has no experts that are multiplied in groups (grouped_mm).")
    names: set[str] = set()
    for fqn, parameter in weights.items():
        count = (parameter.value.shape or (0,))[0]
        if not count or count % share.ranks:
            raise _refused(share, f"{fqn} has {count} experts, which {share.ranks} ranks cannot share evenly.")
        names.add(parameter.value.name)
    counts = {(p.value.shape or (0,))[0] for p in weights.values()}
    if len(counts) != 1:
        raise _refused(share, f"Its layers have different numbers of experts: {', '.join(map(str, sorted(counts)))}.")
    (experts,) = counts
    parameters = tuple(_part(p, share.ranks) if p.value.name in names else p for p in graph.parameters)
    resized = _resized(graph, layers, names)
    values = {name: replace(value, shape=None) if name in resized else value for name, value in graph.values.items()}
    changed = _exchanged(replace(graph, parameters=parameters, values=values), layers, share, experts)
    own = experts // share.ranks
    load = "as many tokens as it sends (balanced routing)"
    if share.worst:
        load = "all tokens of all ranks that can go to its experts"
    text = (
        f"expert parallelism: a rank has {own} of {experts} experts of {len(layers)} layers, which are the parameters "
        f"that the report counts, and gets {load}"
    )
    return changed, [Note("assumption", "SM241", text)]


def expert_parameters(graph: Graph) -> Mapping[str, Parameter]:
    """The weights of routed experts, by name: those of three dimensions that products of groups read."""
    owned = {p.value.name: p for p in graph.parameters}
    source = _sources(graph, set(owned))
    weights: dict[str, Parameter] = {}
    for op in graph.ops:
        if op.base not in _PRODUCTS:
            continue
        weight = op.args[1]
        parameter = owned.get(source.get(weight.name, "")) if isinstance(weight, Ref) else None
        if parameter is not None and len(parameter.value.shape or ()) == 3:
            weights[parameter.fqn] = parameter
    return weights


def _sources(graph: Graph, owned: set[str]) -> dict[str, str]:
    """Values that are parameters, views of one or casts of one, each with the parameter's value."""
    source = {name: name for name in owned}
    for op in graph.ops:
        first = op.args[0] if op.args else None
        if isinstance(first, Ref) and first.name in source and _is_same(op):
            source.update(dict.fromkeys(op.outputs, source[first.name]))
    return source


def _is_same(op: Op) -> bool:
    return not kinds_of(op.base).isdisjoint(("cast", "copy", "view"))


def _part(parameter: Parameter, ranks: int) -> Parameter:
    shape = parameter.value.shape or ()
    return replace(parameter, value=replace(parameter.value, shape=(shape[0] // ranks, *shape[1:])))


def _refused(share: ExpertShare, why: str) -> UsageError:
    return UsageError(
        f"--expert-parallel {share.ranks} does not apply to this model",
        why,
        "Leave it out, or give a number that divides the experts of a layer.",
        code="SM109",
    )


# -- finding the layers ------------------------------------------------------------------------------------------


def _layers(graph: Graph) -> list[_Layer]:
    """The calls of experts.

    Raises:
        UsageError: products of groups whose rows are not tokens by expert, or that read more than rows and weights.
    """
    maker = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    layers: list[_Layer] = []
    covered: set[int] = set()
    for index, op in enumerate(graph.ops):
        if op.base not in _PRODUCTS or index in covered:
            continue
        gather = _gather(graph, maker, index)
        if gather < 0 or graph.ops[gather].base not in _GATHERS:
            raise _unknown(op, "whose rows are not those of tokens in the order of experts")
        inside = _walk(graph, graph.ops[gather].outputs[0], gather)
        covered.update(inside)
        layers.append(_layer(graph, maker, gather, inside))
    return layers


def _gather(graph: Graph, maker: Mapping[str, int], product: int) -> int:
    """The op that makes the rows of a product, past casts and views; -1 for an input of the graph."""
    at = product
    while True:
        arg = graph.ops[at].args[0]
        index = maker.get(arg.name, -1) if isinstance(arg, Ref) else -1
        if index < 0 or not _is_same(graph.ops[index]):
            return index
        at = index


def _walk(graph: Graph, name: str, start: int) -> list[int]:
    """Ops behind `start` that depend on a value, up to the last product of groups before rows are gathered again."""
    values, ops, last = {name}, list[int](), -1
    for index in range(start + 1, len(graph.ops)):
        op = graph.ops[index]
        if values.isdisjoint(op.refs()):
            continue
        if last >= 0 and op.base in _GATHERS:
            break  # rows go back to their tokens, or those of another layer begin
        values.update(op.outputs)
        ops.append(index)
        if op.base in _PRODUCTS:
            last = len(ops) - 1
    return ops[: last + 1]


def _layer(graph: Graph, maker: Mapping[str, int], gather: int, inside: list[int]) -> _Layer:
    ops = graph.ops
    rows, last = ops[gather].outputs[0], inside[-1]
    frame = ops[last].modules
    while True:  # casts of the result in the same module
        readers = [i for i, op in enumerate(ops) if ops[last].outputs[0] in op.refs()]
        if len(readers) != 1 or "cast" not in kinds_of(ops[readers[0]].base) or ops[readers[0]].modules != frame:
            break
        last = readers[0]
        inside.append(last)
    products = [i for i in inside if ops[i].base in _PRODUCTS]
    offsets = {_offsets(ops[i]) for i in products}
    index = maker.get(next(iter(offsets)), -1) if len(offsets) == 1 else -1
    if index < 0 or ops[index].base != "aten::cumsum" or not isinstance(ops[index].args[0], Ref):
        raise _unknown(ops[products[0]], "whose offsets are not the running sum of counts")
    _check_rows(graph, inside, rows, offsets)
    choices = _choices(graph, maker, ops[gather])
    if choices is None:
        raise _unknown(ops[products[0]], "whose tokens are not chosen by topk")
    counts = ops[index].args[0]
    assert isinstance(counts, Ref)
    return _Layer(rows, counts.name, gather, index, tuple(inside), choices)


def _unknown(op: Op, what: str) -> UsageError:
    where = op.modules[-1].path if op.modules else op.name
    return UsageError(
        "experts cannot be divided over ranks",
        f"{where} has products of groups {what}, which is not covered.",
        "Leave --expert-parallel out.",
        code="SM109",
    )


def _offsets(product: Op) -> str:
    given = product.args[2] if len(product.args) > 2 else product.kwargs.get("offs")
    return given.name if isinstance(given, Ref) else ""


def _check_rows(graph: Graph, inside: Sequence[int], rows: str, offsets: set[str]) -> None:
    """What experts read besides rows has to be weights: other tensors by row would have to move with the rows."""
    owned = {p.value.name for p in (*graph.parameters, *graph.buffers)}
    readable = {rows, *offsets, *_sources(graph, owned)}
    for index in inside:
        op = graph.ops[index]
        if any(name not in readable for name in op.refs()):
            raise _unknown(op, "that read other tensors by row, such as biases of experts")
        readable.update(op.outputs)


def _choices(graph: Graph, maker: Mapping[str, int], gather: Op) -> int | None:
    """How many experts a token goes to: the k of the topk whose indices are sorted."""
    order = gather.args[1][0] if isinstance(gather.args[1], tuple) else gather.args[-1]
    names = [order.name] if isinstance(order, Ref) else []
    seen: set[str] = set()
    while names:
        name = names.pop()
        index = maker.get(name, -1)
        if name in seen or index < 0:
            continue
        seen.add(name)
        op = graph.ops[index]
        if op.base == "aten::topk":
            given = op.args[1] if len(op.args) > 1 else op.kwargs.get("k")
            return given if isinstance(given, int) else None
        names += [arg.name for arg in op.args[:1] if isinstance(arg, Ref)]
    return None


def _resized(graph: Graph, layers: Sequence[_Layer], weights: set[str]) -> set[str]:
    """Values whose sizes are those of a share: what experts make, and views of their weights."""
    sources = _sources(graph, {p.value.name for p in graph.parameters})
    resized = {name for name, weight in sources.items() if weight in weights}
    for layer in layers:
        resized.update(name for index in (*layer.inside, layer.offsets) for name in graph.ops[index].outputs)
    return resized


# -- the exchange ------------------------------------------------------------------------------------------------


def _exchanged(graph: Graph, layers: Sequence[_Layer], share: ExpertShare, experts: int) -> Graph:
    used = names_of(graph)
    before: dict[int, list[Op]] = {}
    behind: dict[int, list[Op]] = {}
    names: dict[int, dict[str, str]] = {}  # other names of values that ops read
    ends: dict[str, str] = {}
    for layer in layers:
        exchange = _Exchange(graph, layer, share, experts, used)
        last, result = layer.inside[-1], graph.ops[layer.inside[-1]].outputs[0]
        at = min(layer.inside[0], layer.offsets)
        if at <= max(layer.gather, _maker(graph, layer.counts)):
            raise _unknown(graph.ops[layer.inside[0]], "whose offsets are summed before their rows are gathered")
        before[at], behind[last] = exchange.there, exchange.back
        names[layer.offsets] = {layer.counts: exchange.each}
        for index in range(at, len(graph.ops)):
            read = graph.ops[index].refs()
            if layer.rows in read:
                names.setdefault(index, {})[layer.rows] = exchange.moved
            if index > last and result in read:
                names.setdefault(index, {})[result] = exchange.result
        ends |= exchange.ends
    ops: list[Op] = []
    for index, op in enumerate(graph.ops):
        ops += [*before.get(index, ()), _rename_values(op, names.get(index, {})), *behind.get(index, ())]
    if graph.recorded is not None:
        return with_named_ops(graph, ops, ends)
    changed = with_named_ops(graph, ops)
    return replace(changed, variables={**changed.variables, **ends})


def _maker(graph: Graph, name: str) -> int:
    return next((index for index, op in enumerate(graph.ops) if name in op.outputs), -1)


def _rename_values(op: Op, names: Mapping[str, str]) -> Op:
    if not any(name in names for name in op.refs()):
        return op

    def new(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.name, arg.name))
        return tuple(new(one) for one in arg) if isinstance(arg, tuple) else arg

    kwargs = {key: new(value) for key, value in op.kwargs.items()} if op.kwargs else op.kwargs
    return op.changed(args=tuple(new(arg) for arg in op.args), kwargs=kwargs)


class _Exchange:
    """The ops of one layer's exchange, and until when variables hold their values."""

    def __init__(self, graph: Graph, layer: _Layer, share: ExpertShare, experts: int, used: set[str]) -> None:
        self.graph, self.layer, self.used = graph, layer, used
        self.frames = graph.ops[layer.gather].modules
        own = experts // share.ranks
        more = (share.ranks * min(layer.choices, own), layer.choices) if share.worst else (1, 1)
        rows, result = layer.rows, graph.ops[layer.inside[-1]].outputs[0]
        arriving, moved, self.moved = (
            self._name(rows, "counts"),
            self._name(rows, "received"),
            self._name(rows, "moved"),
        )
        order, self.each = self._name(rows, "order"), self._name(rows, "each")
        local = tuple(self._name(rows, part) for part in ("part", "lengths", "starts", "begins"))
        put, buffer, self.result = (self._name(result, part) for part in ("put", "unordered", "returned"))
        self.there = [
            self._op("staticmem::exchanged_counts", (arriving,), Ref(layer.counts), share.ranks),
            self._op("staticmem::all_to_all", (moved,), Ref(rows), *more),
            self._op("staticmem::order_by_expert", (order, self.each, *local), Ref(arriving), Ref(moved), share.ranks),
            self._op("aten::index.Tensor", (self.moved,), Ref(moved), (Ref(order),)),
        ]
        self.back = [
            self._op("aten::empty_like", (buffer,), Ref(result)),
            self._op("aten::index_put_", (put,), Ref(buffer), (Ref(order),), Ref(result)),
            self._op("staticmem::all_to_all", (self.result,), Ref(put), more[1], more[0]),
        ]
        there, back = self.there[-1].name, self.back[-1].name
        self.ends = dict.fromkeys((arriving, moved, *local, rows), there)
        self.ends |= {buffer: back, put: back}
        self._take_over(rows, self.moved, there)
        if self._is_titan:  # `RoutedExperts.forward` has a variable for the results; `combine` assigns its own anew
            self.ends[self.result] = self._last_of_sum(result)
        else:
            self._take_over(result, self.result, back)
            self.ends[result] = back
        if graph.ops[_maker(graph, layer.counts)].modules == self.frames:
            self._take_over(layer.counts, self.each, there)
            self.ends[layer.counts] = there
        last = [op.name for op in graph.ops if op.modules[: len(self.frames)] == self.frames]
        self.ends[order] = last[-1] if last else back

    @property
    def _is_titan(self) -> bool:
        return any(frame.cls.startswith("torchtitan.") for frame in self.frames)

    def _name(self, name: str, part: str) -> str:
        return unused_name(f"{name}.{part}", self.used)

    def _op(self, target: str, outputs: tuple[str, ...], *args: Arg) -> Op:
        return Op(f"{outputs[0]}_", target, args, NO_KWARGS, outputs, self.frames)

    def _take_over(self, old: str, new: str, end: str) -> None:
        """The new value is assigned to the variable of an old one, which ends with the exchange."""
        ops, recorded = self.graph.ops, self.graph.recorded
        if recorded is not None:
            held = recorded.last_held.get(old, -1)
            if held >= len(ops):
                self.ends[new] = ops[-1].name
                return
            self.ends[new] = ops[held].name if held >= 0 else end
        else:
            read = [op.name for op in ops if old in op.refs()]
            self.ends[new] = read[-1] if read else end

    def _last_of_sum(self, result: str) -> str:
        """The op that makes what is added to the tokens: rows of results, weighted."""
        ops, name = self.graph.ops, result
        at = self.back[-1].name
        while True:
            readers = [op for op in ops if name in op.refs()]
            if len(readers) != 1 or "scatter_add" in readers[0].target or not readers[0].outputs:
                return at
            at, name = readers[0].name, readers[0].outputs[0]


ATTENTION = "aten::scaled_dot_product_attention"


def split_sequence(graph: Graph, share: ContextShare) -> tuple[Graph, Sequence[Note]]:
    """The graph of a rank.

    Raises:
        UsageError: there is no attention that PyTorch divides, or some that it does not.
    """
    if ATTENTION not in graph.bases:
        raise _not_divided(
            "It has no scaled_dot_product_attention, which PyTorch replaces; attention that is written out in other "
            "ops would stay within each rank's part of the sequence.",
            'Export it with attn_implementation="sdpa", or leave --context-parallel out.',
        )
    ops: list[Op] = []
    count = 0
    for op in graph.ops:
        if op.base == ATTENTION:
            _check(op)
            count += 1
            dropout = argument(op, "dropout_p") or 0.0
            tensors = [argument(op, name) for name in ("query", "key", "value")]
            args = (*tensors, share.ranks, share.rank, share.rotate, share.length, dropout)
            op = op.changed(target=RING_ATTENTION, args=args, kwargs=NO_KWARGS)
        ops.append(op)
    text = (
        f"context parallelism: a rank has {share.length:,} of {share.length * share.ranks:,} tokens of each sample; "
        f"{count} layers of attention run on the keys and values of {share.ranks} ranks ({share.rotate})"
    )
    return replace(graph, ops=tuple(ops)), [Note("assumption", "SM242", text)]


def _check(op: Op) -> None:
    where = op.modules[-1].path if op.modules and op.modules[-1].path else op.name
    if argument(op, "attn_mask") is not None:
        raise _not_divided(
            f"{where} has attention with a mask, and PyTorch's context parallelism takes none (attn_bias is not "
            "supported).",
            "Export the model without an attention mask, so that its attention is causal by itself, or leave "
            "--context-parallel out.",
        )
    if not argument(op, "is_causal"):
        raise _not_divided(
            f"{where} has attention that is not causal; PyTorch's load balancing, which is on by default, asks for "
            "is_causal=True.",
            "Leave --context-parallel out.",
        )


def _not_divided(why: str, hint: str) -> UsageError:
    return UsageError("context parallelism does not apply to this model", why, hint, code="SM243")
