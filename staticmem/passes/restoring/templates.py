"""Small trees of calls that are found in a list of ops: what one call was taken apart into.

A template is written as what the result is made of: `("mul", ("sigmoid", "gate"), "x")` is a product of the sigmoid of
something and something. A word is a variable, which means the same wherever it stands; a number is that number, or a
tensor filled with it. `Named("d", template)` gives a part a name, so that it may stand in several places, and
`Piece(i, n, template)` is one of the n results of a split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from staticmem.ir.graph import Arg, Note, Op, Ref, count_bases
from staticmem.ir.record import record
from staticmem.ops import kinds_of
from staticmem.passes.edit import Ops

if TYPE_CHECKING:
    import numpy as np


@record(frozen=True)
class Named:
    """A part of a template that stands in several places."""

    name: str
    template: Template


@record(frozen=True)
class Piece:
    """One of the results of a split along the last dimension."""

    index: int
    count: int
    template: Template


Template: TypeAlias = "str | float | Named | Piece | tuple[Any, ...]"


@dataclass
class Match:
    """What variables mean, and the ops of the tree by their index."""

    values: dict[str, Arg] = field(default_factory=dict)
    ops: dict[int, Op] = field(default_factory=dict)

    def copied(self) -> Match:
        return Match(dict(self.values), dict(self.ops))


@cache
def calls_of(template: Template) -> Mapping[str, int]:
    """How many ops of each base a template takes: a part that stands in several places is the same op."""
    return Counter(f"aten::{part[0]}" for part in _parts(template))


def _parts(template: Template) -> set[tuple[Any, ...]]:
    """All calls in a template."""
    if isinstance(template, (Named, Piece)):
        return _parts(template.template)
    return {template}.union(*map(_parts, template[1:])) if isinstance(template, tuple) else set()


class Finder:
    """Finds templates in a list of ops that is being edited. `consts` are small tensors of the file."""

    def __init__(self, ops: Ops, consts: Mapping[str, np.ndarray]) -> None:
        self.ops, self.consts = ops, consts
        self._bases = count_bases(ops.given)

    def possible(self, templates: Sequence[Template]) -> tuple[Template, ...]:
        """The templates for which there are enough ops: most graphs have none of them."""
        have = self._bases
        return tuple(t for t in templates if all(have[base] >= count for base, count in calls_of(t).items()))

    def find(self, root: Op, templates: Sequence[Template], kept: Sequence[str] = ()) -> Match | None:
        """The first template that ends in this op and whose inner results nobody else reads, but those named in
        `kept`."""
        for template in templates if root.outputs else ():
            for match in self._call(template, root, Match()):
                if self._closed(root, match, kept):
                    return match
        return None

    def replaced(self, root: Op, match: Match, new: Op) -> None:
        """Puts one call in the place of the tree that ends in `root`."""
        for op in match.ops.values():
            if op is not root and not (_filled_with(op) is not None and self._read_elsewhere(op, match)):
                self.ops.drop(op)
        self.ops.put(root, new)

    def _read_elsewhere(self, op: Op, match: Match) -> bool:
        return any(i not in match.ops and self.ops.ops[i] is not None for i in self.ops.readers.get(op.outputs[0], ()))

    def _closed(self, root: Op, match: Match, kept: Sequence[str]) -> bool:
        names = {value.name for key, value in match.values.items() if key in kept and isinstance(value, Ref)}
        last = self.ops.producer[root.outputs[0]]
        for op in match.ops.values():
            if op is root or _filled_with(op) is not None:
                continue
            for name in op.outputs:
                if name in self.ops.outputs and name not in names:
                    return False
                outside = [i for i in self.ops.readers.get(name, ()) if i not in match.ops]
                if any(i < last for i in outside) or (outside and name not in names):
                    return False
        return True

    def _of(self, template: Template, arg: Arg, match: Match) -> Iterator[Match]:
        if isinstance(template, str):
            bound = match.values.get(template)
            if template not in match.values:
                extended = match.copied()
                extended.values[template] = arg
                yield extended
            elif bound == arg:
                yield match
        elif isinstance(template, (int, float)):
            yield from self._number(template, arg, match)
        elif isinstance(template, Named):
            if template.name in match.values:
                if match.values[template.name] == arg:
                    yield match
                return
            for extended in self._of(template.template, arg, match):
                extended.values[template.name] = arg
                yield extended
        elif isinstance(template, Piece):
            yield from self._piece(template, arg, match)
        else:
            maker = self.ops.made_by(arg)
            if maker is not None:
                yield from self._call(template, maker, match)

    def _number(self, number: float, arg: Arg, match: Match) -> Iterator[Match]:
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            if arg == number:
                yield match
            return
        array = self.consts.get(arg.name) if isinstance(arg, Ref) else None
        if array is not None:
            if array.size == 1 and array.reshape(-1)[0] == number:
                yield match
            return
        maker = self.ops.made_by(arg)
        if maker is None or _filled_with(maker) != number:
            return
        extended = match.copied()
        extended.ops[self.ops.producer[maker.outputs[0]]] = maker
        yield extended

    def _piece(self, piece: Piece, arg: Arg, match: Match) -> Iterator[Match]:
        maker = self.ops.made_by(arg)
        if maker is None or not isinstance(arg, Ref) or "split" not in kinds_of(maker.base):
            return
        if len(maker.outputs) != piece.count or maker.outputs.index(arg.name) != piece.index or not maker.args:
            return
        extended = match.copied()
        extended.ops[self.ops.producer[maker.outputs[0]]] = maker
        yield from self._of(piece.template, maker.args[0], extended)

    def _call(self, template: Template, op: Op, match: Match) -> Iterator[Match]:
        """Matches that the tree with this op on top extends."""
        if not isinstance(template, tuple) or op.base != f"aten::{template[0]}" or op.kwargs:
            return
        parts, args = template[1:], op.args
        if len(args) != len(parts):
            return
        swaps = "commutative" in kinds_of(op.base) and len(parts) == 2
        if not swaps and not all(map(self._may, parts, args)):
            return
        start = match.copied()
        start.ops[self.ops.producer[op.outputs[0]]] = op
        yield from self._all(parts, args, start)
        if swaps:
            yield from self._all(parts, args[::-1], start)

    def _may(self, template: Template, arg: Arg) -> bool:
        """False where the first look at an argument says that this is not it."""
        if type(template) is not tuple:
            return True
        maker = self.ops.made_by(arg)
        return maker is not None and maker.base == f"aten::{template[0]}"

    def _all(self, parts: Sequence[Template], args: Sequence[Arg], match: Match) -> Iterator[Match]:
        if not parts:
            yield match
            return
        for extended in self._of(parts[0], args[0], match):
            yield from self._all(parts[1:], args[1:], extended)


def _filled_with(op: Op) -> int | float | None:
    """The number that an op makes a tensor of: `full(size, number)`."""
    numbers = [arg for arg in op.args if isinstance(arg, (int, float))] if "factory" in kinds_of(op.base) else []
    return numbers[-1] if numbers else None


def regrouped(count: int) -> Sequence[Note]:
    """The note of calls that were put together."""
    text = "losses and recurrent cells that the exporter takes apart were put together again"
    return [Note("regrouped", "SM252", text, count)] if count else ()


__all__ = ["Finder", "Match", "Named", "Piece", "Template", "regrouped"]
