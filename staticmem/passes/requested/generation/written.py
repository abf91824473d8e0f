"""Attention that the code writes out: queries times keys, a softmax, and its weights times values.

Source: transformers 5.24, `eager_attention_forward` of the models: llama (scores are scaled and masked, softmax in
float32), gemma2 (scores are capped by tanh), gpt_oss (a column of sinks, dropped after the softmax), gpt2 (keys and
values are not repeated).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from staticmem.ir.graph import Graph, Op, Ref
from staticmem.ir.record import record
from staticmem.ops.registry import CONCATENATIONS, RESHAPES, kinds_of
from staticmem.ops.tags import tagged

_PRODUCT = "aten::matmul"
_VIEWS = ("aten::slice", "aten::unsqueeze")  # that `Lengths.over_scores` knows at other lengths, as it does reshapes
_OVER_KEYS = ("aten::amax", *CONCATENATIONS)  # of scores: what a softmax subtracts, and a column of sinks


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
    if last is None or softmax.name not in scores or not _of_two(first) or not _of_two(last):
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


def _of_two(product: Op) -> bool:
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
