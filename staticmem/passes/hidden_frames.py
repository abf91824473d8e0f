"""Frames that stack traces leave out: methods other than `forward`.

torch.export keeps only the frames of `forward` (torch/fx/proxy.py, `_record_forward_stack_traces_only`). A line such as
`x = self.forward_features(x)` then stands for a whole function, whose variables no line shows. It is told from a call
of a child module by the children that run during it and that it does not name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from staticmem.ir.classes import alternatives
from staticmem.ir.graph import Frame, Graph, Op, SourceLine
from staticmem.passes.locals import Held, common_depth, held_locals
from staticmem.passes.module_names import Table, kept_in_evaluation, known_names, with_known_names
from staticmem.passes.source_locals import held_until
from staticmem.passes.torch_functions import held_within

_METHOD = re.compile(r"\bself\.(\w+)\(")
Stack = tuple[Frame, ...]
Line = tuple[Stack, str, int]  # a running module call, and where it is


def held_values(graph: Graph, policy: str = "expected", *, training: bool = False) -> Held:
    """What variables hold: by the lines of the stack traces, by `policy` where there are none or a frame is missing.

    Where no trace tells, the names that published classes use are known (`training.module_names`), and what they keep
    in evaluation mode always is; "last-use" ignores both.
    In training autograd holds most of what variables hold, and the peak is in backward: hidden frames are left out
    (a guess at them put the peak of TNT-B, batch 8, 1.3 % too high, which is exact without).
    """
    named = {**held_until(graph)}
    for name, index in held_within(graph).items():
        named[name] = max(named.get(name, index), index)
    if named and training:
        return Held(until=named)
    guess = held_locals(graph, policy)
    table = Table({}) if policy == "last-use" else known_names(_classes(graph))
    if not named:
        return with_known_names(graph, guess, table, policy == "named", training) if table.classes else guess
    hidden = hidden_values(graph)
    kept = kept_in_evaluation(graph, table)
    if not hidden:
        return Held(until={**named, **kept})
    guessed = with_known_names(graph, guess, table, policy == "named", training)
    frames = {name: depth for name, depth in guessed.frames.items() if name in hidden}
    until = {**named, **kept}
    for name, index in guessed.until.items():
        if name in hidden:
            until[name] = max(until.get(name, index), index)
    return replace(guessed, frames=frames, until=until)


def _classes(graph: Graph) -> frozenset[str]:
    frames = {frame.cls for stack in {op.modules for op in graph.ops} for frame in stack}
    return frozenset(cls for several in frames for cls in alternatives(several)) - {""}


def has_hidden_frames(graph: Graph) -> bool:
    """Whether some of the code that handles values is not in the stack traces, or all of it."""
    return not any(op.stack for op in graph.ops) or bool(hidden_values(graph))


def hidden_values(graph: Graph) -> set[str]:
    """Names that a frame which is not in the traces may hold."""
    return {name for name, _ in hidden_results(graph)}


def hidden_results(graph: Graph) -> set[tuple[str, int]]:
    """The same, each with the level of the module whose method it is."""
    lines = _hidden_lines(graph)
    if not lines:
        return set()
    made: dict[str, Op] = {}
    found: set[tuple[str, int]] = set()
    for op in graph.ops:
        for name in op.refs():
            maker = made.get(name)
            if maker is None or len(op.stack) < len(op.modules):
                continue
            level = common_depth(maker.modules, op.modules) - 1
            if level >= 0 and _line(op, level) in lines:
                found.add((name, level))
        for name in op.outputs:
            made[name] = op
    return found


def _at(op: Op, level: int) -> SourceLine:
    """Where a module of an op is. `super().forward(x)` is a frame more: the innermost ones belong to the modules."""
    return op.stack[len(op.stack) - len(op.modules) + level]


def _line(op: Op, level: int) -> Line:
    at = _at(op, level)
    return op.modules[: level + 1], at.file, at.line


def _hidden_lines(graph: Graph) -> set[Line]:
    """Lines that call a method, during which children run that they do not name."""
    children = _children(graph)
    found: set[Line] = set()
    for op in graph.ops:
        if len(op.stack) < len(op.modules):
            continue
        for level in range(len(op.modules) - 1):
            text = _at(op, level).text
            methods = _METHOD.findall(text)
            own: set[str] | frozenset[str] = children.get(op.modules[level].path, frozenset())
            if not methods or all(m in own for m in methods):
                continue
            child = _first(op.modules[level].path, op.modules[level + 1].path)
            if child and not re.search(rf"\b{re.escape(child)}\b", text):
                found.add(_line(op, level))
    return found


def _first(parent: str, path: str) -> str:
    """The name of a child module on the way to `path`."""
    prefix = f"{parent}." if parent else ""
    return path[len(prefix) :].split(".", 1)[0] if path.startswith(prefix) and path != parent else ""


def _children(graph: Graph) -> Mapping[str, set[str]]:
    found: dict[str, set[str]] = {}
    for stack in {op.modules for op in graph.ops}:
        for outer, inner in pairwise(stack):
            found.setdefault(outer.path, set()).add(_first(outer.path, inner.path))
    return found


__all__ = ["has_hidden_frames", "held_values", "hidden_results", "hidden_values"]
