"""Many records at once: the errors of each meter."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from statistics import median

from staticmem.report import markdown
from staticmem.validate.record import Meter, Record

HEADS = ("runtime", "device", "meter", "records", "median", "p95", "max", "bias", "in band")


@dataclass(frozen=True)
class Errors:
    """The errors of one meter over the records of one runtime and kind of device.

    An error is |measured - predicted| / measured, with the middle of the band as the prediction; `bias` is the median
    of the signed errors, above zero where predictions are too high. `in_band` is the share of readings in the band.
    """

    runtime: str
    device: str
    meter: str
    records: int
    median: float
    p95: float
    maximum: float
    bias: float
    in_band: float
    worst: str


def errors(records: Sequence[tuple[str, Record]]) -> list[Errors]:
    """A row for each meter that was both predicted and read, in the order of first appearance."""
    groups: dict[tuple[str, str, str], list[tuple[float, bool, str]]] = {}
    for path, record in records:
        for meter in record.meters:
            error = _error(meter)
            if error is not None:
                key = str(record.runtime.get("name", "")), str(record.device.get("kind", "")), meter.name
                groups.setdefault(key, []).append((error, meter.difference == 0, path))
    return [_row(*key, found) for key, found in groups.items()]


def verdicts(records: Sequence[tuple[str, Record]]) -> dict[str, int]:
    """How many records have each verdict."""
    found: dict[str, int] = {}
    for _, record in records:
        found[record.verdict] = found.get(record.verdict, 0) + 1
    return found


def _error(meter: Meter) -> float | None:
    """The signed error of a meter, above zero where the prediction is too high."""
    if meter.low is None or meter.high is None or not meter.measured:
        return None
    return (meter.low + meter.high) / 2 / meter.measured - 1


def _row(runtime: str, device: str, meter: str, found: list[tuple[float, bool, str]]) -> Errors:
    sizes = sorted(abs(error) for error, _, _ in found)
    worst = max(found, key=lambda row: abs(row[0]))
    return Errors(
        runtime, device, meter, len(found), median(sizes), sizes[ceil(0.95 * len(sizes)) - 1], sizes[-1],
        median(error for error, _, _ in found), sum(inside for _, inside, _ in found) / len(found), worst[2],
    )  # fmt: skip


def render_table(rows: Sequence[Errors], counts: dict[str, int]) -> str:
    """Aligned columns, the verdicts last."""
    cells = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEADS))]
    lines = []
    for row in cells:
        shown = [cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(shown).rstrip())
    return "\n".join([*lines, "", _verdicts(counts)]) + "\n"


def render_markdown(rows: Sequence[Errors], counts: dict[str, int]) -> str:
    """A table as GitHub shows it."""
    cells = [[markdown.escape(c) for c in _cells(row)] for row in rows]
    return f"{markdown.table(HEADS, cells)}\n\n{markdown.escape(_verdicts(counts))}\n"


def render_csv(rows: Sequence[Errors]) -> str:
    """A line for each meter; errors are fractions."""
    stream = io.StringIO()
    names = list(Errors.__dataclass_fields__)
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        found = asdict(row)
        for name in ("runtime", "device", "meter", "worst"):
            found[name] = _cell(found[name])
        writer.writerow(found)
    return stream.getvalue()


def _cell(text: str) -> str:
    """A spreadsheet must not take a name for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def render_json(rows: Sequence[Errors], counts: dict[str, int]) -> str:
    """The rows and the verdicts; errors are fractions."""
    return json.dumps({"meters": [asdict(row) for row in rows], "verdicts": counts}, indent=2) + "\n"


def _cells(row: Errors) -> tuple[str, ...]:
    return (
        _plain(row.runtime), _plain(row.device), _plain(row.meter), str(row.records), f"{row.median:.2%}",
        f"{row.p95:.2%}", f"{row.maximum:.2%}", f"{row.bias:+.2%}", f"{row.in_band:.0%}",
    )  # fmt: skip


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _verdicts(counts: dict[str, int]) -> str:
    total = sum(counts.values())
    return f"{total} records: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) + "."
