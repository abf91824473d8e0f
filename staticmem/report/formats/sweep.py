"""A sweep as a table for people and as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence

from staticmem.report.model import CATEGORIES
from staticmem.report.style import Style
from staticmem.report.sweep import CardFit, Sweep, SweepRow
from staticmem.units import format_bytes

_COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red", "may fit": "dim"}
_LEFT = ("name", "model", "phase", "fit")


def render(sweep: Sweep, style: Style, units: str = "binary") -> str:
    """The table, errors below it, and what it comes to as the last line."""
    header, rows = _cells(sweep, units)
    lines = _aligned(header, rows, style)
    for row in sweep.rows:
        if row.error is not None:
            lines.append(style.plain(f"  {row.index + 1}: {row.error.what}. {row.error.why} [{row.error.code}]"))
    lines += ["", style.plain(verdict(sweep, units))]
    return "\n".join(lines) + "\n"


def _cells(sweep: Sweep, units: str) -> tuple[list[str], list[list[str]]]:
    named = any(row.name for row in sweep.rows)
    axes = [axis for axis in sweep.axes if axis != "model"]
    header = ["#", *(["name"] if named else []), *(["model"] if len(sweep.models) > 1 else []), *axes]
    header += ["live", "phase"]
    largest = any(card.max_batch is not None for row in sweep.rows for card in row.cards)
    for gpu in sweep.gpus:
        header += [gpu, "fit"] if "device" in sweep.meters else [f"fit {gpu}"]
        header += ["max batch", "safe"] if largest else []
    rows = []
    for row in sweep.rows:
        cells = [str(row.index + 1), *([row.name or ""] if named else [])]
        cells += [os.path.basename(row.model)] if len(sweep.models) > 1 else []
        cells += [_setting(row, axis) for axis in axes]
        if row.error is not None or row.live_bytes is None:
            cells += ["error", ""]
        else:
            cells += [format_bytes(row.live_bytes, units), row.phase or ""]
        for card in row.cards:
            if "device" in sweep.meters:
                cells += [
                    "" if card.device_bytes is None else format_bytes(card.device_bytes, units),
                    _fit(card, units),
                ]
            else:
                cells.append(card.fit)
            if card.max_batch is not None:
                cells += [str(card.max_batch.batch), str(card.max_batch.safe_batch)]
        rows.append([*cells, *[""] * (len(header) - len(cells))])
    return header, rows


def _setting(row: SweepRow, axis: str) -> str:
    value = row.settings.get(axis, "-")
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _fit(card: CardFit, units: str) -> str:
    if card.missing_bytes:
        return f"{card.fit}, {format_bytes(card.missing_bytes, units)} short"
    return f"{card.fit}, {format_bytes(card.headroom_bytes, units)} left"


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]], style: Style) -> list[str]:
    table = [[style.plain(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    left = [name.startswith(_LEFT) for name in header]
    lines = []
    for number, row in enumerate(table):
        cells = [
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ]
        if number == 0:
            lines.append(style.paint("  ".join(cells).rstrip(), "bold"))
            continue
        painted = [style.paint(cell, *_colour(cell)) for cell in cells]
        lines.append("  ".join(painted).rstrip())
    return lines


def _colour(cell: str) -> tuple[str, ...]:
    word = cell.split(",")[0].strip()
    return (_COLOURS[word],) if word in _COLOURS else ()


def verdict(sweep: Sweep, units: str = "binary") -> str:
    """The one line that a user came for: on each card how many fit, and the largest that does."""
    count = len(sweep.rows)
    failed = sum(row.error is not None for row in sweep.rows)
    parts = [f"{count:,} configuration{'s' if count != 1 else ''}"]
    if failed:
        parts.append(f"{failed:,} could not be analysed")
    good = [row for row in sweep.rows if row.live_bytes is not None]
    if good and not sweep.gpus:
        low, high = min(good, key=_live), max(good, key=_live)
        parts.append(f"live peaks from {format_bytes(_live(low), units)} to {format_bytes(_live(high), units)}")
    sentence = ", ".join(parts)
    for number, gpu in enumerate(sweep.gpus):
        fitting = [(row, row.cards[number]) for row in good if row.cards[number].fit != "does not fit"]
        word = "fit" if "device" in sweep.meters else "may fit"
        if not fitting:
            sentence += f"; none fits {gpu}"
            continue
        row, card = max(fitting, key=lambda pair: (pair[1].device_bytes or 0, _live(pair[0])))
        need = card.device_bytes if card.device_bytes is not None else row.live_bytes or 0
        sentence += (
            f"; {len(fitting):,} {word} {gpu}, the largest with {format_bytes(need, units)} of "
            f"{format_bytes(card.usable_bytes, units)} ({describe(sweep, row)})"
        )
    return sentence + "."


def describe(sweep: Sweep, row: SweepRow) -> str:
    """`batch 64, adam`: what tells a row from the others."""
    if row.name:
        return row.name
    parts = []
    for axis in sweep.axes:
        value = os.path.basename(row.model) if axis == "model" else _setting(row, axis)
        parts.append(value if axis in ("model", "optimizer", "mode") else f"{axis} {value}")
    return ", ".join(parts) or os.path.basename(row.model)


def _live(row: SweepRow) -> int:
    return row.live_bytes or 0


def render_csv(sweep: Sweep) -> str:
    """A header and a row for each configuration; bytes as integers, columns of cards have their name in brackets."""
    settings = list(dict.fromkeys(name for row in sweep.rows for name in row.settings if name != "mode"))
    header = ["index", "name", "model", "mode", *settings, "live_bytes", "phase"]
    categories = list(dict.fromkeys((*CATEGORIES, *(name for row in sweep.rows for name in row.by_category))))
    header += [f"{category}_bytes" for category in categories]
    header += ["forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes", "method"]
    figures: tuple[str, ...] = (
        "fit",
        "allocated_bytes",
        "reserved_bytes",
        "device_bytes",
        "device_low_bytes",
        "device_high_bytes",
    )
    figures += ("headroom_bytes", "missing_bytes")
    largest = ("batch", "device_bytes", "next_device_bytes", "safe_batch", "live_batch")
    with_largest = any(card.max_batch is not None for row in sweep.rows for card in row.cards)
    for gpu in sweep.gpus:
        header += [f"{name}[{gpu}]" for name in figures]
        header += [_largest_column(name, gpu) for name in largest] if with_largest else []
    header.append("error")
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for row in sweep.rows:
        cells: list[object] = [row.index, row.name, row.model, row.mode, *(row.settings.get(s) for s in settings)]
        cells += [row.live_bytes, row.phase, *(row.by_category.get(c) for c in categories)]
        cells += [row.forward_peak_bytes, row.backward_peak_bytes, row.optimizer_peak_bytes, row.method]
        for number in range(len(sweep.gpus)):
            card = row.cards[number] if row.cards else None
            cells += [getattr(card, name, None) for name in figures]
            if with_largest:
                cells += [getattr(getattr(card, "max_batch", None), name, None) for name in largest]
        cells.append(None if row.error is None else f"{row.error.what} [{row.error.code}]")
        writer.writerow([_safe(cell) for cell in cells])
    return stream.getvalue()


def _largest_column(name: str, gpu: str) -> str:
    return f"max_batch[{gpu}]" if name == "batch" else f"max_batch_{name}[{gpu}]"


def _safe(cell: object) -> object:
    """Text that a spreadsheet would run as a formula is quoted: names are from files."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell
