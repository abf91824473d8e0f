"""The allocations of a process, from its start to the end of its third step, out of the trace of one step.

The trace is of a steady step. The steps before it differ in what exists: the first has no optimizer state until its
`optimizer.step()` makes it, in memory that the backward has just freed, and no loss or gradients of a step before.
Where a state comes to lie in step 1 decides what fits in steps 2 and 3: reserved memory may peak in any of them.

Sources: torch/optim/{adam,adamw,sgd,rmsprop,adagrad}.py (`_init_group`, `_multi_tensor_*`: when state is made),
torch/optim/optimizer.py (`zero_grad(set_to_none=True)`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, TypeAlias, TypeVar

from staticmem.allocators.placement import model_to_order
from staticmem.allocators.process import Mark, Origins, Process
from staticmem.allocators.workspace import FIRST, LAST, Workspace, WorkspaceModel
from staticmem.eager.trace import OPEN, Buffer, Trace

T = TypeVar("T")
STEPS = 3
Data: TypeAlias = Literal["resident", "each-step", "handed-over"]
_FIXED = ("parameter", "buffer", "gradient", "optimizer_state", "communication")
_At: TypeAlias = "dict[int, list[tuple[int, Workspace]]]"
# Kernels whose results are allocated in another order than they are returned in (aten/src/ATen/native/cuda/Dropout.cu,
# `dropout_cuda`: the mask, then the result). The trace has them in the order of the ops that are recorded from outside.
MASK_FIRST = ("aten.native_dropout.default",)
STATE_IN_CONSTRUCTOR = (".sum",)  # Adagrad fills its state in __init__ (torch/optim/adagrad.py)


def process(
    trace: Trace,
    workspace: WorkspaceModel | None = None,
    *,
    steps: int = STEPS,
    data: Data = "resident",
) -> Process:
    """The events of `steps` steps from the start of the process.

    Args:
        trace: a step of training or an inference; its setup phase says what exists before.
        workspace: what kernels take for themselves; None: nothing.
        data: where inputs and target come from. "resident": they are made once. "each-step": each step brings new
            ones, the old ones have gone before (`for x, y in loader: x = x.to(device)`). "handed-over": the old ones
            go when the new ones are there (`batch = next(loader).to(device)` into the same variable).
    """
    return _Builder(trace, workspace, data).run(steps)


class _Builder:
    def __init__(self, trace: Trace, workspace: WorkspaceModel | None, data: Data) -> None:
        self.trace, self.data = trace, data
        self.calls: list[int] = []
        self.sizes: list[int] = []
        self.buffers: list[int] = []  # of each id: its buffer, its kernel, whether it grows with the batch
        self.kernels: list[int] = []
        self.scales: list[bool] = []
        self.whats: dict[int, str] = {}
        self.starts: list[int] = [0]  # of each step: its first id
        self.marks: list[Mark] = []
        self.fallbacks: dict[int, tuple[int, ...]] = {}
        self.bounds: dict[int, tuple[int, int]] = {}
        self.strays: dict[int, tuple[int, int]] = {}
        self.empties: list[int] = []
        self.kept: set[str] = set()
        self.now: dict[int, int] = {}  # buffer -> id of its present allocation
        starts = dict(trace.phases)
        self.first = starts.get("forward", 0)
        self.optimizer = starts.get("optimizer", trace.ticks)
        made = trace.buffers
        setup = made.pick(range(bisect_left(made.born, self.first)))
        self.model = model_to_order(b for b in setup if b.category in ("parameter", "buffer", "communication"))
        self.inputs = [b for b in setup if b.category == "input"]
        self.state = _as_created(b for b in setup if b.category == "optimizer_state")
        # gradients that are there before the forward: zero_grad(set_to_none=False) keeps those of the first step
        self.gradients = [b for b in setup if b.category == "gradient" and b.died is None]
        known = {b.id for b in (*self.model, *self.inputs, *self.state, *self.gradients)}
        self.persistent = known
        self.previous = {b.id for b in setup if b.id not in known}  # the loss of the step before, and what modules keep
        fixed_shapes = {b.shape for b in self.model}
        self.grows = [
            category not in _FIXED and shape not in fixed_shapes
            for category, shape in zip(made.categories, made.shapes, strict=True)
        ]
        self.script = self._script(workspace)

    # -- one step ------------------------------------------------------------------------------------------------

    def _script(self, workspace: WorkspaceModel | None) -> list[tuple[int, int, Workspace | None]]:
        """The step as (tick, index, workspace): a birth of buffer `index`, a death of buffer ~`index`, or a workspace
        of kernel `index`."""
        script: list[tuple[int, int, Workspace | None]] = []
        made, first, masks = self.trace.buffers, self.first, self._masks()
        changes: list[int | None] = [None] * (self.trace.ticks - first)  # a tick has one
        for id, born in enumerate(made.born):
            if born >= first:
                changes[born - first] = masks.get(id, id)
        for id, died in enumerate(made.died):
            if first <= died < OPEN:
                changes[died - first] = ~id
        before, after = self._workspaces(workspace) if workspace is not None else ({}, {})
        for tick, index in enumerate(changes, first):
            if index is None:
                continue
            if tick in before:
                script += [(tick, kernel, space) for kernel, space in before[tick]]
            script.append((tick, index, None))
            if tick in after:
                script += [(tick, kernel, space) for kernel, space in after[tick]]
        return script

    def _masks(self) -> dict[int, int]:
        """Which buffer is allocated where the trace has another: the two of a kernel that allocates its mask first."""
        kernels = {index for index, name in enumerate(self.trace.kernels.names) if name in MASK_FIRST}
        found: dict[int, list[int]] = {}
        for id, kernel in enumerate(self.trace.buffers.kernels) if kernels else ():
            if kernel in kernels:
                found.setdefault(kernel, []).append(id)
        swapped: dict[int, int] = {}
        for first, second in (pair for pair in found.values() if len(pair) == 2):
            swapped[first], swapped[second] = second, first
        return swapped

    def _workspaces(self, model: WorkspaceModel) -> tuple[_At, _At]:
        """The workspaces that come before, and those that come after, the event of a tick."""
        taken = {kernel: spaces for kernel, spaces in model.taken() if spaces}
        kernels: dict[int, list[int]] = {kernel: [] for kernel in taken}
        for kernel, tick in zip(self.trace.buffers.kernels, self.trace.buffers.born, strict=True):
            if kernel in kernels and tick >= self.first:
                kernels[kernel].append(tick)
        before: _At = {}
        after: _At = {}
        for kernel, spaces in taken.items():
            ticks = kernels[kernel]
            if not ticks:  # it allocates nothing: before the next that does
                at = bisect_left(self._first_ticks, (kernel, 0))
                if at < len(self._first_ticks):
                    before.setdefault(self._first_ticks[at][1], []).extend((kernel, space) for space in spaces)
                continue
            for space in spaces:
                if space.after == FIRST:
                    before.setdefault(ticks[0], []).append((kernel, space))
                else:
                    at = -1 if space.after == LAST else min(space.after, len(ticks) - 1)
                    after.setdefault(ticks[at], []).append((kernel, space))
        return before, after

    @cached_property
    def _first_ticks(self) -> list[tuple[int, int]]:
        """Each kernel that allocates in the step, with the tick of its first allocation."""
        found: dict[int, int] = {}
        for kernel, tick in zip(self.trace.buffers.kernels, self.trace.buffers.born, strict=True):
            if tick >= self.first:
                found.setdefault(kernel, tick)
        return sorted(found.items())

    # -- the process ---------------------------------------------------------------------------------------------

    def run(self, steps: int) -> Process:
        self._mark(0, "setup")
        self._make(self.model)
        if self.data == "resident":
            self._bring_data()
        early = [b for b in self.state if b.name.endswith(STATE_IN_CONSTRUCTOR)]
        self._make(early)
        late = [*self.gradients, *((b for b in self.state if b not in early) if early else self.state)]
        old: list[int] = []  # ids of what the step before left, besides gradients
        gradients: list[int] = []
        last = start = 0  # where the calls of the step before, and of this one, begin
        for step in range(1, steps + 1):
            self.starts.append(len(self.sizes))
            last, start = start, len(self.calls)
            if step > 2:
                self._again(step, last)
            else:
                self._mark(step, "forward")
                if self.data != "resident":
                    self._bring_data()
                for id in gradients:  # zero_grad()
                    self._free(id)
                if not self.previous:  # an inference: nothing of the pass before is held into this one
                    for id in old:
                        self._free(id)
                self._step(step, late if step == 1 else (), old)
                if step == 1:  # a step without an optimizer
                    self._make([b for b in self.gradients if b.id not in self.now])
                old, gradients = self._left_over()
        return Process(
            tuple(self.calls), tuple(self.sizes), Origins(self.buffers, self.kernels, self.starts, self.whats),
            tuple(self.marks), tuple(self.scales), self.fallbacks, self.bounds, tuple(self.empties), self.strays,
        )  # fmt: skip

    def _again(self, step: int, start: int) -> None:
        """The step before once more, whose calls begin at `start`. From the second on steps differ in ids alone.

        What is released is of the step before, or the model's: an id of the step itself stands for the same `count`
        later, one of the step before that for the same buffer's.
        """
        first, end = self.starts[step - 1], self.starts[step]
        count, buffers = end - first, self.buffers
        made = {buffers[id]: id for id in range(first, end)}
        calls = self.calls[start:]
        for mark in [mark for mark in self.marks if mark.step == step - 1]:
            self.marks.append(Mark(step, mark.phase, mark.event + len(calls)))
        self.calls += [
            call + count if call >= 0 else call - count if ~call >= first else ~made[buffers[~call]] for call in calls
        ]
        self.sizes += self.sizes[first:end]
        self.buffers += buffers[first:end]
        self.kernels += self.kernels[first:end]
        self.scales += self.scales[first:end]
        _repeat(self.whats, first, count)
        _repeat(self.fallbacks, first, count)
        _repeat(self.bounds, first, count)
        _repeat(self.strays, first, count)

    def _bring_data(self) -> None:
        if self.data == "each-step":
            for buffer in self.inputs:
                if buffer.id in self.now:
                    self._free(self.now.pop(buffer.id))
        for buffer in self.inputs:
            gone = self.now.get(buffer.id)
            self._alloc(buffer)
            if gone is not None:
                self._free(gone)

    def _step(self, step: int, late: Sequence[Buffer], old: Sequence[int]) -> None:
        phases = [(name, tick) for name, tick in self.trace.phases if tick >= self.first][1:]
        held: list[int] = []
        left, awaited = list(old), len(self.previous)
        kernel = -1
        now, calls, grows = self.now, self.calls, self.grows
        nbytes, kernels = self.trace.buffers.nbytes, self.trace.buffers.kernels
        for tick, index, space in self.script:
            while phases and tick >= phases[0][1]:
                name, _ = phases.pop(0)
                self._release(held)
                self._mark(step, name)
                if name == "optimizer":
                    self._make(late)
                    late = ()
            if space is not None:
                if space.held and index != kernel:
                    self._release(held)
                kernel = index
                self._workspace(index, space, held)
                continue
            if index >= 0:
                if held and kernels[index] != kernel:
                    self._release(held)
                kernel = kernels[index]
                now[index] = self._new(nbytes[index], index, kernel, grows[index])
                continue
            if held:
                self._release(held)
            if ~index in now:
                calls.append(~now.pop(~index))
            elif ~index in self.previous:  # the loss of the step before, or what a module kept of it
                awaited -= 1
                size = nbytes[~index]
                gone = left if not awaited else [id for id in left if self.sizes[id] == size][:1]
                left = [id for id in left if id not in gone]
                for id in gone:
                    self._free(id)
        self._release(held)
        for name, _ in phases:  # phases without an allocation in the trace
            self._mark(step, name)
            if name == "optimizer":
                self._make(late)
                late = ()

    def _make(self, buffers: Sequence[Buffer]) -> None:
        """Allocates what lasts: the model, and the optimizer's state."""
        ids = range(len(self.sizes), len(self.sizes) + len(buffers))
        made = [b.id for b in buffers]
        self.now.update(zip(made, ids, strict=True))
        self.calls += ids
        self.sizes += [b.nbytes for b in buffers]
        self.buffers += made
        self.kernels += [b.kernel for b in buffers]
        self.scales += [self.grows[id] for id in made]

    def _left_over(self) -> tuple[list[int], list[int]]:
        """Ids of what a step leaves to the next: what lives until its loss is there, and gradients."""
        old: list[int] = []
        gradients: list[int] = []
        for buffer in [b for b in self.now if b not in self.persistent]:
            gradient = self.trace.buffers.categories[buffer] == "gradient"
            (gradients if gradient else old).append(self.now.pop(buffer))
        return old, gradients

    # -- events --------------------------------------------------------------------------------------------------

    def _mark(self, step: int, phase: str) -> None:
        self.marks.append(Mark(step, phase, len(self.calls)))

    def _alloc(self, buffer: Buffer) -> None:
        self.now[buffer.id] = self._new(buffer.nbytes, buffer.id, buffer.kernel, self.grows[buffer.id])

    def _new(self, nbytes: int, buffer: int, kernel: int, grows: bool) -> int:
        id = len(self.sizes)
        self.calls.append(id)
        self.sizes.append(nbytes)
        self.buffers.append(buffer)
        self.kernels.append(kernel)
        self.scales.append(grows)
        return id

    def _free(self, id: int) -> None:
        self.calls.append(~id)

    def _workspace(self, kernel: int, space: Workspace, held: list[int]) -> None:
        name = space.keep or space.once
        if name is not None:
            if name in self.kept:
                return
            self.kept.add(name)
        id = self._new(space.nbytes, -1, kernel, space.keep is None)
        self.whats[id] = space.what
        if space.fallbacks:
            self.fallbacks[id] = space.fallbacks
        if space.bounds is not None:
            self.bounds[id] = space.bounds
        if space.strays is not None:
            self.strays[id] = space.strays
        if space.keep is None:
            if space.held:
                held.append(id)
            else:
                self._free(id)
        if space.once is not None:
            id = self._new(0, -1, kernel, False)
            self.whats[id] = "empty_cache"
            self.empties.append(id)

    def _release(self, held: list[int]) -> None:
        for id in held:
            self._free(id)
        held.clear()


def _repeat(known: dict[int, T], first: int, count: int) -> None:
    """What is known of ids from `first` on holds for the ones `count` later too."""
    known.update({id + count: value for id, value in known.items() if id >= first})


def _as_created(state: Iterator[Buffer]) -> list[Buffer]:
    """State in the order in which an optimizer makes it: for each parameter its `step` before the others."""
    groups: dict[str, list[Buffer]] = {}
    for buffer in state:
        groups.setdefault(buffer.name.rpartition(".")[0], []).append(buffer)
    return [b for group in groups.values() for b in sorted(group, key=lambda b: not b.name.endswith(".step"))]
