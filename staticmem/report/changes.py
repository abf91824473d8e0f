"""What appears and goes at every stage of a step: the listing of `staticmem trace`, as frozen values.

The schedule of a step: kernel calls in order, with the buffers that each allocated and freed.

A free belongs to the last kernel that allocated before it; it happens at the end of that call, or in a later call that
allocates nothing (a view, an in-place op).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from staticmem.eager.trace import Buffer
from staticmem.ir.graph import Graph
from staticmem.liveness import Lifetimes
from staticmem.liveness.why import module_of_op, short


@dataclass(frozen=True, slots=True)
class Stage:
    """The kernels that one op ran in one phase, without another op between. Bytes are rounded up to 512 a buffer.

    `kernels` are indices into `trace.kernels`. What exists before the step is one stage. `total` is alive when the
    stage is over, `highest` the most that was alive within it.
    """

    phase: str
    op: int
    kernels: tuple[int, ...]
    allocated: tuple[Buffer, ...]
    freed: tuple[Buffer, ...]
    total: int
    highest: int


def schedule(lifetimes: Lifetimes) -> list[Stage]:
    """The stages in order of time. The change of `total` is allocated less freed."""
    trace, died = lifetimes.trace, lifetimes.died
    freed_at: dict[int, Buffer] = {}
    for buffer in trace.buffers:
        if died[buffer.id] < lifetimes.ticks:
            freed_at[died[buffer.id]] = buffer
    born_at = {buffer.born: buffer for buffer in trace.buffers}
    stages: list[Stage] = []
    stage = _Part("setup", -1)
    for tick in range(lifetimes.ticks):
        allocated = born_at.get(tick)
        if allocated is not None:
            kernel = trace.kernels[allocated.kernel]
            if (kernel.phase, kernel.op) != (stage.phase, stage.op) or (
                kernel.op < 0 and stage.apart(allocated.kernel)
            ):
                stages += stage.done()
                stage = _Part(kernel.phase, kernel.op)
        stage.add(allocated, freed_at.get(tick), lifetimes.live[tick])
    stages += stage.done()
    return stages


class _Part:
    """A stage that is being collected."""

    def __init__(self, phase: str, op: int) -> None:
        self.phase, self.op = phase, op
        self.kernels: dict[int, None] = {}
        self.allocated: list[Buffer] = []
        self.freed: list[Buffer] = []
        self.total = self.highest = 0

    def apart(self, kernel: int) -> bool:
        """Kernels of the loss, of the engine and of the optimizer belong to no op: each is a stage of its own."""
        return self.phase != "setup" and bool(self.kernels) and kernel not in self.kernels

    def add(self, allocated: Buffer | None, freed: Buffer | None, live: int) -> None:
        if allocated is not None:
            self.allocated.append(allocated)
            self.kernels[allocated.kernel] = None
        if freed is not None:
            self.freed.append(freed)
        self.total, self.highest = live, max(self.highest, live)

    def done(self) -> Sequence[Stage]:
        if not self.allocated and not self.freed:
            return ()
        allocated, freed = tuple(self.allocated), tuple(self.freed)
        return (Stage(self.phase, self.op, tuple(self.kernels), allocated, freed, self.total, self.highest),)


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
