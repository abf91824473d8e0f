"""The sizing report as Markdown: the recommendation first, long parts folded."""

from __future__ import annotations

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
from staticmem.report.markdown import code, details, escape, table
from staticmem.report.sizing import Point, Sizing
from staticmem.report.text import PLAIN, View, printable
from staticmem.report.verdict import shape_text, tflops_text


def render(sizing: Sizing, view: View = PLAIN) -> str:
    """The report as text with a final newline."""
    size = view.size
    first, *others = map(escape, sizing.recommendation.split("\n"))
    parts = [f"## {first}", "", *(f"{line}\n" for line in others)]
    parts += [escape(f"Sizing of {sizing.step}."), "", _inputs(sizing), "", _cards(sizing, view), ""]
    if checkpointing(sizing):
        parts += [f"† with every {code(sizing.blocks or '')} checkpointed", ""]
    parts += [text for why, names in remarks(sizing) for text in (escape(f"{why}: {names}"), "")]
    for title, points in (("Batch", sizing.batches), ("Resolution", sizing.resolutions)):
        if points:
            parts += [details(f"{title}: what it changes on the {sizing.curves_of}", _points(title, points, view)), ""]
    if sizing.levers:
        rows = [
            (escape(lever_text(sizing, x, view)), code(x.flags), size(lever_peak(x)), size(x.saved_bytes))
            for x in sizing.levers
        ]
        parts += [f"### What would make it smaller ({escape(levers_meter(sizing))})", ""]
        parts += [table(("lever", "flags", "peak", "saved"), rows), ""]
    notes = [f"- {escape(note.text)} `{note.code}`" for note in (*sizing.warnings, *sizing.assumptions)]
    ruled = sizing.coverage.ruled + sizing.coverage.transparent
    total = ruled + sizing.coverage.unknown
    body = [f"{ruled:,} of {total:,} ops are known. {escape(' '.join(ACCURACY))}", "", *notes, "", "Not included:", ""]
    body += [f"- {escape(text)}" for text in sizing.not_included]
    parts += [details("Assumptions and confidence", "\n".join(body)), ""]
    if sizing.command:
        parts += ["Reproduce:", "", f"    {printable(sizing.command, '')}", ""]
    return "\n".join(parts)


def _inputs(sizing: Sizing) -> str:
    inputs = "; ".join(f"{i.name}: {shape_text(i.dtype, i.shape)}" for i in sizing.model.inputs)
    rows = [("model", code(sizing.model.path)), ("inputs", code(inputs)), ("parameters", f"{sizing.parameters:,}")]
    if sizing.model.sha256:
        rows.append(("SHA-256", code(sizing.model.sha256)))
    if sizing.date:
        rows.append(("date", escape(sizing.date)))
    rows.append(("GPUs of", escape(sizing.data_checked)))
    rows.append(("made by", f"staticmem {escape(sizing.version)}"))
    return table(("", ""), rows)


def _cards(sizing: Sizing, view: View) -> str:
    heads = ["GPU", "form", "nominal", "usable", "low", "expected", "high", "", "headroom"]
    heads += [
        escape(f"max {grown_name(sizing)}"),
        escape(f"safe {grown_name(sizing)}"),
        "checkpointed",
        "compiled",
        *(strategy_title(name) for name in sizing.strategies),
    ]
    heads += ["GB/s", "TFLOPS", "W", "link", "year", "price"]
    rows = []
    for row in sizing.cards:
        sizes = (row.nominal_bytes, row.usable_bytes, row.device_low_bytes, row.device_bytes, row.device_high_bytes)
        name = escape(row.name)
        cells = [f"**{name}**" if row.slug == sizing.recommended else name, escape(row.form or "")]
        cells += [view.size(n) for n in sizes]
        cells += [escape(outcome(row)), view.size(row.headroom_bytes) if row.headroom_bytes else ""]
        cells += largest_texts(row, sizing)
        compiled = row.device_compiled_bytes
        cells.append(view.size(compiled) if compiled is not None else "")
        cells += [count_text(count) for count in row.counts]
        cells += [str(row.bandwidth_gb_s or ""), escape(tflops_text(row.tflops)), str(row.tdp_w or "")]
        cells += [escape(row.link or ""), str(row.year or ""), escape(price_text(row))]
        rows.append(cells)
    return table(heads, rows)


def _points(title: str, points: tuple[Point, ...], view: View) -> str:
    rows = []
    for point in points:
        name = str(point.batch) if point.batch is not None else "x".join(str(n) for n in point.resolution or ())
        less = point.device_with_checkpointing_bytes
        sizes = (point.live_bytes, point.device_bytes, less)
        rows.append([name, *("" if n is None else view.size(n) for n in sizes)])
    return table((title.lower(), "live", "device", "device, checkpointed"), rows)


FORMATS = (Format("md", "md", render),)
