"""The report as Markdown: for a pull request, an issue, a wiki. The verdict comes first."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.report.formats.report import joined
from staticmem.report.markdown import code, details, escape, table
from staticmem.report.model import NoteInfo, PhasePeak, Report
from staticmem.report.verdict import category_name, place, share, verdict
from staticmem.units import format_bytes, format_count

METERS = {
    "live": "tensors", "allocated": "`torch.cuda.max_memory_allocated()`",
    "reserved": "`torch.cuda.max_memory_reserved()`", "device": "`nvidia-smi`",
}  # fmt: skip


def render(report: Report, units: str = "binary", top: int | None = None) -> str:
    """Markdown with a final newline. `top`: how many of the largest tensors; by default those of `top_tensors`."""

    def size(n: int) -> str:
        return format_bytes(n, units)

    parts = [f"**{escape(verdict(report, units))}**", _meters(report, units)]
    peak = report.peak
    by_size = sorted(((n, c) for c, n in peak.by_category.items() if n), key=lambda row: (-row[0], row[1]))
    rows = [(escape(category_name(c)), size(n), share(n, peak.live_bytes)) for n, c in by_size]
    parts.append(table(("at the peak", "bytes" if units == "bytes" else "memory", "share"), rows))
    folded = [_model(report, units), _phases(report, units)]
    tensors = report.top_tensors[:top]
    if tensors:
        entries = [
            (code(f"{t.module}: {t.name}" if t.module and not t.name.startswith(t.module) else t.name), size(t.bytes),
             escape(category_name(t.category)), code(f"{t.dtype}[{', '.join(map(str, t.shape))}]"),
             escape(joined(t.why)))
            for t in tensors
        ]  # fmt: skip
        folded.append(table(("largest tensors", "size", "category", "shape", "why it is alive"), entries))
    parts.append(details("Model, phases, largest tensors", "\n\n".join(folded)))
    parts += _notes(report)
    return "\n\n".join(parts) + "\n"


def _meters(report: Report, units: str) -> str:
    rows = []
    for name, meaning in METERS.items():
        expected, band = getattr(report.peak, f"{name}_bytes"), report.peak.bands.get(name)
        if expected is None:
            continue
        open_ = band is not None and band.low < band.high
        bounds = f"{format_bytes(band.low, units)} to {format_bytes(band.high, units)}" if band and open_ else ""
        rows.append((name, format_bytes(expected, units), bounds, meaning))
    return table(("meter", "peak", "between", "as read by"), rows)


def _model(report: Report, units: str) -> str:
    model, parameters = report.model, report.parameters
    inputs = ", ".join(f"{t.name} {t.dtype}[{', '.join(map(str, t.shape))}]" for t in model.inputs)
    ops = report.coverage.ops
    rows = [
        ("file", code(model.path)), ("producer", code(model.producer)), ("inputs", code(inputs)),
        ("parameters", f"{format_count(parameters.count)}, {format_bytes(parameters.bytes, units)}"),
        ("ops", f"{ops.ruled + ops.transparent:,} known, {ops.unknown:,} unknown"),
    ]  # fmt: skip
    if model.sha256:
        rows.append(("SHA-256", code(model.sha256)))
    return table(("model", ""), rows)


def _phases(report: Report, units: str) -> str:
    phases = report.phases

    def row(name: str, at: PhasePeak | None) -> list[tuple[str, str, str]]:
        return [(name, format_bytes(at.peak_bytes, units), code(place(at)))] if at is not None else []

    rows = [("before the step", format_bytes(phases.start_bytes, units), ""), *row("forward", phases.forward)]
    rows.append(("end of the forward", format_bytes(phases.forward_end_bytes, units), ""))
    rows += [*row("backward", phases.backward), *row("optimizer", phases.optimizer)]
    return table(("phase", "peak", "at"), rows)


def _notes(report: Report) -> list[str]:
    """Warnings stand open; assumptions are folded."""
    parts = []
    if report.warnings:
        parts.append("Warnings:\n\n" + _list(report.warnings))
    if report.coverage.unknown:
        rows = [(code(u.op), f"{u.count:,}") for u in report.coverage.unknown]
        parts.append(table(("unknown op", "calls"), rows))
    if report.assumptions:
        parts.append(details("Assumptions", _list(report.assumptions)))
    return parts


def _list(notes: Sequence[NoteInfo]) -> str:
    return "\n".join(
        f"- {escape(note.text)}{f' ({note.count} places)' if note.count > 1 else ''} [{escape(note.code)}]"
        for note in notes
    )
