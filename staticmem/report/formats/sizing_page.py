"""The sizing report as one HTML page: no network, light and dark, prints, the JSON inside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

from staticmem.report.formats import Format
from staticmem.report.formats.sizing import (
    ACCURACY,
    CANNOT,
    checkpointing,
    count_text,
    grown_name,
    largest_texts,
    lever_peak,
    levers_meter,
    obstacles,
    outcome,
    price_text,
    strategy_title,
)
from staticmem.report.html.page import data, esc, json_text, name, page, section, stacked_bar, table
from staticmem.report.json import dumps
from staticmem.report.sizing import FITS, TIGHT, CardRow, Sizing
from staticmem.report.text import PLAIN, View
from staticmem.report.verdict import shape_text, tflops_text, with_article
from staticmem.units import GIB

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 118, 14, 34


def render(sizing: Sizing, view: View = PLAIN) -> str:
    """The page as text; the same report gives the same text."""
    parts = [
        _head(sizing, view),
        _inputs(sizing),
        _cards(sizing, view),
        _curves(sizing, view),
        _levers(sizing, view),
        _confidence(sizing),
        _reproduce(sizing),
    ]
    body = '<main id="main">' + "\n".join(part for part in parts if part) + "</main>"
    footer = f"<footer>staticmem {esc(sizing.version)} · {esc(sizing.schema)} · one file, no network</footer>"
    blocks = data("sm-sizing", "application/json", json_text(json.loads(dumps(sizing))))
    title = f"{os.path.basename(sizing.model.path)}: sizing · staticmem"
    return page(title, body + footer, styles=("report.css", "sizing.css"), blocks=blocks)


def _head(sizing: Sizing, view: View) -> str:
    live = view.size(sizing.live_bytes)
    return (
        f'<div class="hero"><p class="eyebrow">Sizing of {name(os.path.basename(sizing.model.path))}</p>'
        f'<h1 class="sentence">{esc(sizing.recommendation)}</h1>'
        f'<p class="lead">{esc(sizing.step)}; {live} of live tensors at the peak.</p></div>'
    )


def _inputs(sizing: Sizing) -> str:
    rows = [
        ("model", name(sizing.model.path)),
        ("from", esc(f"{sizing.model.format}, {sizing.model.producer}")),
        (
            "inputs",
            "<br>".join(name(f"{i.name}: {shape_text(i.dtype, i.shape)}") for i in sizing.model.inputs),
        ),
        ("parameters", f"{sizing.parameters:,}"),
        ("SHA-256", f'<code class="digest">{esc(sizing.model.sha256)}</code>' if sizing.model.sha256 else "large file"),
        ("date", esc(sizing.date) if sizing.date else "not given"),
        ("GPUs of", esc(sizing.data_checked)),
    ]
    body = "".join(f"<dt>{esc(term)}</dt><dd>{text}</dd>" for term, text in rows)
    return section("inputs", "What was sized", f'<dl class="facts">{body}</dl>')


def _cards(sizing: Sizing, view: View) -> str:
    heads = [
        "GPU",
        "nominal",
        "usable",
        "needs",
        "low to high",
        "",
        "headroom",
        f"max {grown_name(sizing)}",
        f"safe {grown_name(sizing)}",
        "checkpointed",
        "compiled",
    ]
    heads += [strategy_title(name) for name in sizing.strategies] + ["GB/s", "TFLOPS", "W", "link", "year", "price"]
    right = [i for i, head in enumerate(heads) if head not in ("GPU", "", "link", "price")]
    rows = [_row(row, sizing, view) for row in sizing.cards]
    classes = ["asked" if row.slug == sizing.recommended else "" for row in sizing.cards]
    lead = "Usable is what the driver gives to a process; a GPU fits where the whole band is within 95 % of it."
    if sizing.strategies:
        lead += " Under each strategy stand the fewest GPUs, of 1, 2, 4, 8 and so on."
    if checkpointing(sizing):
        lead += f" † with every {name(sizing.blocks or '')} checkpointed."
    for why, names in obstacles(sizing):
        lead += f" {CANNOT.capitalize()}, {esc(why)}: {esc(names)}."
    body = table(heads, rows, id="cards", right=right, classes=classes, caption="GPUs")
    return section("fit", "GPUs", f'<div class="cards">{body}</div>', lead)


def _row(row: CardRow, sizing: Sizing, view: View) -> list[str]:
    word = outcome(row)
    kind = "fits" if row.fit == FITS else "tight" if row.fit == TIGHT or word == "with checkpointing" else "short"
    share = min(row.device_bytes / row.usable_bytes, 1.0)
    band = (row.device_low_bytes / row.usable_bytes, row.device_high_bytes / row.usable_bytes)
    kind = "short" if row.obstacle else kind
    bar = stacked_bar([(f"b-{kind}", share, word)], f"{row.name}: {word}", band)
    form = f" <small>{esc(row.form)}</small>" if row.form else ""
    mark = f' <abbr title="assumed: {esc(", ".join(row.assumed))}">*</abbr>' if row.assumed else ""
    range_ = f"{view.size(row.device_low_bytes, 1)} - {view.size(row.device_high_bytes, 1)}"
    cells = [f"{esc(row.name)}{mark}{form}", view.size(row.nominal_bytes, 0)]
    cells += [view.size(nbytes, 1) for nbytes in (row.usable_bytes, row.device_bytes)]
    cells += [f"<small>{range_}</small>{bar}", f'<strong class="{kind}">{esc(word)}</strong>']
    cells.append(view.size(row.headroom_bytes, 1) if row.headroom_bytes else "")
    cells += largest_texts(row, sizing)
    compiled = row.device_compiled_bytes
    cells.append(view.size(compiled, 1) if compiled is not None else "")
    cells += [f'<span title="{esc(c.why)}">{count_text(c)}</span>' if c.why else count_text(c) for c in row.counts]
    cells += [str(row.bandwidth_gb_s or ""), esc(tflops_text(row.tflops)), str(row.tdp_w or "")]
    return [*cells, esc(row.link or ""), str(row.year or ""), esc(price_text(row))]


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
        lines = [("device", [point.device_bytes for point in points])]
        less = [point.device_with_checkpointing_bytes for point in points]
        if all(n is not None for n in less):
            lines.append(("checkpointed", [n or 0 for n in less]))
        lines.append(("live", [point.live_bytes for point in points]))
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
        rows.append((esc(lever.what), f"<code>{esc(lever.flags)}</code>", *sizes, bar))
    heads = ("lever", "flags", "peak", "saved", "")
    lead = f"Each pulled alone, by {esc(levers_meter(sizing))}, as staticmem levers has it."
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
    body += "<p><small>* a figure of the GPU has no source of its own, or was not compared with one.</small></p>"
    return section("confidence", "How sure this is", body)


def _reproduce(sizing: Sizing) -> str:
    if not sizing.command:
        return ""
    return section("reproduce", "How to reproduce it", f'<p class="command"><code>{esc(sizing.command)}</code></p>')


def curve(
    title: str, xs: Sequence[float], labels: Sequence[str], lines: Sequence[tuple[str, Sequence[int]]],
    limits: Sequence[tuple[str, int]], view: View = PLAIN,
) -> str:  # fmt: skip
    """Lines over one axis, and horizontal lines at limits that lie in the picture.

    Args:
        xs: positions of the points, rising; labels: their names under the axis.
        lines: name and bytes at each point; the name is its class too.
        limits: name and bytes.
    """
    top = max(max(values) for _, values in lines)
    shown = [(text, at) for text, at in limits if at <= 1.15 * top]
    beyond = next(((text, at) for text, at in limits if at > 1.15 * top), None)
    if beyond is not None and beyond[1] <= 1.6 * top:
        shown.append(beyond)
    ceiling = max([top, *(at for _, at in shown)]) * 1.04
    span = max(xs[-1] - xs[0], 1e-9)

    def x(value: float) -> float:
        return LEFT + (value - xs[0]) / span * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / ceiling * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(ceiling, y, view), _axis(xs, labels, x)]
    for text, at in shown:
        parts.append(f'<path class="limit" d="M{LEFT} {y(at):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="limit-name" x="{WIDTH - RIGHT + 6}" y="{y(at) + 4:.1f}">{esc(text[:20])}</text>')
    for text, values in lines:
        points = " ".join(f"{x(value):.1f},{y(n):.1f}" for value, n in zip(xs, values, strict=True))
        parts.append(f'<polyline class="curve {esc(text)}" points="{points}"/>')
        for value, label, n in zip(xs, labels, values, strict=True):
            place = f'cx="{x(value):.1f}" cy="{y(n):.1f}" r="3"'
            sentences = esc(f"{text} at {label}: {view.size(n)}")
            parts.append(f'<circle class="dot {esc(text)}" {place}><title>{sentences}</title></circle>')
    keys = "".join(f'<span class="key"><i class="k-{esc(text)}"></i>{esc(text)}</span>' for text, _ in lines)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{esc(title)}">{"".join(parts)}</svg>'
        f'<p class="keys">{keys}</p>'
    )


def _grid(ceiling: float, y: Callable[[float], float], view: View) -> str:
    step = _step(ceiling)
    parts: list[str] = []
    at = 0.0
    while at <= ceiling:
        height = y(at)
        text = esc(view.size(int(at), 0 if step >= GIB else 1))
        parts.append(f'<path class="grid" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{height + 4:.1f}">{text}</text>')
        at += step
    return "".join(parts)


def _step(ceiling: float) -> float:
    """A round distance of lines: 1, 2 or 5 times a power of ten GiB (or of two below it), four to eight of them."""
    unit = float(GIB)
    while unit * 4 > ceiling:
        unit /= 2
    for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        if ceiling / (unit * factor) <= 8:
            return unit * factor
    return ceiling / 5


def _axis(xs: Sequence[float], labels: Sequence[str], x: Callable[[float], float]) -> str:
    parts: list[str] = []
    free = -1e9
    for at, label in zip(xs, labels, strict=True):
        place = x(at)
        if place - free >= 26:  # names that would touch are left out
            parts.append(f'<text class="x" x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}">{esc(label)}</text>')
            free = place
    return "".join(parts)


FORMATS = (Format("html", "html", render),)
