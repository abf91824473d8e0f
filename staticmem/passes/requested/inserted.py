"""Ops that a pass inserts, drops or replaces: what else the graph says of positions and of values follows.

Indices of ops are in `Graph.recorded` (until when values are held, regions of checkpoints); names of values that the
inserted code gives a variable are in `Graph.variables`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from staticmem.ir.graph import Graph, Op, Recorded, Value


def with_ops(
    graph: Graph,
    stretches: Sequence[Sequence[Op]],
    variables: Mapping[str, str],
    behind: Sequence[Op] = (),
    ends: Mapping[str, str] | None = None,
) -> Graph:
    """The graph in which op `i` is replaced by the ops `stretches[i]`, the last of which makes what it made.

    Args:
        behind: ops behind all of them.
        variables: values that outlive their last use, each with the name of the op during which it is held last.
        ends: values that are held until this op at most: what held them longer has another storage now.
    """
    starts = [0]
    for stretch in stretches:
        starts.append(starts[-1] + len(stretch))
    ops = (*(op for stretch in stretches for op in stretch), *behind)
    recorded = graph.recorded
    if recorded is not None:
        recorded = _moved(recorded, graph.ops, starts, ops, variables, ends or {})
    return replace(graph, ops=ops, recorded=recorded, variables={**graph.variables, **variables})


def with_named_ops(
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


def _moved(
    recorded: Recorded,
    before: Sequence[Op],
    starts: Sequence[int],
    ops: Sequence[Op],
    variables: Mapping[str, str],
    ends: Mapping[str, str],
) -> Recorded:
    """What a recording of the ops `before` says, at the new positions: op `i` is at `starts[i + 1] - 1`, or was dropped
    where that is `starts[i] - 1`. A value that an inserted op reads is held until then at least; those without an entry
    are held until the caller drops them."""
    count = len(before)

    def last_of(index: int) -> int:
        if index < 0:  # the step before let go of it
            return index
        return max(starts[index + 1] - 1, 0) if index < count else index - count + len(ops)

    held = {name: last_of(index) for name, index in recorded.last_held.items()}
    made_before = {name for op in before for name in op.outputs}
    for index, op in enumerate(ops):
        for name in op.outputs:
            if name not in made_before:
                held[name] = index
        for name in op.refs():
            if name in held:
                held[name] = max(held[name], index)
    if variables or ends:
        indices = {op.name: index for index, op in enumerate(ops)}
        for name, last in variables.items():
            held[name] = max(held.get(name, 0), indices[last])
        for name, last in ends.items():
            held[name] = min(held.get(name, len(ops)), indices[last])
    regions = tuple(replace(one, start=starts[one.start], end=starts[one.end]) for one in recorded.regions)
    return replace(recorded, last_held=held, regions=regions)


def unused_name(name: str, values: set[str]) -> str:
    """A name that no value of the graph has, and that none will have."""
    while name in values:
        name += "_"
    values.add(name)
    return name


def names_of(graph: Graph) -> set[str]:
    """The names of all values of a graph."""
    owned: list[Value] = [p.value for p in (*graph.parameters, *graph.buffers)]
    return {
        *(v.name for v in (*owned, *graph.inputs, *graph.constant_values.values())),
        *(name for op in graph.ops for name in op.outputs),
        *graph.values,
    }
