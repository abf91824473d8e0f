"""The masks that transformers makes while it generates, where it makes one.

Source: transformers 5.24, `masking_utils.py`: `sdpa_mask`, `eager_mask`, `_ignore_causal_mask_sdpa`,
`create_causal_mask`; and `prepare_inputs_for_generation` of `generation/utils.py`, which makes those of a static cache.
"""

from __future__ import annotations

from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Ref
from staticmem.passes.requested.generation.attention import Attention
from staticmem.passes.requested.generation.caches import Layer
from staticmem.passes.requested.generation.draft import Draft


def needs_mask(call: Attention, layer: Layer, queries: int, prefill: bool) -> bool:
    """Whether the attention of a layer gets a mask: else it is causal, or has one query that sees all keys. Attention
    that is written out always gets one."""
    if call.bias is not None:
        return True
    if layer.static and queries == 1:  # the mask of a cache that may be compiled is never left out
        return True
    return layer.window is not None and layer.tokens_for_mask(queries, prefill) >= layer.window


def add_mask(
    draft: Draft,
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
