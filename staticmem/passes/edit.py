"""Editing of an op list: who makes a value, who reads it, and results that live on under another name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from staticmem.ir.graph import Arg, Op, Ref


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
