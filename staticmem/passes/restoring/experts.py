"""Routed experts as transformers runs them on a GPU.

An export has the op that transformers multiplies with while Dynamo traces it, `grouped_mm_fallback`; on a GPU of sm_80
or newer eager code calls `torch.nn.functional.grouped_mm`, which is `aten::_grouped_mm`. Its casts are to the type of
the weights and of the tokens, which the export has resolved: in another type they are other casts.

Source: transformers 5.24, integrations/moe.py: `_can_use_grouped_mm`, `_grouped_mm`, `grouped_mm_experts_forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.ir.graph import NO_KWARGS, Graph, Note, Op, Ref

GROUPED, FALLBACK = "aten::_grouped_mm", "transformers::grouped_mm_fallback"
_TO = ("aten::to", "aten::_to_copy")


def run_grouped(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """The graph with `_grouped_mm` and casts that follow the tensors that the code takes their types from."""
    maker = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    ops = list(graph.ops)
    replaced = 0
    calls: dict[tuple[object, ...], list[Op]] = {}
    for index, op in enumerate(graph.ops):
        if op.base not in (GROUPED, FALLBACK) or not (op.modules and op.modules[-1].cls.startswith("transformers.")):
            continue
        calls.setdefault(op.modules, []).append(op)
        rows, weight = op.args[:2]
        assert isinstance(rows, Ref)
        assert isinstance(weight, Ref)
        if op.base == FALLBACK:
            ops[index] = replace(op, target=GROUPED)
            replaced += 1
        cast = maker.get(rows.name)
        if cast is not None and ops[cast].base in _TO and weight.name in maker and maker[weight.name] < cast:
            ops[cast] = _to(ops[cast], weight)
    for modules in calls:
        own = [index for index, op in enumerate(graph.ops) if op.modules == modules]
        tokens = next((ops[i].args[0] for i in own if ops[i].base == "aten::index"), None)
        if ops[own[-1]].base in _TO and isinstance(tokens, Ref):
            ops[own[-1]] = _to(ops[own[-1]], tokens)  # `.to(hidden_states.dtype)`
    if all(one is other for one, other in zip(ops, graph.ops, strict=True)):
        return graph, ()
    text = "experts are multiplied by _grouped_mm, as transformers does on GPUs of sm_80 and newer"
    return replace(graph, ops=tuple(ops)), [Note("regrouped", "SM240", text, replaced)] if replaced else []


def _to(cast: Op, other: Ref) -> Op:
    """The cast to the type of another tensor."""
    return replace(cast, target="aten::to.other", args=(cast.args[0], other), kwargs=NO_KWARGS)
