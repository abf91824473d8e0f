"""The record of a step: kernels in order, buffers with their births and deaths, and who held each buffer when.

Time is a tick: every allocation and every release is one tick, so an interval [born, died) says exactly what coexists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from staticmem.eager.columns import OPEN, ROUND, Buffer, Buffers, Hold, Holds, Kernel, Kernels

__all__ = ["OPEN", "ROUND", "Buffer", "Buffers", "Hold", "Holds", "Kernel", "Kernels", "Reduction", "Trace", "round_up"]


def round_up(nbytes: int, to: int = ROUND) -> int:
    return -(-nbytes // to) * to


class Reduction(NamedTuple):
    """What a kernel sums: sizes and strides (elements) of its input, and the axes that go."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass
class Trace:
    """What happened in a step. `phases` are (name, first tick); kernels and buffers are in order of time.

    `reductions` has the input of kernels (by index) whose own memory depends on it; `copies` the bytes of inputs that a
    kernel makes contiguous for itself.
    """

    kernels: Kernels = field(default_factory=Kernels)
    buffers: Buffers = field(default_factory=Buffers)
    holds: Holds = field(default_factory=Holds)
    phases: list[tuple[str, int]] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)  # named ticks, e.g. "forward_end"
    reductions: dict[int, Reduction] = field(default_factory=dict)
    copies: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ticks: int = 0
    phase: str = "setup"
    op: int = -1

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.phases.append((phase, self.ticks))

    def kernel(self, name: str) -> int:
        kernels = self.kernels
        kernels.names.append(name)
        kernels.phases.append(self.phase)
        kernels.ops.append(self.op)
        return len(kernels.names) - 1

    def seal(self) -> Trace:
        """The step is over: buffers and kernels do not change any more, and are made into objects once."""
        self.kernels.seal()
        self.buffers.seal()
        return self
