"""The listing of `staticmem trace` as text and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from staticmem.report.changes import Change, ChangeList, Group
from staticmem.report.formats import Format, csv_format
from staticmem.report.text import PLAIN, Text, View
from staticmem.report.verdict import category_name, shape_text

COLUMNS = "stage phase ops node module sign count dtype shape category bytes total_bytes".split()


def render(listing: ChangeList, view: View = PLAIN) -> str:
    """Text with a final newline: a head for each stage, its groups with + and -, the total; the peak comes first."""
    answer = ""
    if listing.peak is not None:
        size = view.size(listing.peak_bytes)
        answer = f"{len(listing.stages):,} of {listing.count:,} stages. Peak {size} at stage {listing.peak_stage}"
        answer += f": {_ops(listing.peak)}."
    if view.quiet:
        return view.line(answer or "no stage matches")
    text = Text(view)
    if answer:
        text.answer(answer)
        text.lines.append("")
    for stage in listing.stages:
        text.add(f"{stage.index:>5}  {stage.phase}  {_ops(stage)}", "bold")
        for sign, groups, colour in (("+", stage.allocated, "red"), ("-", stage.freed, "green")):
            for row in _rows(groups, listing.least, view):
                text.add(f"       {sign} {row}", colour)
        mark = "   <- peak" if stage.index == listing.peak_stage else ""
        within = f"  ({view.size(stage.highest_bytes)} within)" if stage.highest_bytes > stage.total_bytes else ""
        text.add(f"       = {view.size(stage.total_bytes)}{within}{mark}")
    if not listing.stages:
        text.add("no stage matches")
    return text.end()


def _ops(stage: Change) -> str:
    ops = ", ".join(stage.ops) or ("before the step" if stage.phase == "setup" else "end")
    return f"{ops} in {stage.module}" if stage.module else ops


def _rows(groups: Sequence[Group], least: int, view: View) -> Iterator[str]:
    """A row for each group; those of less than `least` bytes share one. Groups come largest first."""
    small = [group for group in groups if group.bytes < least]
    for group in groups[: len(groups) - len(small)]:
        tensors = f"{group.count} x {shape_text(group.dtype, group.shape)}"
        yield f"{tensors:<40}  {view.size(group.bytes):>11}  {category_name(group.category)}"
    if small:
        tensors = f"{sum(group.count for group in small)} smaller"
        yield f"{tensors:<40}  {view.size(sum(group.bytes for group in small)):>11}"


def csv_rows(listing: ChangeList) -> Iterator[Sequence[object]]:
    """A header and a row for each group; `sign` is + or -, bytes are not signed."""
    yield COLUMNS
    for stage in listing.stages:
        head = (stage.index, stage.phase, " ".join(stage.ops), stage.node, stage.module)
        for sign, groups in (("+", stage.allocated), ("-", stage.freed)):
            for g in groups:
                shape = "x".join(map(str, g.shape))
                yield *head, sign, g.count, g.dtype, shape, g.category, g.bytes, stage.total_bytes


FORMATS = (Format("table", "txt", render), csv_format(csv_rows))
