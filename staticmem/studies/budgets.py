"""Budgets: what the configurations of a config need, against the limits that it sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from staticmem.config.config import Budget
from staticmem.report.sweep import CHECK_SCHEMA, CardFit, Check, Outcome, Sweep, SweepRow


def check(sweep: Sweep, budgets: Sequence[Budget]) -> Check:
    """Every configuration against every budget."""
    outcomes = tuple(outcome for row in sweep.rows for outcome in _of_row(row, budgets))
    failed = any(not o.passed and o.level == "error" and o.error is None for o in outcomes)
    return Check(CHECK_SCHEMA, failed, any(o.error is not None for o in outcomes), outcomes)


def _of_row(row: SweepRow, budgets: Sequence[Budget]) -> Iterator[Outcome]:
    name = row.name or ", ".join(f"{k}={v}" for k, v in row.settings.items()) or "as it is"
    for budget in budgets:
        limit = budget.limit_bytes
        if row.error is not None:
            yield Outcome(name, row.model, None, budget.metric, budget.level, limit, None, None, False, row.error)
        elif budget.metric == "live":
            assert row.live_bytes is not None
            yield _outcome(name, row, None, budget, row.live_bytes)
        else:
            for card in row.cards:
                yield _outcome(name, row, card.gpu, budget, _meter(card, budget.metric))


def _outcome(name: str, row: SweepRow, gpu: str | None, budget: Budget, nbytes: int) -> Outcome:
    limit = budget.limit_bytes
    margin = limit - nbytes
    return Outcome(name, row.model, gpu, budget.metric, budget.level, limit, nbytes, margin, margin >= 0)


def _meter(card: CardFit, metric: str) -> int:
    nbytes = getattr(card, f"{metric}_bytes")
    assert isinstance(nbytes, int), f"{metric} was not evaluated"
    return nbytes
