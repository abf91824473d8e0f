"""The report as Markdown: for a pull request, an issue, a wiki. The verdict comes first."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.report.formats import Format
from staticmem.report.markdown import code, details, escape, table
from staticmem.report.model import NoteInfo, Report
from staticmem.report.text import PLAIN, View
from staticmem.report.verdict import (
    cache_rows,
    category_name,
    compiled_rows,
    joined,
    meter_rows,
    of_size,
    phase_rows,
    shape_text,
    share,
    tensor_name,
    verdict,
)
from staticmem.units import format_count

METERS = {
    "live": "tensors",
    "allocated": "`torch.cuda.max_memory_allocated()`",
    "reserved": "`torch.cuda.max_memory_reserved()`",
    "device": "`nvidia-smi`",
}


def render(report: Report, view: View = PLAIN) -> str:
    """Markdown with a final newline."""
    peak, size = report.peak, view.size
    meters = [(name, expected, between, METERS[name]) for name, expected, between in meter_rows(peak, view)]
    categories = [
        (escape(category_name(category)), size(nbytes), share(nbytes, peak.live_bytes))
        for category, nbytes in of_size(peak.by_category)
    ]
    folded = [_model(report, view), _phases(report, view)]
    tensors = []
    for t in report.top_tensors:
        sizes = (size(t.bytes), escape(category_name(t.category)), code(shape_text(t.dtype, t.shape)))
        tensors.append((code(tensor_name(t.module, t.name)), *sizes, escape(joined(t.why))))
    if tensors:
        folded.append(table(("largest tensors", "size", "category", "shape", "why it is alive"), tensors))
    parts = [
        f"**{escape(verdict(report, view))}**",
        table(("meter", "peak", "between", "as read by"), meters),
        table(("at the peak", "bytes" if view.units == "bytes" else "memory", "share"), categories),
        details("Model, phases, largest tensors", "\n\n".join(folded)),
    ]
    if report.warnings:
        parts.append("Warnings:\n\n" + _list(report.warnings))
    if report.coverage.unknown:
        rows = [(code(unknown.op), f"{unknown.count:,}") for unknown in report.coverage.unknown]
        parts.append(table(("unknown op", "calls"), rows))
    if report.assumptions:
        parts.append(details("Assumptions", _list(report.assumptions)))
    return "\n\n".join(parts) + "\n"


def _model(report: Report, view: View) -> str:
    model, parameters, ops = report.model, report.parameters, report.coverage.ops
    inputs = ", ".join(f"{t.name} {shape_text(t.dtype, t.shape)}" for t in model.inputs)
    rows = [
        ("file", code(model.path)),
        ("producer", code(model.producer)),
        ("inputs", code(inputs)),
        ("parameters", f"{format_count(parameters.count)}, {view.size(parameters.bytes)}"),
        ("ops", f"{ops.ruled + ops.transparent:,} known, {ops.unknown:,} unknown"),
    ]
    if model.sha256:
        rows.append(("SHA-256", code(model.sha256)))
    return table(("model", ""), rows)


def _phases(report: Report, view: View) -> str:
    rows = [(name, view.size(nbytes), code(at)) for name, nbytes, at, _ in phase_rows(report.phases)]
    phases, compiled = table(("phase", "peak", "at"), rows), compiled_rows(report, view)
    tables = (("compiled code", compiled), ("keys and values", cache_rows(report, view)))
    more = [table((title, ""), titled) for title, titled in tables if titled]
    return "\n\n".join((phases, *more))


def _list(notes: Sequence[NoteInfo]) -> str:
    return "\n".join(
        f"- {escape(note.text)}{f' ({note.count} places)' if note.count > 1 else ''} [{escape(note.code)}]"
        for note in notes
    )


FORMATS = (Format("md", "md", render),)
