"""The sizing report as Markdown: the recommendation first, long parts folded."""

from __future__ import annotations

from staticmem.report.formats.sizing import ACCURACY, batch_text, count_text, outcome, price_text, tflops_text
from staticmem.report.markdown import code, details, escape, table
from staticmem.report.sizing import Point, Sizing
from staticmem.scenario.step import TITLES
from staticmem.units import format_bytes


def render(found: Sizing, units: str = "binary") -> str:
    """The report as text with a final newline."""

    def size(nbytes: int) -> str:
        return format_bytes(nbytes, units)

    parts = [f"## {escape(found.recommendation)}", "", escape(f"Sizing of {found.step}."), "", _inputs(found), ""]
    parts += [_cards(found, units), ""]
    if any(count.checkpointing for row in found.cards for count in row.counts):
        parts += [f"† with every {code(found.blocks or '')} checkpointed", ""]
    for title, points in (("Batch", found.batches), ("Resolution", found.resolutions)):
        if points:
            parts += [details(f"{title}: what it changes", _points(title, points, units)), ""]
    if found.levers:
        rows = [(escape(x.what), code(x.flags), size(x.live_bytes), size(x.saved_bytes)) for x in found.levers]
        parts += ["### What would make it smaller", "", table(("lever", "flags", "live peak", "saved"), rows), ""]
    notes = [f"- {escape(note.text)} `{note.code}`" for note in (*found.warnings, *found.assumptions)]
    known = found.coverage.ruled + found.coverage.transparent
    total = known + found.coverage.unknown
    body = [f"{known:,} of {total:,} ops are known. {escape(' '.join(ACCURACY))}", "", *notes, "", "Not included:", ""]
    body += [f"- {escape(text)}" for text in found.not_included]
    parts += [details("Assumptions and confidence", "\n".join(body)), ""]
    if found.command:
        parts += ["Reproduce:", "", f"    {''.join(c for c in found.command if c.isprintable())}", ""]
    return "\n".join(parts)


def _inputs(found: Sizing) -> str:
    inputs = "; ".join(f"{i.name}: {i.dtype}[{', '.join(map(str, i.shape))}]" for i in found.model.inputs)
    rows = [("model", code(found.model.path)), ("inputs", code(inputs)), ("parameters", f"{found.parameters:,}")]
    if found.model.sha256:
        rows.append(("SHA-256", code(found.model.sha256)))
    if found.date:
        rows.append(("date", escape(found.date)))
    rows.append(("cards of", escape(found.data_checked)))
    rows.append(("made by", f"staticmem {escape(found.version)}"))
    return table(("", ""), rows)


def _cards(found: Sizing, units: str) -> str:
    heads = ["card", "form", "nominal", "usable", "low", "expected", "high", "", "headroom"]
    heads += ["max batch", "checkpointed", *(TITLES[name] for name in found.strategies)]
    heads += ["GB/s", "TFLOPS", "W", "link", "year", "price"]
    rows = []
    for row in found.cards:
        sizes = (row.nominal_bytes, row.usable_bytes, row.device_low_bytes, row.device_bytes, row.device_high_bytes)
        name = escape(row.name)
        cells = [f"**{name}**" if row.slug == found.recommended else name, escape(row.form or "")]
        cells += [format_bytes(n, units, 1) for n in sizes]
        cells += [escape(outcome(row)), format_bytes(row.headroom_bytes, units, 1) if row.headroom_bytes else ""]
        cells += [batch_text(row.max_batch), batch_text(row.max_batch_with_checkpointing)]
        cells += [count_text(count) for count in row.counts]
        cells += [str(row.bandwidth_gb_s or ""), escape(tflops_text(row)), str(row.tdp_w or "")]
        cells += [escape(row.link or ""), str(row.year or ""), escape(price_text(row))]
        rows.append(cells)
    return table(heads, rows)


def _points(title: str, points: tuple[Point, ...], units: str) -> str:
    rows = []
    for point in points:
        name = str(point.batch) if point.batch is not None else "x".join(str(n) for n in point.resolution or ())
        less = point.device_with_checkpointing_bytes
        sizes = (point.live_bytes, point.device_bytes, less)
        rows.append([name, *("" if n is None else format_bytes(n, units) for n in sizes)])
    return table((title.lower(), "live", "device", "device, checkpointed"), rows)
