"""Steps of batches between those that were run: the same trace with other sizes.

A search over batches replays tens of steps that differ in sizes alone. Three are run: of the least batch, of the
largest, and of one between them. Where the three have one structure (`structure`), and the bytes of every buffer, its
shape and strides, and all that kernels read lie on one line through the three, a step of a batch between them has the
trace of the first with the sizes of the line. As with the arrays of a sweep, three equal structures do not prove a
fourth (docs/adr/0008). A search of batches uses it to find the batch that it names, whose step is then run
(`confirms`), and a sweep, whose rows say so (`arrays`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from staticmem.eager.strides import Form, form_of
from staticmem.eager.trace import Buffers, Trace
from staticmem.engine.step import StepResult
from staticmem.errors import DimensionError
from staticmem.liveness import Lifetimes
from staticmem.scenario.request import Request
from staticmem.studies import Study
from staticmem.studies.bench import Bench, Verdicts
from staticmem.studies.sizing_search import GrownSize
from staticmem.studies.structure import Affine, take_apart
from staticmem.studies.study import key_of


class _NoLineError(Exception):
    """What differs between two steps is not a number, or grows by no whole number with each sample."""


@dataclass(frozen=True)
class InterpolatedSteps:
    """Steps of batches from `low` to `high`.

    `first` and `last` are the steps of those two, `sizes` the bytes of all buffers, and `ends` those of the steps with
    the least, and with the most, that the file leaves open (`LiveBand.ends`).
    """

    low: int
    high: int
    first: StepResult
    last: StepResult
    sizes: Affine
    ends: tuple[Affine, ...]

    @classmethod
    def through(cls, studies: Sequence[tuple[int, Study]]) -> InterpolatedSteps | None:
        """The steps between three that were run (ascending batches); None where they are not on one line."""
        batches, ran = [batch for batch, _ in studies], [study for _, study in studies]
        first, inner, last = (study.result for study in ran)
        if any(study.result.compiled is not None or study.request.communicators for study in ran):
            return None
        if any(_beside_sizes(study.result.trace) != _beside_sizes(first.trace) for study in ran):
            return None
        open_steps = [study.band.ends for study in ran]
        if any(steps is None or len(steps) != len(open_steps[0] or ()) for steps in open_steps):
            return None
        sizes = _line(batches, [study.lifetimes for study in ran])
        ends = [_line(batches, steps) for steps in zip(*(steps or () for steps in open_steps), strict=True)]
        if sizes is None or None in ends:
            return None
        straight = tuple([line for line in ends if line is not None])
        between = cls(batches[0], batches[-1], first, last, sizes, straight)
        try:
            return between if _equal(between.at(batches[1]).trace, inner.trace) else None
        except _NoLineError:
            return None

    def confirms(self, batch: int, study: Study, band: bool = True) -> bool:
        """Whether the step of a batch, and with `band` what the file leaves open of it, are those of a study that ran
        it."""
        is_same = _equal(self.at(batch).trace, study.result.trace)
        return is_same and (not band or self.spread(batch) == study.spread)

    def at(self, batch: int) -> StepResult:
        """The step of a batch. Its graph is that of `low`.

        Raises:
            _NoLineError: the batch is no more than tried out, by `through`.
        """
        first, last = self.first.trace, self.last.trace
        line = _Line(batch - self.low, self.high - self.low)
        buffers = Buffers()
        near, far = first.buffers, last.buffers
        buffers.nbytes = array("q", (self.sizes.constant + self.sizes.slope * batch).tolist())
        buffers.forms = [line.of(a, b) for a, b in zip(near.forms, far.forms, strict=True)]
        buffers.kernels, buffers.born, buffers.died = near.kernels, near.born, near.died
        buffers.categories, buffers.names = near.categories, near.names
        if first.reads.keys() != last.reads.keys():
            raise _NoLineError
        reads = {kernel: line.of(read, last.reads[kernel]) for kernel, read in first.reads.items()}
        return replace(self.first, trace=replace(first, buffers=buffers, reads=reads).seal())

    def live(self, batch: int) -> int:
        """Bytes of tensors at the peak of a batch."""
        return self.sizes.peak(batch)

    def spread(self, batch: int) -> tuple[int, int]:
        """Bytes by which the peak may be lower, and higher (`Study.spread`)."""
        live = self.live(batch)
        peaks = [live, *(line.peak(batch) for line in self.ends)]
        return live - min(peaks), max(peaks) - live


def _line(batches: Sequence[int], steps: Sequence[Lifetimes]) -> Affine | None:
    cores = [take_apart(lifetimes, apart=False)[0] for lifetimes in steps]
    return Affine.through(list(zip(batches, cores, strict=True)))


def _beside_sizes(trace: Trace) -> tuple[Any, ...]:
    """What is the same at all batches, besides what a structure has."""
    return trace.phases, trace.marks, trace.ticks, trace.replaced_by, trace.loading, trace.streams, trace.cuda_graphs


def _equal(between: Trace, ran: Trace) -> bool:
    mine, theirs = between.buffers, ran.buffers
    columns = [(getattr(mine, name), getattr(theirs, name)) for name in Buffers.__slots__]
    same = all(column == other for column, other in columns) and between.reads == ran.reads
    return same and between.kernels == ran.kernels and _beside_sizes(between) == _beside_sizes(ran)


class _Line:
    """Values at `offset` of `span` from a first one to a last one, which differ in whole numbers alone."""

    def __init__(self, offset: int, span: int) -> None:
        self.offset, self.span = offset, span
        self._forms: dict[tuple[int, int], Form] = {}

    def of(self, first: Any, last: Any) -> Any:
        """The value between two.

        Raises:
            _NoLineError: there is none.
        """
        if first is last:
            return first
        if isinstance(first, Form) and isinstance(last, Form):
            key = first.number, last.number
            if key not in self._forms:
                if first.dtype != last.dtype:
                    raise _NoLineError
                shape, strides = self.of(first.shape, last.shape), self.of(first.strides, last.strides)
                self._forms[key] = form_of(shape, strides, first.dtype)
            return self._forms[key]
        if first == last:
            return first
        if type(first) is int and type(last) is int:
            slope, rest = divmod(last - first, self.span)
            if rest:
                raise _NoLineError
            return first + slope * self.offset
        if isinstance(first, tuple) and type(first) is type(last) and len(first) == len(last):
            parts = [self.of(a, b) for a, b in zip(first, last, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
        raise _NoLineError


class InterpolatingBench(Bench):
    """A bench for the search over batches of one request: steps that lie on a line are not run."""

    def __init__(self, bench: Bench, request: Request, grown: GrownSize) -> None:
        super().__init__(bench.study, bench.many_cards)
        self.bench, self.request, self.grown = bench, request, grown
        self.replays = bench.replays
        self.lines: InterpolatedSteps | None = None
        self._tried: tuple[int, int] | None = None
        self._confirmed: set[tuple[int, bool]] = set()  # with the band, or without
        self._is_straight = True

    def widen(self, low: int, high: int) -> None:
        """Steps of batches up to `high` lie on a line, if three of them do: from `low`, or from one further on, as what
        the file leaves open may move no peak of the least batches."""
        if self._tried == (low, high) or not self._is_straight:
            return
        self._tried = low, high
        for start in (low, 8 * low, 64 * low):
            if high < start + 4:
                return
            batches = start, (start + high) // 2, high
            try:
                asked = [(batch, self.bench.ask(self.grown.at(self.request, batch))) for batch in batches]
                lines = InterpolatedSteps.through(asked)
            except DimensionError:
                return
            if lines is not None:
                self.lines = lines
                self._confirmed.clear()
                return

    def confirms(self, request: Request, band: bool = True) -> bool:
        """Whether the step of a request is the one that runs, as in `InterpolatedSteps`. Where it is not, no line is
        used any more."""
        batch = self._place(request)
        if batch is None or self.lines is None or not self._confirmed.isdisjoint(((batch, band), (batch, True))):
            return True
        if self.lines.confirms(batch, self.bench.ask(request), band):
            self._confirmed.add((batch, band))
            return True
        self.lines, self._is_straight = None, False
        for kept in (self._steps, self._live, self._verdicts, self._nominal):
            kept.clear()
        return False

    def _place(self, request: Request) -> int | None:
        """The batch of a request that lies on the line, None: it is run."""
        size, lines = self.grown.size_of(request), self.lines
        if lines is None or size is None or not lines.low < size // self.grown.stride < lines.high:
            return None
        batch = size // self.grown.stride
        return batch if request == self.grown.at(self.request, batch) else None

    def step(self, request: Request) -> StepResult:
        batch, key = self._place(request), key_of(request)
        if batch is None or self.lines is None:
            return self.bench.step(request)
        if key not in self._steps:
            self._steps[key] = self.lines.at(batch)
        return super().step(request)

    def live(self, request: Request) -> int:
        batch, key = self._place(request), key_of(request)
        if batch is None or self.lines is None:
            return self.bench.live(request)
        if key not in self._live:
            self._live[key] = self.lines.live(batch)
        return self._live[key]

    def _spread(self, request: Request) -> tuple[int, int]:
        batch = self._place(request)
        return super()._spread(request) if batch is None or self.lines is None else self.lines.spread(batch)

    def _of(self, request: Request) -> Verdicts:
        return self.bench._of(request) if self._place(request) is None else super()._of(request)
