"""The repeated blocks of a model, which are the units that strategies split, and when each of them runs in a step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from staticmem.eager.trace import Buffer, Trace
from staticmem.ir.graph import Graph

_NUMBERED = re.compile(r"(?:^|\.)\d+$")  # `layers.3`: an element of a ModuleList or Sequential
ROOT = ""  # the group of all that is in no block


@dataclass(frozen=True, slots=True)
class Run:
    """An interval of a step in which one group runs: from the tick of its first allocation to that of its last."""

    group: str
    phase: str
    start: int
    end: int
    segment: int  # which phase of the trace: forward and backward may occur more than once


def repeated_blocks(graph: Graph, numel: Mapping[str, int]) -> tuple[str, ...]:
    """Paths of the blocks that a model repeats (`layers.0`, `layers.1`, ...): modules of one class that are elements of
    a ModuleList or Sequential, of the class whose modules own the most parameters. In order of their first op.

    `numel` has the elements of each parameter. This is the unit that FSDP's wrapping by class, `fully_shard` in a loop
    over the layers and pipeline stages take. Empty where a model repeats nothing.
    """
    classes: dict[str, dict[str, None]] = {}
    for op in graph.ops:
        for frame in op.modules:
            if _NUMBERED.search(frame.path):
                classes.setdefault(frame.cls, {}).setdefault(frame.path)
    best: tuple[str, ...] = ()
    most = 0
    for paths in classes.values():
        if len(paths) < 2:
            continue
        owned = sum(size for name, size in numel.items() if block_of_name(name, paths) != ROOT)
        if owned > most or (owned == most and best and len(paths) < len(best)):
            best, most = tuple(paths), owned
    return best


def block_of_name(name: str, paths: Sequence[str] | Mapping[str, None]) -> str:
    """The outermost of the blocks that a parameter belongs to."""
    parts = name.split(".")
    return next((path for i in range(1, len(parts)) if (path := ".".join(parts[:i])) in paths), ROOT)


def blocks_of_ops(graph: Graph, paths: Sequence[str]) -> list[str]:
    """The block of each op of the graph."""
    blocks = set(paths)
    return [next((f.path for f in op.modules if f.path in blocks), ROOT) for op in graph.ops]


def names_of_parameters(graph: Graph) -> dict[str, str]:
    """The model's name of each parameter value; a tied one has that of the parameter that it shares."""
    names = {p.value.name: p.fqn for p in graph.parameters if p.alias_of is None}
    return names | {p.value.name: names.get(p.alias_of, p.fqn) for p in graph.parameters if p.alias_of is not None}


def _walk_segments(trace: Trace) -> Iterator[tuple[Buffer, int]]:
    """Buffers in order of birth, each with the index of the phase that it is born in."""
    starts = [tick for _, tick in trace.phases]
    segment = 0
    for buffer in trace.buffers:
        while segment + 1 < len(starts) and buffer.born >= starts[segment + 1]:
            segment += 1
        yield buffer, segment


def runs(trace: Trace, groups: Sequence[str]) -> list[Run]:
    """The runs of the groups in order of time. `groups` has the group of each op. Kernels of no op (the loss, sums of
    gradients) belong to the run that they interrupt; before the first run they are ignored."""
    listed: list[Run] = []
    for buffer, segment in _walk_segments(trace):
        phase = trace.phases[segment][0]
        if phase not in ("forward", "backward"):
            continue
        op = trace.kernels[buffer.kernel].op
        last = listed[-1] if listed and listed[-1].segment == segment else None
        if 0 <= op < len(groups):
            group = groups[op]
        elif last is None:
            continue  # the loss's own backward: the model has not begun
        else:
            group = last.group
        if last is not None and last.group == group:
            listed[-1] = Run(group, phase, last.start, buffer.born, segment)
        else:
            listed.append(Run(group, phase, buffer.born, buffer.born, segment))
    return listed


def forward_ends(trace: Trace) -> dict[int, int]:
    """For each forward phase the tick at which the model has returned: the first allocation of the loss."""
    ends: dict[int, int] = {}
    for buffer, segment in _walk_segments(trace):
        if trace.phases[segment][0] != "forward":
            continue
        if trace.kernels[buffer.kernel].op >= 0:
            ends.pop(segment, None)
        else:
            ends.setdefault(segment, buffer.born)
    return ends
