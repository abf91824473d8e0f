"""The report as one HTML page; `report/html/` makes it."""

from __future__ import annotations

from staticmem.report.formats import Format
from staticmem.report.model import Report
from staticmem.report.text import PLAIN, View


def render(report: Report, view: View = PLAIN) -> str:
    """The page of the report alone. `studies.page` has the one with charts, cards and sliders."""
    from staticmem.report.html import render as page  # late: other formats need none of it

    return page(report, view=view)


FORMATS = (Format("html", "html", render),)
