"""Checkpoints that no source line would show: the lower end of a band has them.

torch.export keeps the frames of functions named `forward` alone. A line such as `x = self.encode(x)` stands for a
method, and a loop in it may run `checkpoint(block, x)`. What code calls so, by habit and in the documentation of
torch.utils.checkpoint, are the repeated modules of a list: numbered modules of one class, of several ops each.

Code of published libraries is as it was compared: it checkpoints nothing unless it is asked to.
"""

from __future__ import annotations

from collections.abc import Set

from staticmem.ir.graph import Graph, Region
from staticmem.ir.module_spans import Call, calls_of, region_of
from staticmem.passes.variables.source_lines import is_published
from staticmem.passes.variables.unseen_code import Line, line_at, lines_of_methods


def hidden_checkpoints(graph: Graph) -> tuple[Region, ...]:
    """The module calls that hidden code may run in checkpoints; worked out once for each graph."""
    key = "hidden checkpoints"
    regions: tuple[Region, ...] | None = graph.derived.get(key)
    if regions is None:
        regions = _hidden(graph)
        graph.derived[key] = regions
    return regions


def _hidden(graph: Graph) -> tuple[Region, ...]:
    lines = lines_of_methods(graph) if any(op.stack for op in graph.ops) else set()
    if not lines:
        return ()
    alike: dict[tuple[object, ...], list[Call]] = {}  # by caller, list and class
    for call in calls_of(graph):
        owner, _, number = call.path.rpartition(".")
        if number.isdigit() and call.end - call.start > 1 and _is_hidden(graph, call, lines):
            alike.setdefault((call.stack[:-1], owner, call.cls), []).append(call)
    return tuple(region_of([call]) for several in alike.values() if len(several) > 1 for call in several)


def _is_hidden(graph: Graph, call: Call, lines: Set[Line]) -> bool:
    """Whether the line that runs the call is that of a method which no trace shows."""
    level = len(call.stack) - 2
    first = next((op for op in graph.ops[call.start : call.end] if len(op.stack) >= len(op.modules) > level + 1), None)
    if first is None or level < 0:
        return False
    source = line_at(first, level)
    return not is_published(source) and (call.stack[:-1], source.file, source.line) in lines
