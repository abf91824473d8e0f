"""The closed forms of a page's sliders: the peak for every batch, in each of some settings of the step.

The settings are precisions x optimizers x resolutions around the requested one. Each takes steps at several
batches; a large graph gets fewer settings, and the page says which were left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from staticmem.devices import gpus
from staticmem.errors import StaticmemError
from staticmem.liveness import Lifetimes
from staticmem.report.html.closed_form import ClosedForm, NotAffineError, closed_form
from staticmem.report.html.what_if import Setting, WhatIf
from staticmem.studies.study import Study

BUDGET = 30_000  # ops over all traced steps; a step of an op takes about 0.1 ms
LARGEST = 65_536  # batch: sliders end here, or where no card of the catalogue has the memory

_OPTIMIZERS = (("sgd", 0.0), ("sgd", 0.9), ("adamw", 0.0))
_PRECISIONS: tuple[tuple[str | None, str | None], ...] = ((None, None), (None, "bfloat16"), ("bfloat16", None))
_SCALES = (0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class _Choice:
    optimizer: str | None
    momentum: float
    dtype: str | None
    amp: str | None
    resolution: tuple[int, int] | None
    sized: bool  # by the request; else the resolution is the file's


def what_if(study: Study) -> WhatIf:
    """The closed forms around a study's request, the asked setting first."""
    base, ops = _asked(study), max(len(study.result.graph.ops), 1)
    batch = study.report.scenario.batch
    if batch is None:
        return WhatIf((), reason="no input has a batch dimension")
    settings: list[Setting] = []
    left = max(BUDGET, 4 * ops)
    high: int | None = None
    for choice in _choices(study, base):
        if left < 4 * ops:
            settings.append(_setting(choice, None, f"left out: a graph of {ops:,} ops gets fewer settings"))
            continue
        left -= 4 * ops
        try:
            if high is None:
                high = _largest(study, batch)
            form = _form(study, choice, batch, high)
        except (StaticmemError, NotAffineError) as error:
            settings.append(_setting(choice, None, _sentence(error)))
            continue
        settings.append(_setting(choice, form, ""))
    first = settings[0]
    if first.form is not None and first.form.peak(batch) != study.lifetimes.peak_bytes:
        return WhatIf((), reason="the step as asked differs from the same step at other batches in more than size")
    if first.form is None:
        return WhatIf((), reason=f"steps at other batches could not be compared: {first.reason}")
    return WhatIf(tuple(settings), batch=batch)


def _asked(study: Study) -> _Choice:
    scenario = study.scenario
    dtype, amp = (chosen.name if chosen else None for chosen in (scenario.dtype, scenario.amp))
    size = study.request.image_size
    return _Choice(scenario.optimizer, scenario.momentum, dtype, amp, size or _file_size(study), size is not None)


def _file_size(study: Study) -> tuple[int, int] | None:
    """The resolution of the file, where its image inputs have one."""
    images = [spec for spec in study.model.inputs if spec.shape is not None and len(spec.shape) == 4]
    sizes = {study.binding.shapes[spec.name][2:] for spec in images if spec.dtype.is_floating_point}
    if len(sizes) != 1:
        return None
    height, width = sizes.pop()
    return height, width


def _choices(study: Study, base: _Choice) -> Iterator[_Choice]:
    """The asked setting, then those that differ in one thing, in two, in three."""
    optimizers = [(base.optimizer, base.momentum)]
    if base.optimizer is not None:
        optimizers += [pair for pair in _OPTIMIZERS if pair != optimizers[0]]
    precisions = [(base.dtype, base.amp), *(pair for pair in _PRECISIONS if pair != (base.dtype, base.amp))]
    sizes = [base.resolution, *_sizes(study, base.resolution)]
    every = [
        (sum(at > 0 for at in picked), picked)
        for picked in product(range(len(optimizers)), range(len(precisions)), range(len(sizes)))
    ]
    for _, (o, p, s) in sorted(every):
        yield _Choice(*optimizers[o], *precisions[p], sizes[s], base.sized or s > 0)


def _sizes(study: Study, size: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Other resolutions, where height or width of an image input are open: multiples of 32, as most strides need."""
    if size is None:
        return []
    images = [spec.shape for spec in study.model.inputs if spec.shape is not None and len(spec.shape) == 4]
    if not any(isinstance(axis, str) for shape in images for axis in shape[2:]):
        return []
    scaled = [(_to_32(size[0] * scale), _to_32(size[1] * scale)) for scale in _SCALES]
    return [pair for pair in dict.fromkeys(scaled) if pair != size]


def _to_32(size: float) -> int:
    return max(32, round(size / 32) * 32)


def _setting(choice: _Choice, form: ClosedForm | None, reason: str) -> Setting:
    optimizer, momentum, size = choice.optimizer, choice.momentum, choice.resolution
    return Setting(optimizer, momentum, choice.dtype, choice.amp, size, form, reason, choice.sized)


def _sentence(error: Exception) -> str:
    return error.what if isinstance(error, StaticmemError) else str(error)


# -- steps ---------------------------------------------------------------------------------------------------------


def _largest(study: Study, batch: int) -> int:
    """A batch that needs more than any card has, within what the file allows."""
    most = max(card.usable for card in gpus.cards().values())
    high = max(4 * batch, 64)
    slope = max(study.lifetimes.peak_bytes // batch, 1)
    while high < LARGEST and high * slope < most:
        high *= 2
    spec = next(spec for spec in study.model.inputs if spec.shape)
    axis = (spec.shape or ())[0]
    limit = study.model.symbols[axis].high if isinstance(axis, str) and axis in study.model.symbols else None
    return high if limit is None else min(high, limit)


def _form(study: Study, choice: _Choice, batch: int, high: int) -> ClosedForm:
    """The closed form of a setting, from batch 1 if a step of one sample does what larger ones do, else from 2."""
    asked = _asked(study) == choice
    middle = batch if 2 < batch < high else 3
    steps = {size: _step(study, choice, size) for size in (2, middle, high)}
    if asked and batch == middle:
        steps[batch] = study.lifetimes
    form = closed_form(steps, 2, high)
    try:
        return closed_form({1: _step(study, choice, 1), **steps}, 1, high)
    except (StaticmemError, NotAffineError):
        return form


def _step(study: Study, choice: _Choice, batch: int) -> Lifetimes:
    resolution = choice.resolution if choice.sized else study.request.resolution
    request = replace(study.request, batch=batch, resolution=resolution, dtype=choice.dtype, amp=choice.amp, gpu=None)
    return study.ask(replace(request, optimizer=choice.optimizer, momentum=choice.momentum)).lifetimes
