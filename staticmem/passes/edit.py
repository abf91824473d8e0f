"""Editing of an op list: who makes a value, who reads it, results that live on under another name, and inserted ops.

Of ops that are inserted, dropped or replaced, what else the graph says follows: indices of ops are in `Graph.recorded`
(until when values are held, regions of checkpoints), and names of values that the inserted code gives a variable are in
`Graph.variables`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from staticmem.ir.graph import Arg, Graph, Op, Recorded, Ref, Value


class Ops:
    """Ops in order, with producers and readers. Changes are collected and applied by `done`."""

    def __init__(self, ops: Sequence[Op], outputs: Sequence[str] = ()) -> None:
        self.given = ops
        self.ops: list[Op | None] = list(ops)
        self.outputs = frozenset(outputs)
        self.renamed: dict[str, str] = {}
        self.inserted: dict[int, list[Op]] = {}

    @cached_property
    def producer(self) -> dict[str, int]:
        """Index of the op that makes a value."""
        return {name: index for index, op in enumerate(self.given) for name in op.outputs}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """Indices of the ops that read a value, once for each use."""
        readers: dict[str, list[int]] = {}
        for index, op in enumerate(self.given):
            for name in op.refs():
                positions = readers.get(name)
                if positions is None:
                    readers[name] = [index]
                else:
                    positions.append(index)
        return readers

    def of(self, *bases: str) -> list[Op]:
        """The ops of these bases as they are now, in order."""
        return [op for op in self.ops if op is not None and op.base in bases]

    def made_by(self, arg: Arg) -> Op | None:
        """The op that made a value, unless it is gone."""
        if not isinstance(arg, Ref):
            return None
        index = self.producer.get(arg.name)
        return self.ops[index] if index is not None else None

    def only_reader(self, name: str) -> Op | None:
        """The op that reads a value, if there is exactly one use of it and the caller does not get it."""
        readers = self.readers.get(name, ())
        return self.ops[readers[0]] if len(readers) == 1 and name not in self.outputs else None

    def drop(self, op: Op) -> None:
        self.ops[self.producer[op.outputs[0]]] = None

    def put(self, old: Op, new: Op) -> None:
        """Replaces an op by one with the same outputs."""
        self.ops[self.producer[old.outputs[0]]] = new

    def insert(self, index: int, op: Op) -> None:
        """Adds an op before the one that has this index now; it appears with `done`."""
        self.inserted.setdefault(index, []).append(op)

    def alias(self, op: Op, name: str) -> None:
        """Drops an op: its result is the same tensor as `name`."""
        self.drop(op)
        self.renamed[op.outputs[0]] = name

    def final(self, name: str) -> str:
        """The name that a value has after renaming."""
        for _ in range(len(self.renamed) + 1):
            if name not in self.renamed:
                break
            name = self.renamed[name]
        return name

    def done(self) -> list[Op]:
        """The ops that are left, with arguments renamed."""
        kept: list[Op] = []
        for index, op in enumerate(self.ops):
            kept.extend(self.inserted.get(index, ()))
            if op is not None:
                kept.append(op)
        kept.extend(self.inserted.get(len(self.ops), ()))
        if not self.renamed:
            return kept
        return [self._renamed(op) for op in kept]

    def _renamed(self, op: Op) -> Op:
        names = {name: self.final(name) for name in op.refs() if name in self.renamed}
        return reading_instead(op, names) if names else op


def reading_instead(op: Op, names: Mapping[str, str]) -> Op:
    """The op with other values in the place of some that it reads."""
    args = tuple(_instead(arg, names) for arg in op.args)
    return op.changed(args=args, kwargs={key: _instead(arg, names) for key, arg in op.kwargs.items()})


def _instead(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names[arg.name]) if arg.name in names else arg
    return tuple(_instead(each, names) for each in arg) if isinstance(arg, tuple) else arg


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
