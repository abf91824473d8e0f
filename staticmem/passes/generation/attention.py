"""The attention calls of a decoder: their keys and values, what repeats these for groups of heads, and their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from staticmem.errors import ModelFileError
from staticmem.ir.graph import Arg, Graph, Op, Ref, Value
from staticmem.ir.record import record
from staticmem.passes.affine import Affine, Knowledge, Mask

SDPA = "aten::scaled_dot_product_attention"
NOT_RECOGNISED = "SM126"
_REPEATS = ("aten::reshape", "aten::view", "aten::_unsafe_view", "aten::clone", "aten::expand", "aten::unsqueeze")
_VIEWS = ("aten::split", "aten::split_with_sizes", "aten::transpose", "aten::view", "aten::reshape", "aten::slice")
_END = 2**62  # a slice that ends behind it takes all that is left
_LONGEST_CHAIN = 12  # ops of `repeat_kv`, with the slices that some exports write between them


@record(frozen=True)
class Attention:
    """One call. `key` and `value` are what a cache takes: as the projections and the rotation leave them.

    `given` are the key and the value of the call, which are others where they are repeated for heads that share them
    (`repeat_kv`): `groups` times, `repeats` are the values of these steps. `mask` is the name of the mask or "",
    `window` the number of tokens that a query sees at most (None: all before it). `grouped`: the kernel takes keys
    that are not repeated (`use_gqa_in_sdpa`), where there is no mask.
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


def attentions(graph: Graph, wide: Graph) -> tuple[Attention, ...]:
    """The attention calls of a decoder in order. `wide` is the same graph at a length beyond any window, so that its
    masks show their windows.

    Raises:
        ModelFileError: there is none, or one that is not causal.
    """
    windows = _windows(wide)
    maker = {name: op for op in graph.ops for name in op.outputs}
    calls = [_attention(op, maker, windows) for op in graph.ops if op.base == SDPA]
    if not calls:
        raise not_recognised(
            "no attention was recognised",
            "Looked for calls of scaled_dot_product_attention; code that multiplies queries and keys itself is not "
            "covered.",
        )
    return tuple(calls)


def not_recognised(what: str, why: str) -> ModelFileError:
    """The error of a graph whose decode step cannot be derived."""
    return ModelFileError(
        f"generation cannot be predicted from this file: {what}",
        why,
        "Export the decoder with its prompt alone: one input of token ids, attn_implementation='sdpa', no padding "
        "(docs/generation.md).",
        code=NOT_RECOGNISED,
    )


def _attention(op: Op, maker: Mapping[str, Op], windows: Mapping[str, int | None]) -> Attention:
    query, *pair = op.args[:3]
    if op.name not in windows or not isinstance(query, Ref) or len(pair) < 2:
        raise not_recognised(
            f"the attention {op.name} is not causal",
            "Looked for is_causal, or a mask of `key <= query` and `key > query - window`; cross attention, prefixes "
            "and masks of other kinds are not covered.",
        )
    (key, of_key, sizes), (value, of_value, value_sizes) = (_before_repeat(arg, maker, op) for arg in pair)
    if _is_latent(value, maker):
        raise not_recognised(
            f"the attention {op.name} caches what its keys and values are computed of",
            "Multi-head latent attention whose cache is compressed (transformers 5 for DeepSeek V3) is not covered.",
        )
    mask, same = argument(op, 3, "attn_mask"), sizes[-1:] == value_sizes[-1:]
    return Attention(
        op.name, key, value, (ref_name(pair[0]), ref_name(pair[1])), (*of_key, *of_value), sizes[2] if sizes else 1,
        mask.name if isinstance(mask, Ref) else "", windows[op.name],
        op.kwargs.get("enable_gqa") is True or bool(sizes and same and sizes[-1] <= 256),
    )  # fmt: skip


def _is_latent(value: str, maker: Mapping[str, Op]) -> bool:
    """Whether values are a projection of latents [batch, 1, tokens, size], which are cached in their place.

    Source: transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, `expand_kv`.
    """
    op = maker.get(value)
    while op is not None and op.base in _VIEWS:
        op = maker.get(ref_name(op.args[0]))
    source = maker.get(ref_name(op.args[0])) if op is not None and op.base == "aten::linear" else None
    shape = source.args[1] if source is not None and source.base in ("aten::view", "aten::reshape") else None
    return isinstance(shape, tuple) and len(shape) == 4 and shape[1] == 1


def ref_name(arg: Arg) -> str:
    return arg.name if isinstance(arg, Ref) else ""


def argument(op: Op, position: int, name: str) -> Arg:
    """An argument of a call, given by position or by name."""
    return op.args[position] if len(op.args) > position else op.kwargs.get(name)


def takes_all(op: Op) -> bool:
    """Whether a slice is the whole tensor: `x[:]`."""
    if op.base != "aten::slice":
        return False
    start, end = (argument(op, 2, "start"), argument(op, 3, "end"))
    return start in (None, 0) and (end is None or (isinstance(end, int) and end > _END))


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
        if op is None or not (op.base in _REPEATS or takes_all(op)) or not isinstance(op.args[0], Ref):
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


def _windows(wide: Graph) -> dict[str, int | None]:
    """The causal attention calls by name, each with its window."""
    knowledge = Knowledge()
    knowledge.contents.update(
        {value.name: Affine(value.shape or (), 1, (0,) * len(value.shape or ())) for value in padding_masks(wide)}
    )
    windows: dict[str, int | None] = {}
    for op in wide.ops:
        if op.base == SDPA:
            mask, causal = argument(op, 3, "attn_mask"), argument(op, 5, "is_causal")
            mask_facts = knowledge.of(mask) if isinstance(mask, Ref) else None
            if isinstance(mask, Ref):
                seen = _window(mask_facts) if isinstance(mask_facts, Mask) else False
                if seen is not False:
                    windows[op.name] = seen
            elif causal is True:
                windows[op.name] = None
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
