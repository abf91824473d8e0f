"""The largest batch of a configuration on a card: solved from the structure of its step, confirmed by running it.

Live memory of one structure is computed for every batch (`structure.Affine`), so the batch at which live tensors and
the context alone fill the card bounds the search. Below it, the device meter is evaluated in full at few batches:
where a line through evaluated batches crosses the usable memory, from there on where the allocator gets by after giving
cached memory back, and at the result N and N + 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from staticmem.devices.meters import on_device
from staticmem.devices.sizing import TIGHT, Fit
from staticmem.errors import DimensionError, StaticmemError, UsageError
from staticmem.report.model import MOST_BATCH, LargestBatch
from staticmem.report.sweep import CardFit
from staticmem.studies import Study, without_cycle_search
from staticmem.studies.bench import Bench, fit_of
from staticmem.studies.device import device_of
from staticmem.studies.sizing_search import batch_range, last_of_few_ops
from staticmem.studies.structure import Affine, Core, curves, take_apart

ROUNDS = 8  # of solving and running again at the solution: two are enough where there is one structure


def largest_batch(bench: Bench, gpu: str) -> LargestBatch:
    """The largest batch of a bench's request on a card; the batch of the request plays no part.

    Raises:
        UsageError: the batch of the model is fixed.
        StaticmemError: the configuration cannot be analysed at any batch.
    """
    return _Search(bench, gpu).run()


@dataclass
class _Search:
    bench: Bench
    gpu: str
    cards: dict[int, CardFit | None] = field(default_factory=dict)  # by batch, without what the file leaves open
    free: dict[int, int] = field(default_factory=dict)  # by batch: the need if nothing is given back
    # by batch, where the band is within 95 %: what the file leaves open adds to the need
    more: dict[int, int] = field(default_factory=dict)
    cores: dict[int, Core] = field(default_factory=dict)

    def run(self) -> LargestBatch:
        model = self.bench.study.model
        if not any(spec.shape for spec in model.inputs):
            why = "No input has a dimension, so a step at another batch is the same step."
            raise UsageError("the batch of this model is fixed", why, "Leave --max-batch out.", "SM199")
        low, most = batch_range(model, MOST_BATCH) or (1, MOST_BATCH)
        first = self._at(low)
        if first is None or low == most or self._at(low + 1) is None:
            raise self._error(low)
        self.usable = _usable(first)
        live = self._live_bound(low, most)
        most_alive = min(live + 1, most)
        # without giving anything back: nearly a line; then whether it runs at all
        batch = self._last(max(self._last(low, most_alive, self._over), low), most_alive, self._fails)
        safe = self._last(low, batch, self._unsure) if batch else 0
        here = self._at(batch) if batch else None
        behind = self._at(batch + 1 if batch else low) if batch < most else None
        need, need_behind = (None if card is None else card.device_bytes for card in (here, behind))
        return LargestBatch(first.gpu, batch, need, need_behind, safe, live)

    # -- one batch -----------------------------------------------------------------------------------------------

    def _study(self, batch: int) -> Study:
        return self.bench.ask(replace(self.bench.study.request, batch=batch, gpu=None))

    def _at(self, batch: int) -> CardFit | None:
        """The full evaluation at a batch; None where the model does not take it."""
        if batch not in self.cards:
            try:
                with without_cycle_search():
                    one = self._study(batch)
                    device = device_of(replace(one.request, gpu=self.gpu))
                    meters = on_device(one.result, device)
                    card = fit_of(device.gpu, meters)
                    self.free[batch] = meters.unlimited + meters.context.expected
                    if (card.device_high_bytes or 0) <= _usable(card) * TIGHT:  # the spread takes two further steps
                        self.more[batch] = one.spread[1]
                    self.cards[batch] = card
            except DimensionError:
                self.cards[batch] = None
        return self.cards[batch]

    def _core(self, batch: int) -> Core | None:
        if batch not in self.cores:
            try:
                with without_cycle_search():
                    self.cores[batch], _ = take_apart(self._study(batch).lifetimes, apart=False)
            except DimensionError:
                return None
        return self.cores[batch]

    def _error(self, batch: int) -> StaticmemError:
        """Why the model takes no batch, or none but this one."""
        try:
            self._study(batch).result  # noqa: B018 - for its error
            self._study(batch + 1).result  # noqa: B018
        except DimensionError as error:
            why = f"{error.what[0].upper()}{error.what[1:]}."
        else:
            why = f"The file allows {batch} alone."
        hint = "Export it with a dynamic batch: dynamic_shapes={'x': {0: torch.export.Dim('batch')}}."
        return UsageError("the batch of this model is fixed", why, hint, "SM199")

    # -- live memory ---------------------------------------------------------------------------------------------

    def _live_bound(self, low: int, most: int) -> int:
        """The largest batch that live tensors and the context allow: nothing above it can fit."""
        first, core = self._at(low), self._core(low)
        assert first is not None
        assert core is not None
        context = (first.device_bytes or 0) - (first.reserved_bytes or 0)
        room = self.usable - context
        if int(curves(core, core.sizes()).peak[0]) > room:
            return 0
        start = max(low, 2) if most > low + 1 else low
        last = last_of_few_ops(self._ops, start, most)
        if last < most:
            return self._doubled(start, last, room)
        ranged = self._structure(start, min(start + 2, most))
        for _ in range(ROUNDS):
            batch = self._solve(ranged, start, most, room)
            if batch <= start or batch <= ranged.high:
                return batch
            wider = self._structure(start, batch)
            if wider.high == ranged.high:
                return batch
            ranged = wider
        return self._solve(ranged, start, most, room)

    def _ops(self, batch: int) -> int:
        """Ops of the step; 0 where the model does not take the batch."""
        try:
            return len(self._study(batch).graph.ops)
        except DimensionError:
            return 0

    def _doubled(self, low: int, most: int, room: int) -> int:
        """`_live_bound` of a step to which each sample adds ops, where no structure reaches from one batch to another.

        Raises:
            UsageError: it has too many ops at `most`, and the card is not full.
        """

        def exceeds(batch: int) -> bool:
            core = self._core(batch)
            return core is None or int(curves(core, core.sizes()).peak[0]) > room

        fits = batch = low
        while not exceeds(batch):
            if batch == most:
                raise UsageError(
                    "the largest batch of this model cannot be found",
                    "Each sample adds ops to its step, as a loop over the batch does. "
                    f"{batch:,} samples fit and make {self._ops(batch):,} ops; larger batches are not tried.",
                    "Give a batch and read whether it fits: --batch N --gpu NAME.",
                    "SM199",
                )
            fits, batch = batch, min(2 * batch, most)
        return bisect_left(range(fits, batch), True, key=exceeds) + fits - 1

    def _structure(self, low: int, high: int) -> Affine:
        """A structure through runs at both ends and between; where there is none, a line through the ends of the
        widest range that has one: the search over full evaluations confirms the result."""
        while high > low + 1:
            middle = (low + high) // 2
            cores = self._cores_at(low, middle, high)
            structure = Affine.through(cores) if len(cores) == 3 else None
            if structure is not None:
                return structure
            high = middle
        cores = self._cores_at(low, high)
        structure = Affine.through(cores) if len(cores) == 2 else None
        return structure or Affine.constant_of(low, cores[0][1])

    def _cores_at(self, *batches: int) -> list[tuple[int, Core]]:
        """The cores at those batches that the model takes."""
        cores = ((batch, self._core(batch)) for batch in batches)
        return [(batch, core) for batch, core in cores if core is not None]

    def _solve(self, ranged: Affine, low: int, most: int, room: int) -> int:
        """The largest batch whose live peak is within `room`, by bisection over a structure."""

        def exceeds(batch: int) -> bool:
            return int(curves(ranged.core, ranged.sizes([batch])).peak[0]) > room

        return bisect_left(range(low, most + 1), True, key=exceeds) + low - 1

    # -- the device ----------------------------------------------------------------------------------------------

    def _over(self, batch: int) -> int:
        """Bytes of the need beyond what is usable, if nothing is given back; positive where the model does not take
        this batch."""
        return self.free[batch] - self.usable if self._at(batch) is not None else self.usable

    def _fails(self, batch: int) -> int:
        """1 where the step runs out of memory or the model does not take this batch, else -1."""
        card = self._at(batch)
        return 1 if card is None or card.fit == Fit.DOES_NOT_FIT.value else -1

    def _unsure(self, batch: int) -> int:
        """Bytes by which the band is more than 95 % of what is usable."""
        card = self._at(batch)
        if card is None:
            return self.usable
        return (card.device_high_bytes or 0) + self.more.get(batch, 0) - int(self.usable * TIGHT)

    def _last(self, low: int, high: int, over: Callable[[int], int]) -> int:
        """The last batch in [low, high] at which `over` is not positive, by full evaluations; 0 where none is. The next
        one has been evaluated too, unless the model does not take it."""

        if over(low) > 0:
            return 0
        if high <= low or over(high) <= 0:
            return self._upward(max(low, high), over)
        fits, fails, turn = low, high, 0
        while fails - fits > 1:
            under, above = over(fits), over(fails)
            crossing = fits + (fails - fits) * -under // max(above - under, 1)
            # reserved memory is nearly a line: its crossing, then the batch behind it; bisection where that is far off
            guess = (fits + fails) // 2 if turn % 4 == 3 else crossing + turn % 2
            guess = min(max(guess, fits + 1), fails - 1)
            if over(guess) <= 0:
                fits = guess
            else:
                fails = guess
            turn += 1
        return fits

    def _upward(self, batch: int, over: Callable[[int], int]) -> int:
        """From a batch that fits, one by one while the next does: the bound was of another structure."""
        for _ in range(64):
            if batch >= MOST_BATCH or over(batch + 1) > 0:
                return batch
            batch += 1
        return batch


def _usable(card: CardFit) -> int:
    """Bytes that the process may take: less than the card has where its allocator is limited to a fraction."""
    return (card.device_bytes or 0) + card.headroom_bytes - card.missing_bytes


def no_card() -> UsageError:
    return UsageError(
        "--max-batch needs a GPU", "The largest batch is that of a GPU's memory.", "Example: --gpu rtx-4090", "SM199"
    )
