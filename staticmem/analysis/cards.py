"""One step against every card of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from staticmem.hardware import gpus
from staticmem.hardware.gpus import Gpu
from staticmem.hardware.reductions import Multiprocessors
from staticmem.hardware.sizing import Verdict, verdict
from staticmem.meters import Device, DeviceMeters, on_device
from staticmem.report.html.cards import CardRow
from staticmem.training.step import StepResult

LIMIT = 20_000  # ticks of a trace; beyond it only the architecture of the asked card is replayed


def card_rows(result: StepResult, asked: Device, spread: tuple[int, int] = (0, 0)) -> tuple[CardRow, ...]:
    """The rows of all cards, the smallest first, with the one that was asked for; `spread` as in `meters.on_device`.

    What the allocator takes depends on a card's architecture only (workspaces of kernels) until the card is full, so it
    is replayed once for each; the context is the card's own.
    """
    cards = {**gpus.cards(), asked.gpu.slug: asked.gpu}
    wide = result.trace.ticks <= LIMIT
    known: dict[str, tuple[Device, DeviceMeters]] = {}
    rows = []
    for card in sorted(cards.values(), key=lambda card: (card.usable, card.name)):
        if not wide and card.architecture != asked.gpu.architecture:
            continue
        device = _with(asked, card)
        if card.architecture not in known:
            roomy = _with(asked, max(_of(card.architecture, asked.gpu), key=lambda other: other.usable))
            known[card.architecture] = (roomy, on_device(result, roomy, spread))
        outcome = _verdict(result, device, spread, *known[card.architecture])
        rows.append(_row(card, outcome, card.slug == asked.gpu.slug))
    return tuple(rows)


def _of(architecture: str, asked: Gpu) -> list[Gpu]:
    return [card for card in (*gpus.cards().values(), asked) if card.architecture == architecture]


def _with(device: Device, card: Gpu) -> Device:
    multiprocessors = Multiprocessors(card.processors, gpus.THREADS[card.architecture])
    return replace(
        device, gpu=card, setup=replace(device.setup, architecture=card.architecture, multiprocessors=multiprocessors)
    )


def _verdict(
    result: StepResult, device: Device, spread: tuple[int, int], roomy: Device, found: DeviceMeters
) -> Verdict:
    """The verdict of a card, from the meters of the largest of its architecture."""
    overhead = device.setup.profile.overhead(device.gpu)
    needed, usable = found.reserved.plus(overhead), device.gpu.usable
    if needed.expected <= usable or device.gpu == roomy.gpu:
        return found.verdict if device.gpu == roomy.gpu else verdict(needed, usable)
    if found.allocated.expected + overhead.expected > usable:  # what is alive does not fit, whatever the cache gives
        return verdict(needed, usable)
    return on_device(result, device, spread).verdict


def _row(card: Gpu, outcome: Verdict, asked: bool) -> CardRow:
    low, expected, high = outcome.needed
    return CardRow(
        card.slug, card.name, card.architecture, card.nominal, card.usable, low, expected, high, outcome.fit.value,
        outcome.headroom, asked, card.assumed, card.chip if card.chip != card.architecture else "",
    )  # fmt: skip
