"""The report in a notebook: a small table that needs no script and follows the notebook's own style."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from staticmem.report.model import Report
from staticmem.report.verdict import category_name, share, verdict
from staticmem.units import format_bytes


def render(report: Report) -> str:
    """An HTML fragment; every text of the model is escaped."""
    peak = report.peak
    meters = []
    for name in ("live", "allocated", "reserved", "device"):
        expected, band = getattr(peak, f"{name}_bytes"), peak.bands.get(name)
        if expected is not None:
            bounds = f"{format_bytes(band.low)} to {format_bytes(band.high)}" if band and band.low < band.high else ""
            meters.append((name, format_bytes(expected), bounds))
    by_size = sorted(((n, c) for c, n in peak.by_category.items() if n), key=lambda row: (-row[0], row[1]))
    categories = [(category_name(c), format_bytes(n), share(n, peak.live_bytes)) for n, c in by_size]
    warnings = "".join(f"<li>{html.escape(note.text)} [{html.escape(note.code)}]</li>" for note in report.warnings)
    parts = [f"<p><b>{html.escape(verdict(report))}</b></p>", _table(("meter", "peak", "between"), meters)]
    parts.append(_table(("at the peak", "memory", "share"), categories))
    if warnings:
        parts.append(f"<p>Warnings</p><ul>{warnings}</ul>")
    return f"<div>{''.join(parts)}</div>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    return f"<table>{cells('th', heads)}{''.join(cells('td', row) for row in rows)}</table>"
