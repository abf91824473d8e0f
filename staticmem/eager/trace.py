"""The record of a step: kernels in order, buffers with their births and deaths, and who held each buffer when.

Time is a tick: every allocation and every release is one tick, so an interval [born, died) says exactly what coexists.
A large step has millions of buffers, kernels and holds, so rows are kept as columns, to which the engine itself
appends; readers get a named tuple for each row.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

from staticmem.eager.reasons import Reason
from staticmem.eager.strides import Form, Shape, Strides, contiguous_strides, form_of
from staticmem.ir.dtypes import DType

ROUND = 512  # bytes; kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp: every block is a multiple of it
OPEN = 2**32 - 1  # the end of a lifetime or hold that does not end in the trace; no trace has as many ticks

Row = TypeVar("Row")


def round_up(nbytes: int, to: int = ROUND) -> int:
    return -(-nbytes // to) * to


class Kernel(NamedTuple):
    """A call that may allocate: an ATen op as the dispatcher names it, in a phase, for an op of the graph."""

    name: str
    phase: str
    op: int  # index into Graph.ops, -1 for the loss, the engine and the optimizer


class Buffer(NamedTuple):
    """A storage: `nbytes` as requested, before rounding. `died` is None while it is alive at the end of the trace.

    `strides` are those of the tensor that it was allocated for, in elements; None: contiguous.
    """

    id: int
    nbytes: int
    shape: Shape
    dtype: DType
    category: str
    name: str
    kernel: int
    born: int
    died: int | None = None
    strides: Strides | None = None

    @property
    def size(self) -> int:
        """Bytes that the buffer occupies: `nbytes` rounded up to 512."""
        return round_up(self.nbytes)


class Hold(NamedTuple):
    """An owner of a buffer over [start, end): a value, a module frame, a saved slot, a gradient slot...

    `op` is the graph's op that the owner belongs to: the one whose backward saved it or waits for it; -1: none.
    """

    buffer: int
    kind: Reason
    who: str
    start: int
    end: int | None = None
    op: int = -1


class Reduction(NamedTuple):
    """Input of a kernel that sums: its sizes, its strides in elements, and the axes that are reduced."""

    shape: Shape
    strides: Strides
    axes: tuple[int, ...]


class Convolution(NamedTuple):
    """A convolution: the forms of input, weight and result, with batch, and its parameters, one for each spatial
    dimension.

    `gradients` says whether a backward kernel computes those of input and weight; None of a forward kernel.
    """

    input: Form
    weight: Form
    result: Form
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # on both sides; what "same" pads on one side more is not in it
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    gradients: tuple[bool, bool] | None = None


def is_depthwise(channels: int, filters: int, groups: int) -> bool:
    """Whether each group of a convolution reads one channel.

    Source: aten/src/ATen/native/Convolution.cpp, `is_depthwise`.
    """
    return groups > 1 and channels == groups and filters % channels == 0


class Copies(NamedTuple):
    """Inputs that a kernel makes contiguous for itself, in bytes."""

    nbytes: tuple[int, ...]


class Indices(NamedTuple):
    """Number of elements of a kernel's index tensor, of the largest where it has several."""

    elements: int


Read: TypeAlias = Reduction | Convolution | Copies | Indices


class CudaGraph(NamedTuple):
    """Kernels [start, end) that run as one CUDA graph, and allocate in the pool of the CUDA graphs.

    Those of [start, body) copy inputs into that pool: `copied` has for each copy what it is of, as indices of buffers.
    """

    start: int
    body: int
    end: int
    copied: Mapping[int, int]


_KERNEL: Any = partial(tuple.__new__, Kernel)
_BUFFER: Any = partial(tuple.__new__, Buffer)
_HOLD: Any = partial(tuple.__new__, Hold)


class Columns(Sequence[Row]):
    """The rows of a table. After `seal`, the first access makes all of them, once."""

    __slots__ = ("_rows", "_sealed")

    def __init__(self) -> None:
        self._sealed = False
        self._rows: list[Row] | None = None

    def _between(self, start: int, end: int) -> list[Row]:
        """New objects for the rows of [start, end)."""
        raise NotImplementedError

    def seal(self) -> None:
        """Nothing changes any more: rows may be kept."""
        self._sealed = True

    def _all(self) -> list[Row]:
        if not self._sealed:
            return self._between(0, len(self))
        if self._rows is None:
            self._rows = self._between(0, len(self))
        return self._rows

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if self._sealed or isinstance(index, slice):
            return self._all()[index]
        return self.pick((index,))[0]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._all())

    def pick(self, places: Iterable[int]) -> list[Row]:
        """The rows at these indices; no others are made."""
        if self._rows is not None:
            return [self._rows[place] for place in places]
        if isinstance(places, range) and places.step == 1 and 0 <= places.start <= places.stop <= len(self):
            return self._between(places.start, places.stop)
        every = range(len(self))
        return [self._between(every[place], every[place] + 1)[0] for place in places]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Kernels(Columns[Kernel]):
    """All kernels of a step in order of time."""

    __slots__ = ("names", "ops", "phases")

    def __init__(self, kernels: Iterable[Kernel] = ()) -> None:
        super().__init__()
        self.names: list[str] = []
        self.phases: list[str] = []
        self.ops = array("i")
        for kernel in kernels:
            self.append(kernel)

    def append(self, kernel: Kernel) -> None:
        self.names.append(kernel.name)
        self.phases.append(kernel.phase)
        self.ops.append(kernel.op)

    def cut(self, length: int) -> None:
        """Forgets all rows but the first `length`."""
        del self.names[length:], self.phases[length:], self.ops[length:]

    def __len__(self) -> int:
        return len(self.names)

    def _between(self, start: int, end: int) -> list[Kernel]:
        return list(map(_KERNEL, zip(self.names[start:end], self.phases[start:end], self.ops[start:end], strict=True)))


class Buffers(Columns[Buffer]):
    """All buffers of a step in order of birth; `died` has OPEN for what is alive at its end."""

    __slots__ = ("born", "categories", "died", "forms", "kernels", "names", "nbytes")

    def __init__(self, buffers: Iterable[Buffer] = ()) -> None:
        super().__init__()
        self.nbytes, self.kernels, self.born, self.died = array("q"), array("i"), array("I"), array("I")
        self.forms: list[Form] = []
        self.categories: list[str] = []
        self.names: list[str] = []
        for buffer in buffers:
            self.append(buffer)

    def append(self, buffer: Buffer) -> None:
        """Adds a buffer; its id is its index here."""
        _, nbytes, shape, dtype, category, name, kernel, born, died, strides = buffer
        self.nbytes.append(nbytes)
        self.forms.append(form_of(shape, contiguous_strides(shape) if strides is None else strides, dtype))
        self.categories.append(category)
        self.names.append(name)
        self.kernels.append(kernel)
        self.born.append(born)
        self.died.append(OPEN if died is None else died)

    def cut(self, length: int) -> None:
        """Forgets all rows but the first `length`."""
        del self.nbytes[length:], self.forms[length:], self.categories[length:], self.names[length:]
        del self.kernels[length:], self.born[length:], self.died[length:]

    def __len__(self) -> int:
        return len(self.forms)

    def _between(self, start: int, end: int) -> list[Buffer]:
        part = slice(start, end)
        died = [None if tick == OPEN else tick for tick in self.died[part]]
        columns = (self.nbytes, self.forms, self.categories, self.names, self.kernels, self.born)
        rows = zip(range(start, end), *[column[part] for column in columns], died, strict=True)
        return [
            _BUFFER((id, nbytes, form.shape, form.dtype, category, name, kernel, born, end, form.strides))
            for id, nbytes, form, category, name, kernel, born, end in rows
        ]


class Holds(Columns[Hold]):
    """All holds of a step, about two for each buffer. `ends` has OPEN where a hold is never released."""

    __slots__ = ("buffers", "ends", "kinds", "ops", "starts", "whos")

    def __init__(self) -> None:
        super().__init__()
        self.buffers, self.starts, self.ends, self.ops = array("I"), array("I"), array("I"), array("i")
        self.kinds: list[Reason] = []
        self.whos: list[str] = []

    def take(self, buffer: int, kind: Reason, who: str, start: int, op: int = -1) -> int:
        """Adds an open hold and returns its index (of `ends`)."""
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

    def _between(self, start: int, end: int) -> list[Hold]:
        part = slice(start, end)
        ends = [None if tick == OPEN else tick for tick in self.ends[part]]
        rows = zip(
            self.buffers[part], self.kinds[part], self.whos[part], self.starts[part], ends, self.ops[part], strict=True
        )
        return list(map(_HOLD, rows))


class Addition(NamedTuple):
    """A gradient that is added to the `.grad` that `leaf` has already, from `tick` on. `stolen`: a leaf without one
    would take the buffer itself, else a copy."""

    leaf: str
    buffer: int
    stolen: bool
    tick: int


@dataclass
class Trace:
    """What happened in a step. `phases` are (name, first tick); kernels and buffers are in order of time.

    `reads` has, by the index of a kernel, the inputs that its own memory depends on. `replaced_by` has, for a buffer
    that the step before left, those that this step leaves in its place. `loading` has, for a buffer of the model, the
    bytes that loading it takes for a moment, `streams` the stream of each that is not of the stream that computes.
    `additions` and `cuda_graphs` are in order of time.
    """

    kernels: Kernels = field(default_factory=Kernels)
    buffers: Buffers = field(default_factory=Buffers)
    holds: Holds = field(default_factory=Holds)
    phases: list[tuple[str, int]] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)  # named ticks, e.g. "forward_end"
    reads: dict[int, tuple[Read, ...]] = field(default_factory=dict)
    replaced_by: dict[int, tuple[int, ...]] = field(default_factory=dict)
    loading: dict[int, int] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    additions: list[Addition] = field(default_factory=list)
    cuda_graphs: list[CudaGraph] = field(default_factory=list)
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

    def in_cuda_graph(self, kernel: int) -> bool:
        """Whether a kernel runs in a CUDA graph."""
        at = bisect_right(self.cuda_graphs, kernel, key=lambda graph: graph.start)
        return at > 0 and kernel < self.cuda_graphs[at - 1].end

    def seal(self) -> Trace:
        """The step is over: buffers and kernels do not change any more, and are made into objects once."""
        self.kernels.seal()
        self.buffers.seal()
        return self
