"""Changes of a step, each analysed in full: its bytes, and the operations that it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from staticmem.report.sweep import SAME, CardFit, LeverRow, need
from staticmem.scenario.request import as_flags
from staticmem.studies import Study, without_cycle_search
from staticmem.studies.bench import Bench, card_fit
from staticmem.studies.compute import Counter
from staticmem.studies.study import Key, key_of


@dataclass(frozen=True)
class Lever:
    """A change of the request: `options` are fields of `Request`, `does` says what, `changes` what else it changes."""

    does: str
    options: Mapping[str, Any]
    changes: str
    note: str = ""


class Trials:
    """Analyses of one model around one request, each once. `gpu` None: live memory is what counts. With a
    `bench`, whose studies serve, a row has what is expected on the card alone, and no verdict but that it cannot run.

    `base` is the request as it is, `card` how it fits the card, and `runs` the number of steps that were run.
    """

    def __init__(self, study: Study, gpu: str | None, bench: Bench | None = None) -> None:
        self.study, self.gpu, self.bench, self.runs = study, gpu, bench, 0
        self._counters: dict[bool, Counter] = {}
        self._rows: dict[Key, LeverRow] = {}
        self.card: CardFit | None = None
        self.base = self.try_out(Lever("as asked", {}, SAME))

    def ask(self, options: Mapping[str, Any]) -> Study:
        """The study of the request with some of its options changed."""
        return (self.bench or self.study).ask(replace(self.study.request, gpu=None, **options))

    def try_out(self, lever: Lever) -> LeverRow:
        """The row of a lever.

        Raises:
            StaticmemError: the lever does not go with the request or the model.
        """
        one = self.ask(lever.options)
        key = key_of(one.request)
        if key not in self._rows:
            with without_cycle_search():
                self._rows[key] = self._run(one)
        row = replace(self._rows[key], does=lever.does, flags=as_flags(lever.options), changes=lever.changes)
        return replace(row, note=lever.note)

    def _run(self, one: Study) -> LeverRow:
        live, device, fit = one.lifetimes.peak_bytes, None, None
        if self.gpu is not None and self.bench is not None:
            device, fit = self.bench.expected_alone(one.request, self.gpu)
        elif self.gpu is not None:
            card = card_fit(one, self.gpu)
            device, fit = card.device_bytes, card.fit
            self.card = self.card or card
        operations, saved, compute = self._operations(one), 0, 0.0
        if self.runs:
            saved = need(self.base) - (live if device is None else device)
            compute = round(operations / self.base.operations - 1, 4) if self.base.operations else 0.0
        self.runs += 1
        return LeverRow("", "", live, device, fit, saved, operations, compute, "", "")

    def _operations(self, one: Study) -> int:
        """Operations of the step that the base takes, whatever its division into micro-batches."""
        counted = self.counter(one.scenario.training).of(one.scenario)
        again = counted.again
        if one.result.compiled is not None:  # then the compiler decides what checkpoints compute again
            again = max(again, one.result.compiled.recomputed_flops)
        return (counted.forward + counted.backward + again) * self.study.request.accumulate

    def counter(self, training: bool) -> Counter:
        if training not in self._counters:
            self._counters[training] = Counter(self.ask({}).result.graph, training)
        return self._counters[training]
