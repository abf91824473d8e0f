"""What the last turn of a loop computes for a turn that never comes.

`for block in self.blocks: y = block(x); x = x + y[:, :c]; skip = skip + y[:, c:]` computes an `x` in its last turn that
nobody reads. PyTorch runs that, and the variable has it until the function returns; exporters of ONNX drop ops without
readers. The sign is a module of a list after which its frame runs ops in each turn that the last turn lacks, where all
others are the same. Code may as well leave them out (`if block is not self.blocks[-1]`), so that only a band has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from staticmem.ir.graph import Graph, Op, Ref
from staticmem.ir.stacks import Stack, general_path
from staticmem.passes.edit import reading_instead
from staticmem.scenario.step import Scenario

_FEWEST_TURNS = 3  # two whole ones show what a turn is


def ends_of_loops(graph: Graph, scenario: Scenario) -> tuple[Graph, Graph] | None:
    """The graph as it is, and with the ops that exporters may have dropped from last turns; None where there are
    none."""
    inserted: dict[int, list[Op]] = {}  # by the index that they come before
    for frame, starts in _turns(graph).items():
        turns = [_ops_of_turn(graph, frame, start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
        end, added = _missing(graph.ops, len(frame), *turns[-3:])
        if added:
            inserted[end] = added
    if not inserted:
        return None
    ops = [each for index, op in enumerate(graph.ops) for each in (*inserted.get(index, ()), op)]
    return graph, replace(graph, ops=(*ops, *inserted.get(len(graph.ops), ())))


def _turns(graph: Graph) -> dict[Stack, list[int]]:
    """By the frame that runs a loop over a list of modules: the first op of each turn. The first list tells turns."""
    lists: dict[Stack, str] = {}
    starts: dict[Stack, dict[str, int]] = {}
    for index, op in enumerate(graph.ops):
        for level in range(len(op.modules) - 1):
            path, _, number = op.modules[level + 1].path.rpartition(".")
            frame = op.modules[: level + 1]
            if number.isdigit() and path != frame[-1].path and lists.setdefault(frame, path) == path:
                starts.setdefault(frame, {}).setdefault(number, index)
    return {frame: list(turns.values()) for frame, turns in starts.items() if len(turns) >= _FEWEST_TURNS}


def _ops_of_turn(graph: Graph, frame: Stack, start: int, end: int | None) -> list[int]:
    """The ops of a turn."""
    within = range(start, len(graph.ops) if end is None else end)
    return [index for index in within if graph.ops[index].modules[: len(frame)] == frame]


def _missing(
    ops: Sequence[Op], depth: int, before: list[int], whole: list[int], last: list[int]
) -> tuple[int, list[Op]]:
    """The ops of a whole turn that the last one lacks, made of what that has, and the index that they come before."""
    keys = [_key(ops[index]) for index in whole]
    if keys != [_key(ops[index]) for index in before]:
        return 0, []
    carried = zip(before, whole, strict=True)
    own = {old: new for a, b in carried for old, new in zip(ops[a].outputs, ops[b].outputs, strict=True)}
    added: list[Op] = []
    end, rest = last[0], iter(last)
    index = next(rest)
    for key, place in zip(keys, whole, strict=True):
        op, given = ops[place], ops[index]
        if _key(given) == key and _reads_the_same(op, given, own):
            own.update(zip(op.outputs, given.outputs, strict=True))
            end, index = index + 1, next(rest, index)
            continue
        if len(op.modules) != depth:  # a module that does not run: its parameters are unread
            return 0, []
        outputs = tuple(f"{name} of the last turn" for name in op.outputs)
        added.append(replace(reading_instead(op, own), name=outputs[0], outputs=outputs, clears=False))
        own.update(zip(op.outputs, outputs, strict=True))
    return end, added


def _reads_the_same(op: Op, given: Op, own: Mapping[str, str]) -> bool:
    """Whether an op of the last turn reads what one of another turn does, or a parameter instead of a parameter."""
    return all(own.get(name, other) == other for name, other in zip(op.refs(), given.refs(), strict=True))


def _key(op: Op) -> tuple[object, ...]:
    """What an op of a turn has in common with that of another turn."""
    numbers = tuple(arg for arg in op.args if not isinstance(arg, Ref | tuple))
    paths = tuple([general_path(frame.path) for frame in op.modules])
    return op.target, numbers, paths, len(op.refs()), len(op.outputs)
