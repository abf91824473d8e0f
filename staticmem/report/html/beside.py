"""What a page shows beside the report: charts, cards, sliders, levers. A page leaves out what it was not given.

Settings of the step that a page can switch between, each with the closed form of its peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from staticmem.report.html.charts import AddressMap, Timeline
from staticmem.report.html.closed_form import ClosedForm
from staticmem.report.sweep import LeverRow
from staticmem.report.verdict import OPTIMIZER_NAMES
from staticmem.scenario.request import as_flags


@dataclass(frozen=True, slots=True)
class Setting:
    """A combination of optimizer, precision and resolution. `sized`: the request gives the resolution, not the file.

    `form` is the closed form of its peak; where there is none, `reason` says why.
    """

    optimizer: str | None
    momentum: float
    dtype: str | None
    amp: str | None
    resolution: tuple[int, int] | None
    sized: bool
    form: ClosedForm | None = None
    reason: str = ""

    @property
    def optimizer_words(self) -> str:
        if self.optimizer is None:
            return "none"
        name = OPTIMIZER_NAMES.get(self.optimizer, self.optimizer)
        return f"{name}, momentum {self.momentum:g}" if self.momentum else name

    @property
    def precision_words(self) -> str:
        cast = f"{self.dtype} model" if self.dtype else "as in the file"
        return f"autocast to {self.amp}" + (f", {cast}" if self.dtype else "") if self.amp else cast

    @property
    def resolution_words(self) -> str:
        return "" if self.resolution is None else f"{self.resolution[0]} \u00d7 {self.resolution[1]}"

    @property
    def options(self) -> dict[str, Any]:
        """The fields of a `Request` that the setting decides, without the batch."""
        step = {"optimizer": self.optimizer, "momentum": self.momentum, "dtype": self.dtype, "amp": self.amp}
        return {"resolution": self.resolution, **step} if self.sized else step


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The settings, the asked one first, at `batch`. Without settings `reason` says why there are none."""

    settings: tuple[Setting, ...]
    batch: int = 1
    reason: str = ""

    def data(self) -> dict[str, Any]:
        """For the page: terms once, and by number in the moments of each setting."""
        terms: dict[tuple[str, int, int], int] = {}
        settings = []
        for setting in self.settings:
            form = setting.form
            row: dict[str, Any] = {
                "optimizer": setting.optimizer_words,
                "precision": setting.precision_words,
                "resolution": setting.resolution_words,
                "flags": as_flags(setting.options).split(),
                "reason": setting.reason,
            }
            if form is not None:
                row |= {"low": form.low, "high": form.high, "traced": list(form.traced)}
                row["moments"] = [
                    {
                        "phase": moment.phase,
                        "kernel": moment.kernel,
                        "terms": [
                            number
                            for term in moment.terms
                            for number in (
                                terms.setdefault((term.category, term.base, term.slope), len(terms)),
                                term.count,
                            )
                        ],
                    }
                    for moment in form.moments
                ]
            settings.append(row)
        return {"batch": self.batch, "terms": [list(term) for term in terms], "settings": settings}


@dataclass(frozen=True, slots=True)
class CardRow:
    """What the step needs on a card, in bytes: `low`, `expected` and `high` are of device memory.

    `fit` and `why` are as in `GpuFit`; `headroom` is what the expected need leaves, negative where it is short.
    `condition` is what the card runs the step with, where it does not do so with the default wheel.
    `stands_for` is the card's own chip where another architecture's workspaces are taken for it, else empty. `asked` is
    the card of the report. `assumed` names figures of the card without a source.
    """

    slug: str
    name: str
    architecture: str
    nominal: int
    usable: int
    low: int
    expected: int
    high: int
    fit: str
    headroom: int
    asked: bool = False
    assumed: tuple[str, ...] = ()
    stands_for: str = ""
    why: str = ""
    condition: str = ""


@dataclass(frozen=True, slots=True)
class Extras:
    """`command` reproduces the report; `what_if_command` is it without what the sliders set. `left_out` says in
    sentences what is missing and why."""

    timeline: Timeline | None = None
    addresses: AddressMap | None = None
    cards: tuple[CardRow, ...] = ()
    what_if: WhatIf | None = None
    levers: tuple[LeverRow, ...] = ()
    command: str = ""
    what_if_command: str = "staticmem analyze MODEL"
    left_out: tuple[str, ...] = ()
