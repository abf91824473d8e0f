"""Loops in code that no stack trace shows: a statement that runs again assigns its name again.

All ops of a hidden function have the line that calls it. Where the ops from one on run once more in the same order, the
function is taken to have a loop, and a variable to be held no longer than until the next turn; what a later turn or
another loop reads is in a container.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from staticmem.ir.graph import Graph, Op
from staticmem.ir.stacks import general_path
from staticmem.passes.variables.source_lines import is_of_torch
from staticmem.passes.variables.unseen_code import line_at

_MOST_TURNS = 8  # that are compared: a turn may begin with the op that it has twice
_LONGEST = 500  # ops of a turn


def ends_of_turns(graph: Graph, frames: Mapping[str, int]) -> dict[str, int]:
    """For those of some values that a loop makes: the op that makes the next one of the name. `frames` has the level of
    the frame that holds each."""
    if not frames:
        return {}
    ops = graph.ops
    keys = [_key(op) for op in ops]
    places: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        places.setdefault(key, []).append(index)
    ends: dict[str, int] = {}
    for place in places.values():
        for number, index in enumerate(place):
            names = [name for name in ops[index].outputs if name in frames]
            if not names or not _is_open(ops[index], frames[names[0]]):
                continue
            again = next((j for j in place[number + 1 : number + 1 + _MOST_TURNS] if _repeats(keys, index, j)), None)
            if again is not None:  # what is read later is in a container, which lives on
                ends.update((name, again) for name in names if graph.last_read.get(name, again) <= again)
    return ends


def _is_open(op: Op, level: int) -> bool:
    """Whether the line of a module of an op is of no layer of PyTorch."""
    return len(op.stack) >= len(op.modules) > level and not is_of_torch(line_at(op, level))


def _key(op: Op) -> Hashable:
    """What tells a statement of a hidden function: the op, the module that runs it (of a list any), and the line."""
    path = op.modules[-1].path if op.modules else ""
    return op.target, general_path(path), tuple((line.file, line.line) for line in op.stack)


def _repeats(keys: list[Hashable], index: int, again: int) -> bool:
    length = again - index
    return length <= _LONGEST and keys[index:again] == keys[again : again + length]
