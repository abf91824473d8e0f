"""What a page shows beside the report: charts, cards, sliders, levers. A page leaves out what it was not given."""

from __future__ import annotations

from dataclasses import dataclass

from staticmem.report.html.charts import AddressMap, Timeline
from staticmem.report.html.what_if import WhatIf
from staticmem.report.sweep import LeverRow


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
