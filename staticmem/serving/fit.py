"""The cheapest change with which an engine starts, or holds so many requests at once, on a card: `fit --mode serve`.

What is given is kept. What is not may be changed, in the order of `study.changes`, with numbers of 8 bits before more
cards where precision may be given up: each alone, then with one of those before it. A way does where the whole of its
band does.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from staticmem.devices import gpus
from staticmem.errors import StaticmemError
from staticmem.frontends.architectures import CONFIG, architecture_of
from staticmem.report.fit import PRECISION
from staticmem.report.formats import JSON, Format
from staticmem.report.model import NoteInfo
from staticmem.report.text import PLAIN, Text, View, printable
from staticmem.scenario.request import OPTIONS, Request, as_flags, flags_of
from staticmem.serving.engine import Engine
from staticmem.serving.formats import stands, starts_with, verdict
from staticmem.serving.report import ServeReport
from staticmem.serving.rules import Rules
from staticmem.serving.study import changes, check_concurrency, enough_for, serve_report, served

SCHEMA = "staticmem.serve-fit/1"
LESS_PRECISE = ("kv_dtype", "load_as")
ORDER = ("max_len", "max_seqs", "utilization", "max_batched_tokens", "enforce_eager", *LESS_PRECISE, "parallel")
FILE = "serve.sh"
ALWAYS = ("max_len", "max_seqs", "max_batched_tokens", "utilization")  # in a command
UNKNOWN = "MODEL"  # in a command, where the name of a config's file says neither a folder nor a repository
Change = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServeWay:
    """Flags beside those that were given ("": none), and what `analyze` says of the engine with them. `holds` is false
    where it does not start, or holds fewer requests than were asked for, at the low end of its bands;
    `least_concurrency` are those of that end."""

    flags: str
    holds: bool
    starts: bool
    certain: bool
    kv_cache_tokens: int
    max_concurrency: float
    least_concurrency: float


@dataclass(frozen=True, slots=True)
class ServeFit:
    """How an engine starts on a card. Where `fits` is true `way` is the first that holds, else the first that does at
    the middle of its bands, or the engine as it was asked. `answer` is what `analyze` says of it. `concurrency` is null
    where none was asked for; `tried` has the ways of one change, and `way`. `command` starts the engine so, and
    `analyze` predicts it. `would_fit`: what is not allowed and would do.
    """

    schema: str
    model: str
    engine: str
    version: str
    gpu: str
    concurrency: int | None
    fits: bool
    answer: str
    change: str
    way: ServeWay
    tried: tuple[ServeWay, ...]
    command: str
    analyze: str
    would_fit: tuple[str, ...]
    warnings: tuple[NoteInfo, ...]


def serve_fit(path: str, request: Request, concurrency: int | None, *, less_precise: bool) -> ServeFit:
    """The first way that does. `less_precise`: numbers of 8 bits may be tried.

    Raises as `serving.study.serve_report`, and:
        UsageError: `--max-seqs` or `--max-batched-tokens` is less than the concurrency (SM602).
    """
    if concurrency is not None:
        check_concurrency(request, concurrency)
    search = _Search(path, request, concurrency)
    change, tried = search.first(less_precise=less_precise)
    fits = change is not None
    if change is None:
        change = next((one for one in tried if search.holds(one, "expected")), {})
    would_fit = () if fits or less_precise or search.first(less_precise=True)[0] is None else (PRECISION,)
    asked = replace(search.request, **change)
    report = serve_report(path, asked)
    scenario = report.scenario
    analyze = f"staticmem analyze {shlex.quote(path)} {flags_of(asked)} --gpu {search.card.slug}"
    return ServeFit(
        SCHEMA,
        path,
        scenario.engine,
        scenario.version,
        search.card.slug,
        concurrency,
        fits,
        verdict(report),
        report.serve.change,
        search.way(change),
        tuple(search.way(one) for one in tried if len(_names(one)) < 2 or one == change),
        _command(path, asked, report, search.rules),
        analyze,
        would_fit,
        report.warnings,
    )


class _Search:
    """The ways of a request, each tried once."""

    def __init__(self, path: str, request: Request, concurrency: int | None) -> None:
        """Raises as `serve_report`."""
        serve_report(path, request)  # what is refused is so before anything is tried
        self.path, self.concurrency = path, concurrency
        self.card = gpus.find(request.gpu or "", file=request.gpus_file)
        question = served(path, request)
        self.rules = question.rules
        enough = {} if concurrency is None else enough_for(question.on(self.card), concurrency)
        self.kept = {name for name, one in OPTIONS.items() if getattr(request, name) != one.default}
        self.request = replace(request, **enough)

    def first(self, *, less_precise: bool) -> tuple[Change | None, list[Change]]:
        """The first change of which the whole band holds, None where there is none; and all up to it."""
        tried: list[Change] = []
        for change in self._ways(less_precise):
            tried.append(change)
            if self.holds(change, "low"):
                return change, tried
        return None, tried

    def holds(self, change: Change, at: str) -> bool:
        """Whether the engine starts with a change and holds what is asked, at an end of its bands."""
        engine = self._engine(change)
        return engine.refusal(at) is None and engine.held(at) >= (self.concurrency or 0)

    def way(self, change: Change) -> ServeWay:
        """What is told of a change."""
        engine = self._engine(change)
        starts = engine.refusal() is None
        certain = (engine.refusal("low") is None) == (engine.refusal("high") is None)
        least = round(engine.held("low"), 2)
        tokens, most = engine.tokens.expected, round(engine.concurrency, 2)
        return ServeWay(as_flags(change), self.holds(change, "low"), starts, certain, tokens, most, least)

    def _engine(self, change: Change) -> Engine:
        return served(self.path, replace(self.request, **change)).on(self.card)

    def _ways(self, less_precise: bool) -> Iterator[Change]:
        yield {}
        for last in self._changes({}, less_precise):
            yield last
            for before in self._changes(last, less_precise):
                if _place(before) < _place(last):
                    yield {**last, **before}

    def _changes(self, after: Change, less_precise: bool) -> list[Change]:
        """Changes of what is not given, in the order in which they are tried, of an engine that has some."""
        listed: list[Change] = list(changes(self._engine(after), "low", self.concurrency))
        listed += [{name: "fp8"} for name in LESS_PRECISE if less_precise]
        listed = [one for one in listed if not self.kept & one.keys() and not after.keys() & one.keys()]
        return sorted([one for one in listed if self._can(one)], key=_place)

    def _can(self, change: Change) -> bool:
        """Whether the model takes it: packed weights are not packed again."""
        try:
            self._engine(change)
        except StaticmemError:
            return False
        return True


def _names(change: Change) -> set[str]:
    """What is changed: cards and how they share the model are one."""
    return change.keys() - {"devices"}


def _place(change: Change) -> int:
    return max(map(ORDER.index, _names(change)))


def _command(path: str, request: Request, report: ServeReport, rules: Rules) -> str:
    """What starts the engine: all that decides its memory, as another version or card has other defaults."""
    scenario, flags = report.scenario, rules.data["flags"]
    model, revision = _source(path)
    told: dict[str, object] = {name: getattr(scenario, name) for name in ALWAYS}
    told |= {name: "fp8" for name in LESS_PRECISE if getattr(request, name) == "fp8"}
    told |= {} if request.dtype is None else {"dtype": report.model.dtype}
    ranks = ("tensor_parallel", "pipeline_parallel")
    told |= {name: getattr(scenario, name) for name in ranks if getattr(scenario, name) > 1}
    told |= {"revision": revision} if revision else {}
    parts = [f"{flags[name]} {shlex.quote(str(value))}" for name, value in told.items()]
    parts += [flags["enforce_eager"]] * scenario.enforce_eager
    return " ".join([rules.data["command"], shlex.quote(model), *parts])


def _source(path: str) -> tuple[str, str]:
    """What the engine loads: a repository and its revision ("": the newest), or a folder."""
    architecture = architecture_of(path)
    if architecture is not None and architecture.revision:
        return architecture.name, "" if architecture.revision == "main" else architecture.revision
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    return (folder if os.path.isdir(path) or os.path.basename(path) == CONFIG else UNKNOWN), ""


def script(result: ServeFit) -> str:
    """The file that starts the engine."""
    comments = printable(result.answer), f"Predicted by: {printable(result.analyze)}"  # a name ends no comment
    return "\n".join(["#!/bin/sh", *(f"# {line}" for line in comments), f"exec {result.command}", ""])


def answer(result: ServeFit) -> str:
    """What `analyze` says, with the change that was made."""
    text = f"With {result.way.flags}: {result.answer}" if result.way.flags else result.answer
    if result.concurrency is None or not result.way.starts:
        return text
    least = f"at the low end of its band {result.way.least_concurrency:,.2f}"
    return f"{text} Asked are {result.concurrency:,}, {least}."


def render(result: ServeFit, view: View = PLAIN) -> str:
    """The answer, what was tried, and the engine's command line."""
    if view.quiet:
        return view.line(answer(result))
    text = Text(view)
    text.answer(answer(result), *([] if result.fits else [_not_sure(result)]))
    if len(result.tried) > 1:
        text.heading("Tried, in addition to the given flags")
        heads = ("flags", "", "tokens", "at once", "at least")
        text.columns([heads, *(_cells(way) for way in result.tried)], right=(2, 3, 4))
    text.heading("The command, and its prediction" if result.fits else "The prediction")
    if result.fits:
        text.add(f"  {result.command}")
    text.add(f"  {result.analyze}")
    if UNKNOWN in result.command.split() and result.fits:
        text.wrap(f"{UNKNOWN}: the folder or the repository with the weights.")
    for note in result.warnings:
        text.wrap(f"{note.code}  {note.text}.")
    return text.end()


def _not_sure(result: ServeFit) -> str:
    if result.would_fit:
        return f"--allow {result.would_fit[0]} would do."
    if result.way.starts:
        return "No way was found whose whole band does; the engine's own log settles it."
    change = result.change if result.concurrency is None else ""
    return f"Given flags are kept. {starts_with(change)}" if change else "No way was found that keeps the given flags."


def _cells(way: ServeWay) -> tuple[str, ...]:
    word = stands(starts=way.starts, certain=way.certain)
    if not way.starts:
        return way.flags or "(none)", word, "-", "-", "-"
    figures = f"{way.kv_cache_tokens:,}", f"{way.max_concurrency:,.2f}", f"{way.least_concurrency:,.2f}"
    return way.flags or "(none)", word, *figures


FORMATS = (Format("table", "txt", render), JSON)
