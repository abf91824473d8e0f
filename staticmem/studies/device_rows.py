"""Rows of a sweep with the meters of cards: each configuration is replayed, and few steps are run.

Requests that differ in the batch alone are a group. Where three of its batches lie on one line (`between`), steps of
the batches between them are not run; where they do not, the range is divided, down to single steps. Batch 1 is always
run: layouts and broadcasting treat a size of 1 in their own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.devices.meters import SharedReplays
from staticmem.studies import Request, Study, without_cycle_search
from staticmem.studies.bench import fit_on
from staticmem.studies.between import InterpolatedSteps
from staticmem.studies.evaluate import Done, Outcome, Row, of_exception, row_between, row_of
from staticmem.studies.study import Key, key_of

LEAST = 5  # batches for which three steps are worth their comparison


def device_rows(study: Study, requests: Sequence[Request], gpus: Sequence[str], done: Done | None) -> list[Outcome]:
    """The rows of requests on a model, in their order; `done` is called for each of them."""
    groups: dict[Key, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(key_of(replace(request, batch=None)), []).append(index)
    outcomes: dict[int, Outcome] = {}
    for members in groups.values():
        group = _Group(study, [requests[index] for index in members], gpus)
        for index in members:
            outcomes[index] = group.outcome(requests[index])
            if done is not None:
                done(1)
    return [outcomes[index] for index in range(len(requests))]


class _Group:
    """Requests that differ in the batch alone."""

    def __init__(self, study: Study, requests: Sequence[Request], gpus: Sequence[str]) -> None:
        self.study, self.request, self.gpus = study, requests[0], gpus
        self.replays = SharedReplays()
        self.studies: dict[int | None, Study] = {}
        batches = sorted({request.batch for request in requests if request.batch is not None and request.batch > 1})
        self.lines = self._through(batches)

    def outcome(self, request: Request) -> Outcome:
        try:
            with without_cycle_search():
                return self._row(request)
        except Exception as error:
            return of_exception(error)

    def _row(self, request: Request) -> Row:
        batch, one = request.batch, self._at(request.batch)
        line = next((line for line in self.lines if batch is not None and line.low < batch < line.high), None)
        if line is None or batch is None:
            row, result, spread = row_of(one), one.result, one.spread
        else:
            one.binding  # noqa: B018 - for the error of a batch that the model does not take
            row = row_between(request, one.scenario.mode, line.sizes, batch)
            result, spread = line.at(batch), line.spread(batch)
        cards = [fit_on(result, request, gpu, spread, self.replays.unlimited) for gpu in self.gpus]
        return replace(row, cards=tuple(cards))

    def _at(self, batch: int | None) -> Study:
        if batch not in self.studies:
            self.studies[batch] = self.study.ask(replace(self.request, batch=batch))
        return self.studies[batch]

    def _through(self, batches: list[int]) -> list[InterpolatedSteps]:
        """Lines through batches, each of which is on one at most."""
        lines, ranges = [], [batches]
        while ranges:
            some = ranges.pop()
            if len(some) < LEAST:
                continue
            middle = len(some) // 2
            try:
                with without_cycle_search():
                    line = InterpolatedSteps.through([(b, self._at(b)) for b in (some[0], some[middle], some[-1])])
            except Exception:  # noqa: S112 - each request for itself has its own error
                continue
            if line is not None:
                lines.append(line)
            else:
                least = max(len(some) // 4, 1)  # the least batches are the most likely to be another kind of step
                ranges += [some[:least], some[least:]]
        return lines
