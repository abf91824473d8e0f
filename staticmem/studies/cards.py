"""One step against every card of the catalogue."""

from __future__ import annotations

from staticmem.devices import gpus
from staticmem.devices.gpus import Gpu
from staticmem.devices.meters import Device
from staticmem.devices.sizing import Verdict
from staticmem.engine.step import StepResult
from staticmem.report.html.cards import CardRow
from staticmem.studies.verdicts import Verdicts

LIMIT = 20_000  # ticks of a trace; beyond it only the architecture of the asked card is replayed


def card_rows(result: StepResult, asked: Device, spread: tuple[int, int] = (0, 0)) -> tuple[CardRow, ...]:
    """The rows of all cards, the smallest first, with the one that was asked for; `spread` as in `meters.on_device`."""
    cards = {**gpus.cards(), asked.gpu.slug: asked.gpu}
    wide = result.trace.ticks <= LIMIT
    verdicts = Verdicts(result, asked, lambda: spread, tuple(cards.values()))
    rows = []
    for card in sorted(cards.values(), key=lambda card: (card.usable, card.name)):
        if wide or card.architecture == asked.gpu.architecture:
            named = card.slug == asked.gpu.slug
            rows.append(_row(card, verdicts.of(card, own=named), named))
    return tuple(rows)


def _row(card: Gpu, outcome: Verdict, asked: bool) -> CardRow:
    low, expected, high = outcome.needed
    return CardRow(
        card.slug, card.name, card.architecture, card.nominal, card.usable, low, expected, high, outcome.fit.value,
        outcome.headroom, asked, card.assumed, card.chip if card.chip != card.architecture else "",
    )  # fmt: skip
