"""The schedule of a step: kernel calls in order, and what each made and let go.

A free belongs to the last kernel that allocated before it: what dies at the end of a call, or in calls after it that
allocate nothing (views, in-place ops).
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
    made: tuple[Buffer, ...]
    freed: tuple[Buffer, ...]
    total: int
    highest: int


def schedule(lifetimes: Lifetimes) -> list[Stage]:
    """The stages in order of time. What was made adds up with what was freed to the change of `total`."""
    trace, died = lifetimes.trace, lifetimes.died
    freed_at: dict[int, Buffer] = {}
    for buffer in trace.buffers:
        if died[buffer.id] < lifetimes.ticks:
            freed_at[died[buffer.id]] = buffer
    born_at = {buffer.born: buffer for buffer in trace.buffers}
    stages: list[Stage] = []
    part = _Part("setup", -1)
    for tick in range(lifetimes.ticks):
        made = born_at.get(tick)
        if made is not None:
            kernel = trace.kernels[made.kernel]
            if (kernel.phase, kernel.op) != (part.phase, part.op) or (kernel.op < 0 and part.apart(made.kernel)):
                stages += part.done()
                part = _Part(kernel.phase, kernel.op)
        part.add(made, freed_at.get(tick), lifetimes.live[tick])
    stages += part.done()
    return stages


class _Part:
    """A stage that is being collected."""

    def __init__(self, phase: str, op: int) -> None:
        self.phase, self.op = phase, op
        self.kernels: dict[int, None] = {}
        self.made: list[Buffer] = []
        self.freed: list[Buffer] = []
        self.total = self.highest = 0

    def apart(self, kernel: int) -> bool:
        """Kernels of the loss, of the engine and of the optimizer belong to no op: each is a stage of its own."""
        return self.phase != "setup" and bool(self.kernels) and kernel not in self.kernels

    def add(self, made: Buffer | None, freed: Buffer | None, live: int) -> None:
        if made is not None:
            self.made.append(made)
            self.kernels[made.kernel] = None
        if freed is not None:
            self.freed.append(freed)
        self.total, self.highest = live, max(self.highest, live)

    def done(self) -> Sequence[Stage]:
        if not self.made and not self.freed:
            return ()
        made, freed = tuple(self.made), tuple(self.freed)
        return (Stage(self.phase, self.op, tuple(self.kernels), made, freed, self.total, self.highest),)
