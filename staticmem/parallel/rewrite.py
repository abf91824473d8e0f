"""A trace taken apart and put together again: what a strategy changes of the step that one device would run.

A strategy changes the size of a buffer, ends its life earlier, drops it, or adds one (a bucket, an all-gathered
parameter). Positions are (tick, order): events of the trace have order 0; what is added comes before or after them, in
the order of the calls. The trace that comes out is numbered anew, so that lifetimes, allocator replay and reports work
on it as on any other.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TypeAlias

from staticmem.eager.trace import Buffer, Hold, Kernel, Kernels, Trace
from staticmem.ir.dtypes import DType
from staticmem.liveness import liveness

Position: TypeAlias = "tuple[int, int]"
_Moment: TypeAlias = "tuple[int, int, int]"  # a position and which call put something there
END_OF_PHASE, BEFORE, EVENT, AFTER = -2, -1, 0, 1  # order at a tick; END_OF_PHASE still belongs to the phase that ends
COMMUNICATION = "communication"  # category of buckets and of buffers that collectives fill


@dataclass(slots=True)
class Piece:
    """A buffer that may be changed. `died` is None where it lives on; `kernel` is the trace's, None for an added one.

    `stream` marks what is allocated on a stream of the collectives: the caching allocator keeps pools by stream.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: DType
    category: str
    name: str
    born: _Moment
    died: _Moment | None
    kernel: int | None
    what: str = ""  # the kernel's name, of an added one
    why: str = ""  # who holds it, of an added one
    holds: list[Hold] = field(default_factory=list)
    stream: bool = False
    dropped: bool = False
    moved: bool = False  # its life is not that of its holds any more


class Rewrite:
    """The pieces of a trace, by the trace's buffer ids, and those that were added."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        lifetimes = liveness(trace)
        self.pieces = [
            Piece(
                b.nbytes, b.shape, b.dtype, b.category, b.name, (b.born, EVENT, 0),
                None if died >= trace.ticks else (died, EVENT, 0), b.kernel,
            )
            for b, died in zip(trace.buffers, lifetimes.died, strict=True)
        ]  # fmt: skip
        for hold in trace.holds:
            self.pieces[hold.buffer].holds.append(hold)
        self._calls = 0
        starts = dict(reversed(trace.phases))
        self.first = starts.get("forward", 0)  # tick at which the step begins

    # -- positions -----------------------------------------------------------------------------------------------

    @property
    def setup(self) -> Position:
        """The end of what exists before the step."""
        return (self.first, END_OF_PHASE)

    @property
    def start(self) -> Position:
        """The beginning of the forward."""
        return (self.first, BEFORE)

    def span(self, phase: str) -> tuple[int, int] | None:
        """First tick of the phase's first occurrence, and the tick behind its last."""
        starts = [*self.trace.phases, ("", self.trace.ticks)]
        found = [(tick, starts[i + 1][1]) for i, (name, tick) in enumerate(self.trace.phases) if name == phase]
        return (found[0][0], found[-1][1]) if found else None

    # -- changes -------------------------------------------------------------------------------------------------

    def resize(self, piece: Piece, nbytes: int, shape: tuple[int, ...] | None = None) -> None:
        piece.nbytes = nbytes
        if shape is not None:
            piece.shape = shape

    def drop(self, piece: Piece) -> None:
        piece.dropped = True

    def end(self, piece: Piece, position: Position) -> None:
        """Ends a life at a position, if it lives that long; where that is before it begins, right after its birth."""
        moment = self._moment(position)
        if piece.died is None or moment < piece.died:
            piece.died = moment if moment > piece.born else self._moment((piece.born[0], AFTER))
            piece.moved = True

    def _moment(self, position: Position) -> _Moment:
        self._calls += 1
        return (*position, self._calls)

    def add(
        self, name: str, category: str, nbytes: int, dtype: DType, born: Position, died: Position | None, what: str,
        why: str, *, stream: bool = False,
    ) -> Piece:  # fmt: skip
        """A buffer that the strategy allocates at `born` in a call named `what`; `why` says who holds it."""
        shape = (nbytes // dtype.itemsize,)
        start, end = self._moment(born), None if died is None else self._moment(died)
        piece = Piece(nbytes, shape, dtype, category, name, start, end, None, what, why, stream=stream)
        self.pieces.append(piece)
        return piece

    # -- the new trace -------------------------------------------------------------------------------------------

    def build(self) -> Trace:
        """The trace of the pieces that are left."""
        old = self.trace
        pieces = [(i, p) for i, p in enumerate(self.pieces) if not p.dropped and (p.died is None or p.died > p.born)]
        events: list[tuple[_Moment, int]] = []
        for i, p in pieces:
            events.append((p.born, i))
            if p.died is not None:
                events.append((p.died, ~i))
        events.sort()
        keys = [key for key, _ in events]
        at = {index: tick for tick, (_, index) in enumerate(events)}

        def tick_of(tick: int, order: int) -> int:
            return bisect_left(keys, (tick, order, -1))

        new = Trace(
            phases=[(name, tick_of(tick, BEFORE)) for name, tick in old.phases],
            marks={name: tick_of(tick, BEFORE) for name, tick in old.marks.items()},
            ticks=len(events),
        )
        ordered, kernels = self._kernels(pieces)
        for _, index in events:
            if index < 0:
                continue
            p = self.pieces[index]
            died = at.get(~index)
            buffer = Buffer(
                len(new.buffers), p.nbytes, p.shape, p.dtype, p.category, p.name, kernels[index], at[index], died
            )
            new.buffers.append(buffer)
            if p.kernel is None:
                new.holds.append(Hold(buffer.id, p.why, "", at[index], died))
            elif p.moved:  # by whom it was held last
                kind, who = (p.holds[-1].kind, p.holds[-1].who) if p.holds else ("value", p.name)
                new.holds.append(Hold(buffer.id, kind, who, at[index], died))
            else:
                for hold in p.holds:
                    end = None if hold.end is None else tick_of(hold.end, EVENT)
                    new.holds.append(hold._replace(buffer=buffer.id, start=tick_of(hold.start, EVENT), end=end))
        new.kernels = Kernels(ordered)
        return new.seal()

    def _kernels(self, pieces: list[tuple[int, Piece]]) -> tuple[list[Kernel], dict[int, int]]:
        """All kernels in order of time, and the place of each piece's (by the piece's index)."""
        old = self.trace
        firsts: list[tuple[int, int]] = []  # (tick of the first allocation, kernel) of the trace's kernels
        seen = set()
        for buffer in old.buffers:
            if buffer.kernel not in seen:
                seen.add(buffer.kernel)
                firsts.append((buffer.born, buffer.kernel))
        firsts.sort()
        ticks = [tick for tick, _ in firsts]
        latest = [kernel for _, kernel in firsts]
        places: dict[int, tuple[int, int, int]] = {}
        made: dict[tuple[int, int, int], Kernel] = {(k, 0, 0): kernel for k, kernel in enumerate(old.kernels)}
        for i, p in pieces:
            if p.kernel is not None:
                places[i] = (p.kernel, 0, 0)
                continue
            before = bisect_left(ticks, p.born[0] + (p.born[1] > EVENT)) - 1
            place = (latest[before] if before >= 0 else -1, 1, i)
            places[i] = place
            made[place] = Kernel(p.what, self._phase_at(p.born), -1)
        sequence = sorted(made)
        order = {place: index for index, place in enumerate(sequence)}
        return [made[place] for place in sequence], {i: order[place] for i, place in places.items()}

    def _phase_at(self, moment: _Moment) -> str:
        found = self.trace.phases[0][0] if self.trace.phases else "setup"
        for name, tick in self.trace.phases:
            if (tick, BEFORE, 0) <= moment:
                found = name
        return found
