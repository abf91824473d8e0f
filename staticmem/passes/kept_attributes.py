"""Weights that `torch.nn.utils.weight_norm` and `spectral_norm` compute: the module keeps them as attributes.

A hook computes `weight` before each forward and assigns it to the module: it lives until the next forward assigns it
again, so through backward and the optimizer, and in the next step until its turn comes. The newer
`torch.nn.utils.parametrizations` keep nothing.

Source: torch/nn/utils/weight_norm.py (`__call__`: setattr of `_weight_norm(v, g)`; parameters `weight_g`, `weight_v`),
torch/nn/utils/spectral_norm.py (`__call__`: setattr of `weight_orig / sigma`).
"""

from __future__ import annotations

from staticmem.ir.graph import Graph, Op, Parameter, Ref, bases_of

_MADE_OF = {"aten::_weight_norm": "_v", "aten::div": "_orig"}  # op -> how the name of its first operand ends


def kept_attributes(graph: Graph) -> dict[str, Parameter]:
    """Results that a module keeps, each with the parameter that it has the shape and type of."""
    if bases_of(graph.ops).isdisjoint(_MADE_OF):
        return {}
    owned = {p.value.name: p for p in graph.parameters}
    partners = {p.fqn for p in (*graph.parameters, *graph.buffers)}
    found: dict[str, Parameter] = {}
    for op in graph.ops:
        source = _source(op, owned)
        if source is not None and _is_normed(source.fqn, op.base, partners):
            found[op.outputs[0]] = source
    return found


def _source(op: Op, owned: dict[str, Parameter]) -> Parameter | None:
    ending = _MADE_OF.get(op.base)
    first = op.args[0] if op.args else None
    if ending is None or not isinstance(first, Ref) or len(op.outputs) != 1:
        return None
    source = owned.get(first.name)
    return source if source is not None and source.fqn.endswith(ending) else None


def _is_normed(fqn: str, base: str, names: set[str]) -> bool:
    """`weight_v` has `weight_g` beside it, `weight_orig` the buffers `weight_u` and `weight_v`."""
    if base == "aten::_weight_norm":
        return f"{fqn[:-2]}_g" in names
    return f"{fqn[:-5]}_u" in names and f"{fqn[:-5]}_v" in names


__all__ = ["kept_attributes"]
