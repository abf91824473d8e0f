"""What strategies ask of a step: its parameters, the blocks of its model, and when each of them is at work."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from staticmem.eager.trace import Trace
from staticmem.ir.graph import Graph
from staticmem.parallel.rewrite import Piece, Rewrite

_NUMBERED = re.compile(r"(?:^|\.)\d+$")  # `layers.3`: an element of a ModuleList or Sequential
ROOT = ""  # the group of all that is in no block


@dataclass(slots=True)
class Weight:
    """A parameter of the step: its storage and what training adds to it."""

    name: str
    shape: tuple[int, ...]
    storage: Piece
    gradients: list[Piece] = field(default_factory=list)
    states: list[Piece] = field(default_factory=list)
    temporaries: list[Piece] = field(default_factory=list)  # of the optimizer's step, of the parameter's shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def trained(self) -> bool:
        return bool(self.gradients)


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of a step in which one group works: from the tick of its first allocation to that of its last."""

    group: str
    phase: str
    start: int
    end: int
    segment: int  # which phase of the trace: forward and backward may occur more than once


def weights(rewrite: Rewrite) -> list[Weight]:
    """The parameters in the order of the model, each with its gradient, state and temporaries of the optimizer."""
    found: dict[str, Weight] = {}
    optimizer = rewrite.span("optimizer")
    loose: dict[int, list[Piece]] = {}  # buffers of the optimizer's step by kernel
    for piece in rewrite.pieces:
        if piece.category == "parameter":
            found.setdefault(piece.name, Weight(piece.name, piece.shape, piece))
        elif piece.category == "gradient" and piece.name.endswith(".grad"):
            of = found.get(piece.name.removesuffix(".grad"))
            if of is not None:
                of.gradients.append(piece)
        elif piece.category == "optimizer_state":
            of = found.get(piece.name.rpartition(".")[0])
            if of is not None:
                of.states.append(piece)
        elif optimizer is not None and piece.born[0] >= optimizer[0] and piece.kernel is not None:
            loose.setdefault(piece.kernel, []).append(piece)
    listed = [w for w in found.values() if w.trained]
    for pieces in loose.values():
        _assign(pieces, listed)
    return list(found.values())


def _assign(pieces: Sequence[Piece], listed: Sequence[Weight]) -> None:
    """Temporaries of one call to the parameters that it goes through in order (`_foreach_*` lists)."""
    at = 0
    for piece in pieces:
        for step in range(len(listed)):
            weight = listed[(at + step) % len(listed)]
            if weight.shape == piece.shape:
                weight.temporaries.append(piece)
                at = at + step + 1
                break


def blocks(graph: Graph, numel: Mapping[str, int]) -> tuple[str, ...]:
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
        owned = sum(size for name, size in numel.items() if _above(name, paths))
        if owned > most or (owned == most and best and len(paths) < len(best)):
            best, most = tuple(paths), owned
    return best


def _above(name: str, paths: Mapping[str, None]) -> list[str]:
    """The paths in `paths` that a parameter's name lies under."""
    parts = name.split(".")
    return [path for i in range(1, len(parts)) if (path := ".".join(parts[:i])) in paths]


def group_of_name(name: str, paths: Sequence[str]) -> str:
    """The block that a parameter belongs to."""
    known = set(paths)
    parts = name.split(".")
    return next((path for i in range(1, len(parts)) if (path := ".".join(parts[:i])) in known), ROOT)


def groups_of_ops(graph: Graph, paths: Sequence[str]) -> list[str]:
    """The block of each op of the graph."""
    known = set(paths)
    return [next((f.path for f in op.modules if f.path in known), ROOT) for op in graph.ops]


def runs(trace: Trace, groups: Sequence[str]) -> list[Run]:
    """Which group works when, in order of time. `groups` has the group of each op; what belongs to no op (the loss,
    sums of gradients) continues the run that it lies in, and is no run before the first."""
    found: list[Run] = []
    starts = [*trace.phases, ("", trace.ticks)]
    segment = 0
    group = ROOT
    for buffer in trace.buffers:
        while segment + 1 < len(trace.phases) and buffer.born >= starts[segment + 1][1]:
            segment += 1
            group = ROOT
        phase = trace.phases[segment][0]
        if phase not in ("forward", "backward"):
            continue
        op = trace.kernels[buffer.kernel].op
        last = found[-1] if found else None
        if 0 <= op < len(groups):
            group = groups[op]
        elif last is None or last.segment != segment:
            continue  # the loss's own backward: the model has not begun
        if last is not None and last.group == group and last.segment == segment:
            found[-1] = Run(group, phase, last.start, buffer.born, segment)
        else:
            found.append(Run(group, phase, buffer.born, buffer.born, segment))
    return found


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
