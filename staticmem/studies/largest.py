"""The largest batch of a configuration on a card, or size of an open dimension: the one definition that every verb,
page and function reports. What is said here of batches holds for any dimension (`GrownSize`).

Two numbers, both of batches whose next one does not do the same:

- expected: the largest batch that does not run out of memory by what is expected (verdict "fits" or "tight");
- safe: the largest whose verdict is "fits": its whole band is within 95 % of the card, and nothing is given back.

Live memory of one structure is computed for every batch (`structure.Affine`), so the batch at which live tensors and
the context alone fill the card bounds the search. Below it batches are tried in full: rungs from the bound downwards,
then those between two of them. Which ones are tried depends on the verdicts of the card alone, so that a verb that asks
for many cards finds what one that asks for a single card finds; steps and replays are shared by cards.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from staticmem.devices.gpus import Gpu
from staticmem.devices.sizing import TIGHT
from staticmem.errors import DimensionError, StaticmemError, UsageError
from staticmem.report.model import MOST_BATCH, LargestBatch, LargestSize
from staticmem.scenario.request import Request
from staticmem.studies import Study, without_cycle_search
from staticmem.studies.bench import Bench
from staticmem.studies.between import InterpolatingBench
from staticmem.studies.position_tables import PositionError
from staticmem.studies.sizing_search import BATCH, GrownSize, last, last_of_few_ops, rungs
from staticmem.studies.structure import Affine, Core, curves, take_apart

USUAL_SHARE = 0.75  # of the batches that live tensors alone allow: what bands leave of them, where a search begins
ROUNDS = 8  # of solving and running again at the solution: two are enough where there is one structure


def largest_batch(bench: Bench, gpu: str) -> LargestBatch:
    """The same of the batch."""
    return largest_size(bench, gpu, BATCH).as_batch()


def largest_size(bench: Bench, gpu: str, grown: GrownSize) -> LargestSize:
    """The largest size of what is grown on a card; the size that the bench's request gives it plays no part.

    Raises:
        UsageError: the model has no such dimension, or its batch is fixed.
        StaticmemError: the configuration cannot be analysed at any size.
    """
    return LargestBatches(bench, bench.study.request, grown).size_on(bench.card(gpu))


@dataclass
class LargestBatches:
    """The largest batches of a request on cards, or sizes of a dimension. Its own batch and card play no part."""

    bench: Bench
    request: Request
    grown: GrownSize = BATCH
    cores: dict[int, Core] = field(default_factory=dict)  # by batch
    structure: Affine | None = None  # the widest that was found
    # by architecture: of the batches that live tensors alone allow, the share that bands left on the card before
    shares: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    shortened: int | None = None  # the last batch that was tried, where each sample adds ops to the step

    def __post_init__(self) -> None:
        self.grown, limits = self.grown.tried(self.bench.ask(replace(self.request, gpu=None)), MOST_BATCH)
        self.low, self.most = limits or (1, MOST_BATCH)
        if self.grown.dim is not None:
            self.most = self._within_tables()
        self.values = rungs(self.low, self.most)
        self.between = InterpolatingBench(self.bench, replace(self.request, gpu=None), self.grown)

    def _within_tables(self) -> int:
        """The most strides for which the model's tables of positions have rows."""
        excess = self._excess(self.most)
        if not excess:
            return self.most
        most = self.most - -(-excess // self.grown.stride)  # one position for each unit of the dimension
        if most >= self.low and not self._excess(most) and self._excess(most + 1):
            return most
        sizes = range(self.low, self.most + 1)
        return self.low + max(bisect_left(sizes, True, key=lambda size: self._excess(size) > 0) - 1, 0)

    def _excess(self, strides: int) -> int:
        """Positions at this size that a table has no row for; 0 too where the model does not take the size."""
        try:
            self._study(strides).graph  # noqa: B018 - for its error
        except PositionError as error:
            return error.excess
        except DimensionError:
            pass
        return 0

    def size_on(self, card: Gpu) -> LargestSize:
        """Both numbers on a card, as sizes, with the needs of the larger and of the size behind it."""
        batch, safe, live = self._both(card)
        behind = batch + 1 if batch else self.low
        need_behind = self._need(behind, card) if behind <= self.most else None
        need, stride = self._need(batch, card) if batch else None, self.grown.stride
        sizes = batch * stride, need, behind * stride, need_behind, safe * stride, live * stride
        return LargestSize(card.slug, self.grown.name, *sizes)

    def both_sizes(self, card: Gpu) -> tuple[int, int]:
        """The largest size that is expected to run, and the largest safe one, without what they need."""
        batch, safe, _ = self._both(card)
        return batch * self.grown.stride, safe * self.grown.stride

    def _both(self, card: Gpu) -> tuple[int, int, int]:
        """The largest batch, the largest safe one, and the most that live tensors alone allow."""
        self.check()
        live = self._live_bound(card, 1.0)
        if self.shortened is not None and live == self.shortened:
            one, flag = ("sample", "--batch N") if self.grown.dim is None else ("unit", f"--dim {self.grown.dim}=N")
            raise UsageError(
                f"the largest {self.grown.name} of this model cannot be found",
                f"Each {one} adds ops to its step, as a loop over the {self.grown.name} does. "
                f"{live:,} {one}s fit and make {self._ops(live):,} ops; larger ones are not tried.",
                f"Give a size and read whether it fits: {flag} --gpu NAME.",
                "SM199",
            )
        safe = self.safe(card)
        return self._last_on_line(live, self.between.runs, card, safe), safe, live

    def safe(self, card: Gpu) -> int:
        """The largest batch that "fits"; 0 where none does."""
        return self._last_on_line(self._live_bound(card, TIGHT), self.between.safe, card, share=USUAL_SHARE)

    def tried(self, card: Gpu) -> int | None:
        """A batch that "fits", where neither of the next two rungs does: at most an eighth below `safe`, for a part of
        its cost. None where the batch is fixed.

        It starts at what the card before it, of the same architecture if there is one, makes likely, so that few steps
        are replayed. Those between two that were run are not run themselves (`between`), but for the one that is named.
        """
        if self._fixed() is not None:
            return None
        bound = self._live_bound(card, TIGHT)
        self._widen_line()
        values = [batch for batch in self.values if batch <= bound]
        kind = card.architecture, card.alternatives
        share = self.shares.get(kind, USUAL_SHARE)

        def fits(batch: int) -> bool:
            return self._holds(self.between.safe, batch, card)

        at = last(values, fits, bisect_right(values, share * bound) - 1)
        if at >= 0 and at + 2 < len(values) and fits(values[at + 2]):  # a band may be wide at one batch
            at += 2 + last(values[at + 2 :], fits)
        if at < 0:
            return 0
        if not self.between.confirms(self.at(values[at])):
            return self.tried(card)
        highest, usable = self.between.highest(self.at(values[at]), card)
        self.shares[kind] = values[at] / bound * usable * TIGHT / highest
        return values[at]

    def tried_size(self, card: Gpu) -> int | None:
        """`tried` as a size of what is grown.

        Raises:
            UsageError: it is a dimension, and the model takes one size alone.
        """
        if self.grown.dim is not None:
            self.check()
        tried = self.tried(card)
        return None if tried is None else tried * self.grown.stride

    # -- one batch -----------------------------------------------------------------------------------------------

    def at(self, batch: int) -> Request:
        """The request at a batch, without a card."""
        return self.grown.at(replace(self.request, gpu=None), batch)

    def _study(self, batch: int) -> Study:
        return self.bench.ask(self.at(batch))

    def _holds(self, judge: Callable[[Request, Gpu], bool], batch: int, card: Gpu) -> bool:
        try:
            return judge(self.at(batch), card)
        except DimensionError:
            return False  # the model does not take this batch

    def _need(self, batch: int, card: Gpu) -> int | None:
        """What `analyze` says of this batch; None where the model does not take it."""
        try:
            return self.bench.needed(self.at(batch), card, own=True)
        except DimensionError:
            return None

    def _fixed(self) -> StaticmemError | None:
        """Why the model takes no batch, or none but one; None where it takes several."""
        model = self.bench.study.model
        hint = "Export it with a dynamic batch: dynamic_shapes={'x': {0: torch.export.Dim('batch')}}."
        if self.grown.dim is not None:
            hint = "Export it again with this dimension open, with an example of a size near those that you want."
        if self.grown.dim is None and not any(spec.shape for spec in model.inputs):
            why, hint = (
                "No input has a dimension, so a step at another batch is the same step.",
                "Leave --max-batch out.",
            )
        elif self.low == self.most:
            why = f"The file allows {self.low} alone."
        else:
            try:
                for batch in (self.low, self.low + 1):
                    self.bench.step(self.at(batch))
            except DimensionError as error:
                why = f"{error.what[0].upper()}{error.what[1:]}."
            else:
                return None
        what = "the batch" if self.grown.dim is None else f"dimension '{self.grown.dim}'"
        return UsageError(f"{what} of this model is fixed", why, hint, "SM199")

    def check(self) -> None:
        """Raises:
        UsageError: the model takes one batch alone.
        """
        fixed = self._fixed()
        if fixed is not None:
            raise fixed

    # -- live memory ---------------------------------------------------------------------------------------------

    def _live_bound(self, card: Gpu, share: float) -> int:
        """The largest batch that live tensors and the context allow on a share of a card: nothing above it can fit."""
        room = self.bench.room(self.at(self.low), card, share)
        low, most = self.low, self.most
        if self._live(low) > room:
            return 0
        start = max(low, 2) if most > low + 1 else low
        if self.shortened is None and (few := last_of_few_ops(self._ops, start, most)) < most:
            self.shortened = few
        if self.shortened is not None:
            return self._doubled(start, self.shortened, room)
        if self.grown.dim is not None and most > start + 1 and not self._is_affine(start):
            return self._doubled(start, most, room)
        self.structure = self.structure or self._guess(start, most)
        for _ in range(ROUNDS):
            batch = self._solve(self.structure, start, most, room)
            if batch <= start or batch <= self.structure.high:
                return batch
            wider = self._structure(start, batch)
            if wider.high <= self.structure.high:
                return batch
            self.structure = wider
        return self._solve(self.structure, start, most, room)

    def _guess(self, start: int, most: int) -> Affine:
        """A first structure: through the step that was asked for, which is run in any case, else the least ones."""
        asked = (self.grown.size_of(self.request) or 0) // self.grown.stride
        if start + 2 < asked <= most:
            structure = Affine.through(self._list_cores(start, asked)) if self.grown.dim is None else None
            if structure is not None:
                return structure
        return self._structure(start, min(start + 2, most))

    def _live(self, batch: int) -> int:
        core = self._core(batch)
        return int(curves(core, core.sizes()).peak[0])

    def _core(self, batch: int) -> Core:
        if batch not in self.cores:
            with without_cycle_search():
                self.cores[batch], _ = take_apart(self._study(batch).lifetimes, apart=False)
        return self.cores[batch]

    def _ops(self, batch: int) -> int:
        """Ops of the step; 0 where the model does not take the batch."""
        try:
            return len(self._study(batch).graph.ops)
        except DimensionError:
            return 0

    def _doubled(self, low: int, most: int, room: int) -> int:
        """`_live_bound` where no structure reaches from one size to another, as each sample adds ops to the step or
        bytes grow with the square of a length: at most `most`, beyond which there are too many of them."""

        def exceeds(batch: int) -> bool:
            try:
                return self._live(batch) > room
            except DimensionError:
                return True

        fits = batch = low
        while not exceeds(batch):
            if batch == most:
                return most
            fits, batch = batch, min(2 * batch, most)
        return bisect_left(range(fits, batch), True, key=exceeds) + fits - 1

    def _is_affine(self, start: int) -> bool:
        """Whether the bytes of every buffer grow in a line at the least sizes: those of scores of pairs do not."""
        cores = self._list_cores(start, start + 1, start + 2)
        return len(cores) == 3 and Affine.through(cores) is not None

    def _structure(self, low: int, high: int) -> Affine:
        """A structure through runs at both ends and between; where there is none, a line through the ends of the
        widest range that has one: the search over full evaluations confirms the result."""
        while high > low + 1:
            middle = (low + high) // 2
            cores = self._list_cores(low, middle, high)
            structure = Affine.through(cores) if len(cores) == 3 else None
            if structure is not None:
                return structure
            high = middle
        cores = self._list_cores(low, high)
        structure = Affine.through(cores) if len(cores) == 2 else None
        return structure or Affine.constant_of(low, cores[0][1])

    def _list_cores(self, *batches: int) -> list[tuple[int, Core]]:
        """The cores at those batches that the model takes."""
        cores = []
        for batch in batches:
            try:
                cores.append((batch, self._core(batch)))
            except DimensionError:
                continue
        return cores

    def _solve(self, ranged: Affine, low: int, most: int, room: int) -> int:
        """The largest batch whose live peak is within `room`, by bisection over a structure."""

        def exceeds(batch: int) -> bool:
            return ranged.peak(batch) > room

        return bisect_left(range(low, most + 1), True, key=exceeds) + low - 1

    # -- verdicts ------------------------------------------------------------------------------------------------

    def _last_on_line(
        self, bound: int, judge: Callable[[Request, Gpu], bool], card: Gpu, least: int = 0, share: float = 1.0
    ) -> int:
        """`_last`, by steps on a line: the one of the batch that is found is run. Where that is another, all are."""
        self._widen_line()
        batch = self._last(bound, lambda batch: self._holds(judge, batch, card), least, share)
        if batch <= least or self.between.confirms(self.at(batch), judge == self.between.safe):
            return batch
        return self._last_on_line(bound, judge, card, least, share)

    def _widen_line(self) -> None:
        if self.structure is not None:
            self.between.widen(self.structure.low, self.structure.high)

    def _last(self, bound: int, allows: Callable[[int], bool], least: int, share: float) -> int:
        """The last batch in (least, bound] that is allowed, where the next one is not; `least`, which is known to be,
        where none is. It is looked for from this share of the bound on."""
        values = [batch for batch in self.values if least < batch <= bound]
        at = last(values, allows, bisect_right(values, share * bound) - 1)
        if at < 0 and not least:
            return 0
        low = values[at] if at >= 0 else least
        high = values[at + 1] if at + 1 < len(values) else bound + 1
        boundary = bisect_left(range(low + 1, high), True, key=lambda batch: not allows(batch)) + low
        return self._upward(boundary, allows) if boundary >= bound else boundary

    def _upward(self, batch: int, allows: Callable[[int], bool]) -> int:
        """From a batch that is allowed, one by one while the next is: the bound was of another structure."""
        for _ in range(64):
            if batch >= self.most or not allows(batch + 1):
                return batch
            batch += 1
        return batch


def no_card(flag: str = "--max-batch") -> UsageError:
    return UsageError(
        f"{flag} needs a GPU", "The largest size is that of a GPU's memory.", "Example: --gpu rtx-4090", "SM199"
    )
