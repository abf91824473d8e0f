"""A run as one HTML page: allocated and reserved memory over its instants, a table that sorts, the JSON inside."""

from __future__ import annotations

from staticmem.report.formats import Format
from staticmem.report.formats.run import RUNS_OUT, notes_of, verdict_lines, with_status
from staticmem.report.html.curves import Line, curve
from staticmem.report.html.page import data, esc, json_text, name, page, section, table
from staticmem.report.html.sections import host_section
from staticmem.report.json import to_json
from staticmem.report.run import InstantReport, RunReport
from staticmem.report.text import PLAIN, View

_HEADS = ("#", "instant", "does", "model", "live", "allocated", "reserved", "device", "at most", "left", "cached", "")
_NAMED = 6  # instants whose names stand below the chart; of more, their numbers in the table


def render(run: RunReport, view: View = PLAIN) -> str:
    """The page as text; the same run gives the same text."""
    answer, *reasons = verdict_lines(run, view)
    why = "".join(f"<p>{esc(reason)}</p>" for reason in reasons)
    of = ", ".join(name(model) for model in run.models)
    hero = f'<div class="hero"><p class="eyebrow">Run of {of}</p><h1 class="sentence">{esc(answer)}</h1>{why}</div>'
    footer = f"<footer>staticmem · {esc(run.schema)} · one file, no network</footer>"
    sections = _timeline(run, view), _changes(run, view), _table(run, view), _host(run, view), _assumed(run)
    body = f'<main id="main">{hero}{"".join(sections)}</main>{footer}'
    blocks = data("sm-run", "application/json", json_text(to_json(run)))
    return page("run · staticmem", body, styles=("report.css", "sizing.css"), scripts=("sort.js",), blocks=blocks)


def _timeline(run: RunReport, view: View) -> str:
    """Both meters over the points of the run, context included, and what the card gives."""
    context = run.context_bytes
    lines = [
        Line("line-0", "reserved, with the context", [reserved + context for _, _, reserved in run.points], False),
        Line("line-1", "allocated, with the context", [allocated + context for _, allocated, _ in run.points], False),
    ]
    first: dict[int, int] = {}
    for at, point in enumerate(run.points):
        first.setdefault(point[0], at)
    instants = run.instants
    short = {at: instants[number].name if len(first) <= _NAMED else str(number + 1) for number, at in first.items()}
    whole = {at: f"{number + 1}: {instants[number].name}" for number, at in first.items()}
    labels, marks = ([names.get(at, "") for at in range(len(run.points))] for names in (short, whole))
    limits = [] if run.gpu is None else [(run.gpu.name, run.gpu.usable_bytes)]
    title = "Memory over the run"
    drawing = curve(title, [float(at) for at in range(len(run.points))], labels, lines, limits, view, marks)
    lead = "Each point is the highest since the one before. A mark on the axis is where an instant begins."
    if run.gpu is not None:
        lead += f" The {run.gpu.name} gives {view.size(run.gpu.usable_bytes)} to a process."
    return section("chart", title, f'<div class="figures"><figure>{drawing}</figure></div>', lead)


def _changes(run: RunReport, view: View) -> str:
    if not run.changes:
        return ""
    rows = "".join(f"<li>{esc(one.does)}: {view.size(one.device_bytes)}</li>" for one in run.changes)
    return section("changes", "It fits with", f"<ul>{rows}</ul>", "Each was replayed alone.")


def _table(run: RunReport, view: View) -> str:
    rows: list[list[str]] = []
    keys: list[list[float | str]] = []
    for number, (one, status) in enumerate(with_status(run)):
        cells: list[tuple[str, float | str]] = [(str(number + 1), number), (esc(one.name), one.name)]
        cells.append((esc(one.does), one.does))
        cells.append((esc(one.model), one.model))
        cells += [(view.size(nbytes), nbytes) for nbytes in _sizes(one)]
        cells.append((f'<strong class="short">{status}</strong>' if status == RUNS_OUT else status, status))
        rows.append([cell for cell, _ in cells])
        keys.append([key for _, key in cells])
    many = "".join(f"<p>{esc(note)}</p>" for note in notes_of(run, view))
    body = many + table(_HEADS, rows, id="rows", right=[0, *range(4, 11)], caption="Instants", keys=keys)
    return section("table", "Instants", f'<div class="cards">{body}</div>', "Click a heading to sort.")


def _host(run: RunReport, view: View) -> str:
    return "" if run.host is None else host_section(run.host, view)


def _assumed(run: RunReport) -> str:
    items = "".join(f"<li>{esc(text)}</li>" for text in run.assumed)
    lead = "Memory differs where one of these does."
    return section("assumed", "Assumed", f"<ul>{items}</ul>", lead) if items else ""


def _sizes(one: InstantReport) -> tuple[int, ...]:
    meters = one.live_bytes, one.allocated_bytes, one.reserved_bytes, one.device_bytes, one.device_high_bytes
    return (*meters, one.left_bytes, one.cached_bytes)


FORMATS = (Format("html", "html", render),)
