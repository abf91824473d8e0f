"""Many records at once: the errors of each meter.

Today's prediction for a record of yesterday: the model is found by its hash, the reading stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from statistics import median
from typing import Any

from staticmem.errors import UsageError
from staticmem.report import markdown
from staticmem.report.formats import JSON, Format, csv_format
from staticmem.report.load import build
from staticmem.report.text import PLAIN, View, columns
from staticmem.scenario.request import OPTIONS, Request
from staticmem.validate.pytorch import reconcile
from staticmem.validate.pytorch.prediction import device_meters, predicted
from staticmem.validate.records import Meter, Record, sha256

_SUFFIXES = (".pt2", ".onnx")
_FILES = ("profile", "gpus_file")  # words that are paths: of the machine that made the record


def models_in(folders: Iterable[str]) -> dict[str, str]:
    """Paths of the models in some folders, by SHA-256.

    Raises:
        UsageError: what is no folder.
    """
    paths: dict[str, str] = {}
    for folder in folders:
        if not os.path.isdir(folder):
            raise UsageError(f"{folder} is not a folder", "--models names folders with models.", code="SM101")
        for name in sorted(os.listdir(folder)):
            if name.endswith(_SUFFIXES):
                path = os.path.join(folder, name)
                paths[sha256(path)] = path
    return paths


def repredicted(record: Record, path: str) -> Record:
    """The record with the meters of its model as this version predicts them; those of other runtimes stay.

    Raises:
        UsageError: the record's request has a word that this version does not know, of another type, or that is a
            path (SM231).
        StaticmemError: the model cannot be analysed under it.
    """
    options = record.scenario.get("request")
    if record.runtime.get("name") != "torch" or not isinstance(options, dict):
        return record
    _check(options)
    kind = str(record.device.get("kind"))
    prediction = predicted(path, options, kind)
    if kind == "cpu":
        bands = reconcile.cpu_bands(prediction)
    else:
        total, version = record.device.get("memory") or 0, str(record.runtime.get("version", ""))
        bands = reconcile.cuda_bands(device_meters(prediction, str(record.device.get("name")), total, version))
    meters = []
    for meter in record.meters:
        low, high = bands.get(meter.name, (meter.low, meter.high))
        meters.append(replace(meter, low=low, high=high))
    return replace(record, meters=tuple(meters))


def _check(options: Mapping[str, Any]) -> None:
    """The request is of another machine: nothing of it is taken on trust."""
    strange = sorted(set(map(str, options)) - set(OPTIONS))
    paths = [name for name in _FILES if options.get(name) is not None]
    try:
        if not strange and not paths:
            build(Request, options, "scenario.request")
            return
        why = f"This version does not know {', '.join(strange[:3])[:80]}" if strange else f"It names a file: {paths[0]}"
    except UsageError as error:
        why = error.why.rstrip(".")
    hint = "Leave --models away, or the record out."
    raise UsageError("the request of a record cannot be predicted again", f"{why}.", hint, "SM231")


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


@dataclass(frozen=True)
class Summary:
    """Errors by meter, and how many records have each verdict."""

    meters: Sequence[Errors]
    verdicts: dict[str, int]


def errors(records: Sequence[tuple[str, Record]]) -> list[Errors]:
    """A row for each meter that was both predicted and read, in the order of first appearance."""
    groups: dict[tuple[str, str, str], list[tuple[float, bool, str]]] = {}
    for path, record in records:
        for meter in record.meters:
            error = _error(meter)
            if error is not None:
                key = str(record.runtime.get("name", "")), str(record.device.get("kind", "")), meter.name
                groups.setdefault(key, []).append((error, meter.difference == 0, path))
    return [_row(*key, values) for key, values in groups.items()]


def verdicts(records: Sequence[tuple[str, Record]]) -> dict[str, int]:
    """How many records have each verdict."""
    counts: dict[str, int] = {}
    for _, record in records:
        counts[record.verdict] = counts.get(record.verdict, 0) + 1
    return counts


def _error(meter: Meter) -> float | None:
    """The signed error of a meter, above zero where the prediction is too high."""
    if meter.low is None or meter.high is None or not meter.measured:
        return None
    return (meter.low + meter.high) / 2 / meter.measured - 1


def _row(runtime: str, device: str, meter: str, values: list[tuple[float, bool, str]]) -> Errors:
    sizes = sorted(abs(error) for error, _, _ in values)
    worst = max(values, key=lambda row: abs(row[0]))
    count, p95 = len(values), sizes[ceil(0.95 * len(sizes)) - 1]
    bias, in_band = median(error for error, _, _ in values), sum(inside for _, inside, _ in values) / count
    return Errors(runtime, device, meter, count, median(sizes), p95, sizes[-1], bias, in_band, worst[2])


def summary(records: Sequence[tuple[str, Record]]) -> Summary:
    """Errors and verdicts of records, each with its path."""
    return Summary(errors(records), verdicts(records))


def render(summary: Summary, view: View = PLAIN) -> str:
    """Aligned columns, the verdicts last."""
    if view.quiet:
        return view.line(_verdicts(summary))
    lines = columns([HEADS, *map(_cells, summary.meters)], view.style, right=range(3, len(HEADS)))
    return "\n".join([*lines, "", _verdicts(summary)]) + "\n"


def render_markdown(summary: Summary, view: View = PLAIN) -> str:
    """A table as GitHub shows it."""
    cells = [[markdown.escape(c) for c in _cells(row)] for row in summary.meters]
    return f"{markdown.table(HEADS, cells)}\n\n{markdown.escape(_verdicts(summary))}\n"


def csv_rows(summary: Summary) -> list[Iterable[object]]:
    """A line for each meter; errors are fractions."""
    return [[f.name for f in fields(Errors)], *[asdict(row).values() for row in summary.meters]]


def _cells(row: Errors) -> tuple[str, ...]:
    errors = [f"{error:.2%}" for error in (row.median, row.p95, row.maximum)]
    return row.runtime, row.device, row.meter, str(row.records), *errors, f"{row.bias:+.2%}", f"{row.in_band:.0%}"


def _verdicts(summary: Summary) -> str:
    counts = summary.verdicts
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"{sum(counts.values())} records: {listed}."


FORMATS = (Format("table", "txt", render), Format("md", "md", render_markdown), csv_format(csv_rows), JSON)
