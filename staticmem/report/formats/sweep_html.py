"""A sweep as one HTML page: a chart over the axis of numbers, a table that sorts, the JSON inside."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from staticmem.frontends.architectures import model_name
from staticmem.report.formats import Format
from staticmem.report.formats.report_html import plain_table
from staticmem.report.formats.sweep import cells_of, fit_text, largest_name, setting, verdict
from staticmem.report.html.curves import Line, curve
from staticmem.report.html.page import data, esc, json_text, name, page, section, stacked_bar, table
from staticmem.report.json import to_json
from staticmem.report.sweep import CardFit, Sweep, SweepRow
from staticmem.report.text import PLAIN, View

LINES = 8  # as many colours are told apart, `k-line-0` to `k-line-7` in sizing.css
_KINDS = {"fits": "fits", "may fit": "fits", "tight": "tight"}


def render(sweep: Sweep, view: View = PLAIN) -> str:
    """The page as text; the same sweep gives the same text."""
    models = ", ".join(name(model_name(model)) for model in sweep.models)
    hero = (
        f'<div class="hero"><p class="eyebrow">Sweep of {models}</p>'
        f'<h1 class="sentence">{esc(verdict(sweep, view))}</h1></div>'
    )
    footer = f"<footer>staticmem · {esc(sweep.schema)} · one file, no network</footer>"
    body = f'<main id="main">{hero}{_charts(sweep, view)}{_table(sweep, view)}</main>{footer}'
    blocks = data("sm-sweep", "application/json", json_text(to_json(sweep)))
    return page("sweep · staticmem", body, styles=("report.css", "sizing.css"), scripts=("sort.js",), blocks=blocks)


def fragment(sweep: Sweep) -> str:
    """What a notebook shows, in its own style; every text of a model is escaped."""
    heads, *rows = cells_of(sweep, PLAIN)
    return f"<div><p><b>{escape(verdict(sweep))}</b></p>{plain_table(heads, rows)}</div>"


def _charts(sweep: Sweep, view: View) -> str:
    """A chart for each card, or one of live memory without cards; none where no axis has numbers."""
    axis = _axis(sweep)
    if axis is None:
        return ""
    series = _series(sweep, axis)
    shown = dict(list(series.items())[:LINES])
    xs = sorted({float(row.settings[axis] or 0) for rows in shown.values() for row in rows})
    cards: list[int | None] = [*range(len(sweep.gpus))] if "device" in sweep.meters else [None]
    figures = []
    for number in cards:
        lines = [
            Line(f"line-{index}", label, _needs(rows, axis, xs, number))
            for index, (label, rows) in enumerate(shown.items())
        ]
        lines = [line for line in lines if any(n is not None for n in line.values)]
        if lines:
            title = f"{'Live memory' if number is None else sweep.gpus[number]} against {axis}"
            drawing = curve(title, xs, [f"{x:g}" for x in xs], lines, _limits(sweep, number), view)
            figures.append(f"<figure><figcaption>{esc(title)}</figcaption>{drawing}</figure>")
    if not figures:
        return ""
    lead = "Device memory that is expected; the dashed line is what the GPU gives to a process."
    lead = lead if "device" in sweep.meters else "Live memory, the least that a step needs."
    if len(series) > len(shown):
        lead += f" The first {len(shown)} of {len(series):,} lines; the table has all."
    return section("chart", f"If {axis} changes", f'<div class="figures">{"".join(figures)}</div>', esc(lead))


def _axis(sweep: Sweep) -> str | None:
    """The axis of the charts: the batch, or the first that has several numbers and nothing else."""
    for axis in sorted(sweep.axes, key=lambda axis: axis != "batch"):
        values = {row.settings.get(axis) for row in sweep.rows}
        if len(values) > 1 and all(type(value) in (int, float) for value in values):
            return axis
    return None


def _series(sweep: Sweep, axis: str) -> dict[str, list[SweepRow]]:
    """Rows that differ in the axis alone, by what they share."""
    series: dict[str, list[SweepRow]] = {}
    for row in sweep.rows:
        shared = [model_name(row.model)] if len(sweep.models) > 1 else []
        shared += [row.name] if row.name else []
        shared += [f"{other} {setting(row, other)}" for other in sweep.axes if other not in (axis, "model")]
        series.setdefault(", ".join(shared) or "the step", []).append(row)
    return series


def _needs(rows: Sequence[SweepRow], axis: str, xs: Sequence[float], number: int | None) -> list[int | None]:
    """Bytes at each position of the axis: of the card with this number, or live."""
    needs: dict[float, int | None] = {}
    for row in rows:
        need = row.live_bytes
        if number is not None:
            need = row.cards[number].device_bytes if row.cards else None
        needs[float(row.settings[axis] or 0)] = need
    return [needs.get(x) for x in xs]


def _limits(sweep: Sweep, number: int | None) -> list[tuple[str, int]]:
    """Usable memory of the card of a chart, or of all where live memory is drawn."""
    cards = next((row.cards for row in sweep.rows if row.cards), ())
    shown = cards if number is None else cards[number : number + 1]
    return sorted(((card.gpu, card.usable_bytes) for card in shown), key=lambda limit: limit[1])


def _table(sweep: Sweep, view: View) -> str:
    """All configurations; each column sorts."""
    named, several = any(row.name for row in sweep.rows), len(sweep.models) > 1
    axes = [axis for axis in sweep.axes if axis != "model"]
    device, largest = "device" in sweep.meters, largest_name(sweep)
    heads = ["#", *["name"] * named, *["model"] * several, *axes]
    right = [0, *[len(heads) - len(axes) + k for k in range(len(axes))]]
    for gpu in sweep.gpus:
        right += [len(heads)] * device
        heads += [gpu, "fit"] if device else [f"fit {gpu}"]
        if largest:
            right += [len(heads), len(heads) + 1]
            heads += [f"max {largest}", "safe"]
    right.append(len(heads))
    heads += ["live", "phase"]  # last: a narrow screen shows what the cards need first
    rows: list[list[str]] = []
    keys: list[list[float | str]] = []
    for row in sweep.rows:
        cells: list[tuple[str, float | str]] = [
            (str(row.index + 1), row.index),
            *[(esc(row.name or ""), row.name or "")] * named,
        ]
        cells += [(name(model_name(row.model)), row.model)] * several
        cells += [(esc(setting(row, axis)), _key(row, axis)) for axis in axes]
        for card in row.cards:
            cells += _card(card, device, bool(largest), view)
        cells += [("", "")] * (len(heads) - 2 - len(cells))
        if row.error is None and row.live_bytes is not None:
            cells += [(view.size(row.live_bytes), row.live_bytes), (esc(row.phase or ""), row.phase or "")]
        else:
            why = f"{row.error.what} [{row.error.code}]" if row.error is not None else ""
            cells += [("error", ""), (f"<small>{esc(why)}</small>", "")]
        rows.append([cell for cell, _ in cells])
        keys.append([key for _, key in cells])
    body = table(heads, rows, id="rows", right=right, caption="Configurations", keys=keys)
    return section("table", "Configurations", f'<div class="cards">{body}</div>', "Click a heading to sort.")


def _key(row: SweepRow, axis: str) -> float | str:
    value = row.settings.get(axis)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else setting(row, axis)


def _card(card: CardFit, device: bool, largest: bool, view: View) -> list[tuple[str, float | str]]:
    """What stands of a card in a row, with what it is sorted by."""
    kind = _KINDS.get(card.fit, "short")
    text = fit_text(card, view) if device else card.fit
    cells: list[tuple[str, float | str]] = [
        (f'<strong class="{kind}">{esc(text)}</strong>', card.headroom_bytes - card.missing_bytes)
    ]
    if device:
        need = card.device_bytes
        share = min((need or 0) / max(card.usable_bytes, 1), 1.0)
        bar = stacked_bar([(f"b-{kind}", share, text)], text) if need is not None else ""
        cells.insert(0, ("" if need is None else f"{view.size(need)}{bar}", "" if need is None else need))
    if largest:
        sizes = (None, None) if card.largest is None else (card.largest.size, card.largest.safe_size)
        cells += [("", "") if size is None else (f"{size:,}", size) for size in sizes]
    return cells


FORMATS = (Format("html", "html", render),)
