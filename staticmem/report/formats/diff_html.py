"""A diff as one HTML page: no network, light and dark, the JSON inside."""

from __future__ import annotations

from staticmem.frontends.architectures import model_name
from staticmem.report.diff import ReportDiff
from staticmem.report.formats import Format
from staticmem.report.formats.diff import INCOMPLETE, Row, headline, meter_rows, sections
from staticmem.report.html.page import data, esc, json_text, name, page, section, table
from staticmem.report.json import to_json
from staticmem.report.text import PLAIN, View


def render(d: ReportDiff, view: View = PLAIN) -> str:
    """The page as text; the same diff gives the same text."""
    models = " and ".join(dict.fromkeys(name(model_name(side.path)) for side in (d.before, d.after)))
    hero = (
        f'<div class="hero"><p class="eyebrow">What changed in {models}</p>'
        f'<h1 class="sentence">{esc(headline(d, view))}</h1></div>'
    )
    parts = [hero, _sides(d), section("memory", "Memory", _table(meter_rows(d, view), "Memory"))]
    parts += [
        section(f"part-{number}", title, _table(rows, title)) for number, (title, rows) in enumerate(sections(d, view))
    ]
    if not d.complete:
        parts.append(f'<p class="lead">{esc(INCOMPLETE)}</p>')
    footer = f"<footer>staticmem · {esc(d.schema)} · one file, no network</footer>"
    blocks = data("sm-diff", "application/json", json_text(to_json(d)))
    body = f'<main id="main">{"".join(parts)}</main>{footer}'
    return page("diff · staticmem", body, styles=("report.css", "sizing.css"), blocks=blocks)


def _sides(d: ReportDiff) -> str:
    """What was compared, and the settings that differ."""
    rows = [
        (word, name(side.path), esc(side.step), esc(f"{side.phase}, {side.peak_at or 'nothing allocated'}"))
        for word, side in (("before", d.before), ("after", d.after))
    ]
    body = table(("", "model", "step", "peak"), rows, caption="Before and after")
    if d.settings:
        cells = [(name(setting), name(before), name(after)) for setting, before, after in d.settings]
        body += "<h3>Settings</h3>" + table(("setting", "before", "after"), cells, caption="Settings")
    return section("sides", "Before and after", body)


def _table(rows: list[Row], caption: str) -> str:
    cells = [(name(title), esc(before), esc(after), _change(change)) for title, before, after, change in rows]
    return table(("", "before", "after", "change"), cells, right=(1, 2, 3), caption=caption)


def _change(text: str) -> str:
    """More memory in the colour of what does not fit, less in that of what does."""
    kind = {"+": "short", "-": "fits"}.get(text[:1], "") if len(text) > 1 else ""
    return f'<span class="{kind}">{esc(text)}</span>' if kind else esc(text)


FORMATS = (Format("html", "html", render),)
