"""Many configurations of a serving engine on cards: `sweep --mode serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from staticmem.devices import gpus
from staticmem.errors import StaticmemError, UsageError
from staticmem.frontends.architectures import model_name
from staticmem.ir.record import record
from staticmem.report.formats import JSON, Format, csv_format
from staticmem.report.sweep import ErrorInfo, Setting
from staticmem.report.text import PLAIN, Text, View
from staticmem.scenario.request import Request
from staticmem.serving.formats import stands, starts_with
from staticmem.serving.report import Serve
from staticmem.serving.study import serve_report

SCHEMA = "staticmem.serve-sweep/1"
_LEFT = ("name", "model", "GPU", "")
_FIGURES = """
    starts certain weights_bytes activation_bytes non_torch_bytes cuda_graph_bytes at_start_bytes kv_cache_bytes
    kv_cache_tokens max_concurrency at_once at_once_95 message missing_bytes change largest_max_len largest_max_seqs
""".split()


@record(frozen=True)
class Configuration:
    """What is asked of an engine, but for its card: `error` where its options exclude each other."""

    name: str | None
    model: str
    request: Request
    settings: Mapping[str, Setting]
    error: StaticmemError | None = None


@dataclass(frozen=True, slots=True)
class ServeRow:
    """A configuration on a card. `settings` has what was asked, without what has its default; `serve` is what `analyze`
    says of it, null where it cannot be analysed, as `error` says."""

    index: int
    name: str | None
    model: str
    gpu: str
    settings: Mapping[str, Setting]
    serve: Serve | None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class ServeSweep:
    """All configurations in order, each on every card. `axes` are the names that vary."""

    schema: str
    models: tuple[str, ...]
    axes: tuple[str, ...]
    gpus: tuple[str, ...]
    rows: tuple[ServeRow, ...]


def serve_sweep(
    configurations: Sequence[Configuration],
    axes: Sequence[str],
    cards: Sequence[str],
    progress: Callable[[int, int], None],
) -> ServeSweep:
    """The rows of configurations on cards; `progress` is called with the number of rows that are done, and that of all.

    Raises:
        UsageError: there is no card, or one that is not known.
    """
    if not cards:
        why = "How much memory an engine takes depends on the card."
        raise UsageError("no card to serve on", why, "Add --gpu h100.", "SM602")
    file = configurations[0].request.gpus_file if configurations else None
    slugs = tuple([gpus.find(card, file=file).slug for card in cards])
    rows: list[ServeRow] = []
    for one in configurations:
        for slug in slugs:
            serve, error = _measured(one, slug)
            rows.append(ServeRow(len(rows), one.name, one.model, slug, one.settings, serve, error))
            progress(len(rows), len(configurations) * len(slugs))
    models = tuple(dict.fromkeys(one.model for one in configurations))
    return ServeSweep(SCHEMA, models, tuple(axes), slugs, tuple(rows))


def _measured(one: Configuration, slug: str) -> tuple[Serve | None, ErrorInfo | None]:
    try:
        if one.error is not None:
            raise one.error
        return serve_report(one.model, replace(one.request, gpu=slug)).serve, None
    except StaticmemError as error:
        return None, ErrorInfo(error.code, error.what, error.why, error.hint)


def verdict(sweep: ServeSweep) -> str:
    """How many start, and which of them holds most tokens."""
    verdicts = Counter("cannot be analysed" if row.serve is None else _stands(row.serve) for row in sweep.rows)
    count = len(sweep.rows)
    parts = [f"{word} {number:,}" for word, number in verdicts.items()]
    answer = f"{count:,} configuration{'s' if count != 1 else ''}: {', '.join(parts)}."
    starting = [(row.serve.kv_cache_tokens, row) for row in sweep.rows if row.serve is not None and row.serve.starts]
    if len(starting) > 1:
        most, row = max(starting, key=lambda pair: pair[0])
        which = [f"{name} {_setting(row, name)}" for name in sweep.axes if name != "model"]
        answer += f" The most tokens, {most:,}, has {', '.join([row.name or model_name(row.model), *which, row.gpu])}."
    return answer


def render(sweep: ServeSweep, view: View = PLAIN) -> str:
    """What it comes to, a row for each configuration, and below them why some do not start."""
    if view.quiet:
        return view.line(verdict(sweep))
    text, (heads, *rows) = Text(view), _cells(sweep, view)
    text.answer(verdict(sweep))
    text.columns(
        [heads, *rows], right=[at for at, name in enumerate(heads) if name not in ("name", "model", "GPU", "")]
    )
    for row in sweep.rows:
        why = "" if row.serve is None or row.serve.starts else row.serve.message
        why = f"{row.error.what}. {row.error.why} [{row.error.code}]" if row.error is not None else why
        if row.serve is not None and row.serve.change:
            why += f" {starts_with(row.serve.change)}"
        if why:
            text.wrap(f"{row.index + 1}: {why}", "    ", "  ")
    return text.end()


def _stands(serve: Serve) -> str:
    return stands(starts=serve.starts, certain=serve.certain)


def _cells(sweep: ServeSweep, view: View) -> Iterator[list[str]]:
    named, several = any(row.name for row in sweep.rows), len(sweep.models) > 1
    axes = [name for name in sweep.axes if name != "model"]
    heads = ["#", *["name"] * named, *["model"] * several, *axes, "GPU", ""]
    yield [*heads, "weights", "activations", "cache", "tokens", "at once"]
    for row in sweep.rows:
        cells = [str(row.index + 1), *[row.name or ""] * named, *[model_name(row.model)] * several]
        cells += [*(_setting(row, name) for name in axes), row.gpu]
        if row.serve is None:
            yield [*cells, "error", "", "", "", "", ""]
            continue
        serve = row.serve
        if not serve.starts and not serve.missing_bytes:  # nothing is loaded
            yield [*cells, _stands(serve), "-", "-", "-", "-", "-"]
            continue
        sizes = [view.size(n) for n in (serve.weights_bytes, serve.activation_bytes, serve.kv_cache_bytes)]
        yield [*cells, _stands(serve), *sizes, f"{serve.kv_cache_tokens:,}", f"{serve.max_concurrency:,.2f}"]


def _setting(row: ServeRow, name: str) -> str:
    value = row.settings.get(name, "-")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def csv_rows(sweep: ServeSweep) -> Iterator[Sequence[object]]:
    """A header, and a row for each configuration on each card."""
    settings = list(dict.fromkeys(name for row in sweep.rows for name in row.settings if name != "mode"))
    yield ["index", "name", "model", "gpu", *settings, *_FIGURES, "error"]
    for row in sweep.rows:
        error = None if row.error is None else f"{row.error.what} [{row.error.code}]"
        figures = [getattr(row.serve, name, None) for name in _FIGURES]
        yield [row.index, row.name, row.model, row.gpu, *(row.settings.get(s) for s in settings), *figures, error]


FORMATS = (Format("table", "txt", render), csv_format(csv_rows), JSON)
