"""The HTML page of a study: what it shows beside the report, and the closed forms of its sliders, are worked out here.

A closed form gives the peak for every batch, in each of some settings of the step: precisions x optimizers x
resolutions around the requested one. Each takes steps at several batches; a large graph gets fewer settings, and the
page says which were left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from staticmem.devices import gpus
from staticmem.errors import StaticmemError
from staticmem.liveness import Lifetimes
from staticmem.report.html import CardRow, Extras, render
from staticmem.report.html.beside import Setting, WhatIf
from staticmem.report.html.charts import address_map, timeline
from staticmem.report.html.closed_form import ClosedForm, NotAffineError, check_alike, closed_form
from staticmem.report.model import Report
from staticmem.report.sweep import LeverRow
from staticmem.report.text import View
from staticmem.studies import without_cycle_search
from staticmem.studies.device import device_of
from staticmem.studies.sizing_search import batch_range, resolutions
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


BUDGET = 30_000  # ops over all traced steps; a step of an op takes about 0.1 ms
LARGEST = 65_536  # batch: sliders end here, or where no card of the catalog has the memory

_OPTIMIZERS = (("sgd", 0.0), ("sgd", 0.9), ("adamw", 0.0))
_PRECISIONS: tuple[tuple[str | None, str | None], ...] = ((None, None), (None, "bfloat16"), ("bfloat16", None))


def what_if(study: Study) -> WhatIf:
    """The closed forms around a study's request, the asked setting first."""
    base, ops = _asked(study), max(len(study.result.graph.ops), 1)
    batch = study.report.scenario.batch
    if batch is None:
        return WhatIf((), reason="no input has a batch dimension")
    if not batch:
        return WhatIf((), reason="the batch of the file is 0")
    settings: list[Setting] = []
    left = max(BUDGET, 4 * ops)
    high: int | None = None
    for choice in _choices(study, base):
        if left < 4 * ops:
            settings.append(replace(choice, reason=f"left out: a graph of {ops:,} ops gets fewer settings"))
            continue
        left -= 4 * ops
        try:
            if high is None:
                high = _largest(study, batch)
            form = _form(study, choice, batch, high)
        except (StaticmemError, NotAffineError) as error:
            settings.append(replace(choice, reason=error.what if isinstance(error, StaticmemError) else str(error)))
            continue
        settings.append(replace(choice, form=form))
    first = settings[0]
    if first.form is not None and (
        batch < first.form.low
        or first.form.peak(batch) != study.lifetimes.peak_bytes  # one sample may take another way
    ):
        return WhatIf((), reason="the step as asked differs from the same step at other batches in more than size")
    if first.form is None:
        return WhatIf((), reason=f"steps at other batches could not be compared: {first.reason}")
    return WhatIf(tuple(settings), batch=batch)


def _asked(study: Study) -> Setting:
    scenario = study.scenario
    dtype, amp = (chosen.name if chosen else None for chosen in (scenario.dtype, scenario.amp))
    size = study.request.image_size
    return Setting(scenario.optimizer, scenario.momentum, dtype, amp, size or _file_size(study), size is not None)


def _file_size(study: Study) -> tuple[int, int] | None:
    """The resolution of the file, where its image inputs have one."""
    sizes = {spec.resolution_of(study.binding.shapes[spec.name]) for spec in study.model.inputs if spec.is_image}
    return sizes.pop() if len(sizes) == 1 else None


def _choices(study: Study, base: Setting) -> Iterator[Setting]:
    """The asked setting, then those that differ in one thing, in two, in three."""
    optimizers = [(base.optimizer, base.momentum)]
    if base.optimizer is not None:
        optimizers += [pair for pair in _OPTIMIZERS if pair != optimizers[0]]
    precisions = [(base.dtype, base.amp), *(pair for pair in _PRECISIONS if pair != (base.dtype, base.amp))]
    sizes = [base.resolution, *(size for size in resolutions(study, base.resolution) if size != base.resolution)]
    every = [
        (sum(at > 0 for at in picked), picked)
        for picked in product(range(len(optimizers)), range(len(precisions)), range(len(sizes)))
    ]
    for _, (o, p, s) in sorted(every):
        yield Setting(*optimizers[o], *precisions[p], sizes[s], base.sized or s > 0)


# -- steps ---------------------------------------------------------------------------------------------------------


def _largest(study: Study, batch: int) -> int:
    """A batch that needs more than any card has, within what the file allows."""
    most = max(card.usable for card in gpus.cards().values())
    high = max(4 * batch, 64)
    slope = max(study.lifetimes.peak_bytes // batch, 1)
    while high < LARGEST and high * slope < most:
        high *= 2
    limits = batch_range(study.model, high)
    return limits[1] if limits is not None else high


def _form(study: Study, choice: Setting, batch: int, high: int) -> ClosedForm:
    """The closed form of a setting, from batch 1 if a step of one sample does what larger ones do, else from 2."""
    asked = _asked(study) == choice
    middle = batch if 2 < batch < high else 3
    steps = {size: _step(study, choice, size) for size in (2, middle)}
    check_alike(steps)  # first: a loop over the batch makes a long step at the last batch
    steps[high] = _step(study, choice, high)
    if asked and batch == middle:
        steps[batch] = study.lifetimes
    form = closed_form(steps, 2, high)
    try:
        return closed_form({1: _step(study, choice, 1), **steps}, 1, high)
    except (StaticmemError, NotAffineError):
        return form


def _step(study: Study, choice: Setting, batch: int) -> Lifetimes:
    return study.ask(replace(study.request, batch=batch, gpu=None, **choice.options)).lifetimes
