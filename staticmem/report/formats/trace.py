"""The listing of `staticmem trace` as text and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from staticmem.report.changes import Change, ChangeList, Group
from staticmem.report.style import Style
from staticmem.report.verdict import category_name
from staticmem.units import format_bytes

COLUMNS = (
    "stage", "phase", "ops", "node", "module", "sign", "count", "dtype", "shape", "category", "bytes", "total_bytes",
)  # fmt: skip


def render(
    listing: ChangeList,
    stages: Sequence[Change],
    least: int = 0,
    style: Style | None = None,
    units: str = "binary",
) -> str:
    """Text with a final newline: a head for each stage, its groups with + and -, the total; the peak comes last.

    Groups below `least` bytes share a line.
    """
    style = style or Style()
    lines: list[str] = []
    for stage in stages:
        lines.append(style.paint(style.plain(f"{stage.index:>5}  {stage.phase}  {_what(stage)}"), "bold"))
        for sign, groups, colour in (("+", stage.made, "red"), ("-", stage.freed, "green")):
            lines += [style.paint(style.plain(f"       {sign} {row}"), colour) for row in _rows(groups, least, units)]
        mark = "   <- peak" if stage.index == listing.peak_stage else ""
        within = stage.highest_bytes
        over = f"  ({format_bytes(within, units)} within)" if within > stage.total_bytes else ""
        lines.append(style.plain(f"       = {format_bytes(stage.total_bytes, units)}{over}{mark}"))
    if not stages:
        lines.append("no stage matches")
    peak = listing.stages[listing.peak_stage] if listing.stages else None
    if peak is not None:
        text = f"{len(stages):,} of {len(listing.stages):,} stages. Peak {format_bytes(listing.peak_bytes, units)}"
        lines += ["", style.paint(style.plain(f"{text} at stage {listing.peak_stage}: {_what(peak)}."), "bold")]
    return "\n".join(lines) + "\n"


def _what(stage: Change) -> str:
    ops = ", ".join(stage.ops) or ("before the step" if stage.phase == "setup" else "end")
    return f"{ops} in {stage.module}" if stage.module else ops


def _rows(groups: Sequence[Group], least: int, units: str) -> list[str]:
    shown = [g for g in groups if g.bytes >= least]
    rest = groups[len(shown) :]
    rows = [_group(g, units) for g in shown]
    if rest:
        text = f"{sum(g.count for g in rest)} smaller"
        rows.append(f"{text:<40}  {format_bytes(sum(g.bytes for g in rest), units):>11}")
    return rows


def _group(group: Group, units: str) -> str:
    shape = ", ".join(str(n) for n in group.shape)
    what = f"{group.count} x {group.dtype}[{shape}]"
    return f"{what:<40}  {format_bytes(group.bytes, units):>11}  {category_name(group.category)}"


def render_csv(stages: Sequence[Change]) -> str:
    """A header and a row for each group; `sign` is + or -, bytes are not signed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for stage in stages:
        for sign, groups in (("+", stage.made), ("-", stage.freed)):
            for g in groups:
                writer.writerow(
                    (
                        stage.index, stage.phase, " ".join(stage.ops), cell(stage.node), cell(stage.module), sign,
                        g.count, g.dtype, "x".join(map(str, g.shape)), g.category, g.bytes, stage.total_bytes,
                    )
                )  # fmt: skip
    return text.getvalue()


def cell(text: str | None) -> str:
    """A name from the file: a spreadsheet would run one that begins like a formula."""
    text = text or ""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
