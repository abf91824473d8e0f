"""A step taken apart: what the sizes of inputs change, and what the optimizer adds.

A trace is a sequence of allocations and releases. Two steps of one *structure* have the same kernels and the same
sequence, and differ in bytes alone. Parts of a trace:

- the core: everything but the optimizer's state and the allocations of its step. It has one structure over a range of
  batch sizes, and there the bytes of every buffer are an affine function of the batch (`Affine`).
- the optimizer's part: state (alive from before the forward to the end) and the curve of its step over the level at
  which it starts. It depends on the parameters, and not on the sizes of inputs.

Nothing of this is assumed: `take_apart` gives None for the optimizer's part where a trace is not of that form, and
`Affine.through` gives None where traces differ in more than bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from staticmem.eager.trace import ROUND
from staticmem.liveness import Lifetimes
from staticmem.report.model import CATEGORIES

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OptimizerPart:
    """What an optimizer adds. Bytes are rounded up to 512 for each buffer.

    `identity` is all that has to be equal where the part serves for another size of input. `state` is alive through
    the step; `peak` is the most that its step adds for a moment, and `peak_by_category` what that consists of.
    """

    identity: int
    state: int
    peak: int
    peak_by_category: tuple[tuple[str, int], ...]

    @classmethod
    def nothing(cls) -> OptimizerPart:
        """The part of no optimizer."""
        return cls(0, 0, 0, ())


@dataclass(frozen=True)
class Core:
    """The step without its optimizer.

    `structure` is equal where two steps differ in bytes alone. `events` has an index into `nbytes` for an allocation,
    and its complement for a release. `phases` has the phase of each event, as an index into `names`, and `categories`
    that of each buffer, as an index into `category_names`.
    """

    structure: int
    parameters: int  # equal where the parameters are: names, shapes, types
    nbytes: Ints
    categories: Ints
    events: Ints
    phases: Ints
    names: tuple[str, ...]
    category_names: tuple[str, ...]

    def sizes(self) -> Ints:
        """Bytes of every buffer, rounded up to 512, as one row."""
        rounded: Ints = -(-self.nbytes // ROUND) * ROUND
        return rounded[None, :]


def take_apart(lifetimes: Lifetimes, apart: bool = True) -> tuple[Core, OptimizerPart | None]:
    """The core of a step and its optimizer's part; None where the two cannot be separated.

    They cannot where the optimizer's step releases what it did not allocate, or leaves behind what it did. Without
    `apart` the core is the whole step.
    """
    trace = lifetimes.trace
    start = next((tick for name, tick in trace.phases if name == "optimizer"), trace.ticks)
    forward = next((tick for name, tick in trace.phases if name == "forward"), 0)
    buffers, born, died, sizes = trace.buffers, lifetimes.born, lifetimes.died, lifetimes.sizes
    state = [b.id for b in buffers if b.category == "optimizer_state" and born[b.id] < forward]
    mine = set(state)
    added = [b.id for b in buffers if born[b.id] >= start]
    separable = apart and all(died[i] >= trace.ticks for i in state)
    separable = separable and all(start <= died[i] < trace.ticks for i in added)
    mine |= set(added)
    separable = separable and not any(start <= died[b.id] < trace.ticks for b in buffers if b.id not in mine)
    if not separable:
        mine, state, added = set(), [], []
    core = _core(lifetimes, mine)
    if not separable:
        return core, None
    return core, _optimizer_part(lifetimes, state, added, start, [sizes[i] for i in added])


def _core(lifetimes: Lifetimes, left_out: set[int]) -> Core:
    trace = lifetimes.trace
    kept = [b for b in trace.buffers if b.id not in left_out]
    renamed = {b.id: index for index, b in enumerate(kept)}
    changes = []
    for buffer in kept:
        changes.append((lifetimes.born[buffer.id], renamed[buffer.id]))
        if lifetimes.died[buffer.id] < lifetimes.ticks:
            changes.append((lifetimes.died[buffer.id], ~renamed[buffer.id]))
    changes.sort()
    names = tuple(dict.fromkeys(name for name, _ in trace.phases))
    starts = [tick for _, tick in trace.phases]
    order = [names.index(name) for name, _ in trace.phases]
    ticks = np.asarray([tick for tick, _ in changes], dtype=np.int64)
    at = np.searchsorted(np.asarray(starts, dtype=np.int64), ticks, side="right") - 1
    phases = np.asarray(order, dtype=np.int64)[np.maximum(at, 0)]
    events = [index for _, index in changes]
    kernels = trace.kernels
    described = tuple(
        (k.name, k.phase, k.op, b.category, b.name, b.dtype.name) for b in kept for k in (kernels[b.kernel],)
    )
    ran = tuple((k.name, k.op) for k in kernels if k.phase not in ("setup", "optimizer"))
    parameters = tuple(
        (b.name, b.shape, b.dtype.name, b.nbytes) for b in kept if b.category in ("parameter", "gradient")
    )
    category_names = tuple(dict.fromkeys((*CATEGORIES, *(b.category for b in kept))))
    category = {name: index for index, name in enumerate(category_names)}
    return Core(
        structure=hash((described, ran, tuple(events), names, tuple(phases.tolist()))),
        parameters=hash(parameters),
        nbytes=np.asarray([b.nbytes for b in kept], dtype=np.int64),
        categories=np.asarray([category[b.category] for b in kept], dtype=np.int64),
        events=np.asarray(events, dtype=np.int64),
        phases=phases,
        names=names,
        category_names=category_names,
    )


def _optimizer_part(
    lifetimes: Lifetimes, state: Sequence[int], added: Sequence[int], start: int, sizes: Sequence[int]
) -> OptimizerPart:
    trace = lifetimes.trace
    categories: dict[str, int] = {}
    level = lifetimes.level_before(start)
    within = lifetimes.live[start:]
    highest = max(within, default=level)
    if highest > level:
        tick = start + within.index(highest)
        for index in added:
            if lifetimes.born[index] <= tick < lifetimes.died[index]:
                category = trace.buffers[index].category
                categories[category] = categories.get(category, 0) + lifetimes.sizes[index]
    states = tuple((trace.buffers[i].name, lifetimes.sizes[i]) for i in state)
    spans = tuple((lifetimes.born[i] - start, lifetimes.died[i] - start) for i in added)
    identity = hash((states, spans, tuple(sizes)))
    total = sum(lifetimes.sizes[i] for i in state)
    return OptimizerPart(identity, total, max(highest - level, 0), tuple(categories.items()))


@dataclass(frozen=True)
class Affine:
    """A structure over batch sizes `low` to `high`: buffer i has `constant[i] + slope[i] * batch` bytes."""

    core: Core
    constant: Ints
    slope: Ints
    low: int
    high: int

    @classmethod
    def through(cls, cores: Sequence[tuple[int, Core]]) -> Affine | None:
        """The structure of steps at some batches (ascending, at least two); None where they are not of one structure,
        or where the bytes of a buffer are not on one line."""
        (low, first), (high, last) = cores[0], cores[-1]
        if low == high or any(core.structure != first.structure for _, core in cores):
            return None
        slope, rest = np.divmod(last.nbytes - first.nbytes, high - low)
        constant = first.nbytes - slope * low
        if rest.any():
            return None
        for batch, core in cores[1:-1]:
            if not np.array_equal(constant + slope * batch, core.nbytes):
                return None
        return cls(first, constant, slope, low, high)

    @classmethod
    def constant_of(cls, batch: int, core: Core) -> Affine:
        """The structure of one step alone: its bytes for any batch."""
        return cls(core, core.nbytes, np.zeros_like(core.nbytes), batch, batch)

    def sizes(self, batches: Sequence[int]) -> Ints:
        """Bytes of every buffer (columns) at every batch (rows), rounded up to 512."""
        nbytes = self.constant[None, :] + self.slope[None, :] * np.asarray(batches, dtype=np.int64)[:, None]
        rounded: Ints = -(-nbytes // ROUND) * ROUND
        return rounded

    def peak(self, batch: int) -> int:
        """The peak of `curves` at one batch, for a part of its cost."""
        return int(_live(self.core, self.sizes([batch])).max(initial=0))

    def curves(self, batches: Sequence[int]) -> Curves:
        """The peaks of the core at some batches."""
        return curves(self.core, self.sizes(batches))


@dataclass(frozen=True)
class Curves:
    """Peaks of a core; one row a batch. Bytes.

    `peak` over the whole core and its `by_category`, `end` when it is over and its `end_by_category`; `phase_peak`
    has a column for each of `phases`.
    """

    peak: Ints
    peak_phase: list[str]
    by_category: Ints
    end: Ints
    end_by_category: Ints
    phases: tuple[str, ...]
    phase_peak: Ints
    categories: tuple[str, ...]

    def take(self, rows: Sequence[int]) -> Curves:
        """Some of the rows, in this order."""
        at = list(rows)
        phase, ends = [self.peak_phase[i] for i in at], (self.end[at], self.end_by_category[at])
        by_category, peaks = self.by_category[at], self.phase_peak[at]
        return Curves(self.peak[at], phase, by_category, *ends, self.phases, peaks, self.categories)


def curves(core: Core, sizes: Ints) -> Curves:
    """The peaks of a core whose buffers have these sizes: buffers are columns, rows are independent."""
    events = core.events
    if not len(events):
        return _nothing(core, sizes)
    buffers, live = np.where(events < 0, ~events, events), _live(core, sizes)
    at = live.argmax(axis=1)
    rows = np.arange(len(sizes))
    born = np.zeros(sizes.shape[1], dtype=np.int64)
    died = np.full(sizes.shape[1], len(events), dtype=np.int64)
    order = np.arange(len(events))
    born[buffers[events >= 0]] = order[events >= 0]
    died[buffers[events < 0]] = order[events < 0]
    onehot = np.eye(len(core.category_names), dtype=np.int64)[core.categories]
    alive = (born[None, :] <= at[:, None]) & (at[:, None] < died[None, :])
    lasting = (died == len(events)).astype(np.int64)
    phase_peak = np.zeros((len(sizes), len(core.names)), dtype=np.int64)
    for index in range(len(core.names)):
        where = np.flatnonzero(core.phases == index)
        if len(where):
            # what is alive when a phase begins belongs to it
            first = max(int(where[0]) - 1, 0)
            phase_peak[:, index] = np.maximum(live[:, where].max(axis=1), live[:, first])
        else:
            phase_peak[:, index] = live[:, -1]
    return Curves(
        peak=live[rows, at],
        peak_phase=[core.names[core.phases[i]] for i in at],
        by_category=(sizes * alive) @ onehot,
        end=live[:, -1],
        end_by_category=(sizes * lasting[None, :]) @ onehot,
        phases=core.names,
        phase_peak=phase_peak,
        categories=core.category_names,
    )


def _live(core: Core, sizes: Ints) -> Ints:
    """Bytes that are alive after each event (columns), of rows of sizes."""
    events = core.events
    of_events = sizes[:, np.where(events < 0, ~events, events)]
    live: Ints = np.cumsum(np.where(events < 0, -of_events, of_events), axis=1)
    return live


def _nothing(core: Core, sizes: Ints) -> Curves:
    """The peaks of a step that holds no tensor at all, as of a model whose results are constants."""
    rows, of_categories = len(sizes), np.zeros((len(sizes), len(core.category_names)), dtype=np.int64)
    none, of_phases = np.zeros(rows, dtype=np.int64), np.zeros((rows, len(core.names)), dtype=np.int64)
    phase = core.names[0]
    return Curves(none, [phase] * rows, of_categories, none, of_categories, core.names, of_phases, core.category_names)
