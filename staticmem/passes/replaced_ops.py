"""A graph with other ops, where what it knows of a recording counts ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from staticmem.ir.graph import Graph, Op


def with_ops(
    graph: Graph, ops: Sequence[Op], ends: Mapping[str, str] | None = None, merged: Mapping[str, str] | None = None
) -> Graph:
    """The graph with these ops. What Python lets go of after an op that is gone, it lets go of after the last op before
    it that is left. `ends` has for new values the names of the ops after which they are let go of, `merged` for values
    that are gone the ones in their place, which then live as long.

    Ops that replace others have their names, and names are unique.
    """
    recorded = graph.recorded
    if recorded is None:
        return replace(graph, ops=tuple(ops))
    at = {op.name: index for index, op in enumerate(ops)}
    last, moved = -1, list[int]()
    for op in graph.ops:
        last = at.get(op.name, last)
        moved.append(last)
    held = {name: moved[index] if 0 <= index < len(moved) else index for name, index in recorded.last_held.items()}
    for name, instead in (merged or {}).items():
        if name in held and instead in held:
            held[instead] = max(held[instead], held[name])
    held |= {name: at[end] for name, end in (ends or {}).items()}
    regions = tuple(
        replace(region, start=moved[region.start], end=moved[region.end - 1] + 1)
        for region in recorded.regions
        if 0 <= region.start < region.end <= len(moved)
    )
    return replace(graph, ops=tuple(ops), recorded=replace(recorded, last_held=held, regions=regions))
