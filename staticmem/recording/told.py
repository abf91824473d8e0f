"""What the user of an export is told of sizes. It is what the recording says, by which `analyze` goes.

Puts recordings into files that have a graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from staticmem.errors import StaticmemError
from staticmem.frontends import carried
from staticmem.ir.expressions import readable

MOST_CONDITIONS = 3  # that a line names


def lines_of(document: Mapping[str, Any], axes: Sequence[Mapping[int, str]] | None = None) -> list[str]:
    """What a recording says of sizes: those that are open with their limits, and those that the code fixed: of
    `axes`, which has names of axes for each input, else by their names."""
    symbols, sizes = document["symbols"], document["sizes"]
    of_one, others = _conditions(symbols, [*sizes["conditions"], *document["training_conditions"]])
    opened = []
    for name, (low, high) in symbols.items():
        limit = f"from {low}" if low > 1 else ""
        if high is not None:
            limit = f"{low} to {high}"
        limits = [limit, *of_one.get(name, ())]
        told = ", ".join(filter(None, dict.fromkeys(limits)))
        opened.append(f"{name} ({told})" if told else name)
    lines = [f"Open sizes: {', '.join(opened) or 'none'}"]
    if fixed := _fixed(document, axes):
        lines.append(f"Fixed by the code: {', '.join(fixed)}")
    if others:
        more = f", and {len(others) - MOST_CONDITIONS} more" if len(others) > MOST_CONDITIONS else ""
        lines.append(f"Recorded for sizes where {', '.join(map(readable, others[:MOST_CONDITIONS]))}{more}")
    if branches := [f"{file}:{line} had {answer}" for file, line, _, answer in document.get("decided", [])]:
        lines.append(f"Followed as it ran on the example inputs: {', '.join(branches[:MOST_CONDITIONS])}")
    return lines


def _fixed(document: Mapping[str, Any], axes: Sequence[Mapping[int, str]] | None) -> list[str]:
    if axes is None:
        return [f"{name} = {n}" for name, n in document["sizes"]["example"].items() if name not in document["symbols"]]
    inputs = [(name, shape) for name, _, shape in document["inputs"]]
    return [
        f"{name}[{axis}] = {shape[axis]}"
        for (name, shape), names in zip(inputs, axes, strict=True)
        for axis in names
        if isinstance(shape[axis], int)
    ]


def both_lines(recorded: list[str], graph: list[str]) -> list[str]:
    """Lines on the sizes of a recording, and on those of the graph beside it where they differ."""
    if all(_without_limits(line) in map(_without_limits, recorded) for line in graph):
        return recorded
    return [*recorded, f"The graph beside it, for other tools: {'; '.join(graph).lower()}"]


def _without_limits(line: str) -> str:
    """A line on sizes without what follows a name in brackets."""
    return re.sub(r" \([^)]*\)", "", line)


def _conditions(symbols: Mapping[str, Any], texts: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Conditions on one open size that its range does not have ("not 1"), by its name, and all others."""
    of_one: dict[str, list[str]] = {}
    others: list[str] = []
    for text in dict.fromkeys(texts):
        match = re.fullmatch(r"Ne\((?:(\w+),(\d+)|(\d+),(\w+))\)", text)
        name, number = (match[1] or match[4], match[2] or match[3]) if match else ("", "")
        ranged = re.fullmatch(r"(?:Ge|Gt|Le|Lt)\((?:\w+,\d+|\d+,\w+)\)", text)
        if name in symbols:
            of_one.setdefault(name, []).append(f"not {number}")
        elif not ranged:
            others.append(text)
    return of_one, others


def with_recording(data: bytes, kind: str, document: dict[str, Any]) -> bytes:
    """The bytes of a file, `.pt2` or `.onnx`, that carries the recording, in place of the one that it has.

    All else in the file stays as it is.
    """
    if kind == ".pt2":
        return carried.into_archive(data, document)
    import onnx

    proto = onnx.ModelProto()
    proto.ParseFromString(data)
    carried.into_proto(proto, document)
    return bytes(proto.SerializeToString(deterministic=True))


def alone(document: dict[str, Any], kind: str, error: StaticmemError) -> bytes:
    """The bytes of a file that has a recording and no graph.

    Raises:
        StaticmemError: `error`, which says why there is no graph, for a format that cannot be without.
    """
    if kind != ".pt2":
        error.hint = "An .onnx is its graph. 'staticmem analyze' needs none: write the recording with -o model.pt2."
        raise error
    return carried.archive_of(document)
