"""The record of a step: kernels in order, buffers with their births and deaths, and who held each buffer when.

Time is a tick: every allocation and every release is one tick, so an interval [born, died) says exactly what coexists.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
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


OPEN = 2**32 - 1  # the end of a hold that is never let go: more ticks than fit into any memory


class Hold(NamedTuple):
    """An owner of a buffer over [start, end): a value, a module frame, a saved slot, a gradient slot...

    `op` is the graph's op that the owner belongs to: the one whose backward saved it or waits for it; -1: none.
    """

    buffer: int
    kind: str
    who: str
    start: int
    end: int | None = None
    op: int = -1


class Holds:
    """All holds of a step, as columns: there are two for each buffer, and more of them than of anything else.

    `ends` has OPEN where a hold is never let go. Iteration and `[index]` give a `Hold` each.
    """

    __slots__ = ("buffers", "ends", "kinds", "ops", "starts", "whos")

    def __init__(self) -> None:
        self.buffers, self.starts, self.ends, self.ops = array("I"), array("I"), array("I"), array("i")
        self.kinds: list[str] = []
        self.whos: list[str] = []

    def take(self, buffer: int, kind: str, who: str, start: int, op: int = -1) -> int:
        """A new hold, which is open; its index, for `ends`."""
        index = len(self.kinds)
        self.buffers.append(buffer)
        self.starts.append(start)
        self.ends.append(OPEN)
        self.ops.append(op)
        self.kinds.append(kind)
        self.whos.append(who)
        return index

    def append(self, hold: Hold) -> None:
        index = self.take(hold.buffer, hold.kind, hold.who, hold.start, hold.op)
        if hold.end is not None:
            self.ends[index] = hold.end

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> Hold:
        end = self.ends[index]
        return Hold(
            self.buffers[index], self.kinds[index], self.whos[index], self.starts[index],
            None if end == OPEN else end, self.ops[index],
        )  # fmt: skip

    def __iter__(self) -> Iterator[Hold]:
        return map(self.__getitem__, range(len(self)))


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
        self.kernels.append(Kernel(name, self.phase, self.op))
        return len(self.kernels) - 1
