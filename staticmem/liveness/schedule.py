"""The schedule of a step: kernel calls in order, with the buffers that each allocated and freed.

A free belongs to the last kernel that allocated before it; it happens at the end of that call, or in a later call that
allocates nothing (a view, an in-place op).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from staticmem.eager.trace import Buffer
from staticmem.liveness.intervals import Lifetimes


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
