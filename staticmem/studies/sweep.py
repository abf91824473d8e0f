"""A sweep: many configurations of one or several models, here, in local processes, or on any executor.

Rows of a sweep with the meters of cards: each configuration is replayed, and few steps are run.

Requests that differ in the batch alone are a group. Where three of its batches lie on one line (`between`), steps of
the batches between them are not run; where they do not, the range is divided, down to single steps. Batch 1 is always
run: layouts and broadcasting treat a size of 1 in their own way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from staticmem.config.config import Config, load
from staticmem.config.locate import is_config
from staticmem.devices.architectures import standing
from staticmem.devices.meters import SharedReplays, needs_said
from staticmem.devices.sizing import Fit
from staticmem.documents import Node
from staticmem.errors import StaticmemError, UsageError, did_you_mean
from staticmem.report.sweep import MAY_FIT, SCHEMA, CardFit, ErrorInfo, Sweep, SweepRow
from staticmem.scenario.kinds import kind_of, read_keyword, read_keywords, read_texts
from staticmem.scenario.request import OPTIONS, Request
from staticmem.studies import Study, without_cycle_search, workers
from staticmem.studies.bench import Bench, card_fit, fit_on
from staticmem.studies.between import InterpolatedSteps
from staticmem.studies.evaluate import (
    OPTIMIZER_OPTIONS,
    Done,
    Outcome,
    Row,
    evaluate,
    of_exception,
    row_between,
    row_of,
    without_options,
)
from staticmem.studies.largest import largest_size, no_card
from staticmem.studies.points import Point, points, settings_of, varying
from staticmem.studies.sizing_search import GrownSize
from staticmem.studies.study import OF_THE_GRAPH, Key, assumed_batch, idle_in, key_of, unused

METERS = ("live", "device")
CHUNK = 24  # replayed configurations of a task: enough to share steps, few enough to show progress
GROUPS = 24  # groups of sizes in a task of arrays: each takes three steps
Progress = Callable[[int, int], None]  # configurations done, of how many
Task = tuple[str, list[int]]  # model, indices of points


def sweep(
    source: str | os.PathLike[str] | Config,
    what_if: Mapping[str, Sequence[Any]] | None = None,
    *,
    gpus: Sequence[str] | str = (),
    meter: str | None = None,
    executor: Executor | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    **options: Any,
) -> Sweep:
    """The memory of many configurations: the cross product of lists, or the scenarios of a config.

    Args:
        source: a config (`.yaml`, or a `Config`), or a model file.
        what_if: lists of values by name: fields of `staticmem.analyze`, `dims.NAME`, or `model`.
        gpus: cards by name or size; those of the config where none is given.
        meter: "live", evaluated as arrays where steps have one structure; "device", which runs each step and replays
            the allocator for each card. By default "device" where there are cards.
        executor: where the work is done: any `concurrent.futures.Executor`, such as `client.get_executor()` of Dask's
            `distributed`. Model files are opened there by their paths.
        jobs: local processes, where no executor is given.
        progress: is called with the number of configurations that are done, and that of all.
        options: of every configuration, as for `staticmem.analyze`; they override those of a config.

    Raises:
        StaticmemError: nothing can be analysed. A configuration that cannot has `error` in its row.
    """
    config = source if isinstance(source, Config) else None
    model = None
    if config is None:
        path = os.fspath(source)  # type: ignore[arg-type]
        config, model = (load(path), None) if is_config(path) else (Config(), path)
    axes = _read_axes({} if what_if is None else what_if)
    given = read_keywords("sweep", options)
    configurations = points(config, model, given, axes)
    cards = read_texts("sweep", "gpus", gpus) or config.gpus
    return run(configurations, cards, meter, executor, jobs, progress)


def _read_axes(what_if: object) -> dict[str, tuple[Any, ...]]:
    """The lists of values by name, each value as a config has it.

    Raises:
        UsageError: it is no mapping, a name is not known, or a value is of a wrong type.
    """
    from staticmem.config.fields import axes as axes_of_config

    if not isinstance(what_if, Mapping):
        why, hint = "It is a mapping of names to lists of values.", "Example: {'batch': [8, 16]}"
        raise UsageError(f"what_if is of type {type(what_if).__name__}", why, hint, "SM197")
    allowed = axes_of_config()
    read = {}
    for name, values in what_if.items():
        if name not in allowed and not str(name).startswith("dims."):
            raise UsageError(f"what_if '{name}' is not known", "", did_you_mean(str(name), allowed), "SM197")
        if isinstance(values, str) or not isinstance(values, Iterable):
            why, hint = "Each name has the values to try.", f"Example: {{'{name}': [{values!r}]}}"
            raise UsageError(f"what_if '{name}' is not a list", why, hint, "SM197")
        read[name] = tuple([_read_value(name, value) for value in values])
    return read


def _read_value(name: str, value: Any) -> Any:
    """A value of a list; None and "none" leave an option out."""
    if name.startswith("dims."):
        return kind_of(OPTIONS["batch"]).read(Node(value, "sweep", path=name))
    if name not in OPTIONS or value is None or value == "none":
        return value
    return read_keyword("sweep", OPTIONS[name], value)


def run(
    configurations: Sequence[Point],
    gpus: Sequence[str],
    meter: str | None = None,
    executor: Executor | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    largest: GrownSize | None = None,
) -> Sweep:
    """The rows of configurations; `largest`: with the largest size of this of each on every card."""
    from staticmem.devices import gpus as catalog

    file = configurations[0].request.gpus_file if configurations else None
    cards = [catalog.find(gpu, file=file) for gpu in gpus]  # an unknown card is an error before any work
    slugs = tuple([card.slug for card in cards])
    if meter not in (None, *METERS):
        raise UsageError(f"unknown meter '{meter}'", f"It is one of {', '.join(METERS)}.", "Use live.", "SM134")
    meter = meter or ("device" if gpus else "live")
    asked = bool(gpus)
    if meter == "device" and not gpus:
        from staticmem.studies.device import DEFAULT_GPU

        gpus, slugs = (DEFAULT_GPU,), (DEFAULT_GPU,)
    tasks = _tasks(configurations, meter == "device")
    outcomes: dict[int, Outcome] = {p.index: p.error for p in configurations if p.error is not None}
    count = 0

    def done(more: int) -> None:
        nonlocal count
        count += more
        if progress is not None:
            progress(count, len(configurations))

    done(len(outcomes))
    for indices, results in _results(configurations, tasks, gpus, meter == "device", largest, executor, jobs, done):
        outcomes.update(zip(indices, results, strict=True))
        done(len(outcomes) - count)
    rows = tuple(_row(point, outcomes[point.index]) for point in configurations)
    assumed = {text for outcome in outcomes.values() if isinstance(outcome, Row) for text in outcome.assumed}
    assumed.update(text for card in cards for text in card.unsaid)
    if meter == "device" and not asked:
        assumed.add(f"{gpus[0]}: no GPU is named (--gpu)")
    meters = ("live", "allocated", "reserved", "device") if meter == "device" else ("live",)
    models = tuple(dict.fromkeys(p.model for p in configurations))
    return Sweep(SCHEMA, models, varying(configurations), meters, slugs, rows, tuple(sorted(assumed)))


def with_largest(
    configurations: Sequence[Point],
    gpus: Sequence[str],
    grown: GrownSize,
    jobs: int = 1,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """A sweep over all but the batch, or the dimension of `grown`, with its largest size on each card.

    Raises:
        UsageError: no card is given.
    """
    if not gpus:
        raise no_card(grown.flag)
    distinct: dict[object, Point] = {}
    for point in configurations:
        distinct.setdefault((point.model, point.name, key_of(grown.left_out(point.request))), point)
    kept = [replace(point, index=index) for index, point in enumerate(distinct.values())]
    return run(kept, gpus, "device", executor, jobs, progress, largest=grown)


def _tasks(configurations: Sequence[Point], device: bool) -> list[Task]:
    """Points of one model in pieces; those that share steps stay together."""
    by_model: dict[str, dict[Any, list[int]]] = {}
    for point in configurations:
        if point.error is None:
            request = point.request
            key = key_of(replace(request, batch=None) if device else _size_and_kind(request))
            by_model.setdefault(point.model, {}).setdefault(key, []).append(point.index)
    tasks: list[Task] = []
    for model, groups in by_model.items():
        listed = list(groups.values())
        if device:
            tasks += [(model, piece) for piece in _pieces(listed, configurations)]
        else:
            at_once = (listed[start : start + GROUPS] for start in range(0, len(listed), GROUPS))
            tasks += [(model, [i for group in piece for i in group]) for piece in at_once]
    return tasks


def _pieces(groups: Sequence[Sequence[int]], configurations: Sequence[Point]) -> list[list[int]]:
    """Groups of configurations that differ in the batch alone, in pieces: small ones together, large ones divided, so
    that batches of a piece are next to one another."""
    batch_of = {point.index: point.request.batch or 0 for point in configurations}
    pieces: list[list[int]] = [[]]
    for group in groups:
        ordered = sorted(group, key=lambda index: batch_of[index])
        parts = -(-len(ordered) // CHUNK)
        for part in range(parts):
            some = ordered[part * len(ordered) // parts : (part + 1) * len(ordered) // parts]
            if pieces[-1] and len(pieces[-1]) + len(some) > CHUNK:
                pieces.append([])
            pieces[-1] += some
    return [piece for piece in pieces if piece]


def _size_and_kind(request: Request) -> Request:
    return replace(without_options(request, OPTIMIZER_OPTIONS), batch=None)


def _results(
    configurations: Sequence[Point],
    tasks: Sequence[Task],
    gpus: Sequence[str],
    device: bool,
    largest: GrownSize | None,
    executor: Executor | None,
    jobs: int,
    done: Done,
) -> Iterator[tuple[list[int], list[Outcome]]]:
    """Indices of points with their outcomes: here, on the executor, or in processes, which are worth their start where
    there is more than one task."""
    requests = {point.index: point.request for point in configurations}
    if executor is None and (jobs <= 1 or len(tasks) <= 1):
        for model, indices in tasks:
            yield indices, measure(model, [requests[i] for i in indices], gpus, device, largest, done)
        return

    def run(task: Task) -> tuple[Any, ...]:
        model, indices = task
        return measure, workers.whole_name(model), [requests[i] for i in indices], tuple(gpus), device, largest

    if executor is not None:
        outcomes = workers.on_executor(executor, tasks, run)
    else:
        outcomes = workers.in_processes(tasks, run, jobs, lambda task: [(task[0], [index]) for index in task[1]])
    for (_, indices), result in outcomes:
        yield indices, [result] * len(indices) if isinstance(result, StaticmemError) else result


def _row(point: Point, outcome: Outcome) -> SweepRow:
    place = point.index, point.name, point.model, settings_of(point.request)
    if isinstance(outcome, Row):
        row, peaks = outcome, (outcome.forward, outcome.backward, outcome.optimizer)
        return SweepRow(*place, row.mode, row.live, row.phase, row.by_category, *peaks, row.method, row.cards)
    info = ErrorInfo(outcome.code, outcome.what, outcome.why, outcome.hint)
    return SweepRow(*place, None, None, None, {}, None, None, None, None, (), info)


# -- one task ----------------------------------------------------------------------------------------------------


def measure(
    path: str,
    requests: Sequence[Request],
    gpus: Sequence[str],
    device: bool,
    largest: GrownSize | None = None,
    done: Done | None = None,
) -> list[Outcome]:
    """The rows of a model file; `device`: with what the allocator and the card add; `largest`: with the largest size
    of this. A function of plain values, so that any executor can run it where the file is; `done` is called with the
    number of requests that are done since its last call."""
    try:
        study = Study.open(path, Request())
    except Exception as error:
        return [of_exception(error)] * len(requests)
    if not device:
        outcomes = [live_only(outcome, gpus) for outcome in evaluate(study, requests, done)]
    elif largest is None:
        outcomes = device_rows(study, requests, gpus, done)
    else:
        outcomes = []
        for request in requests:
            outcomes.append(_find_largest(study, request, gpus, largest))
            if done is not None:
                done(1)
    idle: Idle = {}
    return [_say_assumptions(study, outcome, largest, idle) for outcome in outcomes]


Idle = dict[tuple[Any, ...], list[str]]  # what a graph has no use for, by the values of options that act on its ops


def _say_assumptions(study: Study, outcome: Outcome, largest: GrownSize | None, idle: Idle) -> Outcome:
    """A row with what its request leaves to a default that moves the figure most (the batch, and whether it trains),
    and what of it has no effect."""
    if isinstance(outcome, StaticmemError):
        return outcome
    request = outcome.request
    assumed = []
    if request.batch is None and (largest is None or largest.dim is not None):
        sizes, notes = assumed_batch(study.model, dict(request.dims or {}))
        assumed += [f"batch {size}: none is given (--batch)" for size in set(sizes.values()) if notes]
    if outcome.mode == "infer" and request.mode is None:
        assumed.append("inference: no optimizer is named (--optimizer)")
    given = tuple([getattr(request, name) for name in OF_THE_GRAPH])
    if given not in idle:  # of one size, for all: a graph for each would be half of a sweep
        differs = given != tuple([OPTIONS[name].default for name in OF_THE_GRAPH])
        idle[given] = unused(request, idle_in(study.ask(request))) if differs else []
    assumed += idle[given]
    return replace(outcome, assumed=tuple(assumed))


def _find_largest(study: Study, request: Request, gpus: Sequence[str], largest: GrownSize) -> Outcome:
    try:
        with without_cycle_search():
            one = study.ask(request)
            row = replace(row_of(one), cards=tuple(card_fit(one, gpu) for gpu in gpus))
        bench = Bench(one)
        cards = [
            card if card.obstacle else card.with_largest(largest_size(bench, card.gpu, largest)) for card in row.cards
        ]
        return replace(row, cards=tuple(cards))
    except Exception as error:
        return of_exception(error)


def live_only(outcome: Outcome, gpus: Sequence[str]) -> Outcome:
    """Live memory and the least context against the cards: that rules a card out, and never in."""
    if isinstance(outcome, StaticmemError):
        return outcome
    try:
        return replace(outcome, cards=tuple(_ruled_out(outcome, gpu) for gpu in gpus))
    except Exception as error:
        return of_exception(error)


def _ruled_out(row: Row, gpu: str) -> CardFit:
    from staticmem.studies.device import device_of

    device = device_of(replace(row.request, gpu=gpu))
    card = device.gpu
    left = card.usable - row.live - device.setup.profile.overhead(card).low
    outcome = standing(card, device.setup.torch, needs_said(row.request.scenario()[0]))
    fit = MAY_FIT if left >= 0 else Fit.DOES_NOT_FIT.value
    fit = Fit.CANNOT_RUN.value if outcome.obstacle else fit
    return CardFit(
        card.slug,
        card.usable,
        fit,
        None,
        None,
        None,
        None,
        None,
        max(left, 0),
        max(-left, 0),
        obstacle=outcome.obstacle,
        why=outcome.obstacle,
        condition=outcome.condition,
    )


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
