"""A sweep: many configurations of one or several models, here, in local processes, or on any executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from staticmem.config.config import Config, load
from staticmem.config.locate import is_config
from staticmem.errors import StaticmemError, UsageError, did_you_mean
from staticmem.report.sweep import MAY_FIT, SCHEMA, CardFit, ErrorInfo, Sweep, SweepRow
from staticmem.scenario.request import Request
from staticmem.studies import Study, without_cycle_search
from staticmem.studies.bench import card_fit
from staticmem.studies.evaluate import Done, Outcome, Row, evaluate, row_of
from staticmem.studies.points import Point, points, settings_of, varying
from staticmem.studies.study import key_of

METERS = ("live", "device")
CHUNK = 8  # configurations of a task whose every step is run: enough to be worth a process, few enough to show progress
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
    **words: Any,
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
        words: of every configuration, as for `staticmem.analyze`; they override those of a config.

    Raises:
        StaticmemError: nothing can be analysed. A configuration that cannot has `error` in its row.
    """
    config = source if isinstance(source, Config) else None
    model = None
    if config is None:
        path = os.fspath(source)  # type: ignore[arg-type]
        config, model = (load(path), None) if is_config(path) else (Config(), path)
    axes = {name: tuple(values) for name, values in (what_if or {}).items()}
    _known_names(axes)
    given = {name: value for name, value in words.items() if value is not None}
    made = points(config, model, given, axes)
    cards = (gpus,) if isinstance(gpus, str) else tuple(gpus) or config.gpus
    return run(made, cards, meter, executor, jobs, progress)


def _known_names(axes: Mapping[str, Any]) -> None:
    from staticmem.config.fields import axes as known

    for name in axes:
        if name not in known() and not name.startswith("dims."):
            raise UsageError(f"what_if '{name}' is not known", "", did_you_mean(name, known()), "SM197")


def run(
    made: Sequence[Point],
    gpus: Sequence[str],
    meter: str | None = None,
    executor: Executor | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    largest: bool = False,
) -> Sweep:
    """The rows of configurations; `largest`: with the largest batch of each on every card."""
    from staticmem.devices import gpus as catalog

    file = made[0].request.gpus_file if made else None
    slugs = tuple(catalog.find(gpu, file=file).slug for gpu in gpus)  # unknown cards are told before any work
    if meter not in (None, *METERS):
        raise UsageError(f"unknown meter '{meter}'", f"It is one of {', '.join(METERS)}.", "Use live.", "SM134")
    meter = meter or ("device" if gpus else "live")
    if meter == "device" and not gpus:
        from staticmem.studies.device import DEFAULT_GPU

        gpus, slugs = (DEFAULT_GPU,), (DEFAULT_GPU,)
    tasks = _tasks(made, meter == "device")
    found: dict[int, Outcome] = {p.index: p.error for p in made if p.error is not None}
    count = 0

    def done(more: int) -> None:
        nonlocal count
        count += more
        if progress is not None:
            progress(count, len(made))

    done(len(found))
    with _executor(executor, jobs, len(tasks)) as chosen:
        for indices, results in _results(made, tasks, gpus, meter == "device", largest, chosen, done):
            found.update(zip(indices, results, strict=True))
            done(len(found) - count)
    rows = tuple(_row(point, found[point.index]) for point in made)
    meters = ("live", "allocated", "reserved", "device") if meter == "device" else ("live",)
    return Sweep(SCHEMA, tuple(dict.fromkeys(p.model for p in made)), varying(made), meters, slugs, rows)


def _tasks(made: Sequence[Point], device: bool) -> list[Task]:
    """Points of one model in pieces; those that share steps stay together."""
    by_model: dict[str, dict[Any, list[int]]] = {}
    for point in made:
        if point.error is None:
            request = point.request
            key = point.index if device else key_of(_size_and_kind(request))
            by_model.setdefault(point.model, {}).setdefault(key, []).append(point.index)
    tasks: list[Task] = []
    at_once = CHUNK if device else GROUPS
    for model, groups in by_model.items():
        listed = list(groups.values())
        pieces = (listed[start : start + at_once] for start in range(0, len(listed), at_once))
        tasks += [(model, [i for group in piece for i in group]) for piece in pieces]
    return tasks


def _size_and_kind(request: Request) -> Request:
    from staticmem.studies.evaluate import OPTIMIZER_WORDS, without_words

    return replace(without_words(request, OPTIMIZER_WORDS), batch=None)


@contextmanager
def _executor(given: Executor | None, jobs: int, tasks: int) -> Iterator[Executor | None]:
    """The executor to use; None: here. Processes are worth their start where there is more than one task."""
    if given is not None or jobs <= 1 or tasks <= 1:
        yield given
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(min(jobs, tasks), mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _results(
    made: Sequence[Point],
    tasks: Sequence[Task],
    gpus: Sequence[str],
    device: bool,
    largest: bool,
    executor: Executor | None,
    done: Done,
) -> Iterator[tuple[list[int], list[Outcome]]]:
    requests = {point.index: point.request for point in made}
    if executor is None:
        for model, indices in tasks:
            yield indices, measure(model, [requests[i] for i in indices], gpus, device, largest, done)
        return
    waiting: dict[Future[list[Outcome]], list[int]] = {
        executor.submit(
            measure, os.path.abspath(model), [requests[i] for i in indices], tuple(gpus), device, largest
        ): indices
        for model, indices in tasks
    }
    yield from _as_they_come(waiting)


def _as_they_come(waiting: Mapping[Future[list[Outcome]], list[int]]) -> Iterator[tuple[list[int], list[Outcome]]]:
    try:
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BaseException:
        for future in waiting:
            future.cancel()
        raise


def _row(point: Point, found: Outcome) -> SweepRow:
    settings = settings_of(point.request)
    if isinstance(found, Row):
        row = found
        return SweepRow(
            point.index, point.name, point.model, settings, row.mode, row.live, row.phase, row.by_category, row.forward,
            row.backward, row.optimizer, row.method, row.cards,
        )  # fmt: skip
    error: StaticmemError = found
    info = ErrorInfo(error.code, error.what, error.why, error.hint)
    return SweepRow(
        point.index, point.name, point.model, settings, None, None, None, {}, None, None, None, None, (), info
    )  # fmt: skip


# -- one task ----------------------------------------------------------------------------------------------------


def measure(
    path: str,
    requests: Sequence[Request],
    gpus: Sequence[str],
    device: bool,
    largest: bool = False,
    done: Done | None = None,
) -> list[Outcome]:
    """The rows of a model file; `device`: with what the allocator and the card add; `largest`: with the largest batch
    of each. A function of plain values, so that any executor can run it where the file is; `done` is told how many more
    are done."""
    try:
        study = Study.open(path, Request())
    except StaticmemError as error:
        return [error] * len(requests)
    if device:
        found = []
        for request in requests:
            found.append(_with_device(study, request, gpus, largest))
            if done is not None:
                done(1)
        return found
    return [live_only(outcome, gpus) for outcome in evaluate(study, requests, done)]


def _with_device(study: Study, request: Request, gpus: Sequence[str], largest: bool) -> Outcome:
    try:
        with without_cycle_search():
            one = study.ask(request)
            row = replace(row_of(one), cards=tuple(card_fit(one, gpu) for gpu in gpus))
        if not largest:
            return row
        from staticmem.studies.largest import largest_batch

        cards = [replace(card, max_batch=largest_batch(one, card.gpu)) for card in row.cards]
        return replace(row, cards=tuple(cards))
    except StaticmemError as error:
        return error


def live_only(outcome: Outcome, gpus: Sequence[str]) -> Outcome:
    """Live memory and the least context against the cards: that rules a card out, and never in."""
    if isinstance(outcome, StaticmemError):
        return outcome
    from staticmem.studies.device import device_of

    cards = []
    for gpu in gpus:
        device = device_of(replace(outcome.request, gpu=gpu))
        need = outcome.live + device.setup.profile.overhead(device.gpu).low
        left = device.gpu.usable - need
        fit = MAY_FIT if left >= 0 else "does not fit"
        cards.append(
            CardFit(
                device.gpu.slug, device.gpu.usable, fit, None, None, None, None, None, max(left, 0), max(-left, 0)
            )
        )  # fmt: skip
    return replace(outcome, cards=tuple(cards))
