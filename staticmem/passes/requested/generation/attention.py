"""The attention of a decoder: its calls with keys, values and masks, in all their forms, and what else mixes tokens.

Groups of heads have keys and values that are repeated for them. Attention may also be written out: queries times keys,
a softmax, and its weights times values. Source: transformers 5.24, `eager_attention_forward` of the models: llama
(scores are scaled and masked, softmax in float32), gemma2 (scores are capped by tanh), gpt_oss (a column of sinks,
dropped after the softmax), gpt2 (keys and values are not repeated).

The file has one number of tokens. In a decode step there is one query and as many keys as the cache has, and a static
cache has more keys than there are queries in the prefill too. Which numbers of an op are tokens is read from two
bindings of the file (`Lengths`).

What mixes tokens beside the attention keeps more from step to step than keys and values, and is refused. State-space
layers and short convolutions run a convolution over tokens (transformers 5.24: mamba, lfm2, qwen3_next, kimi_linear),
linear attention multiplies queries, keys and values without a softmax between (minimax). Layers may also read the keys
and values of others, which are cached once (gemma3n, gemma4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from staticmem.errors import ModelFileError
from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Graph, Op, Ref, Value
from staticmem.ir.record import record
from staticmem.ops import parameters
from staticmem.ops.registry import FREE_PRODUCTS, RESHAPES, kinds_of
from staticmem.ops.tags import tagged
from staticmem.passes.affine import Affine, Knowledge, Mask

_PRODUCT = "aten::matmul"
_VIEWS = ("aten::slice", "aten::unsqueeze")  # that `Lengths.over_scores` knows at other lengths, as it does reshapes
_OVER_KEYS = ("aten::amax", "aten::cat")  # of scores: what a softmax subtracts, and a column of sinks


@record(frozen=True)
class Written:
    """One attention. `first` multiplies queries and keys, `last` weights and values; `scores` are the names of the ops
    between them, with those that slice the mask. `key` is what `first` takes, before it was transposed for it, `value`
    what `last` takes. `mask` is the `where` that makes what is added to the scores.
    """

    first: Op
    last: Op
    scores: frozenset[str]
    key: str
    value: str
    mask: Op | None


def written_attentions(graph: Graph, maker: Mapping[str, Op]) -> Iterator[Written]:
    """The attentions in order, each softmax with the products before and behind it."""
    at = {op.name: index for index, op in enumerate(graph.ops)}
    for op in graph.ops:
        if "softmax" not in kinds_of(op.base):
            continue
        first = _product_before(op, maker)
        written = _written(graph, at, first, op, maker) if first is not None else None
        if written is not None:
            yield written


def _product_before(softmax: Op, maker: Mapping[str, Op]) -> Op | None:
    """The product that makes the scores."""
    names, seen = [*softmax.refs()], set[str]()
    while names:
        op = maker.get(name := names.pop())
        if op is None or name in seen:
            continue
        seen.add(name)
        if op.base == _PRODUCT:
            return op
        if _is_on_scores(op):
            names += op.refs()[::-1]
    return None


def _written(graph: Graph, at: Mapping[str, int], first: Op, softmax: Op, maker: Mapping[str, Op]) -> Written | None:
    descended, scores, adds = set(first.outputs), list[str](), list[Op]()
    last = None
    for op in graph.ops[at[first.name] + 1 :]:
        if not op.outputs or descended.isdisjoint(op.refs()):  # what has no result is a check
            continue
        if op.base == _PRODUCT:
            last = op
            break
        if not _is_on_scores(op) and "softmax" not in kinds_of(op.base):
            break
        descended.update(op.outputs)
        scores.append(op.name)
        if op.base in ("aten::add", "aten::add_") and at[op.name] < at[softmax.name]:
            adds.append(op)
    if last is None or softmax.name not in scores or not _has_two_tensors(first) or not _has_two_tensors(last):
        return None
    key, value = first.refs()[1], last.refs()[1]
    turned = maker.get(key)
    if last.refs()[0] not in descended or turned is None or value not in maker:
        return None
    if _swaps_last(turned) and turned.refs():
        key = turned.refs()[0]
    elif turned.base == "aten::permute":
        return None
    masked = next((mask for add in adds if (mask := _mask(add, descended, maker)) is not None), None)
    choice, views = masked if masked is not None else (None, ())
    return Written(first, last, frozenset((*scores, *views)), key, value, choice)


def _is_same(op: Op) -> bool:
    """Whether an op gives the same numbers, or some of them, with the keys where they were."""
    return op.base in _VIEWS or not kinds_of(op.base).isdisjoint(("cast", "copy", "expanded"))


def _is_on_scores(op: Op) -> bool:
    """Whether an op makes scores, or weights, of scores: the keys stay the last dimension. What puts a mask in itself
    is none, because the mask is looked for in what is added."""
    if _is_same(op) or op.base in RESHAPES or op.base in _OVER_KEYS or "dropout" in kinds_of(op.base):
        return True
    return op.base in tagged("pointwise") and "masking" not in kinds_of(op.base)


def _has_two_tensors(product: Op) -> bool:
    """Whether a product has two tensors."""
    return len(product.args) > 1 and all(isinstance(arg, Ref) for arg in product.args[:2])


def _swaps_last(op: Op) -> bool:
    """Whether an op only exchanges the last two dimensions of four."""
    if op.base == "aten::transpose":
        return {dim % 4 for dim in op.args[1:3] if isinstance(dim, int)} == {2, 3}
    return op.base == "aten::permute" and op.args[1] == (0, 1, 3, 2)


def _mask(add: Op, scores: set[str], maker: Mapping[str, Op]) -> tuple[Op, tuple[str, ...]] | None:
    """The `where` of the mask that an op adds to the scores, and the names of the ops between."""
    for name in add.refs():
        op, between = maker.get(name), list[str]()
        while op is not None and name not in scores and _is_same(op) and op.refs():
            between.append(op.name)
            op = maker.get(op.refs()[0])
        if op is not None and name not in scores and op.base == "aten::where":
            return op, tuple(between)
    return None


NOT_RECOGNISED = "SM126"
_END = 2**62  # a slice that ends behind it takes all that is left


def not_recognised(what: str, why: str) -> ModelFileError:
    """The error of a graph whose decode step cannot be derived."""
    return ModelFileError(
        f"generation cannot be predicted from this file: {what}",
        why,
        "Export the decoder with its prompt alone: one input of token ids, attn_implementation='sdpa' or 'eager', no "
        "padding (docs/generation.md).",
        code=NOT_RECOGNISED,
    )


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


def ops_over_keys(graph: Graph, cached: Iterable[str], ends: Iterable[Op], scores: frozenset[str]) -> tuple[str, ...]:
    """The names of the ops, in order, that make what an attention takes of what the cache has. `ends` are the calls
    that take it.

    Raises:
        ModelFileError: other code reads what they make.
    """
    descended, names = set(cached), list[str]()
    last = {op.name for op in ends}
    left = set(last)
    for op in graph.ops:
        if op.name in left:
            left.discard(op.name)
            if not left:
                break
        elif op.outputs and op.name not in scores and not descended.isdisjoint(op.refs()):
            names.append(op.name)
            descended.update(op.outputs)
    of_attention = last | scores | set(names)
    for op in graph.ops:
        if op.outputs and op.name not in of_attention and not descended.isdisjoint(op.refs()):
            raise not_recognised(
                f"{op.name} ({op.base}) reads keys or values beside the attention",
                "Its result would have the tokens of the cache, and what is done with it then is not known.",
            )
    return tuple(names)


class Lengths:
    """The numbers of each op as functions of tokens: linear, through two bindings of one file."""

    def __init__(self, one: Graph, many: Graph) -> None:
        """`one` is bound at one token, `many` at more."""
        shape = many.inputs[0].shape
        assert shape is not None
        self.tokens = shape[1]
        self.one = {op.name: op for op in one.ops}
        self.many = {op.name: op for op in many.ops}

    def over_keys(self, op: Op, keys: int) -> Op:
        """An op of the file, whatever its tokens, with those of the cache."""
        one, many = self._both(op)
        args = tuple(
            [self._replace_keys(a, b, c, keys, op) for a, b, c in zip(op.args, one.args, many.args, strict=True)]
        )
        kwargs = {
            k: self._replace_keys(v, one.kwargs.get(k), many.kwargs.get(k), keys, op) for k, v in op.kwargs.items()
        }
        return op.changed(args=args, kwargs=kwargs)

    def over_scores(self, op: Op, keys: int) -> Op:
        """An op over scores [.., queries, keys]: its last dimension has the tokens of the cache."""
        one, many = self._both(op)
        if op.base == "aten::slice" and op.args[1:2] in ((-1,), (3,)):
            return self.over_keys(op, keys)
        names = parameters(op.base)
        position = names.index("size") if "size" in names else len(op.args)
        sizes = op.args[position] if position < len(op.args) else ()
        if not isinstance(sizes, tuple) or not sizes:
            return op
        first, second = (_take_last(each.args[position]) for each in (one, many))
        last = self._replace_keys(sizes[-1], first, second, keys, op)
        args = (*op.args[:position], (*sizes[:-1], last), *op.args[position + 1 :])
        return op.changed(args=args)

    def _both(self, op: Op) -> tuple[Op, Op]:
        one, many = self.one.get(op.name), self.many.get(op.name)
        if one is None or many is None or not len(one.args) == len(many.args) == len(op.args):
            raise _unlike(op)
        return one, many

    def _replace_keys(self, own: Arg, one: Arg, many: Arg, keys: int, op: Op) -> Arg:
        """An argument at a number of keys. Names stay."""
        if isinstance(own, Ref) or own == one == many:
            return own
        if isinstance(own, tuple) and isinstance(one, tuple) and isinstance(many, tuple):
            if not len(own) == len(one) == len(many):
                raise _unlike(op)
            return tuple([self._replace_keys(a, b, c, keys, op) for a, b, c in zip(own, one, many, strict=True)])
        if type(one) is not int or type(many) is not int:
            raise _unlike(op)
        slope, rest = divmod(many - one, self.tokens - 1)
        if rest:
            raise _unlike(op)
        return one + slope * (keys - 1)


def _take_last(sizes: Arg) -> Arg:
    return sizes[-1] if isinstance(sizes, tuple) and sizes else None


def _unlike(op: Op) -> Exception:
    return not_recognised(
        f"the sizes of {op.name} ({op.base}) do not grow with the tokens",
        "Looked for ops over keys and values whose sizes are a multiple of the tokens and a constant.",
    )


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
        op.name,
        key,
        value,
        given,
        (*of_key, *of_value),
        sizes[2] if sizes else 1,
        mask.name if isinstance(mask, Ref) else "",
        windows[op.name],
        op.kwargs.get("enable_gqa") is True or bool(sizes and same and sizes[-1] <= 256),
        over_keys[0] if over_keys else op.name,
        op.name,
        frozenset(over_keys),
    )


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
        name,
        key,
        value,
        (written.key, written.value),
        (),
        1,
        choice.outputs[0],
        windows[name],
        False,
        over_keys[0] if over_keys else name,
        written.last.name,
        frozenset(over_keys),
        written.scores,
        (number, choice),
    )


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


def refuse_other_mixing(graph: Graph, calls: Sequence[Attention]) -> None:
    """Raises where tokens meet outside of the attention calls.

    Raises:
        ModelFileError: the cache of the model has more, or less, than keys and values of these calls.
    """
    keys = [call.key for call in calls]
    if len(set(keys)) < len(keys):
        raise not_recognised("several attentions read the same keys", "Layers that share their cache are not covered.")
    products = {name for call in calls for name in (call.op, call.last)}
    hidden: set[str] = set()
    ids = graph.inputs[0].name
    for op in graph.ops:
        kinds = kinds_of(op.base)
        if "lookup" in kinds and ref_name(op.args[0]) not in hidden:
            first = op.base == "aten::embedding" and ids in op.refs()
            hidden.update(op.outputs if first else ())
            continue
        read = [name for name in op.refs() if name in hidden]
        if not read:
            continue
        hidden.update(op.outputs)
        mixes = not kinds.isdisjoint(("convolution", "recurrent"))
        if mixes or (op.base in FREE_PRODUCTS and len(read) > 1 and op.name not in products):
            raise not_recognised(
                f"{op.name} ({op.base}) mixes tokens beside the attention",
                "State-space layers, convolutions over tokens and linear attention keep states, which are not covered.",
            )
