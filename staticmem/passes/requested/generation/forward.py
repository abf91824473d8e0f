"""One forward of the decoder inside of `generate`: the exported ops with caches, masks and positions of generation.

Routed experts are multiplied in another way in a decode step. The prefill sorts tokens by expert and runs
`_grouped_mm`; a decode step on a GPU copies the weights of the experts that each token goes to, and runs `bmm`. Source:
transformers 5.23, generation/utils.py, `_optimize_model_for_decode`; integrations/moe.py, `batched_mm_experts_forward`
and `_batched_linear`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from staticmem.ir.graph import NO_KWARGS, Arg, Frame, Graph, Op, Ref
from staticmem.ir.record import record
from staticmem.ops import kinds_of
from staticmem.ops.registry import LINEARS
from staticmem.passes.edit import with_named_ops
from staticmem.passes.requested.generation.attention import (
    Attention,
    Lengths,
    argument,
    not_recognised,
    padding_masks,
    ref_name,
    takes_all,
)
from staticmem.passes.requested.generation.caches import (
    END,
    GrowingOps,
    Held,
    Layer,
    Updated,
    add_mask,
    needs_mask,
    readers,
    renamed,
)
from staticmem.passes.restoring.masks import without_dead


@record(frozen=True)
class Inputs:
    """Names of what `generate` gives to the forward: token ids, their positions, and masks by window, made before."""

    ids: str
    positions: str
    masks: Mapping[int | None, str]


@record(frozen=True)
class Outputs:
    """What a forward leaves: the name of its logits, its caches, and whether it computed logits of all positions."""

    logits: str
    caches: tuple[Held, ...]
    all_logits: bool


class Forward:
    """Adds one forward to a draft."""

    def __init__(
        self,
        draft: GrowingOps,
        graph: Graph,
        calls: Sequence[Attention],
        layers: Sequence[Layer],
        lengths: Lengths,
        inputs: Inputs,
        prefix: str = "",
    ) -> None:
        """`graph` is bound at the batch and the tokens of this forward; its values get `prefix`, but in the prefill."""
        self.lengths = lengths
        self.draft, self.graph, self.layers, self.inputs, self.prefix = draft, graph, layers, inputs, prefix
        self.prefill = not prefix
        self.calls = {call.op: (number, call) for number, call in enumerate(calls)}
        self.updates = {call.updated_at: number for number, call in enumerate(calls)}
        self.over_keys = {name: number for number, call in enumerate(calls) for name in call.over_keys}
        self.over_scores = {name: number for number, call in enumerate(calls) for name in call.over_scores}
        self.updated: dict[int, Updated] = {}
        self.batch, self.tokens = graph.inputs[0].shape or (1, 1)
        self.masks: dict[int | None, str] = dict(inputs.masks)
        self.maker = {name: op for op in graph.ops for name in op.outputs}
        self.order = {op.name: index for index, op in enumerate(graph.ops)}
        self.names: dict[str, str] = {}  # of values of the file, as this forward has them
        self.given: dict[str, str] = {}  # what is read in the place of values of the file: masks, and what caches have
        self.frame_calls = 1 + max((f.call for op in graph.ops for f in op.modules), default=0) if prefix else 0
        self.stacks: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}

    def run(self, caches: Sequence[Held]) -> Outputs:
        """Adds the ops. `caches`: what the layers have, nothing in the prefill."""
        ops, all_logits = self._prepared()
        ends = self._ends(ops)
        reads = readers(ops)
        masks_at = self._first_mask()
        left: list[Held] = []
        by_number = dict(self.calls.values())
        for index, op in enumerate(ops):
            if self.order.get(op.name, 0) >= masks_at >= 0:
                self._make_masks(op.modules, ends)
                masks_at = -1
            if op.name in self.updates:
                call = by_number[self.updates[op.name]]
                left.append(self._update(index, call, caches, ops, reads, ends))
            numbered = self.calls.get(op.name)
            if numbered is not None and numbered[1].bias is None:
                number, call = numbered
                self._attend(op, call, self.layers[number], self.updated[number], ends)
            else:
                self._add(self._sized(op))
        results = {name for op in ops for name in op.outputs if name}
        for name, end in ends.items():
            if name in results:
                self.draft.ends[self._own(name)] = f"{self.prefix}{end}"
        # what is held to the end goes when the forward returns, but for what it returns
        returned = {self._own(name) for name in self.graph.outputs}
        self.draft.let_go({self._own(name) for name in results} - self.draft.ends.keys() - returned)
        return Outputs(self._own(self.graph.outputs[0]), tuple(left), all_logits)

    # -- names ---------------------------------------------------------------------------------------------------

    def _own(self, name: str) -> str:
        return self.names.get(name, name)

    def _add(self, op: Op) -> None:
        """An op of the file under the names of this forward."""
        changed = renamed(renamed(op, self.given), self.names)
        self.names.update({name: f"{self.prefix}{name}" for name in op.outputs if name})
        outputs = tuple(self._own(name) for name in op.outputs)
        self.draft.ops.append(
            replace(changed, name=f"{self.prefix}{op.name}", modules=self._stack(op.modules), outputs=outputs)
        )

    def _sized(self, op: Op) -> Op:
        """An op with the sizes that it has over what a cache gave."""
        number = self.over_keys.get(op.name, self.over_scores.get(op.name))
        if number is None:
            return op
        update = self.updated.get(number)  # what slices a mask may run before
        length = update.length if update is not None else self.layers[number].tokens_for_mask(self.tokens, self.prefill)
        if length == self.tokens:
            return op
        return self.lengths.over_keys(op, length) if op.name in self.over_keys else self.lengths.over_scores(op, length)

    def _stack(self, modules: tuple[Frame, ...]) -> tuple[Frame, ...]:
        """Module calls of this forward, which are others than those of the forward before."""
        if not self.frame_calls or not modules:
            return modules
        if modules not in self.stacks:
            self.stacks[modules] = tuple([Frame(f.path, f.cls, f.call + self.frame_calls) for f in modules])
        return self.stacks[modules]

    # -- the ops of the file -------------------------------------------------------------------------------------

    def _prepared(self) -> tuple[list[Op], bool]:
        """The ops without those that only make masks and positions or repeat keys; whether all logits are computed."""
        graph, touched = self.graph, set[str]()
        given = {graph.inputs[0].name: self.inputs.ids, **self._positions()}
        masks = {call.mask: _name_mask(call.window) for _, call in self.calls.values() if call.bias is not None}
        ops = []
        for op in graph.ops:
            numbered = self.calls.get(op.name)
            if op.outputs and not masks.keys().isdisjoint(op.refs()):
                if op.name not in self.over_scores:
                    raise not_recognised(f"{op.name} ({op.base}) reads the mask", "Looked for attention alone.")
                op = renamed(op, masks)
            if numbered is not None and numbered[1].bias is None:
                call = numbered[1]
                touched.update((*call.repeats, *call.given, *filter(None, (call.mask,))))
                query = ref_name(op.args[0])
                taken = call.given if call.over_keys else (call.key, call.value)
                op = op.changed(args=(Ref(query), *map(Ref, taken)))
                op = op.changed(kwargs={"scale": scale} if (scale := argument(op, 6, "scale")) is not None else {})
            ops.append(renamed(op, given))
        touched.update(name for name in (*given, *masks) if name in self.maker)
        ops, all_logits = self._slice_last_token(ops)
        return without_dead(ops, graph.outputs, touched), all_logits

    def _positions(self) -> dict[str, str]:
        """Positions that the code makes where it is given none: `generate` gives positions [batch, tokens]."""
        values = {v.name: self.inputs.positions for v in self.graph.inputs if "position_ids" in v.name}
        masks = {call.mask for _, call in self.calls.values()}
        for op in self.graph.ops:
            if op.base != "aten::unsqueeze" or op.args[1] not in (0, -2) or op.outputs[0] in masks:
                continue
            source = self.maker.get(ref_name(op.args[0]))
            if source is not None and source.base == "aten::add" and not isinstance(source.args[1], Ref):
                source = self.maker.get(ref_name(source.args[0]))
            if source is not None and source.base == "aten::arange" and source.args[:1] == (self.tokens,):
                values[op.outputs[0]] = self.inputs.positions
        return values

    def _slice_last_token(self, ops: list[Op]) -> tuple[list[Op], bool]:
        """Logits of the last position alone, where the code slices the hidden states for `logits_to_keep`.

        Source: transformers 5.23, generation/utils.py, `generate`: `model_kwargs["logits_to_keep"] = 1`.
        """
        name = self.graph.outputs[0]
        for _ in range(32):  # casts, soft caps and the like behind the head
            op = self.maker.get(name)
            if op is None or op.base in LINEARS:
                break
            name = ref_name(op.args[0])
        head = self.maker.get(name)
        hidden = ref_name(head.args[head.base == "aten::addmm"]) if head is not None else ""
        slices = []
        while (op := self.maker.get(hidden)) is not None and takes_all(op):
            slices.append(op)
            hidden = ref_name(op.args[0])
        if not slices or self.tokens == 1:
            return ops, not slices and self.tokens > 1
        last = slices[0]
        args = (Ref(last.outputs[0]), 1, self.tokens - 1, END)
        kept = Op("last_token", "aten::slice.Tensor", args, {}, ("last_token",), last.modules)
        self.order[kept.name] = self.order[last.name]
        assert head is not None
        changed = []
        for op in ops:
            changed.append(op if op.name != head.name else renamed(op, {last.outputs[0]: "last_token"}))
            if op.name == last.name:
                changed.append(kept)
        return changed, False

    def _ends(self, ops: Sequence[Op]) -> dict[str, str]:
        """The op after which Python lets go of each value, by the recording: one that is left."""
        if self.graph.recorded is None:
            return {}
        left = {op.name for op in ops}
        names, last = [], ops[0].name if ops else ""
        for op in self.graph.ops:
            last = op.name if op.name in left else last
            names.append(last)
        held = self.graph.recorded.last_held
        return {name: names[index] for name, index in held.items() if 0 <= index < len(names)}

    # -- attention -----------------------------------------------------------------------------------------------

    def _first_mask(self) -> int:
        """The index of the first op of the file that makes a mask of an attention; 0 where there is none."""
        masks = [self.order[self.maker[call.mask].name] for _, call in self.calls.values() if call.mask in self.maker]
        return min(masks, default=0)

    def _make_masks(self, modules: tuple[Frame, ...], ends: Mapping[str, str]) -> None:
        """Masks that the model makes, in its order; they live as long as those of the recording."""
        made_at = {op.name: index for index, op in enumerate(self.graph.ops)}
        calls = sorted(
            self.calls.values(),
            key=lambda each: made_at[self.maker[each[1].mask].name] if each[1].mask in self.maker else -1,
        )
        for number, call in calls:
            layer = self.layers[number]
            if layer.window in self.masks or not needs_mask(call, layer, self.tokens, self.prefill):
                continue
            name = f"{self.prefix}mask.{len(self.masks)}"
            parts = add_mask(
                self.draft, name, call, layer, self.tokens, self.batch, self._stack(modules[:1]), self.prefill
            )
            self.masks[layer.window] = parts[0]
            for value in parts:
                ends_of = ends.get(call.mask)
                if ends_of is not None:
                    self.draft.ends[value] = f"{self.prefix}{ends_of}"
        self.given.update({_name_mask(window): name for window, name in self.masks.items()})

    def _update(
        self,
        index: int,
        call: Attention,
        caches: Sequence[Held],
        ops: Sequence[Op],
        reads: Mapping[str, Sequence[int]],
        ends: dict[str, str],
    ) -> Held:
        """The cache takes the keys and values of this forward, before the op at `index`."""
        number = self.calls[call.op][0]
        layer, key, value = self.layers[number], self._own(call.key), self._own(call.value)
        modules = self._stack(next(op.modules for op in ops[index:] if op.name == call.op))
        if caches:
            update = layer.decode(self.draft, caches[number], key, value, modules)
        else:
            update = layer.prefill(self.draft, key, value, modules)
        self.updated[number] = update
        given_on = update.key == key  # the attention gets the new ones themselves
        for name in () if given_on else self._freed_by_update(ops, index, call, reads):
            if ends.get(name) is None or self.order[ends[name]] >= self.order[ops[index].name]:
                ends.pop(name, None)
                self.draft.let_go((self._own(name),))
        if call.over_keys or call.bias is not None:
            self.given.update({call.key: update.key, call.value: update.value})
        return update.cached

    def _freed_by_update(
        self, ops: Sequence[Op], index: int, call: Attention, reads: Mapping[str, Sequence[int]]
    ) -> list[str]:
        """Names over the storages of the new key and value, which the code lets go of when the cache returns its own.
        A projection that makes queries too, or both at once, stays: a variable has it or a view of it."""
        freed: list[str] = []
        for name in (call.key, call.value):
            storage, fused = self._storage(name)
            later = [op for each in storage for at in reads.get(each, ()) if at >= index and (op := ops[at])]
            if not fused and all(not op.outputs or op.name in self._find_attention_ops(call) for op in later):
                freed += storage
        return freed

    def _find_attention_ops(self, call: Attention) -> frozenset[str]:
        """The ops that read what the cache gave, not what was given to it."""
        if not call.over_keys and call.bias is None:
            return frozenset((call.op,))
        return call.over_keys | call.over_scores | {call.op, call.last}

    def _storage(self, name: str) -> tuple[list[str], bool]:
        """The names of the tensor that a value is a view of, and of the views between; whether it has other parts."""
        names, fused = [name], False
        while (op := self.maker.get(names[-1])) is not None and op.args and isinstance(op.args[0], Ref):
            kinds = kinds_of(op.base)
            if "split" in kinds or (op.base in ("aten::slice", "aten::select") and not takes_all(op)):
                fused = True
            elif "view" not in kinds and not takes_all(op):
                break
            names.append(op.args[0].name)
        return [n for n in names if n in self.maker], fused

    def _attend(self, op: Op, call: Attention, layer: Layer, update: Updated, ends: Mapping[str, str]) -> None:
        """The attention over what the cache gave.

        Source: transformers 5.23, integrations/sdpa_attention.py, `sdpa_attention_forward`.
        """
        modules, draft, prefix = self._stack(op.modules), self.draft, self.prefix
        query, key, value = Ref(self._own(ref_name(op.args[0]))), Ref(update.key), Ref(update.value)
        if call.over_keys:
            key, value = (Ref(self._own(name)) for name in call.given)
        mask = self.masks.get(layer.window) if needs_mask(call, layer, self.tokens, self.prefill) else None
        kwargs: dict[str, Arg] = dict(op.kwargs)

        def call_of(part: str, target: str, *args: Arg) -> Ref:
            return Ref(draft.call(target, *args, to=f"{prefix}{op.outputs[0]}.{part}", modules=modules))

        local: list[tuple[str, str]] = []  # values of variables of the function, with those of the file like them
        if call.grouped and mask is None:
            kwargs["enable_gqa"] = True
        elif call.groups > 1 and self.tokens == 1 and self._unpacks(op):
            packed = call_of("packed", "staticmem::packed_queries", query, key)
            local.append((packed.name, ref_name(op.args[0])))
            query = packed
        elif call.groups > 1:
            repeated = []
            for part, source, given in (("keys", key, call.given[0]), ("values", value, call.given[1])):
                shape = self._expanded(given, update.length)
                one = call_of(f"{part}.1", "aten::unsqueeze", source, 2)
                wide = call_of(f"{part}.wide", "aten::expand", one, shape)
                batch, heads, groups, length, size = shape
                full = call_of(part, "aten::reshape", wide, (batch, heads * groups, length, size))
                draft.let_go((one.name, wide.name))
                repeated.append(full)
                local.append((full.name, given))
            key, value = repeated
        causal = mask is None and self.tokens > 1
        if causal and update.length > self.tokens:
            key, value = (
                call_of(f"{part}.prompt", "aten::slice.Tensor", one, 2, 0, self.tokens)
                for part, one in (("key", key), ("value", value))
            )
            local += zip((key.name, value.name), call.given, strict=True)
        args = (query, key, value, Ref(mask) if mask is not None else None, 0.0, causal)
        self._add(op.changed(args=args, kwargs=kwargs))
        for name, like in local:
            draft.ends[name] = f"{prefix}{ends.get(like, op.name)}"

    def _unpacks(self, op: Op) -> bool:
        """Whether the code reshapes what the attention gives: then it packs queries of one token."""
        after = [other for other in self.graph.ops if op.outputs[0] in other.refs()]
        shapes = [other.args[1] for other in after if other.base in ("aten::reshape", "aten::view")]
        return any(isinstance(shape, tuple) and len(shape) == 4 for shape in shapes)

    def _expanded(self, given: str, length: int) -> tuple[int, int, int, int, int]:
        """The sizes to which `repeat_kv` expands keys of `length` tokens."""
        op = self.maker[given]
        while op.base != "aten::expand":
            op = self.maker[ref_name(op.args[0])]
        sizes = op.args[1]
        assert isinstance(sizes, tuple)
        batch, heads, groups, _, size = (int(n) if isinstance(n, int) else 0 for n in sizes)
        return batch, heads, groups, length, size


def _name_mask(window: int | None) -> str:
    """The name under which ops read the mask of a window until it exists."""
    return f"mask of {window}"


def ids_of(graph: Graph) -> bool:
    """Whether the inputs of a graph are token ids [batch, tokens], and besides masks of padding and positions alone."""
    accepted = [*padding_masks(graph), *(v for v in graph.inputs if "position_ids" in v.name)]
    first = graph.inputs[0] if graph.inputs else None
    return first is not None and len(first.shape or ()) == 2 and all(v in accepted for v in graph.inputs[1:])


_GROUPED = "aten::_grouped_mm"


def with_batched_experts(graph: Graph) -> Graph:
    """The graph of a decode step, with `bmm` over copied weights where the file has grouped products."""
    by_module: dict[tuple[Frame, ...], list[Op]] = {}
    for op in graph.ops:
        if op.base == _GROUPED and any(frame.cls.startswith("transformers.") for frame in op.modules):
            by_module.setdefault(op.modules, []).append(op)
    for products in by_module.values():
        graph = _batched(graph, products)
    return graph


def _batched(graph: Graph, products: list[Op]) -> Graph:
    """The graph with the products of one module call replaced; as it is where they are not those of the source."""
    modules = products[0].modules
    maker = {name: op for op in graph.ops for name in op.outputs}
    own = [op for op in graph.ops if op.modules[: len(modules)] == modules]
    sort = next((op for op in own if op.base == "aten::sort"), None)
    if sort is None or len(sort.outputs) < 2:
        return graph
    order, ids = sort.outputs[1], ref_name(sort.args[0])
    tokens = next((op for op in own if op.base == "aten::floor_divide" and ref_name(op.args[0]) == order), None)
    back = next((op for op in own if op.base == "aten::index_put_"), None)
    if tokens is None or back is None:
        return graph
    inverse = {ref_name(back.args[0]), *back.outputs}
    gone = {sort.name, tokens.name, back.name, *(maker[name].name for name in inverse if name in maker)}
    names: dict[str, str] = {sort.outputs[0]: ids}  # biases are those of the experts in the order of tokens
    ends: dict[str, str] = {}
    ops: list[Op] = []
    selected: list[str] = []
    biases: list[Op] = []  # selected after the weights
    last = own[-1].name
    for op in graph.ops:
        inside = op.modules[: len(modules)] == modules
        rows = ref_name(op.args[1][0]) if op.base == "aten::index" and isinstance(op.args[1], tuple) else ""
        if op.name in gone:
            continue
        if inside and rows == sort.outputs[0]:
            biases.append(renamed(op, names))
            continue
        if inside and rows == tokens.outputs[0]:
            ops += _repeated(renamed(op, names), tokens.args[1])
        elif inside and rows and (rows == order or rows in inverse):
            names[op.outputs[0]] = names.get(ref_name(op.args[0]), ref_name(op.args[0]))
        elif inside and op.base == _GROUPED:
            new = _product(renamed(op, names), maker.get(ref_name(op.args[1])), ids)
            for weights in selected:
                ends[weights] = new[0].name
            selected = [new[0].outputs[0]]
            ends |= {value.outputs[0]: op.name for value in new[1:-1]}
            ops += [new[0], *biases, *new[1:]]
            biases.clear()
        else:
            ops.append(renamed(op, names))
    ends |= dict.fromkeys(selected, last)
    return with_named_ops(graph, _without_unread(ops, own, graph.outputs), ends, names)


def _repeated(op: Op, times: Arg) -> list[Op]:
    """`hidden_states.repeat_interleave(num_top_k, dim=0)` in place of the rows that were sorted."""
    return [replace(op, target="aten::repeat_interleave.self_int", args=(op.args[0], times, 0))]


def _product(op: Op, turned: Op | None, ids: str) -> list[Op]:
    """`bmm(weights[ids], x.unsqueeze(-1)).squeeze(-1)`; the last op has the name of the grouped product. `turned` makes
    its weights where they are no parameter as it is."""
    name, transposed = op.outputs[0], turned is None or turned.base != "aten::transpose"
    source = ref_name(op.args[1]) if turned is None or transposed else ref_name(turned.args[0])
    axis = 1 if transposed else -1

    def call(part: str, target: str, *args: Arg) -> Op:
        return Op(f"{op.name}.{part}", target, args, NO_KWARGS, (f"{name}.{part}",), op.modules)

    chosen = call("weights", "aten::index.Tensor", Ref(source), (Ref(ids),))
    column = call("column", "aten::unsqueeze", op.args[0], axis)
    pair = (Ref(column.outputs[0]), Ref(chosen.outputs[0]))
    result = call("bmm", "aten::bmm", *(pair if transposed else pair[::-1]))
    squeezed = replace(op, target="aten::squeeze.dim", args=(Ref(result.outputs[0]), axis), kwargs=NO_KWARGS)
    return [chosen, column, result, squeezed]


def _without_unread(ops: list[Op], own: list[Op], outputs: tuple[str, ...]) -> list[Op]:
    """Without the ops of the module that only led to the offsets of groups."""
    names = {op.name for op in own}
    while True:
        read = readers(ops)
        left = [op for op in ops if op.name not in names or any(n in read or n in outputs for n in op.outputs)]
        if len(left) == len(ops):
            return left
        ops = left
