"""Budgets: what the configurations of a config need, against the limits that it sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from staticmem.config.config import Budget
from staticmem.devices.sizing import Fit
from staticmem.report.sweep import CHECK_SCHEMA, CardFit, Check, Outcome, Sweep, SweepRow

_REFUSED = (Fit.DOES_NOT_FIT.value, Fit.CANNOT_RUN.value)


def check(sweep: Sweep, budgets: Sequence[Budget]) -> Check:
    """Every configuration against every budget; without budgets, against the memory of each GPU that is named."""
    outcomes = tuple(sorted((one for row in sweep.rows for one in _compare_row(row, budgets)), key=_urgency))
    failed = any(not o.passed and o.level == "error" and o.error is None for o in outcomes)
    broken = any(o.error is not None for o in outcomes)
    return Check(CHECK_SCHEMA, failed, broken, outcomes, sweep.assumed)


def _urgency(outcome: Outcome) -> tuple[bool, bool, bool, int]:
    """What fails comes first: what could not be analysed, then errors, then warnings, the worst of each first."""
    return outcome.error is None, outcome.passed, outcome.level == "warning", outcome.margin_bytes or 0


def _compare_row(row: SweepRow, budgets: Sequence[Budget]) -> Iterator[Outcome]:
    name = row.name or ", ".join(f"{k}={v}" for k, v in row.settings.items()) or "as it is"
    if not budgets:
        for card in row.cards:
            yield _outcome(name, row, card, Budget("device", card.usable_bytes), _meter(card, "device"))
    for budget in budgets or ([Budget("device", 0)] if row.error is not None else []):
        limit = budget.limit_bytes
        if row.error is not None:
            yield Outcome(name, row.model, None, budget.metric, budget.level, limit, None, None, False, row.error)
        elif budget.metric == "live":
            assert row.live_bytes is not None
            alone = all(other.metric == "live" for other in budgets)  # else the budgets of cards say it
            yield _outcome(name, row, _worst(row.cards) if alone else None, budget, row.live_bytes)
        else:
            for card in row.cards:
                yield _outcome(name, row, card, budget, _meter(card, budget.metric))


def _worst(cards: Sequence[CardFit]) -> CardFit | None:
    """The card of which most is to be said: that does not run the step, else on a condition, else barely; None where
    the step fits all."""
    said = [card for card in cards if card.fit in _REFUSED or card.condition or card.why]
    return min(said, key=lambda card: (card.fit not in _REFUSED, not card.condition), default=None)


def _outcome(name: str, row: SweepRow, card: CardFit | None, budget: Budget, nbytes: int) -> Outcome:
    """A budget is kept where the meter is within it, and, of a card, where the card runs the step at all."""
    limit, gpu = budget.limit_bytes, card.gpu if card is not None else None
    margin = limit - nbytes
    runs = card is None or card.fit not in _REFUSED
    stands = (card.fit, card.why, card.condition, card.missing_bytes) if card is not None else (None, "", "", 0)
    passed = margin >= 0 and runs
    high = card.device_high_bytes if card is not None and budget.metric == "device" else None
    fit, why, condition, missing = stands
    return Outcome(
        name,
        row.model,
        gpu,
        budget.metric,
        budget.level,
        limit,
        nbytes,
        margin,
        passed,
        None,
        fit,
        why,
        condition,
        missing,
        high,
    )


def _meter(card: CardFit, metric: str) -> int:
    nbytes = getattr(card, f"{metric}_bytes")
    assert isinstance(nbytes, int), f"{metric} was not evaluated"
    return nbytes
