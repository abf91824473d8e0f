"""Takes a trace apart and builds it again: a strategy changes the step that one device would run.

A strategy changes the size of a buffer, ends its life earlier, drops it, or adds one (a bucket, an all-gathered
parameter). Positions are (tick, order): events of the trace have order 0; what is added comes before or after them, in
the order of the calls. The trace that comes out is numbered anew, so that lifetimes, allocator replay and reports work
with it as with any other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from staticmem.eager.reasons import Reason
from staticmem.eager.trace import Buffer, Convolution, Hold, Indices, Kernel, Kernels, Trace
from staticmem.ir.dtypes import DType
from staticmem.liveness import Lifetimes

Position: TypeAlias = "tuple[int, int]"
_Moment: TypeAlias = "tuple[int, int, int]"  # a position, and the number of the call that asked for it
END_OF_PHASE, BEFORE, EVENT, AFTER = -2, -1, 0, 1  # order at a tick; END_OF_PHASE still belongs to the phase that ends
GATHERING, REDUCING = 1, 2  # streams of collectives
COMMUNICATION = "communication"  # category of buckets and of buffers that collectives fill


@dataclass(slots=True)
class Piece:
    """A buffer that may be changed. `died` is None where it lives on; `kernel` is the trace's, None for an added one.

    `stream` is that of the collectives on which it is allocated, of which the caching allocator keeps a pool; 0: the
    stream that computes.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: DType
    category: str
    name: str
    born: _Moment
    died: _Moment | None
    kernel: int | None
    call: str = ""  # name of an added one's kernel
    holder: str = ""  # who holds an added one
    holds: list[Hold] = field(default_factory=list)
    stream: int = 0
    dropped: bool = False
    moved: bool = False  # its life is no longer that of its holds
    strides: tuple[int, ...] | None = None  # None: contiguous


@dataclass(slots=True)
class Weight:
    """A parameter of the step: its storage and what training adds to it."""

    name: str
    shape: tuple[int, ...]
    storage: Piece
    gradients: list[Piece] = field(default_factory=list)
    states: list[Piece] = field(default_factory=list)
    temporaries: list[Piece] = field(default_factory=list)  # of the optimizer's step, of the parameter's shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def trained(self) -> bool:
        return bool(self.gradients)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (self.storage, *self.states, *self.temporaries, *self.gradients)


class Rewrite:
    """The pieces of a trace, by the trace's buffer ids, and those that were added.

    `first` is the tick at which the step begins, `start` the beginning of its forward, and `setup` the end of what
    exists before the step.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.pieces: list[Piece] = []
        for b, tick in zip(trace.buffers, Lifetimes(trace).died, strict=True):
            died = None if tick >= trace.ticks else (tick, EVENT, 0)
            life = ((b.born, EVENT, 0), died, b.kernel)
            self.pieces.append(Piece(b.nbytes, b.shape, b.dtype, b.category, b.name, *life, strides=b.strides))
        for hold in trace.holds:
            self.pieces[hold.buffer].holds.append(hold)
        self._calls = 0
        self.first = dict(reversed(trace.phases)).get("forward", 0)
        self.start: Position = (self.first, BEFORE)
        self.setup: Position = (self.first, END_OF_PHASE)

    def span(self, phase: str) -> tuple[int, int] | None:
        """First tick of the phase's first occurrence, and the tick behind its last."""
        starts = [*self.trace.phases, ("", self.trace.ticks)]
        spans = [(tick, starts[i + 1][1]) for i, (name, tick) in enumerate(self.trace.phases) if name == phase]
        return (spans[0][0], spans[-1][1]) if spans else None

    def weights(self) -> list[Weight]:
        """The parameters in the order of the model, each with its gradient, state and temporaries of the optimizer."""
        by_name: dict[str, Weight] = {}
        optimizer = self.span("optimizer")
        temporaries: dict[int, list[Piece]] = {}  # by kernel
        for piece in self.pieces:
            if piece.category == "parameter":
                by_name.setdefault(piece.name, Weight(piece.name, piece.shape, piece))
            elif piece.category == "gradient" and piece.name.endswith(".grad"):
                owner = by_name.get(piece.name.removesuffix(".grad"))
                if owner is not None:
                    owner.gradients.append(piece)
            elif piece.category == "optimizer_state":
                owner = by_name.get(piece.name.rpartition(".")[0])
                if owner is not None:
                    owner.states.append(piece)
            elif optimizer is not None and piece.born[0] >= optimizer[0] and piece.kernel is not None:
                temporaries.setdefault(piece.kernel, []).append(piece)
        trained = [weight for weight in by_name.values() if weight.trained]
        for pieces in temporaries.values():
            _assign_in_order(pieces, trained)
        return list(by_name.values())

    def separate_gradients(self, weights: Sequence[Weight]) -> None:
        """Gives each weight a gradient of its own in every backward, where the trace adds those of later ones to the
        first: as if `.grad` had been None each time. They stay until they are ended."""
        by_name = {weight.name: weight for weight in weights}
        starts = [tick for _, tick in self.trace.phases]
        for addition in self.trace.additions:
            weight = by_name.get(addition.leaf)
            begun = starts[bisect_right(starts, addition.tick) - 1]
            if weight is None or any(g.born[0] >= begun for g in weight.gradients):
                continue  # a second gradient within one backward is added there too
            piece, name = self.pieces[addition.buffer], f"{weight.name}.grad"
            if addition.stolen:
                piece.category, piece.name, piece.died, piece.moved = "gradient", name, None, True
            else:
                size, at = piece.dtype.nbytes(weight.numel), (addition.tick, BEFORE)
                call = "aten.new_empty_strided.default"
                piece = self.add(name, size, piece.dtype, at, call, name, category="gradient")
            weight.gradients.append(piece)

    # -- changes -------------------------------------------------------------------------------------------------

    def drop(self, *pieces: Piece) -> None:
        for piece in pieces:
            piece.dropped = True

    def end(self, piece: Piece, position: Position) -> None:
        """Ends a piece at a position if it lives beyond it; right after its birth if the position is before that."""
        moment = self._moment(position)
        if piece.died is None or moment < piece.died:
            piece.died = moment if moment > piece.born else self._moment((piece.born[0], AFTER))
            piece.moved = True

    def add(
        self,
        name: str,
        nbytes: int,
        dtype: DType,
        born: Position,
        call: str,
        holder: str,
        *,
        died: Position | None = None,
        category: str = COMMUNICATION,
        stream: int = 0,
    ) -> Piece:
        """A buffer that the strategy allocates at `born` in a kernel named `call`; `holder` keeps it alive."""
        start, end = self._moment(born), None if died is None else self._moment(died)
        shape = (nbytes // dtype.itemsize,)
        piece = Piece(nbytes, shape, dtype, category, name, start, end, None, call, holder, stream=stream)
        self.pieces.append(piece)
        return piece

    def _moment(self, position: Position) -> _Moment:
        self._calls += 1
        return (*position, self._calls)

    # -- the new trace -------------------------------------------------------------------------------------------

    def build(self) -> Trace:
        """The trace of the pieces that are left."""
        old = self.trace
        pieces = [(i, p) for i, p in enumerate(self.pieces) if not p.dropped and (p.died is None or p.died > p.born)]
        events = [(p.born, i) for i, p in pieces] + [(p.died, ~i) for i, p in pieces if p.died is not None]
        events.sort()
        moments = [moment for moment, _ in events]
        tick_of_event = {index: tick for tick, (_, index) in enumerate(events)}

        def tick_of(tick: int, order: int) -> int:
            return bisect_left(moments, (tick, order, -1))

        new = Trace(
            phases=[(name, tick_of(tick, BEFORE)) for name, tick in old.phases],
            marks={name: tick_of(tick, BEFORE) for name, tick in old.marks.items()},
            ticks=len(events),
        )
        new.kernels, kernels, places = self._kernels(pieces)
        for kernel, reads in old.reads.items():  # the memory of a rank's sums and copies is not counted
            new.reads[places[kernel, 0, 0]] = tuple([r for r in reads if isinstance(r, Convolution | Indices)])
        ids: dict[int, int] = {}  # by the piece's index
        for born, (_, index) in enumerate(events):
            if index < 0:
                continue
            ids[index] = len(new.buffers)
            p, id, died = self.pieces[index], len(new.buffers), tick_of_event.get(~index)
            life = (kernels[index], born, died)
            new.buffers.append(Buffer(id, p.nbytes, p.shape, p.dtype, p.category, p.name, *life, p.strides))
            if p.stream:
                new.streams[id] = p.stream
            if p.kernel is None:
                new.holds.append(Hold(id, Reason.RANK, p.holder, born, died))
            elif p.moved:  # by its last owner
                kind, who = (p.holds[-1].kind, p.holds[-1].who) if p.holds else (Reason.VALUE, p.name)
                new.holds.append(Hold(id, kind, who, born, died))
            else:
                for hold in p.holds:
                    end = None if hold.end is None else tick_of(hold.end, EVENT)
                    new.holds.append(hold._replace(buffer=id, start=tick_of(hold.start, EVENT), end=end))
        for before, after in old.replaced_by.items():
            if before in ids:
                new.replaced_by[ids[before]] = tuple([ids[one] for one in after if one in ids])
        new.loading = {ids[one]: nbytes for one, nbytes in old.loading.items() if one in ids}
        return new.seal()

    def _kernels(self, pieces: list[tuple[int, Piece]]) -> tuple[Kernels, dict[int, int], dict[_Moment, int]]:
        """All kernels in order of time; the index among them of each piece's kernel, by the piece's index; and the
        index of each sort key, which is (k, 0, 0) for kernel k of the old trace."""
        first_tick: dict[int, int] = {}  # of the trace's kernels
        for buffer in self.trace.buffers:
            first_tick.setdefault(buffer.kernel, buffer.born)
        by_tick = sorted((tick, kernel) for kernel, tick in first_tick.items())
        ticks = [tick for tick, _ in by_tick]
        places: dict[int, tuple[int, int, int]] = {}
        kernels: dict[tuple[int, int, int], Kernel] = {(k, 0, 0): kernel for k, kernel in enumerate(self.trace.kernels)}
        for i, p in pieces:
            if p.kernel is not None:
                places[i] = (p.kernel, 0, 0)
                continue
            before = bisect_left(ticks, p.born[0] + (p.born[1] > EVENT)) - 1
            places[i] = (by_tick[before][1] if before >= 0 else -1, 1, i)
            kernels[places[i]] = Kernel(p.call, self._find_phase(p.born), -1)
        sequence = sorted(kernels)
        rank = {place: index for index, place in enumerate(sequence)}
        return Kernels([kernels[place] for place in sequence]), {i: rank[place] for i, place in places.items()}, rank

    def _find_phase(self, moment: _Moment) -> str:
        phases = self.trace.phases
        begun = [name for name, tick in phases if (tick, BEFORE, 0) <= moment] or [name for name, _ in phases[:1]]
        return begun[-1] if begun else "setup"


def _assign_in_order(pieces: Sequence[Piece], trained: Sequence[Weight]) -> None:
    """Temporaries of one call to the parameters that it goes through in order (`_foreach_*` lists)."""
    at = 0
    for piece in pieces:
        for step in range(len(trained)):
            weight = trained[(at + step) % len(trained)]
            if weight.shape == piece.shape:
                weight.temporaries.append(piece)
                at = at + step + 1
                break
