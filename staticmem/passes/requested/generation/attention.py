"""The attention calls of a decoder: their keys and values, what repeats these for groups of heads, and their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Graph, Op, Ref, Value
from staticmem.ir.record import record
from staticmem.ops import kinds_of
from staticmem.passes.affine import Affine, Knowledge, Mask
from staticmem.passes.requested.generation.over_keys import ops_over_keys
from staticmem.passes.requested.generation.reading import argument, not_recognised, ref_name, takes_all
from staticmem.passes.requested.generation.written import Written, written_attentions

SDPA = "aten::scaled_dot_product_attention"
_LONGEST_CHAIN = 12  # ops of `repeat_kv`, with the slices that some exports write between them


@record(frozen=True)
class Attention:
    """One call. `key` and `value` are what a cache takes: keys and values as the projections and the rotation leave
    them, or what both are computed of (latent attention).

    `given` are the key and the value of the call, which are others where they are repeated for heads that share them
    (`repeat_kv`): `groups` times, `repeats` are the values of these steps. `mask` is the name of the mask or "",
    `window` the number of tokens that a query sees at most (None: all before it). `grouped`: the kernel takes keys
    that are not repeated (`use_gqa_in_sdpa`), where there is no mask.

    `updated_at` is the op before which the cache takes keys and values, `last` the one that multiplies values. The ops
    `over_keys` run over all that the cache has then, `over_scores` over scores [.., queries, keys], where the code
    writes the attention out. `bias` is the mask as such code adds it: the ops that make a number of its type, and
    choose between it and the least one.
    """

    op: str
    key: str
    value: str
    given: tuple[str, str]
    repeats: tuple[str, ...]
    groups: int
    mask: str
    window: int | None
    grouped: bool
    updated_at: str
    last: str
    over_keys: frozenset[str] = frozenset()
    over_scores: frozenset[str] = frozenset()
    bias: tuple[Op, Op] | None = None


def attentions(graph: Graph, wide: Graph) -> tuple[Attention, ...]:
    """The attention calls of a decoder in order. `wide` is the same graph at a length beyond any window, so that its
    masks show their windows.

    Raises:
        ModelFileError: there is none, or one that is not causal.
    """
    maker = {name: op for op in graph.ops for name in op.outputs}
    written = {each.first.name: each for each in written_attentions(graph, maker)}
    of_wide = {name: op for op in wide.ops for name in op.outputs}
    windows = _windows(wide, {name: each.mask.name for name, each in written.items() if each.mask is not None})
    calls = []
    for op in graph.ops:
        if op.base == SDPA:
            calls.append(_attention(graph, op, maker, windows, of_wide))
        elif op.name in written:
            calls.append(_written_attention(graph, written[op.name], maker, windows, of_wide))
    if not calls:
        raise not_recognised(
            "no attention was recognised",
            "Looked for calls of scaled_dot_product_attention, and for a matmul of queries and keys, a softmax and a "
            "matmul with values.",
        )
    return tuple(calls)


def _not_causal(name: str) -> Exception:
    return not_recognised(
        f"the attention {name} is not causal",
        "Looked for is_causal, or a mask of `key <= query` and `key > query - window`; cross attention, prefixes "
        "and masks of other kinds are not covered.",
    )


def _attention(
    graph: Graph, op: Op, maker: Mapping[str, Op], windows: Mapping[str, int | None], wide: Mapping[str, Op]
) -> Attention:
    """A call of scaled_dot_product_attention. `wide` has the makers of values at a great length."""
    query, *pair = op.args[:3]
    if op.name not in windows or not isinstance(query, Ref) or len(pair) < 2:
        raise _not_causal(op.name)
    (key, of_key, sizes), (value, of_value, value_sizes) = (_before_repeat(arg, maker, op) for arg in pair)
    mask, same = argument(op, 3, "attn_mask"), sizes[-1:] == value_sizes[-1:]
    given = ref_name(pair[0]), ref_name(pair[1])
    over_keys = tuple[str, ...]()
    if (latents := _latents(graph, key, value, maker, wide)) is not None:
        key, value, of_key, of_value, sizes = *latents, (), (), ()
        over_keys = ops_over_keys(graph, latents, (op,), frozenset())
    return Attention(
        op.name, key, value, given, (*of_key, *of_value), sizes[2] if sizes else 1,
        mask.name if isinstance(mask, Ref) else "", windows[op.name],
        op.kwargs.get("enable_gqa") is True or bool(sizes and same and sizes[-1] <= 256),
        over_keys[0] if over_keys else op.name, op.name, frozenset(over_keys),
    )  # fmt: skip


def _written_attention(
    graph: Graph, written: Written, maker: Mapping[str, Op], windows: Mapping[str, int | None], wide: Mapping[str, Op]
) -> Attention:
    """An attention that the code writes out."""
    name, choice = written.first.name, written.mask
    number = maker.get(ref_name(choice.args[1])) if choice is not None and len(choice.args) > 2 else None
    if choice is None or number is None or name not in windows:
        raise _not_causal(name)
    (key, *_), (value, *_) = (
        _before_repeat(Ref(_before_cast(each, maker)), maker, written.first) for each in (written.key, written.value)
    )
    key, value = _latents(graph, key, value, maker, wide) or (key, value)
    over_keys = ops_over_keys(graph, (key, value), (written.first, written.last), written.scores)
    return Attention(
        name, key, value, (written.key, written.value), (), 1, choice.outputs[0], windows[name], False,
        over_keys[0] if over_keys else name, written.last.name, frozenset(over_keys), written.scores, (number, choice),
    )  # fmt: skip


def _before_cast(name: str, maker: Mapping[str, Op]) -> str:
    """What is multiplied in float32 is cached as it was before (transformers 5.24, models/gptj/modeling_gptj.py:
    `key.to(torch.float32)`)."""
    op = maker.get(name)
    if op is not None and op.base == "aten::to" and dtypes.float32 in (*op.args[1:], *op.kwargs.values()):
        return ref_name(op.args[0])
    return name


def _latents(
    graph: Graph, key: str, value: str, maker: Mapping[str, Op], wide: Mapping[str, Op]
) -> tuple[str, str] | None:
    """The latents [batch, 1, tokens, size] that keys and values are computed of, and the rotated part that all heads of
    the keys share: what is cached in their place. None where values are no projection of such. At one token their sizes
    are those of [batch, tokens, heads, size], so that those at a great length tell.

    Source: transformers 5.24, models/deepseek_v3/modeling_deepseek_v3.py, `expand_kv`.
    """
    op = maker.get(value)
    while op is not None and "view" in kinds_of(op.base):
        op = maker.get(ref_name(op.args[0]))
    latents = ref_name(op.args[0]) if op is not None and op.base == "aten::linear" else ""
    source = wide.get(latents)
    shape = source.args[1] if source is not None and source.base in ("aten::view", "aten::reshape") else None
    if not isinstance(shape, tuple) or len(shape) != 4 or shape[1] != 1:
        return None
    parts, names = {key}, list[str]()
    for op in graph.ops:
        first = ref_name(op.args[0]) if op.args else ""
        if first in parts and op.base == "aten::slice":
            parts.update(op.outputs)
        elif first in parts and op.base == "aten::copy_":
            names.append(ref_name(op.args[1]))
        elif key in op.outputs and op.base == "aten::cat":
            names += op.refs()
    shared = [maker[name] for name in names if name in maker and maker[name].base == "aten::expand"]
    if len(shared) != 1:
        raise not_recognised(
            f"the keys {key} are computed of latents in a way that is not known",
            "Looked for a part that is projected, and one that the heads share and expand gives them.",
        )
    return latents, ref_name(shared[0].args[0])


def _repeats(op: Op) -> bool:
    return not kinds_of(op.base).isdisjoint(("copy", "expanded", "reshaped"))


def _before_repeat(arg: Arg, maker: Mapping[str, Op], of: Op) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """What `repeat_kv` repeats, the names of its steps and the sizes that it expands to; without one the value itself.
    A first update of an empty cache (`cat` with a tensor without elements) is none of it.

    Source: transformers/integrations/sdpa_attention.py, `repeat_kv`.
    """
    if not isinstance(arg, Ref):
        raise not_recognised(f"{of.name} has no keys or values", "Looked for tensors that the graph computes.")
    name, steps, sizes = arg.name, list[str](), tuple[int, ...]()
    for _ in range(_LONGEST_CHAIN):
        op = maker.get(name)
        if op is None or not (_repeats(op) or takes_all(op)) or not isinstance(op.args[0], Ref):
            break
        if op.base == "aten::expand":
            given = op.args[1]
            if not isinstance(given, tuple) or len(given) != 5:
                break
            sizes = tuple(size for size in given if isinstance(size, int))
        steps.append(name)
        name = op.args[0].name
        if op.base == "aten::unsqueeze" and sizes:
            inner = maker.get(name)
            while inner is not None and takes_all(inner) and isinstance(inner.args[0], Ref):
                steps.append(name)
                name = inner.args[0].name
                inner = maker.get(name)
            return name, tuple(steps), sizes
    return arg.name, (), ()


def _windows(wide: Graph, choices: Mapping[str, str]) -> dict[str, int | None]:
    """The causal attention calls by name, each with its window. `choices` has the name of the `where` that makes the
    mask, for attention that is written out."""
    knowledge = Knowledge()
    knowledge.contents.update(
        {value.name: Affine(value.shape or (), 1, (0,) * len(value.shape or ())) for value in padding_masks(wide)}
    )
    windows: dict[str, int | None] = {}
    seen: dict[str, int | bool | None] = {}
    for op in wide.ops:
        chosen = argument(op, 3, "attn_mask") if op.base == SDPA else None
        if op.base == "aten::where":
            chosen = op.args[0]
        if isinstance(chosen, Ref):
            facts = knowledge.of(chosen)
            seen[op.name] = _window(facts) if isinstance(facts, Mask) else False
        elif op.base == SDPA and argument(op, 5, "is_causal") is True:
            seen[op.name] = None
        window = seen.get(choices.get(op.name, op.name), False)
        if (window is None or window is not False) and (op.base == SDPA or op.name in choices):
            windows[op.name] = window
        knowledge.visit(op)
    return windows


def _window(mask: Mask) -> int | bool | None:
    """The window of a causal mask; None without one, False for any other mask."""
    causal, window = False, None
    for term in mask.terms:
        if any(term.coef[:-2]) or len(term.coef) < 2:
            return False
        if term.const == 0 and term.coef[-2:] == (1, -1):
            causal = True
        elif term.coef[-2:] == (-1, 1) and window is None:
            window = term.const + 1
        else:
            return False
    return window if causal and not mask.never else False


def padding_masks(graph: Graph) -> Sequence[Value]:
    """Inputs that say which tokens are padding: integers or booleans [batch, tokens], named so."""
    return [v for v in graph.inputs if "attention_mask" in v.name and len(v.shape or ()) == 2]
