"""The report as HTML: one page, which `report/html/` makes, and in a notebook a small table without a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from staticmem.report.formats import Format
from staticmem.report.model import Report
from staticmem.report.text import PLAIN, View
from staticmem.report.verdict import category_name, meter_rows, of_size, share, verdict


def page(report: Report, view: View = PLAIN) -> str:
    """The page of the report alone. `studies.page` has the one with charts, cards and sliders."""
    from staticmem.report.html import render  # late: other formats need none of it

    return render(report, view=view)


def fragment(report: Report) -> str:
    """What a notebook shows, in its own style (`Report._repr_html_`); every text of the model is escaped."""
    peak = report.peak
    categories = [(category_name(c), PLAIN.size(n), share(n, peak.live_bytes)) for c, n in of_size(peak.by_category)]
    warnings = "".join(f"<li>{escape(note.text)} [{escape(note.code)}]</li>" for note in report.warnings)
    parts = [
        f"<p><b>{escape(verdict(report))}</b></p>",
        plain_table(("meter", "peak", "between"), meter_rows(peak, PLAIN)),
        plain_table(("at the peak", "memory", "share"), categories),
        f"<p>Warnings</p><ul>{warnings}</ul>" if warnings else "",
    ]
    return f"<div>{''.join(parts)}</div>"


def plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in the style of a notebook; heads and cells are text."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"

    return f"<table>{cells('th', heads)}{''.join(cells('td', row) for row in rows)}</table>"


FORMATS = (Format("html", "html", page),)
