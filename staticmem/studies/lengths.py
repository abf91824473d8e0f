"""Data of many lengths: the shapes of the batches of a run, and the steps of all these shapes.

Steps that differ in one open dimension and in their batch are the same trace with other sizes, as long as the code does
not branch on them. Some of the shapes are run. Where those have one structure, tensors whose bytes lie on a polynomial
of batch and length through all of them (products of a batch with a length of degree 2 at most, as scores of attention
have) are on it at the shapes between. Other tensors, such as those that a kernel pads, and workspaces of kernels are
those of the next larger shape that was run. Where the structure differs, so is the whole step. The report says it.
"""

from __future__ import annotations

import copy
import math
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from staticmem.allocators.from_trace import Builder
from staticmem.config.lengths import numbers_of, wrong
from staticmem.config.plan import DRAWN, PACKED, PADDED, SORTED, TOKENS
from staticmem.units import round_up

AT_WORST = 2  # steps with the longest batch behind those of a run
RUN_WHOLE = 12  # so many shapes are all run
SAMPLES = 9  # of lengths that are run where there are more; the polynomial has three coefficients of a length
Shape: TypeAlias = "tuple[int, int]"  # batch, length


@dataclass(frozen=True)
class Lengths:
    """Where lengths come from, and how samples become batches.

    `source` is `normal(mean, deviation)`, `lognormal(mu, sigma)`, `uniform(least, most)`, or a file: one number a line,
    a column of a CSV, a field of JSONL. `rule`: "padded" pads a batch to its longest sample, "sorted" does so with
    samples in order of their length, "tokens" fills a budget of tokens with samples in their order, padding included,
    "packed" has rows of `most` tokens. `bucket`: lengths are rounded up to multiples of it.
    """

    source: str
    column: str = ""
    rule: str = PADDED
    tokens: int = 0
    bucket: int = 1
    least: int = 1
    most: int = 0  # 0: that of the file
    seed: int = 0

    def shapes(self, steps: int, batch: int) -> list[Shape]:
        """The batches of a run, and behind them twice the longest that the data allow, which a longer run meets: the
        loop holds outputs of one while the next runs.

        Raises:
            UsageError: the source cannot be read, or a bound is missing.
        """
        if self.rule == TOKENS and not self.tokens:
            raise wrong("the rule `tokens` needs a budget", "Add `tokens: 8192`.")
        if self.rule == PACKED:
            if not self.most:
                raise wrong("packed rows need a length", "Add `most: 4096`, the tokens of a row.")
            return [(batch, self.most)] * (steps + AT_WORST)
        numbers = self._numbers()
        longest = self.most or max(numbers)
        draw = random.Random(self.seed)  # noqa: S311 - an order of samples, no secret
        shapes: list[Shape] = []
        while len(shapes) < steps:
            epoch = list(numbers)
            draw.shuffle(epoch)
            shapes += self._batches(epoch, batch, draw)
        longest = round_up(longest, self.bucket)
        worst = (max(self.tokens // longest, 1) if self.rule == TOKENS else batch), longest
        return [*shapes[:steps], worst, worst]

    def chance_of_longest(self, shapes: Sequence[Shape]) -> float:
        """How probable it is that a run draws a sample as long as those of the longest batch. `shapes` are those of the
        run, with those behind it; a file is gone through in random order, a distribution is drawn from anew."""
        *drawn_shapes, (_, longest) = shapes
        count = sum(batch for batch, _ in drawn_shapes[: 1 - AT_WORST])
        needed = longest - self.bucket + 1
        if self.rule == PACKED or self.least >= needed:
            return 1.0
        drawn = DRAWN.fullmatch(self.source)
        if drawn is not None:
            return 1.0 - (1.0 - _share_above(drawn[1], float(drawn[2]), float(drawn[3]), needed)) ** count
        numbers = self._numbers()
        missed = 1.0
        for place in range(sum(number >= needed for number in numbers)):
            missed *= max(len(numbers) - count - place, 0) / (len(numbers) - place)
            if not missed:
                break
        return 1.0 - missed

    def _batches(self, lengths: list[int], batch: int, draw: random.Random) -> list[Shape]:
        """The batches of an epoch."""
        if self.rule == TOKENS:
            return list(self._filled(lengths))
        if self.rule == SORTED:
            lengths.sort()
        groups = [lengths[at : at + batch] for at in range(0, max(len(lengths) - batch + 1, 1), batch)]
        if self.rule == SORTED:  # batches of alike lengths, in any order
            draw.shuffle(groups)
        return [(len(group), round_up(max(group), self.bucket)) for group in groups]

    def _filled(self, lengths: Iterable[int]) -> Iterable[Shape]:
        count = longest = 0
        for length in lengths:
            padded = round_up(length, self.bucket)
            if count and (count + 1) * max(longest, padded) > self.tokens:
                yield count, longest
                count = longest = 0
            count, longest = count + 1, max(longest, padded)
        if count:
            yield count, longest

    def _numbers(self) -> list[int]:
        """The lengths of the data, within their bounds."""
        return numbers_of(self.source, self.column, self.least, self.most, self.seed)


def _share_above(kind: str, first: float, second: float, needed: int) -> float:
    """The share of a distribution that is `needed` or more."""
    if kind == "uniform":
        return min(max((second - needed) / max(second - first, 1e-9), 0.0), 1.0)
    at = (math.log(needed) if kind == "lognormal" else needed) - first
    return math.erfc(at / max(second, 1e-9) / math.sqrt(2)) / 2


class ShapedBuilders:
    """The builders of steps of many shapes."""

    def __init__(self, make: Callable[[Shape], Builder], shapes: Sequence[Shape]) -> None:
        """`make` runs the step of a shape."""
        distinct = sorted(set(shapes), key=_by_length)
        samples = distinct if len(distinct) <= RUN_WHOLE else _samples(distinct)
        self.ran = {shape: make(shape) for shape in samples}
        self.count = len(distinct)
        self._fit = None if len(samples) == len(distinct) else _Fit.through(self.ran)

    @property
    def rounds_up(self) -> bool:
        """Whether shapes have the whole steps of larger ones."""
        return self._fit is None and len(self.ran) < self.count

    @property
    def rounded_bytes(self) -> int:
        """The bytes of tensors that a shape has as the next larger one has them."""
        return 0 if self._fit is None else self._fit.nbytes

    def at(self, shape: Shape) -> Builder:
        """The builder of a shape: of one that was not run, that of the next larger one with the bytes of its tensors.
        Kernels then take the workspaces of the larger one."""
        if shape in self.ran:
            return self.ran[shape]
        larger = [one for one in self.ran if one[0] >= shape[0] and one[1] >= shape[1]]
        base = self.ran[min(larger, key=_by_length)]
        return base if self._fit is None else self._fit.at(shape, base)


def _by_length(shape: Shape) -> tuple[int, int]:
    return shape[1], shape[0]


def _samples(distinct: Sequence[Shape]) -> list[Shape]:
    """Shapes that stand for all: lengths from the least to the most, each with the least and the largest batch that
    there is; so that the largest of them is at least as large as each."""
    lengths = sorted({length for _, length in distinct})
    chosen = sorted({lengths[at * (len(lengths) - 1) // (SAMPLES - 1)] for at in range(SAMPLES)})
    batches = sorted({batch for batch, _ in distinct})
    tried = sorted({batches[0], batches[len(batches) // 2], batches[-1]})
    if len(tried) == 1:
        return [(tried[0], length) for length in chosen]
    samples: set[Shape] = set()
    for below, length in pairwise([0, *chosen]):
        samples |= {min(shape for shape in distinct if shape[1] == length), max(s for s in distinct if s[1] == length)}
        # with a budget short rows have large batches: each shape has a sample that is as large or larger
        samples.add((max(batch for batch, at in distinct if below < at <= length), length))
    return sorted(samples, key=_by_length)


class _Fit:
    """The bytes of all tensors of a step as polynomials of batch and length."""

    def __init__(self, coefficients: np.ndarray, others: np.ndarray, nbytes: int) -> None:
        """`others`: the indices of tensors that are on none, with the bytes of all of them in the largest step."""
        self.coefficients, self.others, self.nbytes = coefficients, others, nbytes

    @classmethod
    def through(cls, ran: dict[Shape, Builder]) -> _Fit | None:
        """None where the steps have several structures."""
        base, *larger = ran.values()
        if any(_structure(builder) != _structure(base) for builder in larger):
            return None
        sizes = np.array([builder.trace.buffers.nbytes for builder in ran.values()], dtype=np.float64)
        terms = np.array([_terms(shape) for shape in ran])
        coefficients, _, rank, _ = np.linalg.lstsq(terms, sizes, rcond=None)
        if rank == len(ran):  # it goes through any points: nothing is shown
            return None
        others = np.nonzero((np.rint(terms @ coefficients) != sizes).any(axis=0))[0]
        return cls(coefficients, others, int(sizes[:, others].max(axis=0, initial=0).sum()))

    def at(self, shape: Shape, base: Builder) -> Builder:
        """The builder of a shape, as `base` with the sizes of its tensors."""
        rounded = np.rint(_terms(shape) @ self.coefficients).astype(np.int64)
        rounded[self.others] = np.frombuffer(base.trace.buffers.nbytes, dtype=np.int64)[self.others]
        sizes = rounded.tolist()
        builder = copy.copy(base)
        buffers = copy.copy(base.trace.buffers)
        buffers.nbytes = array("q", sizes)
        builder.trace = replace(base.trace, buffers=buffers)
        builder.inputs = [buffer._replace(nbytes=sizes[buffer.id]) for buffer in base.inputs]
        builder.current = {}
        return builder


def _terms(shape: Shape) -> np.ndarray:
    """The monomials, of lengths in thousands so that they are of one magnitude."""
    batch, length = shape[0] / 16, shape[1] / 1024
    return np.array([1.0, length, length * length, batch, batch * length, batch * length * length])


def _structure(builder: Builder) -> tuple[Any, ...]:
    """All that two steps of one structure share."""
    trace, buffers = builder.trace, builder.trace.buffers
    columns = buffers.born, buffers.died, buffers.kernels, buffers.categories, buffers.names
    return (*columns, trace.phases, trace.replaced_by, trace.streams, trace.kernels.names)
