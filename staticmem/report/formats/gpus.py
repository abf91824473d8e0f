"""The catalog of cards as a table, as CSV, and as JSON with sources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from staticmem.devices.gpus import TYPES, Gpu, checked
from staticmem.report.formats import Format, csv_format
from staticmem.report.text import PLAIN, View, columns
from staticmem.report.verdict import tflops_text

HEADS = ("name for --gpu", "GPU", "sold", "usable", "GB/s", "TFLOPS", "W", "link", "year", "class")

_WIDEST = {0: 60, 1: 60}  # names in a file of the user may be long


def render(cards: Sequence[Gpu], view: View = PLAIN) -> str:
    """A row a card; a star marks one with figures that have no source of their own."""
    if view.quiet:
        return "".join(view.line(card.slug) for card in cards)
    rows = [HEADS, *[_row(card, view) for card in cards]]
    lines = columns(rows, view.style, right=(2, 3, 4, 6, 8), optional=(6, 7, 9, 5, 4, 8), widest=_WIDEST)
    return "\n".join(lines) + "\n"


def _row(card: Gpu, view: View) -> tuple[str, ...]:
    name = f"{card.name} *" if card.assumed or card.unread else card.name
    figures = (str(card.bandwidth or ""), tflops_text(dict(card.tflops)), str(card.tdp or ""))
    rest = (card.link or "", str(card.year or ""), card.price_class or "")
    return card.slug, name, view.size(card.nominal, 0), view.size(card.usable), *figures, *rest


def _fields(card: Gpu) -> dict[str, Any]:
    return {
        "slug": card.slug,
        "name": card.name,
        "vendor": card.vendor,
        "architecture": card.chip or card.architecture,
        "form": card.form,
        "processors": card.processors,
        "nominal_bytes": card.nominal,
        "nvml_bytes": card.nvml,
        "usable_bytes": card.usable,
        "bandwidth_gb_s": card.bandwidth,
        "tflops": dict(card.tflops),
        "tdp_w": card.tdp,
        "link": card.link,
        "year": card.year,
        "class": card.price_class,
        "assumed": [*card.assumed, *card.unread],
        "sources": [{"figure": figure, "url": url} for figure, url in card.sources],
    }


def render_json(cards: Sequence[Gpu], view: View = PLAIN) -> str:
    """Every figure with its source, and when the catalog was checked."""
    return json.dumps({"checked": checked(), "cards": [_fields(card) for card in cards]}, indent=2) + "\n"


def csv_rows(cards: Sequence[Gpu]) -> Iterator[Sequence[object]]:
    """A header and a row a card, without sources."""
    for number, card in enumerate(cards):
        row = _fields(card)
        row.pop("sources")
        tflops, assumed = row.pop("tflops"), " ".join(row.pop("assumed"))
        row |= {f"tflops_{name}": tflops.get(name) for name in TYPES} | {"assumed": assumed}
        if number == 0:
            yield list(row)
        yield list(row.values())


FORMATS = (Format("table", "txt", render), csv_format(csv_rows), Format("json", "json", render_json))
