"""`staticmem gpus`: the catalog of cards."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from staticmem.cli.cards import add_filters, choose
from staticmem.cli.reporting import add_output, chosen_format

if TYPE_CHECKING:
    from staticmem.devices.gpus import Gpu

FORMATS = ("table", "json", "csv")
SUFFIXES = {"txt": "table", "json": "json", "csv": "csv"}

DESCRIPTION = """\
The cards that --gpu and 'staticmem size' know: what is sold, what nvidia-smi shows, what a process can use.
A star marks a card with figures that have no source of their own.
"""

EPILOG = """\
examples:
  staticmem gpus
  staticmem gpus --vendor nvidia --min-memory 40GB --year 2022
  staticmem gpus --class consumer -f csv
  staticmem gpus --gpus-file mine.yaml -f json     # every figure with its source
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "gpus",
        help="the catalog of cards",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    add_filters(parser, own_file=True)
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    from staticmem.cli.output import check_target, put, style_of

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    kind = chosen_format(args, SUFFIXES, "table")
    cards = choose(args)
    if kind == "json":
        text = _json(cards)
    elif kind == "csv":
        text = _csv(cards)
    else:
        lines = [card.slug for card in cards] if args.quiet else _table(cards, args)
        text = "\n".join(map(style_of(args).plain, lines)) + "\n"
    put(text, args)
    return 0


def _table(cards: Sequence[Gpu], args: argparse.Namespace) -> list[str]:
    from staticmem.units import format_bytes

    heads = ["name for --gpu", "card", "sold", "usable", "GB/s", "TFLOPS", "W", "link", "year", "class"]
    rows = []
    for card in cards:
        name = f"{card.name} *" if card.assumed or card.unread else card.name
        rows.append([
            card.slug, name, format_bytes(card.nominal, args.units, 0), format_bytes(card.usable, args.units, 1),
            str(card.bandwidth or ""), _tflops(card), str(card.tdp or ""), card.link or "", str(card.year or ""),
            card.price_class or "",
        ])  # fmt: skip
    right = (2, 3, 4, 6, 8)
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = []
    for row in (heads, *rows):
        cells = (f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return lines


def _tflops(card: Gpu) -> str:
    """The dense 16-bit figure, else that of float32."""
    found = dict(card.tflops)
    return next((f"{found[name]:g} {name}" for name in ("bf16", "fp16", "fp32") if name in found), "")


def _plain(card: Gpu) -> dict[str, Any]:
    return {
        "slug": card.slug, "name": card.name, "vendor": card.vendor, "architecture": card.chip or card.architecture,
        "form": card.form, "processors": card.processors, "nominal_bytes": card.nominal, "nvml_bytes": card.nvml,
        "usable_bytes": card.usable, "bandwidth_gb_s": card.bandwidth, "tflops": dict(card.tflops),
        "tdp_w": card.tdp, "link": card.link, "year": card.year, "class": card.price_class,
        "assumed": [*card.assumed, *card.unread], "sources": [{"figure": f, "url": u} for f, u in card.sources],
    }  # fmt: skip


def _json(cards: Sequence[Gpu]) -> str:
    import json

    from staticmem.devices.gpus import checked

    return json.dumps({"checked": checked(), "cards": [_plain(card) for card in cards]}, indent=2) + "\n"


def _csv(cards: Sequence[Gpu]) -> str:
    import csv
    import io

    from staticmem.devices.gpus import TYPES
    from staticmem.report.formats.trace import cell

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for number, card in enumerate(cards):
        row = _plain(card)
        row.pop("sources")
        tflops, assumed = row.pop("tflops"), " ".join(row.pop("assumed"))
        row |= {f"tflops_{name}": tflops.get(name) for name in TYPES} | {"assumed": assumed}
        if number == 0:
            writer.writerow(row)
        writer.writerow(cell(value) if isinstance(value, str) else value for value in row.values())
    return out.getvalue()
