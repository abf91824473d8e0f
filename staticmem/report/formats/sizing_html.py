"""The sizing report as one HTML page: no network, light and dark, prints, the JSON inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from staticmem.frontends.architectures import model_name
from staticmem.report.formats import Format
from staticmem.report.formats.sizing import (
    ACCURACY,
    checkpointing,
    count_text,
    grown_name,
    largest_texts,
    lever_peak,
    lever_text,
    levers_meter,
    outcome,
    price_text,
    remarks,
    strategy_title,
)
from staticmem.report.html.curves import Line, curve
from staticmem.report.html.page import data, esc, json_text, name, page, section, stacked_bar, table
from staticmem.report.json import to_json
from staticmem.report.sizing import FITS, TIGHT, CardRow, Sizing
from staticmem.report.text import PLAIN, View
from staticmem.report.verdict import shape_text, tflops_text, with_article
from staticmem.units import GIB


def render(sizing: Sizing, view: View = PLAIN) -> str:
    """The page as text; the same report gives the same text."""
    parts = [
        _head(sizing, view),
        _cards(sizing, view),
        _curves(sizing, view),
        _levers(sizing, view),
        _confidence(sizing),
        _inputs(sizing),
        _reproduce(sizing),
    ]
    body = '<main id="main">' + "\n".join(part for part in parts if part) + "</main>"
    footer = f"<footer>staticmem {esc(sizing.version)} · {esc(sizing.schema)} · one file, no network</footer>"
    blocks = data("sm-sizing", "application/json", json_text(to_json(sizing)))
    title = f"{model_name(sizing.model.path)}: sizing · staticmem"
    return page(title, body + footer, styles=("report.css", "sizing.css"), scripts=("sort.js",), blocks=blocks)


def _head(sizing: Sizing, view: View) -> str:
    step, live = esc(sizing.step[:1].upper() + sizing.step[1:]), view.size(sizing.live_bytes)
    first, *others = [esc(line).replace(" %", "&nbsp;%") for line in sizing.recommendation.split("\n")]
    rest = f'<p class="lead">{" ".join(others)}</p>' if others else ""
    return (
        f'<div class="hero"><p class="eyebrow">Sizing of {name(model_name(sizing.model.path))}</p>'
        f'<h1 class="sentence">{first}</h1>{rest}'
        f'<p class="lead">{step}; {live} of live tensors at the peak.</p></div>'
    )


def _inputs(sizing: Sizing) -> str:
    rows = [
        ("model", name(sizing.model.path)),
        ("from", esc(f"{sizing.model.format}, {sizing.model.producer}")),
        ("inputs", "<br>".join(name(f"{i.name}: {shape_text(i.dtype, i.shape)}") for i in sizing.model.inputs)),
        ("parameters", f"{sizing.parameters:,}"),
        ("SHA-256", f'<code class="digest">{esc(sizing.model.sha256)}</code>' if sizing.model.sha256 else "large file"),
        ("date", esc(sizing.date) if sizing.date else "not given"),
        ("GPUs of", esc(sizing.data_checked)),
    ]
    body = "".join(f"<dt>{esc(term)}</dt><dd>{text}</dd>" for term, text in rows)
    return section("inputs", "What was sized", f'<dl class="facts">{body}</dl>')


@dataclass(frozen=True)
class _Column:
    """A column of the table of GPUs: its head, the HTML of a cell, and what it is sorted by."""

    head: str
    cell: Callable[[CardRow], str]
    key: Callable[[CardRow], float | str]
    number: bool = True


def _cards(sizing: Sizing, view: View) -> str:
    rows = sorted(sizing.cards, key=lambda row: bool(row.obstacle))  # those that cannot run the step come last
    classes = ["asked" if row.slug == sizing.recommended else "" for row in rows]
    lead = "Usable is what the driver gives to a process; a GPU fits where the whole band is within 95 % of it."
    if sizing.strategies:
        lead += " Under each strategy stand the fewest GPUs, of 1, 2, 4, 8 and so on."
    if checkpointing(sizing):
        lead += f" † with every {name(sizing.blocks or '')} checkpointed."
    body = f'<div class="cards">{_table(_columns(sizing, view), rows, "cards", "GPUs", classes)}</div>'
    said = [f"{esc(why[:1].upper() + why[1:])}: {esc(names)}." for why, names in remarks(sizing)]
    if said:
        listed = "".join(f"<li>{text}</li>" for text in said)
        body += f'<ul class="notes">{listed}</ul>'
    body += (
        "<details><summary>Bandwidth, arithmetic, power and year of each GPU</summary>"
        f'<div class="cards">{_table(_DATA, rows, "data", "Data of the GPUs")}</div></details>'
    )
    return section("fit", "GPUs", body, lead)


def _table(
    columns: Sequence[_Column], rows: Sequence[CardRow], id: str, caption: str, classes: Sequence[str] = ()
) -> str:
    heads = [column.head for column in columns]
    cells = [[column.cell(row) for column in columns] for row in rows]
    keys = [[column.key(row) for column in columns] for row in rows]
    right = [number for number, column in enumerate(columns) if column.number]
    return table(heads, cells, id=id, right=right, classes=classes, caption=caption, keys=keys)


def _columns(sizing: Sizing, view: View) -> list[_Column]:
    """What a buyer compares, without the columns that are empty for every GPU."""

    def compiled(row: CardRow) -> str:
        return view.size(row.device_compiled_bytes) if row.device_compiled_bytes is not None else ""

    priced = any(row.price is not None for row in sizing.cards)
    largest, safe = f"max {grown_name(sizing)}", f"safe {grown_name(sizing)}"
    columns = [
        _NAME,
        _Column("price" if priced else "class", lambda row: esc(price_text(row, priced)), _price, number=False),
        _Column("", _outcome, lambda row: "", number=False),
        _Column("needs", lambda row: view.size(row.device_bytes), lambda row: row.device_bytes),
        _Column("usable", lambda row: view.size(row.usable_bytes), lambda row: row.usable_bytes),
        _Column("low to high", lambda row: _band(row, view), lambda row: row.device_high_bytes / row.usable_bytes),
        *[_largest(number, head, sizing) for number, head in ((1, safe), (2, "checkpointed"), (0, largest))],
        _Column("compiled", compiled, lambda row: row.device_compiled_bytes or 0),
    ]
    columns += [_strategy(number, name) for number, name in enumerate(sizing.strategies)]
    return [column for column in columns if any(column.cell(row) for row in sizing.cards)]


def _largest(number: int, head: str, sizing: Sizing) -> _Column:
    """A column of `CardRow.largest`."""
    return _Column(head, lambda row: largest_texts(row, sizing)[number], lambda row: row.largest[number] or 0)


def _strategy(number: int, name: str) -> _Column:
    def cell(row: CardRow) -> str:
        count = row.counts[number]
        return f'<span title="{esc(count.why)}">{count_text(count)}</span>' if count.why else count_text(count)

    return _Column(strategy_title(name), cell, lambda row: row.counts[number].devices or "")


def _card_name(row: CardRow) -> str:
    form = f" <small>{esc(row.form)}</small>" if row.form else ""
    mark = f' <abbr title="assumed: {esc(", ".join(row.assumed))}">*</abbr>' if row.assumed else ""
    return f"{esc(row.name)}{mark}{form}"


_NAME = _Column("GPU", _card_name, lambda row: row.name, number=False)
_DATA = (
    _NAME,
    _Column("memory", lambda row: f"{row.nominal_bytes / GIB:.0f} GiB", lambda row: row.nominal_bytes),
    _Column("GB/s", lambda row: str(row.bandwidth_gb_s or ""), lambda row: row.bandwidth_gb_s or ""),
    _Column("TFLOPS", lambda row: esc(tflops_text(row.tflops)), lambda row: max(row.tflops.values(), default="")),
    _Column("W", lambda row: str(row.tdp_w or ""), lambda row: row.tdp_w or ""),
    _Column("link", lambda row: esc(row.link or ""), lambda row: row.link or "", number=False),
    _Column("year", lambda row: str(row.year or ""), lambda row: row.year or ""),
)


def _price(row: CardRow) -> float | str:
    """The price by the hour, else to buy; classes are no numbers."""
    if row.price is None:
        return row.price_class or ""
    return row.price.hour if row.price.hour is not None else row.price.buy or ""


def _kind(row: CardRow) -> str:
    if row.fit == FITS and not row.obstacle:
        return "fits"
    tight = row.fit == TIGHT or outcome(row) == "with checkpointing"
    return "tight" if tight and not row.obstacle else "short"


def _outcome(row: CardRow) -> str:
    return f'<strong class="{_kind(row)}">{esc(outcome(row))}</strong>'


def _band(row: CardRow, view: View) -> str:
    """A bar of what the step needs of the card, with the band across it."""
    share = min(row.device_bytes / row.usable_bytes, 1.0)
    band = (row.device_low_bytes / row.usable_bytes, row.device_high_bytes / row.usable_bytes)
    bar = stacked_bar([(f"b-{_kind(row)}", share, outcome(row))], f"{row.name}: {outcome(row)}", band)
    return f"<small>{view.size(row.device_low_bytes)} - {view.size(row.device_high_bytes)}</small>{bar}"


def _curves(sizing: Sizing, view: View) -> str:
    charts = []
    if len(sizing.batches) > 1:
        xs = [float(point.batch or 0) for point in sizing.batches]
        labels = [str(point.batch) for point in sizing.batches]
        charts.append(("Peak against batch", xs, labels, sizing.batches))
    if len(sizing.resolutions) > 1:
        sides = [point.resolution or (0, 0) for point in sizing.resolutions]
        xs = [float(height * width) ** 0.5 for height, width in sides]
        labels = [f"{h}" if h == w else f"{h}x{w}" for h, w in sides]
        charts.append(("Peak against resolution", xs, labels, sizing.resolutions))
    if not charts:
        return ""
    limits = _limits(sizing.cards)
    figures = []
    for title, xs, labels, points in charts:
        lines = [Line("device", "device", [point.device_bytes for point in points])]
        less = [point.device_with_checkpointing_bytes for point in points]
        if all(n is not None for n in less):
            lines.append(Line("checkpointed", "checkpointed", less))
        lines.append(Line("live", "live", [point.live_bytes for point in points]))
        figures.append(
            f"<figure><figcaption>{esc(title)}</figcaption>{curve(title, xs, labels, lines, limits, view)}</figure>"
        )
    lead = f"What {esc(with_article(sizing.curves_of))} needs; dashed lines are the usable memory of GPUs."
    return section(
        "sensitivity", "If batch or resolution change", f'<div class="figures">{"".join(figures)}</div>', lead
    )


def _limits(cards: Sequence[CardRow]) -> list[tuple[str, int]]:
    """Usable memory of some cards, apart enough to be read."""
    limits: list[tuple[str, int]] = []
    for row in cards:
        if not limits or row.usable_bytes > 1.3 * limits[-1][1]:
            limits.append((row.name, row.usable_bytes))
    return limits


def _levers(sizing: Sizing, view: View) -> str:
    if not sizing.levers:
        return ""
    rows = []
    for lever in sizing.levers:
        peak = lever_peak(lever)
        bar = stacked_bar([("c-plain", lever.saved_bytes / (peak + lever.saved_bytes), lever.what)], lever.what)
        sizes = (view.size(peak), f"-{view.size(lever.saved_bytes)}")
        rows.append((esc(lever_text(sizing, lever, view)), f"<code>{esc(lever.flags)}</code>", *sizes, bar))
    heads = ("lever", "flags", "peak", "saved", "")
    lead = f"What each lever saves alone, in {esc(levers_meter(sizing))}; staticmem levers has all."
    return section("levers", "What would make it smaller", table(heads, rows, right=(2, 3), caption="Levers"), lead)


def _confidence(sizing: Sizing) -> str:
    ops = sizing.coverage
    ruled = ops.ruled + ops.transparent
    facts = [f"{ruled:,} of {ruled + ops.unknown:,} ops are known.", *ACCURACY]
    if sizing.unknown_ops:
        facts.append(f"Unknown: {', '.join(sizing.unknown_ops[:8])}.")
    listed = (*sizing.warnings, *sizing.assumptions)
    notes = "".join(f"<li>{esc(n.text)} <code>{esc(n.code)}</code></li>" for n in listed)
    left = "".join(f"<li>{esc(text)}</li>" for text in sizing.not_included)
    lead = " ".join(esc(text) for text in facts)
    body = f"<p>{lead}</p><h3>Assumptions</h3><ul class='notes'>{notes}</ul>"
    body += f"<h3>Not included</h3><ul class='notes'>{left}</ul>"
    body += "<p><small>* a figure of the GPU has no source, or was not compared with one.</small></p>"
    return section("confidence", "How sure this is", body)


def _reproduce(sizing: Sizing) -> str:
    if not sizing.command:
        return ""
    return section("reproduce", "How to reproduce it", f'<p class="command"><code>{esc(sizing.command)}</code></p>')


FORMATS = (Format("html", "html", render),)
