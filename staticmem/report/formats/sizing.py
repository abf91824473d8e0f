"""The sizing report in a terminal: the cards, what would make the step smaller, and the recommendation last."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from staticmem.report.sizing import FITS, TIGHT, CardRow, Count, Sizing
from staticmem.report.style import Style
from staticmem.scenario.step import TITLES
from staticmem.units import format_bytes

_LIVE = (
    "Live memory equals PyTorch's to the byte on 98 % of the 81 reference cases and is within 0.2 % on the others, for "
    "torch.export files (docs/accuracy.md)."
)
_DEVICE = (
    "What the allocator, workspaces and the context add has sources but was not verified on hardware; the band from "
    "low to high says how far it is known."
)
_RANKS = (
    "Steps on several devices agree with PyTorch where that runs without GPUs (FSDP2, DDP); DeepSpeed, tensor and "
    "pipeline parallel follow their source."
)
ACCURACY = (_LIVE, _DEVICE, _RANKS)
_COLOURS = {"fits": "green", "tight": "yellow", "with checkpointing": "yellow"}


def render(found: Sizing, style: Style, units: str = "binary", verbose: bool = False) -> str:
    """The report as text with a final newline. `verbose` has every column and the assumptions."""
    lines = [
        style.paint(style.plain(f"Sizing: {found.step}"), "bold"),
        f"  {found.parameters:,} parameters, {format_bytes(found.live_bytes, units)} of live tensors at the peak",
        "",
        *_table(found, style, units, verbose),
    ]
    if any(count.checkpointing for row in found.cards for count in row.counts):
        lines.append(style.plain(f"  † with every {found.blocks} checkpointed"))
    if found.levers:
        lines += ["", style.paint("What would make it smaller", "bold")]
        size = max(len(format_bytes(lever.saved_bytes, units)) for lever in found.levers)
        what = max(len(lever.what) for lever in found.levers)
        lines += [
            style.plain(f"  -{format_bytes(lever.saved_bytes, units):>{size}}  {lever.what:<{what}}  {lever.flags}")
            for lever in found.levers
        ]
    for title, notes in (("Assumptions", found.assumptions if verbose else ()), ("Warnings", found.warnings)):
        if notes:
            lines += ["", style.paint(title, "bold")]
            lines += [style.plain(f"  - {note.text} [{note.code}]") for note in notes]
    lines += [
        "",
        style.plain(
            f"Live memory is exact where the graph is known; the rest is a band (data of {found.data_checked})."
        ),
        "",
        style.paint(style.plain(found.recommendation), "bold"),
    ]
    return "\n".join(lines) + "\n"


def _table(found: Sizing, style: Style, units: str, verbose: bool) -> list[str]:
    heads = ["card", "usable", "needs", "at most", "", "headroom"]
    batches = any(row.max_batch is not None for row in found.cards)
    pairs = any(row.max_batch_with_checkpointing is not None for row in found.cards)
    heads += ["max batch"] * batches + ["checkpointed"] * pairs + [TITLES[name] for name in found.strategies]
    heads += ["GB/s", "TFLOPS", "W", "year", "price"] if verbose else []
    rows = [_row(found, row, units, batches, pairs, verbose) for row in found.cards]
    widths = [max(len(cells[i]) for cells in (heads, *rows)) for i in range(len(heads))]
    lines = [style.paint(_line(heads, widths), "dim")]
    for row, cells in zip(found.cards, rows, strict=True):
        text = style.plain(_line(cells, widths))
        lines.append(style.paint(text, "bold") if row.slug == found.recommended else _painted(text, cells[4], style))
    return lines


def _painted(text: str, word: str, style: Style) -> str:
    before, found, after = text.partition(word)
    return before + style.paint(found, _COLOURS.get(word, "red")) + after


def _row(found: Sizing, row: CardRow, units: str, batches: bool, pairs: bool, verbose: bool) -> list[str]:
    cells = [
        row.name, format_bytes(row.usable_bytes, units), format_bytes(row.device_bytes, units),
        format_bytes(row.device_high_bytes, units), outcome(row),
        format_bytes(row.headroom_bytes, units) if row.headroom_bytes else "",
    ]  # fmt: skip
    cells += [batch_text(row.max_batch)] * batches + [batch_text(row.max_batch_with_checkpointing)] * pairs
    cells += [count_text(count) for count in row.counts]
    if verbose:
        cells += [
            str(row.bandwidth_gb_s or ""), tflops_text(row), str(row.tdp_w or ""), str(row.year or ""), price_text(row),
        ]  # fmt: skip
    return cells


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names and words are left-aligned, numbers right-aligned."""
    parts = [
        f"{cell:<{width}}" if i in (0, 4) else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"  {'  '.join(parts)}".rstrip()


def outcome(row: CardRow) -> str:
    """`fits`, `tight`, `with checkpointing`, or `short by 3.1 GiB`."""
    if row.fit in (FITS, TIGHT):
        return row.fit
    if row.fit_with_checkpointing == FITS:
        return "with checkpointing"
    return f"short by {format_bytes(row.missing_bytes)}"


def count_text(count: Count) -> str:
    """`4`, `8†` (with checkpointing), `-`."""
    if count.devices is None:
        return "-"
    return f"{count.devices}†" if count.checkpointing else str(count.devices)


def batch_text(batch: int | None) -> str:
    return "" if batch is None else str(batch) if batch else "-"


def tflops_text(row: CardRow) -> str:
    """The dense 16-bit figure, else that of float32."""
    for name in ("bf16", "fp16", "fp32"):
        if name in row.tflops:
            return f"{row.tflops[name]:g} {name}"
    return ""


def price_text(row: CardRow) -> str:
    """The user's price, else the class."""
    if row.price is None:
        return row.price_class or ""
    parts = []
    if row.price.buy is not None:
        parts.append(f"{row.price.buy:,.0f} {row.price.currency}")
    if row.price.hour is not None:
        parts.append(f"{row.price.hour:g} {row.price.currency}/h")
    return ", ".join(parts)


FIELDS = (
    "slug", "name", "vendor", "form", "architecture", "nominal_bytes", "nvml_bytes", "usable_bytes", "device_low_bytes",
    "device_bytes", "device_high_bytes", "fit", "headroom_bytes", "missing_bytes", "fit_with_checkpointing",
    "max_batch", "max_batch_with_checkpointing", "bandwidth_gb_s", "tdp_w", "link", "year", "price_class",
)  # fmt: skip
TYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")


def render_csv(found: Sizing) -> str:
    """The table as text. Names of cards cannot begin a formula of a spreadsheet."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    counts = [f"devices_{name}" for name in found.strategies] + [f"checkpointing_{name}" for name in found.strategies]
    writer.writerow([*FIELDS, *counts, *(f"tflops_{name}" for name in TYPES), "price_buy", "price_hour", "currency"])
    for row in found.cards:
        writer.writerow(_cells(row))
    return out.getvalue()


def _cells(row: CardRow) -> list[object]:
    cells: list[object] = [_plain(getattr(row, name)) for name in FIELDS]
    cells += [count.devices for count in row.counts] + [int(count.checkpointing) for count in row.counts]
    cells += [row.tflops.get(name) for name in TYPES]
    price = row.price
    return cells + ([None] * 3 if price is None else [price.buy, price.hour, _plain(price.currency)])


def _plain(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
