"""What `forward` of published classes gives names to, for files without stack traces.

`module_names.json` has for classes of torchvision, timm and transformers which variable takes the result of each child
module and of each op that `forward` calls itself. `scripts/module_names.py` reads it out of exports that do have stack
traces; it has no code, only names. A variable keeps its value until it is assigned again or `forward` returns, so that
a class that is in the table needs no policy (`training.locals`).

A result is told by its producer: the attribute of the child module (`*` for a number), or the op (`aten::cat`), and the
how-manieth of that call of `forward` it is. Names: "" is no name, `xs[]` an element of a list, `^[]` of the caller's
list, `self.x` an attribute, which the module holds on. null: calls of the class differ. The policy decides for a whole
call as soon as one of its results is not in the table: an optional layer may assign a name again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from staticmem.graph.ir import Frame, Graph, Op
from staticmem.training.locals import Held, common_depth

Stack = tuple[Frame, ...]
Names = Mapping[str, Mapping[str, str | list[str | None]]]


@dataclass(frozen=True, slots=True)
class Result:
    """A value that a running `forward` receives: from a child that returns, or from an op that it calls."""

    call: Stack  # up to the frame that receives it
    producer: str
    nth: int  # result of that producer in this call
    value: str
    index: int  # of the op that made it

    @property
    def cls(self) -> str:
        """Class of the receiving module."""
        return self.call[-1].cls


@cache
def known_names() -> Names:
    """The table: class -> producer -> name, or a list of names by `nth`."""
    text = Path(__file__).with_name("module_names.json").read_text(encoding="utf-8")
    classes: Names = json.loads(text)["classes"]
    return classes


def with_known_names(graph: Graph, held: Held, names: Names, only_add: bool = False) -> Held:
    """`held` of the policy, with what the table says where it says something; `only_add` lets go of nothing."""
    decided, until = _known(graph, names, every=only_add)
    if not decided:
        return held
    frames = {v: depth for v, depth in held.frames.items() if only_add or (v, depth) not in decided}
    reach = _reach(graph)
    kept = {v: i for v, i in held.until.items() if only_add or (v, reach.get(v, 0) - 1) not in decided}
    for value, index in until.items():
        kept[value] = max(kept.get(value, index), index)
    return replace(held, frames=frames, until=kept)


def results(graph: Graph, only: Mapping[str, Any] | None = None) -> Iterator[Result]:
    """Every result that some `forward` receives, in order; of the classes in `only` where it is given."""
    reach = _reach(graph)
    counts: dict[tuple[Stack, str], int] = {}
    for index, op in enumerate(graph.ops):
        modules = op.modules
        for name in op.outputs:
            for level in range(max(0, reach.get(name, len(modules)) - 1), len(modules)):
                if only is not None and modules[level].cls not in only:
                    continue
                producer = _producer(op, level)
                call = modules[: level + 1]
                nth = counts.get((call, producer), 0)
                counts[call, producer] = nth + 1
                yield Result(call, producer, nth, name, index)


def _reach(graph: Graph) -> dict[str, int]:
    """How many frames a value's maker shares with all of its readers."""
    made: dict[str, Stack] = {}
    reach: dict[str, int] = {}
    for op in graph.ops:
        for name in op.refs():
            if name in made:
                shared = common_depth(made[name], op.modules)
                reach[name] = min(reach.get(name, shared), shared)
        for name in op.outputs:
            made[name] = op.modules
    return {**reach, **{name: 1 for name in graph.outputs if name in made}}


def _producer(op: Op, level: int) -> str:
    if len(op.modules) == level + 1:
        return op.base.rstrip("_")
    outer, inner = op.modules[level].path, op.modules[level + 1].path
    prefix = f"{outer}." if outer else ""
    child = inner[len(prefix) :].split(".", 1)[0] if inner.startswith(prefix) else inner
    return "*" if child.isdigit() else child


def _name(entry: str | list[str | None] | None, nth: int) -> str | None:
    if entry is None or isinstance(entry, str):
        return entry
    return entry[nth] if nth < len(entry) else None


def _known(graph: Graph, names: Names, every: bool) -> tuple[set[tuple[str, int]], dict[str, int]]:
    """Values that the table decides, each with the level of the frame, and until which op they are held.

    `every`: also the known names of calls that are not all known. A name that an unknown result takes again is then
    held for too long, which is what an upper bound may do.
    """
    ends = _ends(graph)
    holds: dict[tuple[Stack, str], str] = {}  # what a name means now
    decided: set[tuple[str, int]] = set()
    until: dict[str, int] = {}

    def hold(value: str, index: int) -> None:
        until[value] = max(until.get(value, index), index)

    found = [(result, _name(names[result.cls].get(result.producer), result.nth)) for result in results(graph, names)]
    unclear = {result.call for result, name in found if name is None and not every and _matters(result, names)}
    for result, name in found:
        if name is None or result.call in unclear:
            continue
        decided.add((result.value, len(result.call) - 1))
        if name.startswith("^"):
            hold(result.value, ends[result.call[:-1]] if len(result.call) > 1 else ends[result.call])
        elif name.endswith("[]"):
            hold(result.value, ends[result.call])
        elif name:
            before = holds.pop((result.call, name), None)
            if before is not None:
                hold(before, result.index)
            holds[result.call, name] = result.value
    for (call, name), value in holds.items():
        hold(value, len(graph.ops) - 1 if name.startswith("self.") else ends[call])
    return decided, until


def _matters(result: Result, names: Names) -> bool:
    """Whether an unknown result makes a whole call unclear: of a child that the table lacks (an optional layer),
    or one that differed. An op that it does not have may be an exporter's."""
    return "::" not in result.producer or result.producer in names[result.cls]


def _ends(graph: Graph) -> dict[Stack, int]:
    """The last op of every module call."""
    ends: dict[Stack, int] = {}
    for index, op in enumerate(graph.ops):
        following = graph.ops[index + 1].modules if index + 1 < len(graph.ops) else ()
        if following is not op.modules:
            for level in range(len(op.modules)):
                ends[op.modules[: level + 1]] = index
    return ends


__all__ = ["Names", "Result", "known_names", "results", "with_known_names"]
