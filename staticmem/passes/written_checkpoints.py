"""Checkpoints that the model's own code calls: `x = checkpoint(block, x)`.

An export inlines such a call: its ops look like all others. Only the source lines of stack traces show it, where the
line is in a `forward` (torch.export keeps the frames of no other function). A file without traces cannot tell.

Source: torch/utils/checkpoint.py (`checkpoint`, `checkpoint_sequential`: all segments but the last are checkpoints).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from staticmem.ir.graph import Frame, Graph, Note, Op
from staticmem.ir.record import record
from staticmem.passes.regions import Region, regions_of
from staticmem.scenario.step import Scenario

_CALL = re.compile(r"(?<!\w)(?:checkpoint|(?P<segments>checkpoint_sequential))\((?P<rest>.*)")
_FUNCTION = re.compile(r"\s*([A-Za-z_][\w.]*)")
_SEGMENTS = re.compile(r"\s*[\w.]+\s*,\s*(?:segments\s*=\s*)?(\d{1,4})\s*,")


@record(frozen=True)
class _Line:
    """A line with a checkpoint, in one call of the module whose `forward` it is in: the ops [start, end)."""

    frames: tuple[Frame, ...]
    text: str
    start: int
    end: int


def all_regions(graph: Graph, scenario: Scenario) -> tuple[tuple[Region, ...], list[Note]]:
    """The checkpoints of the scenario, and those of the code that do not contradict them; notes of the latter."""
    asked = regions_of(graph, scenario)
    written, notes = written_regions(graph)
    added = [w for w in written if not any(_crosses(w, a) for a in asked)]
    return tuple(sorted({*asked, *added}, key=lambda r: (r.start, r.depth, -r.end))), notes


def _crosses(a: Region, b: Region) -> bool:
    """Whether two regions are the same calls, or overlap without one being inside of the other."""
    return a.start < b.end and b.start < a.end and not a.is_within(b) and not b.is_within(a)


def written_regions(graph: Graph) -> tuple[list[Region], list[Note]]:
    """The checkpoints that source lines show, and what a report has to say of them."""
    found: list[Region] = []
    lost = 0
    for line in _lines(graph):
        regions = list(_regions(graph, line))
        found += regions
        lost += not regions
    notes: list[Note] = []
    if found:
        text = (
            "the model's code calls torch.utils.checkpoint, which was followed (as use_reentrant=False): "
            f"{_listed(found)}"
        )
        notes.append(Note("assumption", "SM316", text, len(found)))
    if lost:
        text = (
            "the model's code calls checkpoint_sequential with a number of segments that its line does not show: its "
            "ops are taken to save everything, so that the peak is too high (--checkpoint-segments says how many)"
        )
        notes.append(Note("warning", "SM317", text, lost))
    return found, notes


def _listed(found: Sequence[Region]) -> str:
    names = list(dict.fromkeys(region.name or "the model" for region in found))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _lines(graph: Graph) -> Iterator[_Line]:
    """Runs of ops under one line; ops without a trace (shape arithmetic) belong to what is around them."""
    current: tuple[tuple[Frame, ...], str, int, str] | None = None
    start = last = 0
    for index, op in enumerate(graph.ops):
        if not op.stack:
            continue
        key = _key(op)
        if key != current:
            if current is not None:
                yield _Line(current[0], current[3], start, last + 1)
            current, start = key, index
        last = index
    if current is not None:
        yield _Line(current[0], current[3], start, last + 1)


def _key(op: Op) -> tuple[tuple[Frame, ...], str, int, str] | None:
    """The outermost line of an op that calls a checkpoint: module frames down to it, file, line, text."""
    depth = 0
    for line in op.stack:
        depth += line.function == "forward"
        if "checkpoint" in line.text and _CALL.search(line.text) and not line.text.lstrip().startswith("def "):
            return op.modules[:depth], line.file, line.line, line.text
    return None


def _regions(graph: Graph, line: _Line) -> Iterator[Region]:
    match = _CALL.search(line.text)
    assert match is not None
    depth = len(line.frames)
    parts = _by_child(graph, line)
    if match["segments"]:
        segments = _SEGMENTS.match(match["rest"])
        if segments is None:
            return
        size = len(parts) // int(segments[1]) if 0 < int(segments[1]) <= len(parts) else 0
        for first in range(0, size * (int(segments[1]) - 1), size or 1):
            row = parts[first : first + size]
            yield Region(row[0][1], row[-1][2], depth, f"{_path(row[0][0])} to {_path(row[-1][0])}")
        return
    if _are_modules(line, parts, match["rest"]):
        for child, start, end in parts:
            yield Region(start, end, depth + 1, _path(child))
    else:
        yield Region(line.start, line.end, depth, line.frames[-1].path if line.frames else "")


def _path(frame: Frame | None) -> str:
    return frame.path if frame is not None else ""


def _by_child(graph: Graph, line: _Line) -> list[tuple[Frame | None, int, int]]:
    """The ops of a line by the child module that runs; None for those of the frame itself."""
    depth = len(line.frames)
    parts: list[tuple[Frame | None, int, int]] = []
    for index in range(line.start, line.end):
        op = graph.ops[index]
        if not op.modules and parts:  # shape arithmetic
            parts[-1] = (*parts[-1][:2], index + 1)
            continue
        child = op.modules[depth] if len(op.modules) > depth else None
        if parts and parts[-1][0] == child:
            parts[-1] = (*parts[-1][:2], index + 1)
        else:
            parts.append((child, index, index + 1))
    return parts


def _are_modules(line: _Line, parts: Sequence[tuple[Frame | None, int, int]], rest: str) -> bool:
    """Whether each call runs one child module: `checkpoint(self.block, x)`, or a loop over children of one list.

    A function or a method (`checkpoint(self._inner, x)`) is one call that may run several.
    """
    children = [child.path for child, _, _ in parts if child is not None]
    if len(children) < len(parts):
        return False
    if len(children) == 1:
        return True
    given = _FUNCTION.match(rest)
    own = line.frames[-1].path if line.frames else ""
    if given is not None and given[1].startswith("self."):
        named = f"{own}.{given[1][5:]}" if own else given[1][5:]
        return all(path == named or path.startswith(named + ".") for path in children)
    lists = {path.rpartition(".")[0] for path in children}
    return len(lists) == 1 and all(path.rpartition(".")[2].isdigit() for path in children)


__all__ = ["all_regions", "written_regions"]
