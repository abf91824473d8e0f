"""Which ops of a graph run under a checkpoint: modules by class or path, groups of them, segments of a Sequential."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from staticmem.errors import UsageError, did_you_mean
from staticmem.ir.classes import alternatives
from staticmem.ir.graph import Frame, Graph
from staticmem.ir.record import record
from staticmem.scenario.step import SQRT, Scenario

Stack = tuple[Frame, ...]


@record(frozen=True)
class Region:
    """The ops [start, end) of a graph, one call of `checkpoint`. `depth` is the number of module frames around it."""

    start: int
    end: int
    depth: int
    name: str

    def is_within(self, other: Region) -> bool:
        return other.start <= self.start and self.end <= other.end and self.depth > other.depth


@record(frozen=True)
class _Call:
    """A module call: the frames down to it, and its ops [start, end)."""

    stack: Stack
    start: int
    end: int

    @property
    def frame(self) -> Frame:
        return self.stack[-1]


def regions_of(graph: Graph, scenario: Scenario) -> tuple[Region, ...]:
    """The checkpoints of a scenario in order, outer ones before those inside them.

    Raises:
        UsageError: a name that no module has, or no Sequential with that many modules.
    """
    if not scenario.checkpoint and not scenario.checkpoint_segments:
        return ()
    calls = _calls(graph)
    found: list[Region] = []
    if scenario.checkpoint:
        found += _grouped(_matching(calls, scenario.checkpoint), scenario.checkpoint_every)
    if scenario.checkpoint_segments:
        found += _segments(calls, scenario.checkpoint_segments, scenario.checkpoint_sequential)
    return tuple(sorted(set(found), key=lambda r: (r.start, r.depth, -r.end)))


def _calls(graph: Graph) -> list[_Call]:
    """Every module call with ops of its own or in modules below it, in order of start."""
    done: list[_Call] = []
    running: list[tuple[Stack, int]] = []
    stack: Stack = ()
    last = 0
    for index, op in enumerate(graph.ops):
        if not op.modules or op.modules == stack:  # shape arithmetic carries no module: it belongs to what runs
            last = index + 1 if op.modules else last
            continue
        common = 0
        for a, b in zip(stack, op.modules, strict=False):
            if a != b:
                break
            common += 1
        done.extend(_Call(frames, start, last) for frames, start in running[common:])
        running = running[:common]
        running.extend((op.modules[: depth + 1], index) for depth in range(common, len(op.modules)))
        stack, last = op.modules, index + 1
    done.extend(_Call(frames, start, last) for frames, start in running)
    return _joined(graph, sorted(done, key=lambda c: (c.start, len(c.stack))))


def _joined(graph: Graph, calls: Sequence[_Call]) -> list[_Call]:
    """Joins the parts of a call between which a file has ops of a caller (a mask that an export computes in place)."""
    found: dict[Stack, list[_Call]] = {}
    for call in calls:
        parts = found.setdefault(call.stack, [])
        if parts:
            gap = {op.modules for op in graph.ops[parts[-1].end : call.start]}
            if all(call.stack[: len(m)] == m and len(m) < len(call.stack) for m in gap):
                call = _Call(call.stack, parts.pop().start, call.end)
        parts.append(call)
    return sorted((c for parts in found.values() for c in parts), key=lambda c: (c.start, len(c.stack)))


# -- by class or path --------------------------------------------------------------------------------------------


def _matching(calls: Sequence[_Call], selectors: Sequence[str]) -> list[_Call]:
    found: list[_Call] = []
    for selector in selectors:
        matches = [call for call in calls if _matches(call.frame, selector)]
        if not matches:
            raise _unknown(calls, selector)
        found += matches
    return sorted(set(found), key=lambda c: (c.start, len(c.stack)))


def _matches(frame: Frame, selector: str) -> bool:
    if selector and any(selector in (cls, cls.rpartition(".")[2]) for cls in alternatives(frame.cls)):
        return True
    parts, wanted = frame.path.split("."), selector.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)) and bool(frame.path)


def _unknown(calls: Sequence[_Call], selector: str) -> UsageError:
    classes = {cls.rpartition(".")[2] for c in calls if c.frame.cls for cls in alternatives(c.frame.cls)}
    known = classes | {c.frame.path for c in calls if c.frame.path}
    if not known:
        why = "The file does not say which modules its ops belong to."
        return UsageError("--checkpoint cannot be used with this file", why, "Export with torch.export.", code="SM163")
    why = "It is neither a class nor a path of a module of this model." if classes else (
        "It is not the path of a module, and this file does not have the classes of modules."
    )  # fmt: skip
    listed = sorted(classes) if classes else sorted(p for p in known if p.count(".") < 2)
    close = did_you_mean(selector, known)
    hint = close if close.startswith("Did") else f"Known: {', '.join(listed[:20])}{', ...' if len(listed) > 20 else ''}"
    return UsageError(f"--checkpoint '{selector}' names no module", why, hint, code="SM163")


def _grouped(calls: Sequence[_Call], every: int) -> Iterator[Region]:
    """`every` calls that follow each other in one parent are one region."""
    siblings: dict[Stack, list[_Call]] = {}
    for call in calls:
        siblings.setdefault(call.stack[:-1], []).append(call)
    for row in siblings.values():
        for first in range(0, len(row), every):
            yield _region(row[first : first + every])


def _region(row: Sequence[_Call]) -> Region:
    first, last = row[0], row[-1]
    name = first.frame.path if first is last else f"{first.frame.path} to {last.frame.path}"
    # one call is the module's own frame; more of them are statements of the parent
    return Region(first.start, last.end, len(first.stack) - (first is not last), name)


# -- segments ----------------------------------------------------------------------------------------------------


def _segments(calls: Sequence[_Call], segments: int | str, path: str | None) -> Iterator[Region]:
    """`checkpoint_sequential`: all segments but the last, which takes what the division leaves, are checkpoints."""
    for sequential, children in _sequentials(calls, path):
        count = _length(children)
        wanted = max(1, round(count**0.5)) if segments == SQRT else int(segments)
        size = count // wanted
        if size == 0:
            raise UsageError(
                f"--checkpoint-segments {wanted} is more than '{sequential.frame.path}' has modules",
                f"It has {count}.",
                f"Use at most {count}, or {SQRT}.",
                code="SM164",
            )
        for start in range(0, size * (wanted - 1), size):
            row = [c for k, c in enumerate(children) if start <= _position(c, k) < start + size]
            if row:
                yield _region(row)


def _sequentials(calls: Sequence[_Call], path: str | None) -> list[tuple[_Call, list[_Call]]]:
    """The calls of the Sequential at `path`, or of the one with the most modules, each with its children in order."""
    children: dict[Stack, list[_Call]] = {}
    for call in calls:
        children.setdefault(call.stack[:-1], []).append(call)
    found = [(c, children[c.stack]) for c in calls if c.stack in children and _is_sequential(c, children[c.stack])]
    if path is None and found:
        path = max(found, key=lambda pair: _length(pair[1]))[0].frame.path
    chosen = [pair for pair in found if pair[0].frame.path == path]
    if chosen:
        return chosen
    paths = sorted({pair[0].frame.path for pair in found})
    what = "this model has no Sequential" if not paths else f"'{path}' is not a Sequential of this model"
    hint = did_you_mean(path or "", paths) if paths else "Use --checkpoint with the class of its blocks."
    raise UsageError(what, "--checkpoint-segments divides the modules of a torch.nn.Sequential.", hint, code="SM164")


def _is_sequential(call: _Call, children: Sequence[_Call]) -> bool:
    """By class, or where a file has no classes, by children that are numbered."""
    if call.frame.cls:
        return call.frame.cls.rpartition(".")[2] == "Sequential"
    return all(c.frame.path.rpartition(".")[2].isdigit() for c in children)


def _position(call: _Call, index: int) -> int:
    """A module's place in its Sequential: its number; modules that run no op are not in the graph."""
    name = call.frame.path.rpartition(".")[2]
    return int(name) if name.isdigit() and len(name) < 6 else index


def _length(children: Sequence[_Call]) -> int:
    return max((_position(c, k) for k, c in enumerate(children)), default=-1) + 1
