"""The device meters of configurations, each from its own step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from staticmem.errors import StaticmemError
from staticmem.report.sweep import MAY_FIT, CardFit
from staticmem.studies import Request, Study, without_cycle_search
from staticmem.studies.bench import card_fit
from staticmem.studies.evaluate import Done, Outcome, Row, evaluate, row_of


@dataclass(frozen=True)
class Measured:
    """A configuration and the cards."""

    row: Row
    cards: tuple[CardFit, ...]


Found = Measured | StaticmemError


def measure(
    path: str,
    requests: Sequence[Request],
    gpus: Sequence[str],
    device: bool,
    largest: bool = False,
    done: Done | None = None,
) -> list[Found]:
    """The rows of a model file; `device`: with what the allocator and the card add; `largest`: with the largest batch
    of each. A function of plain values, so that any executor can run it where the file is; `done` is told how many more
    are done."""
    try:
        study = Study.open(path, Request())
    except StaticmemError as error:
        return [error] * len(requests)
    if device:
        found = []
        for request in requests:
            found.append(_with_device(study, request, gpus, largest))
            if done is not None:
                done(1)
        return found
    return [live_only(outcome, gpus) for outcome in evaluate(study, requests, done)]


def _with_device(study: Study, request: Request, gpus: Sequence[str], largest: bool) -> Found:
    try:
        with without_cycle_search():
            one = study.ask(request)
            found = Measured(row_of(one), tuple(card_fit(one, gpu) for gpu in gpus))
        if not largest:
            return found
        from staticmem.studies.largest import largest_batch

        cards = [replace(card, max_batch=largest_batch(one, card.gpu)) for card in found.cards]
        return replace(found, cards=tuple(cards))
    except StaticmemError as error:
        return error


def live_only(outcome: Outcome, gpus: Sequence[str]) -> Found:
    """Live memory and the least context against the cards: that rules a card out, and never in."""
    if isinstance(outcome, StaticmemError):
        return outcome
    from staticmem.studies.device import device_of

    cards = []
    for gpu in gpus:
        device = device_of(replace(outcome.request, gpu=gpu))
        need = outcome.live + device.setup.profile.overhead(device.gpu).low
        left = device.gpu.usable - need
        fit = MAY_FIT if left >= 0 else "does not fit"
        cards.append(
            CardFit(
                device.gpu.slug, device.gpu.usable, fit, None, None, None, None, None, max(left, 0), max(-left, 0)
            )
        )  # fmt: skip
    return Measured(outcome, tuple(cards))
