"""The meters of a card beside the live one."""

from __future__ import annotations

from dataclasses import replace

from staticmem.meters import on_device
from staticmem.report.model import Band, GpuFit, NoteInfo, Report
from staticmem.training.step import StepResult


def with_device(report: Report, result: StepResult, query: str) -> Report:
    """The report with the meters of a card beside the live one."""
    found = on_device(result, query)
    bands = dict(report.peak.bands)
    for name, band in (("allocated", found.allocated), ("reserved", found.reserved), ("device", found.device)):
        bands[name] = Band(band.low, band.high)
    peak = replace(
        report.peak,
        bands=bands,
        allocated_bytes=found.allocated.expected,
        reserved_bytes=found.reserved.expected,
        device_bytes=found.device.expected,
        context_bytes=found.context.expected,
    )
    card, verdict = found.gpu, found.verdict
    fit = GpuFit(
        card.slug, card.name, card.architecture, card.usable, verdict.fit.value, max(verdict.headroom, 0),
        verdict.missing, card.assumed,
    )  # fmt: skip
    text = (
        "workspaces, context and loaded libraries of the card are data with sources, partly assumed, and were not "
        "verified on hardware; the bands say how far they are known (docs/hardware.md)"
    )
    return replace(report, peak=peak, gpu=fit, assumptions=(*report.assumptions, NoteInfo("SM401", text, 1)))
