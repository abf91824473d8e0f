"""The HTML page of a study: what it shows beside the report is worked out here."""

from __future__ import annotations

from staticmem.report.html import CardRow, Extras, render
from staticmem.report.html.charts import address_map, timeline
from staticmem.report.model import Report
from staticmem.report.sweep import LeverRow
from staticmem.report.text import View
from staticmem.studies import without_cycle_search
from staticmem.studies.device import device_of
from staticmem.studies.study import Study

CHART_LIMIT = 200_000  # buffers: beyond it a page would be larger than what people open


def page(
    study: Study,
    report: Report | None = None,
    *,
    units: str = "binary",
    command: str = "",
    what_if_command: str = "staticmem analyze MODEL",
    levers: tuple[LeverRow, ...] | None = None,
) -> str:
    """The page as text.

    Args:
        report: the study's, with what was added to it.
        units: as in `units.format_bytes`.
        command: the command line that makes this report.
        what_if_command: the same without batch, resolution, optimizer and precision, for the sliders.
        levers: changes of the step with their peaks, where they were worked out.
    """
    with without_cycle_search():
        return render(report or study.report, extras(study, command, what_if_command, levers), View(units=units))


def extras(
    study: Study, command: str = "", what_if_command: str = "", levers: tuple[LeverRow, ...] | None = None
) -> Extras:
    """What the page shows beside the report, as far as the graph's size allows."""
    from staticmem.devices.meters import replayed
    from staticmem.studies.bench import LIMIT, card_rows
    from staticmem.studies.what_if import what_if

    report, result, left_out = study.report, study.result, []
    line = address = None
    cards: tuple[CardRow, ...] = ()
    if len(result.trace.buffers) <= CHART_LIMIT:
        line = timeline(result.graph, study.lifetimes)
    else:
        left_out.append(f"timeline and address map: {len(result.trace.buffers):,} tensors are too many for a page")
    if report.peak.device_bytes is not None:
        device = device_of(study.request)
        cards = card_rows(result, device, study.spread)
        if result.trace.ticks > LIMIT:
            left_out.append(f"GPUs of architectures other than {device.gpu.architecture}: the graph is large")
        if line is not None:
            process, replay = replayed(result, device)
            address = address_map(process, replay, f"{device.gpu.name}, {device.gpu.architecture}")
    else:
        left_out.append("GPUs and address map: they need a replay of the allocator (--gpu NAME asks for it)")
    if levers is None:
        left_out.append("levers: 'staticmem levers' works them out")
    form = what_if(study)
    return Extras(line, address, cards, form, levers or (), command, what_if_command, tuple(left_out))
