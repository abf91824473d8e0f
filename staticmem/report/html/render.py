"""The report as a page: a pure function of the report and of what is shown beside it."""

from __future__ import annotations

import os
from typing import Any

from staticmem.report.html import head, sections
from staticmem.report.html.extras import Extras
from staticmem.report.html.pack import block, packed_text
from staticmem.report.html.page import cut, data, json_text, page, visible
from staticmem.report.html.timeline import Span
from staticmem.report.json import dumps
from staticmem.report.model import Report

SCRIPTS = ("pack.js", "chart.js", "timeline.js", "addresses.js", "icicle.js", "what_if.js", "report.js")
BASE64 = "application/octet-stream;base64"


def render(report: Report, extras: Extras | None = None, units: str = "binary") -> str:
    """The page as text. The same report and extras always give the same text.

    Args:
        extras: what is shown beside the report; the page leaves out what is missing.
        units: "binary" (GiB), "decimal" (GB) or "bytes".
    """
    from staticmem.version import __version__

    extras = extras or Extras()
    parts = [
        ("", "", f'<div class="hero">{head.verdict(report, extras.cards, units)}</div>'),
        ("meters", "Meters", head.meters(report, units)),
        ("fit", "Fit", head.fit_table(extras.cards, units)),
        ("timeline", "Timeline", sections.timeline_section(report) if extras.timeline is not None else ""),
        ("peak", "Peak", sections.peak_section(report, units)),
        ("modules", "Modules", sections.module_section(report, units)),
        ("addresses", "Addresses", sections.address_section(extras, units)),
        ("what-if", "What if", sections.what_if_section(extras.what_if)),
        ("levers", "Levers", sections.lever_section(extras.levers, report.peak.live_bytes, units)),
        ("basis", "Basis", sections.basis_section(report, extras, units)),
        ("model", "Model", sections.model_section(report, extras, units)),
    ]
    links = [(id, title) for id, title, text in parts if id and text]
    body = (
        f'{head.top_bar(links)}\n<main id="main">\n'
        + "\n".join(text for _, _, text in parts if text)
        + f"\n</main>\n<footer>staticmem {__version__} · {report.schema} · one file, no network</footer>"
    )
    title = f"{os.path.basename(report.model.path)}: memory · staticmem"
    return page(title, body, styles=("report.css",), scripts=SCRIPTS, blocks="\n".join(_blocks(report, extras, units)))


def _blocks(report: Report, extras: Extras, units: str) -> list[str]:
    blocks = [
        data("sm-settings", "application/json", json_text(_settings(report, extras, units))),
        data("sm-report", BASE64, packed_text(dumps(report))),
        data("sm-modules", BASE64, _modules(report)),
    ]
    if extras.timeline is not None:
        blocks.append(data("sm-timeline", BASE64, extras.timeline.packed()))
    if extras.addresses is not None:
        blocks.append(data("sm-addresses", BASE64, extras.addresses.packed()))
    if extras.what_if is not None and extras.what_if.settings:
        blocks.append(
            data(
                "sm-what-if",
                "application/json",
                json_text(extras.what_if.data() | {"command": visible(extras.what_if_command)}),
            )
        )
    return blocks


def _settings(report: Report, extras: Extras, units: str) -> dict[str, Any]:
    """What the script has to know beside the columns."""
    settings: dict[str, Any] = {
        "units": units,
        "file": f"{os.path.basename(report.model.path)}.json",
        "model": report.model.path,
        "peak_bytes": report.peak.live_bytes,
        "order": list(head.ORDER),
        "asked": report.gpu.name if report.gpu is not None else None,
        "cards": [[card.name, card.usable] for card in extras.cards],
    }
    if extras.timeline is not None:
        found = extras.timeline
        settings["timeline"] = {
            "ticks": found.ticks, "peak_tick": found.peak_tick, "categories": list(found.categories),
            "phases": _spans(found.phases),
        }  # fmt: skip
    if extras.addresses is not None:
        settings["addresses"] = {
            "events": extras.addresses.events, "peak_at": extras.addresses.peak_at,
            "phases": _spans(extras.addresses.phases),
        }  # fmt: skip
    return settings


def _spans(spans: tuple[Span, ...]) -> list[list[Any]]:
    return [[span.name, span.start, span.end] for span in spans]


def _modules(report: Report) -> str:
    """Bytes of the modules at the peak by category, in units of 512."""
    rows = report.peak.by_module
    categories = list(report.peak.by_category)
    columns = {part: ("plain", [row.by_category.get(part, 0) // 512 for row in rows]) for part in categories}
    return block(columns, {"modules": [visible(cut(row.module)) for row in rows], "categories": categories})
