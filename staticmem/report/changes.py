"""What appears and goes at every stage of a step: the listing of `staticmem trace`, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from staticmem.eager.trace import Buffer
from staticmem.ir.graph import Graph
from staticmem.liveness import Lifetimes
from staticmem.liveness.schedule import Stage, schedule
from staticmem.liveness.why import module_of_op, short

SCHEMA = "staticmem.trace/1"


@dataclass(frozen=True, slots=True)
class Group:
    """Buffers of one shape, dtype and category. `bytes` is their sum, each rounded up to 512."""

    count: int
    dtype: str
    shape: tuple[int, ...]
    category: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """One stage, `index` in the whole list: `ops` are its kernels, `allocated` and `freed` the groups, largest first.

    `total_bytes` is alive when it is over, `highest_bytes` the most within it. The total changes by
    `allocated_bytes - freed_bytes`.
    """

    index: int
    phase: str
    ops: tuple[str, ...]
    node: str | None
    module: str | None
    allocated: tuple[Group, ...]
    freed: tuple[Group, ...]
    allocated_bytes: int
    freed_bytes: int
    total_bytes: int
    highest_bytes: int


@dataclass(frozen=True, slots=True)
class ChangeList:
    """Stages of a step in order. `peak_bytes` is the largest `highest_bytes`; `peak_stage` the index of that stage.

    `peak` is that stage, and `count` how many there are, also where the list has a part of them. Groups below `least`
    bytes share a line.
    """

    schema: str
    model: str
    peak_bytes: int
    peak_stage: int
    stages: tuple[Change, ...]
    peak: Change | None = field(default=None, metadata={"json": False})
    count: int = field(default=0, metadata={"json": False})
    least: int = field(default=0, metadata={"json": False})


def changes(model: str, graph: Graph, lifetimes: Lifetimes) -> ChangeList:
    """The list of a step's stages."""
    stages = schedule(lifetimes)
    listed = tuple(_change(i, graph, lifetimes, stage) for i, stage in enumerate(stages))
    at = next((i for i, stage in enumerate(stages) if stage.highest == lifetimes.peak_bytes), 0)
    peak = listed[at] if listed else None
    return ChangeList(SCHEMA, model, lifetimes.peak_bytes, at, listed, peak, len(listed))


def _change(index: int, graph: Graph, lifetimes: Lifetimes, stage: Stage) -> Change:
    kernels = lifetimes.trace.kernels
    ops = tuple(dict.fromkeys(short(kernels[k].name) for k in stage.kernels)) if stage.phase != "setup" else ()
    node = graph.ops[stage.op].name if 0 <= stage.op < len(graph.ops) else None
    place = (node, module_of_op(graph, stage.op) or None)
    sizes = (sum(b.size for b in stage.allocated), sum(b.size for b in stage.freed), stage.total, stage.highest)
    return Change(index, stage.phase, ops, *place, _groups(stage.allocated), _groups(stage.freed), *sizes)


def _groups(buffers: Sequence[Buffer]) -> tuple[Group, ...]:
    alike: dict[tuple[str, tuple[int, ...], str], list[Buffer]] = {}
    for buffer in buffers:
        alike.setdefault((buffer.dtype.name, buffer.shape, buffer.category), []).append(buffer)
    groups = [
        Group(len(same), dtype, shape, category, sum(b.size for b in same))
        for (dtype, shape, category), same in alike.items()
    ]
    return tuple(sorted(groups, key=lambda g: (-g.bytes, g.dtype, g.shape)))


def select(listing: ChangeList, phase: str | None = None, module: str | None = None, least: int = 0) -> ChangeList:
    """The list with stages of a phase, of a module and those in it, that make or free at least `least` bytes."""
    stages = tuple(
        stage
        for stage in listing.stages
        if (phase is None or stage.phase == phase)
        and (module is None or stage.module == module or (stage.module or "").startswith(f"{module}."))
        and max(stage.allocated_bytes, stage.freed_bytes) >= least
    )
    return replace(listing, stages=stages, least=least)
