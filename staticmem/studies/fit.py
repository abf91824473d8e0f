"""How a training step fits a card: the way to run it that gives up least, and settings that run it so.

Ways are tried in the order of what they give up, the most first: changes of training that the user allows (precision,
then 8-bit optimizer state, then adapters, each on top of those before it), checkpoints (the same numbers, computed
again), sharding over the devices, micro-batches. So no change of training is made where checkpoints are enough, and
nothing is sharded where smaller micro-batches are. The first way that is safe is taken, with the largest micro-batch
that is: safe is what `largest` calls so, the verdict "fits".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from staticmem.devices.sizing import TIGHT
from staticmem.errors import StaticmemError, UsageError
from staticmem.parallel.rank import on_one_device, sent_bytes
from staticmem.report.fit import ADAPTERS, CHANGES, OPTIMIZER, PRECISION, SCHEMA, Concession, Cost, Fit, Way
from staticmem.report.model import MOST_BATCH
from staticmem.report.settings import LIBRARIES
from staticmem.report.sweep import NUMERICS, SAME, TRAINING
from staticmem.scenario.options import checked_choice
from staticmem.scenario.precision import precision
from staticmem.scenario.request import Request, flags_of
from staticmem.scenario.strategies import STRATEGIES, facts_of
from staticmem.studies import Study, without_cycle_search
from staticmem.studies.bench import Bench
from staticmem.studies.fit_settings import Options, check_fit, commands, replicas_of, settings_of, strategies_of
from staticmem.studies.largest import LargestBatches
from staticmem.studies.let_go import worth_letting_go
from staticmem.studies.levers import (
    adapter_levers,
    changed_by_micro_batches,
    checkpoint_levers,
    optimizer_levers,
    precision_levers,
)
from staticmem.studies.sizing_search import BATCH, divisors, last
from staticmem.studies.study import unused
from staticmem.studies.trials import Counter


@dataclass(frozen=True)
class _Change:
    """Options of a request, and what they give up."""

    options: Mapping[str, Any]
    concessions: tuple[Concession, ...] = ()

    def and_then(self, options: Mapping[str, Any], what: str, changes: str) -> _Change:
        return _Change({**self.options, **options}, (*self.concessions, Concession(what, changes)))


def fit(study: Study, options: Options) -> Fit:
    """The way to run the request's step that gives up least, of those that are safe on the card.

    Raises:
        UsageError: nothing is trained, samples cannot be shared evenly, or the library has no such settings.
        StaticmemError: the step cannot be analysed in any way that was tried.
    """
    for word in options.allow:
        checked_choice("allow", word, CHANGES)
    with without_cycle_search():
        return _Search(study, options).run()


class _Search:
    def __init__(self, study: Study, options: Options) -> None:
        self.study, self.options = study, options
        self.devices = study.request.devices or 1
        check_fit(study, options)
        self.strategies = strategies_of(study.request, options.library)
        blank: dict[str, Any] = {
            "gpu": None,
            "preset": None,
            "parallel": None,
            "devices": None,
            "replicas": None,
            "offload_parameters": False,
        }
        asked = replace(study.request, **blank)
        self.bench = Bench(study.ask(asked))
        if options.library is not None:
            asked = LIBRARIES[options.library].as_run(asked)
        self.request = replace(asked, batch=None, accumulate=1)
        self.card = self.bench.card(options.gpu)
        self.error: StaticmemError | None = None
        self.together: list[tuple[Mapping[str, Any], bool]] = []  # ways of all devices, and whether one is safe
        self.batches = self._micro_batches()

    def run(self) -> Fit:
        taken = self._first(self.options.allow)
        if taken is None:
            return self._without_an_answer()
        change, request = taken
        way = self._way(change, request)
        settings = settings_of(self.study, request, self.card, self.options)
        return self._fit(way, request, True, settings=settings)

    def _fit(self, way: Way, request: Request, fits: bool, **more: Any) -> Fit:
        asked = self.study.request
        # how many devices there are is its own question
        alone = self.study if asked.parallel else self.study.ask(replace(asked, devices=None))
        assumed = (*self.card.unsaid, *unused(asked, alone.notes))
        rest: dict[str, Any] = {"would_fit": (), "settings": (), "assumed": assumed, **more}
        if asked.batch is None and self.options.global_batch is None and self.batches is not None:
            text = f"the batch is the file's ({self.share // asked.accumulate:,}), which is fixed"
            rest["assumed"] += (f"{text}: 'staticmem analyze --max-batch' looks for a larger one",)
        samples = way.batch * way.accumulate * way.devices
        rest["let_go"] = worth_letting_go(self.bench.ask(request))
        return Fit(
            SCHEMA,
            self.study.model.path,
            self.card.slug,
            self.card.name,
            self.card.usable,
            samples,
            fits,
            way,
            self._cost(request),
            tuple(word for word in CHANGES if word in self.options.allow),
            **rest,
        )

    # -- ways ----------------------------------------------------------------------------------------------------

    def _first(self, allowed: Sequence[str]) -> tuple[_Change, Request] | None:
        """The first way that is safe, with its largest micro-batch; None where there is none."""
        ways = list(self._ways(allowed))
        for done, change in enumerate(ways):
            self.options.progress(done, len(ways))
            if self._needs_more_than_unsafe(change):
                continue
            request = self._largest(replace(self.request, **change.options))
            if request is not None:
                return self._add_losses_of_micro_batches(change, request), request
        return None

    def _needs_more_than_unsafe(self, change: _Change) -> bool:
        """Whether groups of devices would share a model that is not safe on all of them together, which each have less
        of it."""
        if change.options.get("replicas") is None or self.study.request.replicas is not None:
            return False
        together = {**change.options, "replicas": None}
        safe = next((safe for options, safe in self.together if options == together), None)
        if safe is None:
            safe = self._largest(replace(self.request, **together)) is not None
            self.together.append((together, safe))
        return not safe

    def _ways(self, allowed: Sequence[str]) -> Iterator[_Change]:
        """From the least that is given up to the most; those of a whole batch and of micro-batches are one."""
        for change in self._changes(allowed):
            for checkpointed in self._checkpointed(change):
                yield from self._shared(checkpointed)

    def _changes(self, allowed: Sequence[str]) -> Iterator[_Change]:
        """What trains the same, then with each change that is allowed on top of those before it."""
        change = _Change({})
        yield change
        study = self.bench.study
        if PRECISION in allowed:
            # the first: the other casts the weights too
            lever = next(precision_levers(self.request, self.card, training=True), None)
            if lever is not None:
                change = change.and_then(lever.options, f"autocast to {lever.options['amp']}", NUMERICS)
                yield change
        if OPTIMIZER in allowed:
            name = f"{self.request.optimizer}-8bit"
            for lever in optimizer_levers(study):
                if lever.options.get("optimizer") == name:
                    change = change.and_then(lever.options, lever.does, TRAINING)
                    yield change
        if ADAPTERS in allowed:
            for lever in adapter_levers(study):
                if not lever.options.get("quantize"):
                    change = change.and_then(lever.options, lever.does, TRAINING)
                    yield change

    def _checkpointed(self, change: _Change) -> Iterator[_Change]:
        yield change
        for lever in checkpoint_levers(self.bench.study):
            if set(lever.options) == {"checkpoint"}:
                yield change.and_then(lever.options, lever.does, SAME)
                return

    def _shared(self, change: _Change) -> Iterator[_Change]:
        for strategy in self.strategies:
            if strategy is None:
                yield change
                continue
            for replicas in replicas_of(self.study.request, strategy, self.options.library):
                options = {"parallel": strategy, "devices": self.devices, "replicas": replicas}
                options["offload_parameters"] = self.study.request.offload_parameters
                if STRATEGIES[strategy].keeps_whole or self.study.request.parallel == strategy:
                    yield replace(change, options={**change.options, **options})
                else:
                    does = f"{STRATEGIES[strategy].title} over {self.devices} devices"
                    does += f" in {replicas} groups that have the whole model each" if replicas is not None else ""
                    yield change.and_then(options, does, SAME)

    # -- micro-batches -------------------------------------------------------------------------------------------

    def _micro_batches(self) -> list[int] | None:
        """Micro-batches that are tried, the least first; None where the largest batch is looked for."""
        request, total = self.study.request, self.options.global_batch
        if total is None:
            batch = request.batch or self._batch_of_the_file()
            if batch is None:
                return None
            self.share, most = batch * request.accumulate, batch
        else:
            if total % self.devices:
                why = f"Each of {self.devices} devices takes as many samples as the others."
                less = total - total % self.devices
                hint = f"Try --global-batch {less or self.devices}, or another number of --devices."
                raise UsageError(f"{total:,} samples cannot be shared evenly", why, hint, "SM296")
            self.share = most = total // self.devices
        return [n for n in divisors(self.share) if n <= min(most, MOST_BATCH)]

    def _batch_of_the_file(self) -> int | None:
        """The batch of a file that does not leave it open; None for one that does."""
        study = self.bench.study
        if BATCH.tried(study)[1] is not None:
            return None
        return next((shape[0] for shape in study.binding.shapes.values() if shape), 1)

    def _at(self, request: Request, batch: int) -> Request:
        return replace(request, batch=batch, accumulate=self.share // batch)

    def _largest(self, request: Request) -> Request | None:
        """The request with the largest micro-batch that is safe; None where none is."""
        if self.batches is None:
            batch = self._largest_of_all(request)
            return replace(request, batch=batch, accumulate=self.study.request.accumulate) if batch else None
        if self._is_safe(self._at(request, self.batches[-1])):
            return self._at(request, self.batches[-1])
        tried = self.batches[:-1]
        if len(tried) > 1 and not self._is_safe(self._at(request, tried[0])):
            tried = tried[1:]  # an export may have no batch of 1
        at = last(tried, lambda n: self._is_safe(self._at(request, n)))
        return self._at(request, tried[at]) if at >= 0 else None

    def _largest_of_all(self, request: Request) -> int:
        try:
            batches = LargestBatches(self.bench, replace(request, accumulate=self.study.request.accumulate))
            batches.check()
            return batches.safe(self.card)
        except StaticmemError as error:
            self.error = self.error or error
            return 0

    def _is_safe(self, request: Request) -> bool:
        try:
            return self.bench.safe(request, self.card)
        except StaticmemError as error:  # the model does not take this batch, or a change does not go with the request
            self.error = self.error or error
            return False

    def _add_losses_of_micro_batches(self, change: _Change, request: Request) -> _Change:
        """The change with what smaller micro-batches than the request's give up."""
        if self.batches is None or request.batch == self.batches[-1]:
            return change
        does = f"{request.accumulate:,} micro-batches of {request.batch:,} a step"
        changes = changed_by_micro_batches(self.bench.study.graph)
        if changes == TRAINING:
            does += ", so that batch norms see fewer samples"
        return change.and_then({}, does, changes)

    # -- figures -------------------------------------------------------------------------------------------------

    def _way(self, change: _Change, request: Request) -> Way:
        """The figures of `analyze`."""
        report = self.study.ask(replace(request, gpu=self.card.slug)).report
        band, fits = report.peak.bands["device"], report.gpu
        assert fits is not None
        assert report.peak.device_bytes is not None
        over = fits.missing_bytes or max(band.high - int(TIGHT * self.card.usable), 0)
        return Way(
            change.concessions,
            request.batch or 1,
            request.accumulate,
            self.devices,
            request.parallel,
            flags_of(request),
            report.peak.live_bytes,
            band.low,
            report.peak.device_bytes,
            band.high,
            fits.fit,
            0 if fits.fit == "fits" else over,
            *commands(self.study, request, self.card, band.high, self.options.config),
            fits.why,
            fits.condition,
        )

    def _cost(self, request: Request) -> Cost:
        one = self.study.ask(on_one_device(request))
        counted = Counter(one.result.graph, True).of(one.scenario)
        again = counted.again
        if one.result.compiled is not None:  # then the compiler decides what is computed again
            again = max(again, one.result.compiled.recomputed_flops)
        times = request.accumulate
        operations = (counted.forward + counted.backward + again) * times
        return Cost(operations, again * times, self._sent(request))

    def _sent(self, request: Request) -> int:
        """Bytes that one device sends in a step."""
        parameters = self.study.ask(on_one_device(request)).report.parameters
        size = parameters.bytes / max(parameters.count, 1)
        updated = round(parameters.trainable_count * size)
        half = precision("amp", request.amp)
        strategy = facts_of(request.parallel)
        by_policy = strategy is not None and strategy.shards_modules and half is not None
        # FSDP2's policy gathers in 16 bit and sums in float32 (`parallel.strategies.fsdp.REDUCE`)
        reduced = 4 * parameters.trainable_count if by_policy else updated
        sizes = parameters.bytes, reduced, updated
        return sent_bytes(request.parallel, self.devices, *sizes, request.accumulate, request.replicas or 1)

    # -- nothing fits --------------------------------------------------------------------------------------------

    def _without_an_answer(self) -> Fit:
        """The way that needs least, and what would have to be allowed.

        Raises:
            StaticmemError: no way could be analysed.
        """
        nearest: tuple[int, _Change, Request] | None = None
        for change in self._ways(self.options.allow):
            if self._needs_more_than_unsafe(change):
                continue
            request = self._smallest(replace(self.request, **change.options))
            if request is None:
                continue
            need = self.bench.expected(request, self.card)
            if nearest is None or need < nearest[0]:
                nearest = need, self._add_losses_of_micro_batches(change, request), request
        if nearest is None:
            assert self.error is not None
            raise self.error
        _, change, request = nearest
        return self._fit(self._way(change, request), request, False, would_fit=self._would_fit())

    def _smallest(self, request: Request) -> Request | None:
        """The request with the least micro-batch that the model takes; None where it takes none of them."""
        limits = BATCH.tried(self.bench.study)[1]
        least = replace(request, batch=limits[0] if limits is not None else 1)
        for asked in [least] if self.batches is None else [self._at(request, n) for n in self.batches]:
            try:
                self.bench.step(asked)
            except StaticmemError as error:
                self.error = self.error or error
                continue
            return asked
        return None

    def _would_fit(self) -> tuple[str, ...]:
        """Changes that are not allowed and with which something fits; empty where all of them are not enough."""
        allowed = [word for word in CHANGES if word in self.options.allow]
        more: list[str] = []
        for word in CHANGES:
            if word not in allowed:
                more.append(word)
                if self._first([*allowed, *more]) is not None:
                    return tuple(more)
        return ()
