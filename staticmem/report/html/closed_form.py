"""The peak of a step as a closed form of the batch: exact, and small enough to be computed in a page.

Every buffer of a step has `base + slope x batch` bytes as long as the batch changes no decision of the step, and
PyTorch rounds each up to 512. So what is alive at a moment is a sum of such terms, and the peak the largest sum of a
few moments:

    peak(batch) = max over moments of  sum of count x round_up(base + slope x batch, 512)

That the step decides alike is not assumed: steps traced at several batches must agree buffer by buffer in births and
deaths, and all their sizes must lie on the lines. Moments that are never the largest in the range are left out, by
bounds that take the rounding into account (at most 511 bytes for a buffer whose size is not a multiple of 512).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from staticmem.eager.trace import ROUND, round_up
from staticmem.liveness import Lifetimes


@dataclass(frozen=True, slots=True)
class Term:
    """`count` buffers of a category with `base + slope x batch` bytes each, before rounding."""

    category: str
    base: int
    slope: int
    count: int

    def at(self, batch: int) -> int:
        return self.count * round_up(self.base + self.slope * batch)


@dataclass(frozen=True, slots=True)
class Moment:
    """What is alive at one tick. `phase` and `kernel` say when that is."""

    tick: int
    phase: str
    kernel: str
    terms: tuple[Term, ...]

    def at(self, batch: int) -> int:
        """Live bytes at this moment."""
        return sum(term.at(batch) for term in self.terms)


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The peak of live bytes for batches `low` to `high`. `traced` are the batches of the steps that it agrees with."""

    low: int
    high: int
    traced: tuple[int, ...]
    moments: tuple[Moment, ...]

    def peak(self, batch: int) -> int:
        """Bytes of live tensors at the peak.

        Raises:
            ValueError: a batch outside of the range.
        """
        if not self.low <= batch <= self.high:
            raise ValueError(f"batch {batch} is not in {self.low} to {self.high}")
        return max((moment.at(batch) for moment in self.moments), default=0)


class NotAffineError(Exception):
    """Steps at different batches differ in more than sizes; the message says in what."""


Line = tuple[int, int]  # base, slope


def closed_form(traced: Mapping[int, Lifetimes], low: int, high: int) -> ClosedForm:
    """The closed form of steps by batch: at least three, among them `high`.

    Raises:
        NotAffineError: they have none in common.
    """
    batches = sorted(traced)
    if len(batches) < 3 or batches[-1] != high:
        raise ValueError(f"steps at {batches} for batches up to {high}")
    lines = _lines(traced, batches)
    of = traced[batches[0]]
    born_at = {tick: index for index, tick in enumerate(of.born)}
    moments: dict[tuple[Term, ...], Moment] = {}
    for tick in _candidates(of, lines, low, high):
        buffer = of.trace.buffers[born_at[tick]]
        kernel = of.trace.kernels[buffer.kernel]
        terms = Counter(
            (of.trace.buffers[i].category, *lines[i])
            for i in range(len(lines))
            if lines[i] != (0, 0) and of.born[i] <= tick < of.died[i]
        )
        listed = tuple(Term(*key, count) for key, count in sorted(terms.items()))
        moments.setdefault(listed, Moment(tick, kernel.phase, kernel.name, listed))
    form = ClosedForm(low, high, tuple(batches), tuple(moments.values()))
    for batch in batches:
        if low <= batch and form.peak(batch) != traced[batch].peak_bytes:  # pragma: no cover - what the lines imply
            raise NotAffineError(f"the closed form misses the step at batch {batch}")
    return form


def check_alike(traced: Mapping[int, Lifetimes]) -> None:
    """Raises: NotAffineError: the steps at these batches differ in more than sizes."""
    (batch, first), *others = sorted(traced.items())
    for other, step in others:
        if (first.born, first.died) != (step.born, step.died):
            raise NotAffineError(f"the step at batch {other} does other things than the one at {batch}")


def _lines(traced: Mapping[int, Lifetimes], batches: Sequence[int]) -> list[Line]:
    """Base and slope of every buffer."""
    check_alike(traced)
    first = traced[batches[0]]
    columns = [[buffer.nbytes for buffer in traced[batch].trace.buffers] for batch in batches]
    near, far = batches[0], batches[-1]
    lines: list[Line] = []
    for index, sizes in enumerate(zip(*columns, strict=True)):
        slope, rest = divmod(sizes[-1] - sizes[0], far - near)
        base = sizes[0] - slope * near
        if rest or any(base + slope * batch != size for batch, size in zip(batches, sizes, strict=True)):
            buffer = first.trace.buffers[index]
            raise NotAffineError(f"'{buffer.name or buffer.category}' does not grow evenly with the batch")
        lines.append((base, slope))
    return lines


def _candidates(of: Lifetimes, lines: Sequence[Line], low: int, high: int) -> list[int]:
    """Ticks that may be the peak for some batch in the range; the earliest of equal ones."""
    changes: list[tuple[int, int, int, int] | None] = [None] * of.ticks  # sign, base, slope, slack
    for index, (base, slope) in enumerate(lines):
        exact = slope % ROUND == 0
        size = (round_up(base) if exact else base, slope, 0 if exact else ROUND - 1)
        changes[of.born[index]] = (1, *size)
        if of.died[index] < of.ticks:
            changes[of.died[index]] = (-1, *size)
    tops: dict[tuple[int, int, int, int], int] = {}
    base = slope = slack = 0
    last, rising = 0, False
    for tick, change in enumerate([*changes, (-1, 0, 0, 0)]):
        if change is None:
            continue
        sign, growing = change[0], change[0] > 0
        if rising and not growing:  # equal lines are equal sums only where nothing is rounded
            tops.setdefault((base, slope, slack, tick if slack else 0), last)
        base, slope, slack = base + sign * change[1], slope + sign * change[2], slack + sign * change[3]
        rising, last = growing, tick
    if not tops:
        return []
    lines_of_tops = {top[:2] for top in tops}
    edges = _upper_edges(sorted(lines_of_tops), low, high)
    best = [max(line[0] + line[1] * batch for line in lines_of_tops) for batch in edges]
    return sorted(
        tick
        for (base, slope, slack, _), tick in tops.items()
        if any(
            base + slope * batch + slack >= most * (1 - 1e-9) for batch, most in zip(edges, best, strict=True)
        )  # floats: rather one moment too many
    )


def _upper_edges(lines: Sequence[Line], low: int, high: int) -> list[float]:
    """Where the upper envelope of lines turns within [low, high], and both ends.

    A line (raised by its slack) that exceeds a convex envelope anywhere in the range exceeds it at one of these: what
    it has over the envelope is concave, and its pieces end there.
    """
    edges = [float(low), float(high)]
    at = float(low)
    now = max(lines, key=lambda line: (line[0] + line[1] * at, line[1]))
    while True:
        crossings = [((now[0] - line[0]) / (line[1] - now[1]), line[1], line) for line in lines if line[1] > now[1]]
        ahead = [crossing for crossing in crossings if crossing[0] >= at]
        if not ahead:
            return edges
        at, _, now = min(ahead, key=lambda crossing: (crossing[0], -crossing[1]))
        if at >= high:
            return edges
        edges.append(at)
