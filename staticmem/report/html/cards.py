"""Rows of the table of cards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardRow:
    """What the step needs on a card, in bytes: `low`, `expected` and `high` are of device memory.

    `fit` is "fits", "tight" or "does not fit"; `headroom` is what the expected need leaves, negative where it is short.
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
