"""The sizing report in a terminal: the cards, what would make the step smaller, and the recommendation last."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.report.style import Style
from staticmem.scenario.parallel import TITLES
from staticmem.studies.sizing.model import CardRow, Sizing
from staticmem.studies.sizing.words import batch_text, count_text, outcome, price_text, tflops_text
from staticmem.units import format_bytes

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
