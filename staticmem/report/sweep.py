"""Results of sweeps, levers and budgets as frozen values.

Field names are those of the JSON (`schemas/sweep-1.schema.json`, `schemas/levers-1.schema.json`). Bytes are integers.
Within schema major 1, fields are only added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from staticmem.devices.sizing import Fit
from staticmem.report.model import LargestBatch, LargestSize
from staticmem.report.shown import Shown

SCHEMA = "staticmem.sweep/1"
LEVERS_SCHEMA = "staticmem.levers/1"
CHECK_SCHEMA = "staticmem.check/1"

# Beside the words of devices.sizing.Fit:
MAY_FIT = "may fit"  # live memory alone does not rule it out
CANNOT_RUN = Fit.CANNOT_RUN.value
SAME, NUMERICS, TRAINING = "none", "numerics", "training"  # what a lever changes besides memory
Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class CardFit:
    """A configuration on a card. `fit`: "fits", "tight", "does not fit", "may fit" where only live memory was
    evaluated, or "cannot run it", whatever its memory. `why`, `obstacle`, `condition`, `missing_bytes` and
    `least_usable_bytes` are as in `gpu` of a report. The meters are expected bytes, `device_low_bytes` and
    `device_high_bytes` the band; None: not evaluated.
    """

    gpu: str
    usable_bytes: int
    fit: str
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    device_low_bytes: int | None
    device_high_bytes: int | None
    headroom_bytes: int
    missing_bytes: int
    max_batch: LargestBatch | None = None
    max_dim: LargestSize | None = None
    obstacle: str = ""
    why: str = ""
    condition: str = ""
    least_usable_bytes: int | None = None

    def with_largest(self, largest: LargestSize) -> CardFit:
        """This with the largest batch or size of a dimension."""
        return replace(self, max_batch=largest.as_batch()) if largest.dim == "batch" else replace(self, max_dim=largest)

    @property
    def largest(self) -> LargestSize | None:
        """The largest batch or size of a dimension that was asked for."""
        return self.max_dim if self.max_batch is None else LargestSize.of_batch(self.max_batch)


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Why a configuration could not be analysed."""

    code: str
    what: str
    why: str
    hint: str


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One configuration. `settings` has what was asked, without what has its default; `name` is that of a scenario.

    `live_bytes` is the live peak, `phase` where it is, `by_category` what is alive then; then the peak of each phase.
    `method` is "run", or "arrays" where the bytes were worked out from steps of the same structure. Where `error` is
    given the figures are None.
    """

    index: int
    name: str | None
    model: str
    settings: Mapping[str, Setting]
    mode: str | None
    live_bytes: int | None
    phase: str | None
    by_category: Mapping[str, int]
    forward_peak_bytes: int | None
    backward_peak_bytes: int | None
    optimizer_peak_bytes: int | None
    method: str | None
    cards: tuple[CardFit, ...]
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Sweep(Shown):
    """All configurations in order. `axes` are the names that vary; `meters` what was evaluated; `gpus` the cards;
    `assumed` what the configurations leave open: a batch, a GPU, whether they train."""

    kind: ClassVar[str] = "sweep"

    schema: str
    models: tuple[str, ...]
    axes: tuple[str, ...]
    meters: tuple[str, ...]
    gpus: tuple[str, ...]
    rows: tuple[SweepRow, ...]
    assumed: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """A table, where other results have their text."""
        return self._formats().notebook(self)

    def to_html(self) -> str:
        """The sweep as a page that works offline: a chart over the axis of numbers, and a table that sorts."""
        return str(self._rendered("html"))


@dataclass(frozen=True, slots=True)
class LeverRow:
    """A change of the step. `flags` are those of the change alone, which take the place of flags of the same name, and
    `command` is the whole command that predicts the step with it. `live_bytes` and `device_bytes` are its peaks,
    analysed in full; `saved_bytes` is what it saves of the device memory, or of the live memory without a card
    (negative: it takes more).

    `operations` are floating-point operations of the step (products, convolutions, attention), and `compute` their
    change as a fraction: 0.31 is 31 % more. `changes`: "none" but memory and time, "numerics", or "training".
    `moved_bytes` go between the GPU and the CPU in a step, both ways.
    """

    does: str
    flags: str
    live_bytes: int
    device_bytes: int | None
    fit: str | None
    saved_bytes: int = field(metadata={"signed": True})
    operations: int
    compute: float
    changes: str
    note: str
    moved_bytes: int = 0
    command: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Levers(Shown):
    """The levers of a step, those that save most first. `base` is the step as it was asked for.

    `gpu` and `usable_bytes` are the card's, `budget_bytes` what the step may need; None: not given. `why`, `condition`,
    `missing_bytes` and `least_usable_bytes` belong to the verdict on the step as asked, `base.fit`, as in a report.
    `assumed`: what the card's size does not say, and what was asked and has no effect.
    """

    kind: ClassVar[str] = "levers"

    schema: str
    model: str
    gpu: str | None
    usable_bytes: int | None
    budget_bytes: int | None
    base: LeverRow
    rows: tuple[LeverRow, ...]
    why: str = ""
    condition: str = ""
    missing_bytes: int = 0
    least_usable_bytes: int | None = None
    assumed: tuple[str, ...] = ()


def cheapest(levers: Levers) -> LeverRow | None:
    """Of the levers that bring a step within the budget, the one that costs least: first what changes nothing else,
    then the least compute, then what is not tight, then what saves no more than it has to."""
    if levers.budget_bytes is None:
        return None
    within = [row for row in levers.rows if need(row) <= levers.budget_bytes]
    return min(within, key=_cost, default=None)


def _cost(row: LeverRow) -> tuple[int, float, bool, int]:
    return (SAME, NUMERICS, TRAINING).index(row.changes), round(row.compute, 2), row.fit == "tight", -need(row)


def need(row: LeverRow) -> int:
    """What counts: device memory where there is a card, else live memory."""
    return row.live_bytes if row.device_bytes is None else row.device_bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """One configuration against one budget. `gpu` is the card that a meter beyond `live` is for.

    `margin_bytes` is what the limit leaves; below zero the budget failed. None where the configuration could not be
    analysed, as `error` says. `fit`, `why`, `condition` and `missing_bytes` are the verdict on the card, as in `gpu` of
    a report: a step that does not fit it, or that it cannot run, passes no budget of it. Of live memory they are those
    of the card that stands worst, where cards are named and no other budget is of them, and `fit` is None without.
    `high_bytes` is the upper end of the band of device memory, None of other meters.
    """

    configuration: str
    model: str
    gpu: str | None
    metric: str
    level: str
    limit_bytes: int
    bytes: int | None
    margin_bytes: int | None
    passed: bool
    error: ErrorInfo | None = None
    fit: str | None = None
    why: str = ""
    condition: str = ""
    missing_bytes: int = 0
    high_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """All outcomes, those first that failed. `failed`: one of level "error" is not kept; `broken`: a configuration
    could not be analysed; `assumed` as in a sweep."""

    schema: str
    failed: bool
    broken: bool
    outcomes: tuple[Outcome, ...]
    assumed: tuple[str, ...] = ()
