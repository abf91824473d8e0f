"""Inductor's values: what is computed where it is read, and what has a buffer.

Sources, all of PyTorch 2.15: `torch/_inductor/ir.py` (`TensorBox`, `StorageBox`, `Pointwise`, `Reduction`,
`ComputedBuffer`, `ExternKernel`, layouts) and `torch/_inductor/ops_handler.py` (`OpCounterCSE`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from staticmem.compiler.inductor import indexing, layout
from staticmem.eager.strides import Form, Shape, Strides, contiguous_strides, form_of, storage_bytes
from staticmem.ir.dtypes import DType
from staticmem.tracing.nodes import Node

READS_WHERE_REUSED = 4  # config.realize_reads_threshold
READS_AT_MOST = 8  # config._realize_acc_reads_threshold_default
OPS_WHERE_REUSED = 30  # config._realize_opcount_threshold_default
OPS_AT_MOST = 100  # graph.py, run_node: has_large_inner_fn(threshold=100)

Weights = Mapping[object, int]  # what is computed, and how many calls of `ops` that is
NOTHING: Weights = {}
SPLIT_SCAN = "split scan"  # the type of a scan in parts, which is no kernel of reductions
ANYWHERE = ("constant", "number")  # the first of keys of what is the same for each element


class Place(NamedTuple):
    """What is computed at another element than the one of the loops: of `shape`, through `views`. Calls with equal
    text are one call, so that a sum written out computes what all its terms need once."""

    what: object
    shape: Shape
    views: indexing.Views


def at_views(weights: Weights, shape: Shape, views: indexing.Views) -> Weights:
    """What a view of a computation of this shape computes."""
    if not views or not weights:
        return weights
    return {_at(what, shape, views): count for what, count in weights.items()}


def _at(what: object, shape: Shape, views: indexing.Views) -> object:
    if isinstance(what, Place):
        return _at(what.what, what.shape, indexing.then(what.views, shape, views))
    if type(what) is tuple and what[0] in ANYWHERE:
        return what
    views = indexing.simplest(shape, views)
    return Place(what, shape, views) if views else what


class Buffer:
    """A value in memory, or an input of the graph.

    Attributes:
        number: of the buffer: `buf7`; of an input, below zero.
        strides: while `flexible`, what they would be.
        flexible: nobody has asked for strides yet.
        padded: strides may be padded to 128 bytes when they are decided.
        fresh: the kernel itself allocates it (`ExternKernelAlloc`, and what several results consist of).
        into: it has no storage of its own and is written into a part of this buffer (`NonOwningLayout`).
        mutates: it is another name of this buffer after a write (`MutationLayout`).
        operation: that writes it; None for an input.
        what: what it is, for reports.
        op: index in `Graph.ops`, or -1.
        recomputed: a backward computes it again.
    """

    __slots__ = (
        "dtype", "flexible", "fresh", "into", "into_views", "mutates", "number", "op", "operation", "recomputed",
        "shape", "strides", "what", "without_tensor",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        shape: Shape,
        dtype: DType,
        strides: Strides | None = None,
        *,
        fresh: bool = False,
        what: str = "",
        op: int = -1,
    ) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype
        self.flexible = strides is None
        self.strides = contiguous_strides(shape) if strides is None else strides
        self.fresh, self.what, self.op = fresh, what, op
        self.into: Buffer | None = None
        self.into_views: indexing.Views = indexing.NO_VIEWS
        self.mutates: Buffer | None = None
        self.recomputed = False
        self.without_tensor = False  # the tuple of a kernel with several results
        self.operation: Operation | None = None

    @property
    def form(self) -> Form:
        return form_of(self.shape, self.strides, self.dtype)

    @property
    def name(self) -> str:
        """As Inductor names it: orders are by this text."""
        return f"buf{self.number}"

    @property
    def allocated(self) -> int:
        """Elements from the first to the last (`get_allocation_storage_size`)."""
        return storage_bytes(self.shape, self.strides, 8)

    def freeze(self, *, pad: bool = True) -> None:
        """The strides as they are, padded (`FlexibleLayout.as_fixed`)."""
        if self.flexible:
            self.freeze_as(self.strides, pad=pad)

    def freeze_as(self, strides: Strides, *, pad: bool) -> None:
        """These strides (`as_stride_order`, `as_exact_strides`)."""
        self.strides = layout.pad_strides(self.shape, strides, self.dtype) if pad else strides
        self.flexible = False

    def decide(self, *, pad: bool = True) -> None:
        """The order of loops that the reads suggest (`ComputedBuffer.decide_layout`)."""
        if not self.flexible:
            return
        operation = self.operation
        order = operation.loops.suggested_order(self.shape) if operation and operation.loops else None
        if order:
            self.strides = layout.fill_ordered(self.shape, order)
        self.freeze(pad=pad)

    def place(self) -> tuple[Strides, int]:
        """Strides and offset, in the buffer that it is written into where it is a part of one."""
        whole = self.into
        if whole is None:
            return self.strides, 0
        strides, offset = whole.place()
        placed = indexing.strides_through(whole.shape, strides, self.into_views)
        assert placed is not None, "parts of a concatenation are slices"
        return placed[0], placed[1] + offset

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}"


class Read:
    """An access to a buffer, as a chain of views of it that has the shape of the loops, and how often it is loaded."""

    __slots__ = ("buffer", "times", "views")

    def __init__(self, buffer: Buffer, views: indexing.Views, times: int = 1) -> None:
        self.buffer, self.views, self.times = buffer, views, times

    def through(self, views: indexing.Views) -> Read:
        return Read(self.buffer, views, self.times)

    def key(self) -> tuple[int, indexing.Views]:
        return self.buffer.number, indexing.in_short(self.views)

    def strides(self) -> tuple[Strides, int] | None:
        """Strides and offset over the loops, or None where the index is not linear."""
        strides, offset = self.buffer.place()
        placed = indexing.strides_through(self.buffer.shape, strides, self.views)
        return placed and (placed[0], placed[1] + offset)

    def hints(self) -> Strides:
        """Strides over the loops, as far as an index that is not linear has them."""
        return indexing.stride_hints(self.buffer.shape, self.buffer.place()[0], self.views)

    def dependence(self) -> tuple[bool, ...]:
        """Which loops its index depends on."""
        return indexing.dependence(self.buffer.shape, self.buffer.place()[0], self.views)


class Loops:
    """A computation of each element: `Pointwise`, or a `Reduction` over the last dimensions of `loops`.

    Attributes:
        shape: of the result.
        loops: sizes of the result and of the reduction: what reads refer to.
        reads: accesses, each once.
        weights: what is computed.
        reduction: "" for Pointwise, else its type.
        inner: the dimensions of `loops` that the reduction goes along: the last ones; of a scan, which has a result for
            each element, the one that it follows.
        linear: it writes where it computes; a scatter does not.
    """

    __slots__ = ("dtype", "inner", "kind", "linear", "loops", "reads", "reduction", "shape", "weights")

    def __init__(
        self,
        shape: Shape,
        dtype: DType,
        reads: Iterable[Read],
        weights: Weights,
        *,
        reduction: str = "",
        loops: Shape | None = None,
        linear: bool = True,
        kind: str = "",
        along: int | None = None,
    ) -> None:
        self.shape, self.dtype, self.weights, self.reduction = shape, dtype, weights, reduction
        self.loops = shape if loops is None else loops
        self.linear, self.kind = linear, kind
        self.inner: tuple[int, ...] = () if along is None else (along,)
        if linear and along is None:
            self.inner = tuple(range(len(shape), len(self.loops)))
        self.reads = once(reads, self.loops)

    @property
    def op_count(self) -> int:
        """Calls of `ops`, loads included (`OpCounterCSE`)."""
        return len(self.reads) + sum(self.weights.values())

    def suggested_order(self, shape: Shape) -> list[int] | None:
        """`ComputedBuffer.get_fill_order`."""
        rows = [read.hints()[: len(shape)] for read in self.reads]
        return layout.pick_loop_order(rows, shape) if rows else None


def once(reads: Iterable[Read], shape: Shape) -> tuple[Read, ...]:
    """Accesses to the same elements are one."""
    every = tuple(reads)
    if len({read.buffer.number for read in every}) == len(every):
        return every
    unique: dict[object, Read] = {}
    for read in every:
        placed = read.strides()
        linear = placed is not None and len(placed[0]) == len(shape)
        key = (
            (indexing.without_ones(shape, placed[0]), placed[1])
            if placed is not None and linear
            else indexing.in_short(read.views)
        )
        whole = (read.buffer.number, key)
        first = unique.get(whole)
        unique[whole] = read if first is None else Read(read.buffer, first.views, first.times + read.times)
    return tuple(unique.values())


class Box:
    """`StorageBox`: either not computed yet, or in a buffer."""

    __slots__ = ("data",)

    def __init__(self, data: Buffer | Loops) -> None:
        self.data = data


class Value:
    """`TensorBox`: a view of a box."""

    __slots__ = ("box", "dtype", "shape", "views")

    def __init__(self, box: Box, shape: Shape, dtype: DType, views: indexing.Views = indexing.NO_VIEWS) -> None:
        self.box, self.shape, self.dtype, self.views = box, shape, dtype, views

    @classmethod
    def of(cls, data: Buffer | Loops) -> Value:
        return cls(Box(data), data.shape, data.dtype)

    @property
    def buffer(self) -> Buffer | None:
        return self.box.data if isinstance(self.box.data, Buffer) else None

    @property
    def loops(self) -> Loops | None:
        return self.box.data if isinstance(self.box.data, Loops) else None

    def strides(self) -> tuple[Strides, int] | None:
        """Strides and offset in its buffer, or None where it has none or they are not linear."""
        buffer = self.buffer
        return indexing.strides_through(buffer.shape, buffer.strides, self.views) if buffer else None

    def load(self) -> tuple[Sequence[Read], Weights]:
        """What it takes to compute an element of this (`make_loader`)."""
        data = self.box.data
        if isinstance(data, Buffer):
            operation = data.operation
            if operation is not None and operation.inlined and operation.loops is not None and not self.views:
                return (), operation.loops.weights
            return (Read(data, self.views),), NOTHING
        if not self.views:
            return data.reads, data.weights
        moved = tuple(r.through(indexing.then(r.views, data.shape, self.views)) for r in data.reads)
        return moved, at_views(data.weights, data.shape, self.views)

    def view(self, step: indexing.Step, *, pad: bool = True) -> Value:
        """A view of this. One of a buffer decides the strides of the buffer."""
        buffer = self.buffer
        new = indexing.new_shape(step)
        if buffer is not None and buffer.flexible and new != self.shape:
            if step[0] == "reshape" and not self.views and buffer.strides == contiguous_strides(buffer.shape):
                buffer.freeze_as(buffer.strides, pad=False)  # View.create: require_exact_strides
            else:
                buffer.decide(pad=pad)
        if step[0] == "slice" and buffer is None:
            step = ("cut", *step[1:])
        if step[0] == "reshape" and buffer is not None:
            told = all(indexing.in_strides(other) for other in self.views if other[0] == "reshape")
            if told and indexing.strides_through(buffer.shape, buffer.strides, (*self.views, step)) is not None:
                step = ("reshape", None, new)
        return Value(self.box, new, self.dtype, indexing.chain(self.views, step, self.shape))


class Operation:
    """What writes buffers: a computation of ours, or a call of an extern kernel.

    Attributes:
        number: order of creation: `op7`.
        outputs: buffers that it writes; several for kernels with several results only in `parts`.
        loops: what it computes; None for an extern kernel.
        reads: buffers that it reads.
        kernel: as ATen names it, for extern kernels.
        call: the node that an extern kernel runs; None for a part of its results.
        nop: it writes nothing itself (`ConcatKernel`).
        inlined: a constant that its readers compute themselves.
        side_effects: it is never dead.
    """

    __slots__ = (
        "call", "inlined", "kernel", "loops", "nop", "number", "op", "output", "part_of", "reads", "side_effects",
        "what",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        output: Buffer,
        reads: Sequence[Buffer],
        *,
        loops: Loops | None = None,
        kernel: str = "",
        nop: bool = False,
        what: str = "",
        op: int = -1,
    ) -> None:
        self.number, self.output, self.loops, self.kernel = number, output, loops, kernel
        self.reads = tuple(dict.fromkeys(reads))
        self.nop, self.what, self.op = nop, what, op
        # constants are never read from memory, unless through a view (`ComputedBuffer.make_loader`)
        self.inlined = loops is not None and not loops.reads and not loops.reduction
        self.side_effects = False
        self.part_of: Operation | None = None
        self.call: Node | None = None
        output.operation = self

    def __repr__(self) -> str:
        return f"op{self.number} {self.kernel or self.what} -> {self.output}"
