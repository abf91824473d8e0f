"""Module calls of a graph as spans of its ops, those that a class or path names, and the regions that spans make."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from staticmem.errors import UsageError, did_you_mean
from staticmem.ir.graph import Graph, Region
from staticmem.ir.record import record
from staticmem.ir.stacks import Stack, common_depth


@record(frozen=True)
class Call:
    """A module call: the frames down to it, and its ops [start, end)."""

    stack: Stack
    start: int
    end: int

    @property
    def cls(self) -> str:
        return self.stack[-1].cls

    @property
    def path(self) -> str:
        return self.stack[-1].path


def calls_of(graph: Graph) -> list[Call]:
    """Every module call with ops of its own or in modules below it, in order of start."""
    ended: list[Call] = []
    running: list[tuple[Stack, int]] = []
    stack: Stack = ()
    last = 0
    for index, op in enumerate(graph.ops):
        if not op.modules or op.modules == stack:  # shape arithmetic carries no module: it belongs to what runs
            last = index + 1 if op.modules else last
            continue
        common = common_depth(stack, op.modules)
        ended.extend(Call(frames, start, last) for frames, start in running[common:])
        running[common:] = [(op.modules[: depth + 1], index) for depth in range(common, len(op.modules))]
        stack, last = op.modules, index + 1
    ended.extend(Call(frames, start, last) for frames, start in running)
    return _joined(graph, by_start(ended))


def _joined(graph: Graph, calls: Sequence[Call]) -> list[Call]:
    """Joins the parts of a call between which a file has ops of a caller (a mask that an export computes in place)."""
    parts_of: dict[Stack, list[Call]] = {}
    for call in calls:
        parts = parts_of.setdefault(call.stack, [])
        if parts:
            gap = {op.modules for op in graph.ops[parts[-1].end : call.start]}
            if all(call.stack[: len(m)] == m and len(m) < len(call.stack) for m in gap):
                call = Call(call.stack, parts.pop().start, call.end)
        parts.append(call)
    return by_start(call for parts in parts_of.values() for call in parts)


def by_start(calls: Iterable[Call]) -> list[Call]:
    return sorted(calls, key=lambda c: (c.start, len(c.stack)))


def by_parent(calls: Sequence[Call]) -> dict[Stack, list[Call]]:
    children: dict[Stack, list[Call]] = {}
    for call in calls:
        children.setdefault(call.stack[:-1], []).append(call)
    return children


def region_of(row: Sequence[Call]) -> Region:
    first, last = row[0], row[-1]
    name = first.path if first is last else f"{first.path} to {last.path}"
    # one call is the module's own frame; more of them are statements of the parent
    return Region(first.start, last.end, len(first.stack) - (first is not last), name)


# -- by class or path --------------------------------------------------------------------------------------------

_WILDCARD = re.compile(r"[*?[]")


def selected(calls: Sequence[Call], selectors: Sequence[str], flag: str) -> list[Call]:
    """The calls of the modules that `flag` names by class or path, in order of start.

    Raises:
        UsageError: a name that no module has.
    """
    chosen: set[Call] = set()
    by_name: dict[str, list[Call]] = {}
    for call in calls:
        for name in {call.path, call.cls, call.cls.rpartition(".")[2]} - {""}:
            by_name.setdefault(name, []).append(call)
    for selector in selectors:
        matches = by_name.get(selector, [])
        if _WILDCARD.search(selector):
            matches = [*matches, *(call for call in calls if _matches(call.path, selector))]
        if not matches:
            raise _names_no_module(calls, selector, flag)
        chosen.update(matches)
    return by_start(chosen)


def _matches(path: str, pattern: str) -> bool:
    """Whether each name in a path matches that of a pattern with `*`, `?` and `[...]`."""
    parts, wanted = path.split("."), pattern.split(".")
    return bool(path) and len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _names_no_module(calls: Sequence[Call], selector: str, flag: str) -> UsageError:
    classes = {call.cls.rpartition(".")[2] for call in calls if call.cls}
    paths = {call.path for call in calls if call.path}
    if not classes and not paths:
        why = "The file does not say which modules its ops belong to."
        return UsageError(f"{flag} cannot be used with this file", why, "Export with torch.export.", code="SM163")
    why = "It is neither a class nor a path of a module of this model."
    if not classes:
        why = "It is not the path of a module, and this file does not have the classes of modules."
    listed = sorted(classes or (path for path in paths if path.count(".") < 2))
    close = did_you_mean(selector, classes | paths)
    hint = close if close.startswith("Did") else f"Known: {', '.join(listed[:20])}{', ...' if len(listed) > 20 else ''}"
    return UsageError(f"{flag} '{selector}' names no module", why, hint, code="SM163")
