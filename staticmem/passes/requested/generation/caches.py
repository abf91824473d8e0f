"""The caches of keys and values that `generate` fills, one for each attention call, and the masks that it makes.

Of caches: their lengths in the prefill and in the last decode step, and the calls that fill them.

Source: transformers 5.23, `cache_utils.py`: `DynamicLayer.update`, `DynamicSlidingWindowLayer.update`,
`StaticLayer.lazy_initialization` and `update`, `StaticSlidingWindowLayer.update`.

Of masks: transformers makes one where it needs one. Source: transformers 5.24, `masking_utils.py`: `sdpa_mask`,
`eager_mask`, `_ignore_causal_mask_sdpa`, `create_causal_mask`; and `prepare_inputs_for_generation` of
`generation/utils.py`, which makes those of a static cache.

Ops in the order in which Python runs them, each value with the op after which Python lets go of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from staticmem.ir import dtypes
from staticmem.ir.graph import NO_KWARGS, Arg, Frame, Op, Ref
from staticmem.ir.record import record
from staticmem.passes.requested.generation.attention import Attention
from staticmem.scenario.generation import Generation


class GrowingOps:
    """A list of ops that grows. `ends` has for values the name of the op after which they are let go of."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.ends: dict[str, str] = {}

    @property
    def last(self) -> str:
        """The name of the op that was added last."""
        return self.ops[-1].name

    def call(
        self,
        target: str,
        *args: Arg | str,
        to: str,
        modules: tuple[Frame, ...] = (),
        kwargs: Mapping[str, Arg] = NO_KWARGS,
    ) -> str:
        """Adds a call that makes the value `to`, whose name is returned."""
        self.ops.append(Op(f"{to}_", target, tuple(args), kwargs, (to,), modules))
        return to

    def let_go(self, names: Iterable[str], after: str | None = None) -> None:
        """Python lets go of values after an op; None: after the last one."""
        self.ends.update(dict.fromkeys(names, after or self.last))

    def last_held(self) -> dict[str, int]:
        """The values that are let go of, each with the index of the op: no earlier than they are read."""
        at = {op.name: index for index, op in enumerate(self.ops)}
        read = {name: index for index, op in enumerate(self.ops) for name in op.refs()}
        return {name: max(at[end], read.get(name, 0)) for name, end in self.ends.items()}


def renamed(op: Op, names: Mapping[str, str]) -> Op:
    """The op with other names for what it reads."""
    if names.keys().isdisjoint(op.refs()):
        return op
    args = tuple([_renamed(arg, names) for arg in op.args])
    return op.changed(args=args, kwargs={key: _renamed(arg, names) for key, arg in op.kwargs.items()})


def _renamed(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names[arg.name]) if arg.name in names else arg
    return tuple([_renamed(a, names) for a in arg]) if isinstance(arg, tuple) else arg


def readers(ops: Sequence[Op]) -> dict[str, list[int]]:
    """Indices of the ops that read each value."""
    positions: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        for name in op.refs():
            positions.setdefault(name, []).append(index)
    return positions


END = 2**63 - 1
KEPT = ".kept"  # ends the names of views of what a window keeps
CAT, ZEROS, COPY = "aten.cat.default", "aten.zeros.default", "aten._to_copy.default"


@record(frozen=True)
class Held:
    """What a cache holds: names of the keys and of the values, which may be views of longer tensors."""

    key: str
    value: str


@record(frozen=True)
class Updated:
    """What an update gives to the attention: names of the keys and of the values, and their tokens; `cached` stays."""

    key: str
    value: str
    length: int
    cached: Held
    lasting: tuple[str, ...] = ()


@record(frozen=True)
class Layer:
    """One cache. `window` is that of its attention; None: it keeps all tokens."""

    number: int
    window: int | None
    asked: Generation

    @property
    def static(self) -> bool:
        return self.asked.cache == "static"

    @property
    def size(self) -> int:
        """Tokens of a static cache."""
        return min(self.window or self.asked.longest, self.asked.longest)

    @property
    def tokens(self) -> int:
        """Tokens of the tensors at the end."""
        if self.static:
            return self.size
        return self.before_last_step()[1] + 1 if self.asked.steps else self.asked.prompt

    def before_last_step(self) -> tuple[int, int]:
        """Tokens of the tensor that a dynamic cache has when the last decode step begins, and those of them that it
        keeps."""
        asked = self.asked
        past = asked.longest - 1
        if self.window is None:
            return past, past
        kept = min(past, self.window - 1)
        return (asked.prompt if asked.steps == 1 else min(past - 1, self.window - 1) + 1), kept

    def tokens_for_mask(self, queries: int, prefill: bool) -> int:
        """Keys that a mask is made for: `get_mask_sizes` of the layers."""
        asked = self.asked
        if not self.static:
            past = 0 if prefill else asked.longest - 1
            return past + queries if self.window is None else min(past, self.window - 1) + queries
        if self.window is None:
            return self.size
        return queries if prefill and queries > self.size else self.size

    # -- updates -------------------------------------------------------------------------------------------------

    def prefill(self, draft: GrowingOps, key: str, value: str, modules: tuple[Frame, ...]) -> Updated:
        """The first update, of an empty cache."""
        if self.static:
            return self._first_static(draft, key, value, modules)
        prompt = self.asked.prompt
        lasting: tuple[str, ...] = ()
        if self.window is not None:  # a tensor of one integer on the device
            lasting = (self._integer(draft, "window", modules),)
        names = [
            draft.call("staticmem::cache", Ref(source), prompt, CAT, to=f"cache.{self.number}.{part}", modules=modules)
            for part, source in (("key", key), ("value", value))
        ]
        kept = self._kept(draft, names, prompt, modules)
        return Updated(names[0], names[1], prompt, kept, lasting)

    def grow(self, draft: GrowingOps, held: Held) -> Held:
        """The cache when the last decode step begins: the steps between are not run one by one."""
        if self.static or self.asked.steps < 2:
            return held
        length, _ = self.before_last_step()
        names = []
        for part, source in (("key", held.key), ("value", held.value)):
            names.append(
                draft.call("staticmem::cache", Ref(source), length, CAT, to=f"cache.{self.number}.{part}.grown")
            )
            draft.let_go(dict.fromkeys((source, source.removesuffix(KEPT))))
        return self._kept(draft, names, length, ())

    def decode(self, draft: GrowingOps, held: Held, key: str, value: str, modules: tuple[Frame, ...]) -> Updated:
        """The update of the last step."""
        if self.static:
            return self._last_static(draft, held, key, value, modules)
        length = self.before_last_step()[1] + 1
        names = []
        for part, old, new in (("key", held.key, key), ("value", held.value, value)):
            to = f"cache.{self.number}.{part}.last"
            names.append(draft.call("aten::cat", (Ref(old), Ref(new)), 2, to=to, modules=modules))
            if self.window is None:
                draft.let_go((old,))
        kept = self._kept(draft, names, length, modules)
        if self.window is not None:  # both exist twice until the new ones are assigned
            for old, new in ((held.key, kept.key), (held.value, kept.value)):
                draft.let_go((old, old.removesuffix(KEPT)), f"{new}_")
        return Updated(names[0], names[1], length, kept)

    def _kept(self, draft: GrowingOps, names: list[str], length: int, modules: tuple[Frame, ...]) -> Held:
        """The last `window - 1` tokens, as views; without a window the tensors themselves."""
        if self.window is None:
            return Held(*names)
        start = max(length - self.window + 1, 0)
        return Held(
            *(draft.call("aten::slice.Tensor", Ref(n), 2, start, END, to=f"{n}{KEPT}", modules=modules) for n in names)
        )

    def _integer(self, draft: GrowingOps, what: str, modules: tuple[Frame, ...]) -> str:
        kwargs: dict[str, Arg] = {"dtype": dtypes.int64}
        return draft.call("aten::scalar_tensor", 0, to=f"cache.{self.number}.{what}", modules=modules, kwargs=kwargs)

    def _first_static(self, draft: GrowingOps, key: str, value: str, modules: tuple[Frame, ...]) -> Updated:
        number, prompt, size = self.number, self.asked.prompt, self.size
        names = [
            draft.call("staticmem::cache", Ref(source), size, ZEROS, to=f"cache.{number}.{part}", modules=modules)
            for part, source in (("key", key), ("value", value))
        ]
        count = self._integer(draft, "count", modules)
        if prompt > size:  # the last tokens are copied, and the attention sees all
            return Updated(key, value, prompt, Held(*names), (count,))
        self._positions(draft, prompt, count, "", modules)
        return Updated(names[0], names[1], size, Held(*names), (count,))

    def _last_static(self, draft: GrowingOps, held: Held, key: str, value: str, modules: tuple[Frame, ...]) -> Updated:
        number, count = self.number, f"cache.{self.number}.count"
        if self.window is not None and self.asked.longest - 1 >= self.size:  # full: rolled, and copied back
            rolled = [
                draft.call("aten::roll", Ref(old), (-1,), (-2,), to=f"cache.{number}.{part}.rolled", modules=modules)
                for part, old in (("key", held.key), ("value", held.value))
            ]
            draft.let_go(rolled)
        else:
            self._positions(draft, 1, count, ".last", modules)
        return Updated(held.key, held.value, self.size, held)

    def _positions(self, draft: GrowingOps, tokens: int, count: str, suffix: str, modules: tuple[Frame, ...]) -> None:
        """`arange(tokens) + cumulative_length`, which `index_copy_` reads."""
        name = f"cache.{self.number}.position{suffix}"
        first = draft.call("aten::arange", tokens, to=f"{name}.arange", modules=modules)
        draft.call("aten::add.Tensor", Ref(first), Ref(count), to=name, modules=modules)
        draft.let_go((first, name))


def needs_mask(call: Attention, layer: Layer, queries: int, prefill: bool) -> bool:
    """Whether the attention of a layer gets a mask: else it is causal, or has one query that sees all keys. Attention
    that is written out always gets one."""
    if call.bias is not None:
        return True
    if layer.static and queries == 1:  # the mask of a cache that may be compiled is never left out
        return True
    return layer.window is not None and layer.tokens_for_mask(queries, prefill) >= layer.window


def add_mask(
    draft: GrowingOps,
    name: str,
    call_of: Attention,
    layer: Layer,
    queries: int,
    batch: int,
    modules: tuple[Frame, ...],
    prefill: bool,
) -> tuple[str, ...]:
    """The calls that make a mask [batch, 1, queries, keys]: its name, and that of the tensor that it is a view of. It
    has booleans, or what is added to scores where the attention is written out."""
    keys, names = layer.tokens_for_mask(queries, prefill), list[str]()

    def call(part: str, target: str, *args: object, **kwargs: object) -> str:
        names.append(draft.call(target, *args, to=f"{name}.{part}", modules=modules, kwargs=kwargs))  # type: ignore[arg-type]
        return names[-1]

    call("batch", "aten::arange", batch)
    call("head", "aten::arange", 1)
    axes = {}
    for part, size, before, behind in (("query", queries, 2, 1), ("key", keys, 3, 0)):
        first = call(f"{part}.arange", "aten::arange", size)
        view = call(part, "aten::add.Tensor", Ref(first), 0)
        draft.let_go((names.pop(-2),))
        for axis in range(before):
            view = call(f"{part}.{axis}", "aten::unsqueeze", Ref(view), 0)
        if behind:
            view = call(f"{part}.last", "aten::unsqueeze", Ref(view), -1)
        axes[part] = Ref(view)
    query, key = axes["query"], axes["key"]
    if layer.window is None:
        mask = call("causal", "aten::le.Tensor", key, query)
    else:
        all_true = call("true", "aten::new_ones", query, (), dtype=dtypes.bool_)
        first = call("first", "aten::sub.Tensor", query, layer.window)
        after = call("after", "aten::gt.Tensor", key, Ref(first))
        draft.let_go((first,))
        seen = call("seen", "aten::bitwise_and.Tensor", Ref(all_true), Ref(after))
        draft.let_go((all_true, after))
        causal = call("causal", "aten::le.Tensor", key, query)
        mask = call("mask", "aten::bitwise_and.Tensor", Ref(seen), Ref(causal))
        draft.let_go((seen, causal))
        names = [one for one in names if one not in (all_true, first, after, seen, causal)]
    wide = call("wide", "aten::expand", Ref(mask), (batch, -1, queries, keys))
    draft.let_go([one for one in names if one not in (mask, wide)])
    if call_of.bias is None:
        return wide, mask
    number, choice = call_of.bias
    zero = draft.call(number.target, *number.args, to=f"{name}.zero", modules=modules, kwargs=number.kwargs)
    args = (Ref(wide), Ref(zero), *choice.args[2:])
    bias = draft.call(choice.target, *args, to=f"{name}.bias", modules=modules, kwargs=choice.kwargs)
    draft.let_go((zero, wide, mask))
    return (bias,)
