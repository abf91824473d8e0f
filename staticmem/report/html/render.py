"""The report as a page: a pure function of the report and of what is shown beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.frontends.architectures import model_name
from staticmem.report.html import head, sections
from staticmem.report.html.beside import Extras
from staticmem.report.html.charts import Columns, Span
from staticmem.report.html.page import block, cut, data, json_text, packed_text, page, visible
from staticmem.report.json import dumps
from staticmem.report.model import ModuleBytes, Report
from staticmem.report.text import PLAIN, View

SCRIPTS = ("pack.js", "chart.js", "timeline.js", "addresses.js", "icicle.js", "what_if.js", "report.js")
BASE64 = "application/octet-stream;base64"


def render(report: Report, extras: Extras | None = None, view: View = PLAIN) -> str:
    """The page as text. The same report and extras always give the same text.

    Args:
        extras: what is shown beside the report; the page leaves out what is missing.
    """
    from staticmem.version import __version__

    extras = extras or Extras()
    parts = [
        ("", "", f'<div class="hero">{head.verdict(report, extras.cards, view)}</div>'),
        ("meters", "Meters", head.meters(report, view)),
        ("host", "Host", sections.host_section(report.host, view) if report.host is not None else ""),
        ("fit", "Fit", head.fit_table(extras.cards, view)),
        ("timeline", "Timeline", sections.timeline_section(report) if extras.timeline is not None else ""),
        ("peak", "Peak", sections.peak_section(report, view)),
        ("owners", "Owners", sections.owner_section(report, view)),
        ("modules", "Modules", sections.module_section(report, view)),
        ("addresses", "Addresses", sections.address_section(extras, view)),
        ("what-if", "What if", sections.what_if_section(extras.what_if)),
        ("levers", "Levers", sections.lever_section(extras.levers, report.peak.live_bytes, view)),
        ("basis", "Basis", sections.basis_section(report, extras, view)),
        ("model", "Model", sections.model_section(report, extras, view)),
    ]
    links = [(id, title) for id, title, text in parts if id and text]
    body = (
        f'{head.top_bar(links)}\n<main id="main">\n'
        + "\n".join(text for _, _, text in parts if text)
        + f"\n</main>\n<footer>staticmem {__version__} · {report.schema} · one file, no network</footer>"
    )
    title = f"{model_name(report.model.path)}: memory · staticmem"
    return page(title, body, styles=("report.css",), scripts=SCRIPTS, blocks="\n".join(_blocks(report, extras, view)))


def _blocks(report: Report, extras: Extras, view: View) -> list[str]:
    blocks = [
        data("sm-settings", "application/json", json_text(_settings(report, extras, view))),
        data("sm-report", BASE64, packed_text(dumps(report))),
        data("sm-modules", BASE64, _modules(report)),
    ]
    if report.owners:
        blocks.append(data("sm-owners", BASE64, _owners(report)))
    if extras.timeline is not None:
        blocks.append(data("sm-timeline", BASE64, extras.timeline.packed()))
    if extras.addresses is not None:
        blocks.append(data("sm-addresses", BASE64, extras.addresses.packed()))
    if extras.what_if is not None and extras.what_if.settings:
        what_if = extras.what_if.data() | {"command": visible(extras.what_if_command)}
        blocks.append(data("sm-what-if", "application/json", json_text(what_if)))
    return blocks


def _settings(report: Report, extras: Extras, view: View) -> dict[str, Any]:
    """What the script has to know beside the columns."""
    settings: dict[str, Any] = {
        "units": view.units,
        "file": f"{model_name(report.model.path)}.json",
        "model": report.model.path,
        "peak_bytes": report.peak.live_bytes,
        "order": list(head.ORDER),
        "asked": report.gpu.name if report.gpu is not None else None,
        "cards": [[card.name, card.usable] for card in extras.cards],
    }
    if extras.timeline is not None:
        line = extras.timeline
        shown = {"ticks": line.ticks, "peak_tick": line.peak_tick, "categories": list(line.categories)}
        settings["timeline"] = {**shown, "phases": _spans(line.phases)}
    if extras.addresses is not None:
        address = extras.addresses
        phases = _spans(address.phases)
        settings["addresses"] = {"events": address.events, "peak_at": address.peak_at, "phases": phases}
    return settings


def _spans(spans: tuple[Span, ...]) -> list[list[Any]]:
    return [[span.name, span.start, span.end] for span in spans]


def _modules(report: Report) -> str:
    return block(*_columns(report, report.peak.by_module))


def _owners(report: Report) -> str:
    """The modules of each owner; `owner` is its place in `owners`."""
    places = [place for place, owner in enumerate(report.owners) for _ in owner.by_module]
    columns, strings = _columns(report, [module for owner in report.owners for module in owner.by_module])
    owners = [visible(cut(owner.owner)) for owner in report.owners]
    return block({**columns, "owner": ("plain", places)}, {**strings, "owners": owners})


def _columns(report: Report, rows: Sequence[ModuleBytes]) -> tuple[Columns, dict[str, list[str]]]:
    """Bytes of modules at the peak by category, in units of 512."""
    categories = list(report.peak.by_category)
    columns: Columns = {part: ("plain", [row.by_category.get(part, 0) // 512 for row in rows]) for part in categories}
    return columns, {"modules": [visible(cut(row.module)) for row in rows], "categories": categories}
