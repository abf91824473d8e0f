"""The largest token budget, or batch, of an instant with batches of many lengths with which a run fits.

A run is replayed with a few of them: memory grows by nearly as much for each token, so two replays say where the next
is tried, and the search ends between one that fits with its whole band and a little larger one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from staticmem.config.plan import TOKENS, Instant
from staticmem.errors import UsageError
from staticmem.report.run import LargestLengths, LengthsInfo

MOST = 1 << 24  # samples or tokens of a batch
CLOSE = 100  # a token budget is found to a part in so many
REPLAYS = 14  # of one search
LINES = 5  # sizes by lines; then halves, which no step of memory holds up


class Replayed(NamedTuple):
    """Whether a run fits with its whole band, the upper end of that and its limit on the card, and the batches of the
    instant."""

    fits: bool
    high: int
    limit: int
    lengths: LengthsInfo


def find_largest(instants: Sequence[Instant], replay: Callable[[Sequence[Instant], int], Replayed]) -> LargestLengths:
    """The largest budget of the first instant with lengths, and of those with the same options.

    `replay` runs instants, and looks at the one with a number.

    Raises:
        UsageError: no instant has lengths.
    """
    number = next((at for at, one in enumerate(instants) if "lengths" in one.own), None)
    if number is None:
        why = "--max-budget finds the largest batch, or token budget, of steps whose lengths vary."
        raise UsageError("no instant of the plan has lengths", why, "Add `lengths` to a step (docs/plan.md).", "SM449")
    chosen = instants[number]
    lengths = chosen.own["lengths"]
    is_budget = lengths.get("rule") == TOKENS
    same = [
        (one.word, one.options, one.own.get("lengths")) == (chosen.word, chosen.options, lengths) for one in instants
    ]

    def replayed(size: int) -> Replayed:
        changed = [
            _of_size(one, size, is_budget) if is_same else one for one, is_same in zip(instants, same, strict=True)
        ]
        return replay(changed, number)

    first = lengths.get("tokens", 0) if is_budget else chosen.options.get("batch", 1)
    closeness = CLOSE if is_budget else MOST
    tried = search(replayed, first or 1, closeness)
    fits = max((size for size, one in tried.items() if one.fits), default=0)
    fails = [size for size, one in tried.items() if not one.fits and size > fits]
    at_it = tried[fits or min(tried)]
    return LargestLengths(
        of="tokens" if is_budget else "batch",
        size=fits,
        fails_at=min(fails, default=0),
        replays=len(tried),
        device_high_bytes=at_it.high,
        worst_batch=at_it.lengths.worst_batch,
        worst_length=at_it.lengths.worst_length,
        worst_chance=at_it.lengths.worst_chance,
        seed=lengths.get("seed", 0),
    )


def search(replayed: Callable[[int], Replayed], first: int, closeness: int) -> dict[int, Replayed]:
    """The sizes that were tried. The largest that fits and the next that does not are one apart, or a part in
    `closeness` of it."""
    tried: dict[int, Replayed] = {}
    size, fits, fails = first, 0, MOST
    while len(tried) < REPLAYS:
        one = tried[size] = replayed(size)
        fits, fails = (size, fails) if one.fits else (fits, size)
        if fails - fits <= max(1, fits // closeness):
            break
        size = _between(tried, fits, fails)
    return tried


def _between(tried: Mapping[int, Replayed], fits: int, fails: int) -> int:
    """A size between the two: where memory fills the card, as a line through the two sizes that came closest."""
    limit = next(iter(tried.values())).limit
    near = sorted(sorted(tried, key=lambda size: abs(tried[size].high - limit))[:2])
    low, high = near[0], near[-1]
    grown = tried[high].high - tried[low].high
    if grown > 0:
        guess = low + (limit - tried[low].high) * (high - low) // grown
    else:  # of one size: what does not grow with it counts as if it did, so that the next one is on the safe side
        guess = high * limit // max(tried[high].high, 1)
    is_between = fits > 0 and fails < MOST
    if is_between and len(tried) > LINES:
        guess = (fits + fails) // 2
    margin = (fails - fits) // 16 if is_between else 0
    return min(max(guess, fits + 1 + margin), fails - 1 - margin)


def _of_size(instant: Instant, size: int, is_budget: bool) -> Instant:
    """The instant with another budget, or batch."""
    if is_budget:
        return replace(instant, own={**instant.own, "lengths": {**instant.own["lengths"], "tokens": size}})
    return replace(instant, options={**instant.options, "batch": size})
