"""The record of a step: kernels in order, buffers with their births and deaths, and who held each buffer when.

Time is a tick: every allocation and every release is one tick, so an interval [born, died) says exactly what coexists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from staticmem.dtypes import DType

ROUND = 512  # bytes; kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp: every block is a multiple of it


def round_up(nbytes: int, to: int = ROUND) -> int:
    return -(-nbytes // to) * to


@dataclass(slots=True)
class Kernel:
    """A call that may allocate: an ATen op as the dispatcher names it, in a phase, for an op of the graph."""

    name: str
    phase: str
    op: int  # index into Graph.ops, -1 for the loss, the engine and the optimizer


@dataclass(slots=True)
class Buffer:
    """A storage: `nbytes` as requested, before rounding. `died` is None while it is alive at the end of the trace."""

    id: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: DType
    category: str
    name: str
    kernel: int
    born: int
    died: int | None = None

    @property
    def size(self) -> int:
        """Bytes that the buffer occupies: `nbytes` rounded up to 512."""
        return -(-self.nbytes // ROUND) * ROUND


@dataclass(slots=True)
class Hold:
    """An owner of a buffer over [start, end): a value, a module frame, a saved slot, a gradient slot...

    `op` is the graph's op that the owner belongs to: the one whose backward saved it or waits for it; -1: none.
    """

    buffer: int
    kind: str
    who: str
    start: int
    end: int | None = None
    op: int = -1


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

    kernels: list[Kernel] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
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
        self.kernels.append(Kernel(name, self.phase, self.op))
        return len(self.kernels) - 1
