r"""Regular expressions on names that a file chose: refused where Python's `re` could not finish.

`re` goes back over every way in which a pattern can be laid over a text: `(a+)+$` has 2^n of them on n letters, so with
the right pattern a file with one such name would keep it busy for ever. `re` takes no limit of time, and a library
should neither set a signal nor start a process for it. So the ways are counted first, which is as cheap as a match
without going back: for each item of the parsed pattern, in how many ways each position of the text is reached. Where an
item is no plain character, it is taken to match: the count is never too low. A pattern that goes back a lot on some
text is not refused for that; the names of the model are what counts.

Globs in place of regular expressions would need none of this, but `--freeze` takes what users pass to `re.search`. A
list of allowed constructs would be shorter, and would refuse patterns that are quick on every name of a model, such as
`(\w+\.)*bias`: a repeated group is slow on some texts only, which a count on the names tells.

The parsed pattern is private to Python (`re._parser`, before 3.11 `sre_parse`); an item that is not known here counts
as too many ways.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticmem.errors import UsageError

STEPS = 10**8  # of all names together: some seconds of `re`, at the worst
TURNS = 20_000  # items that are counted for one name: less than a tenth of a second
LONGEST_NAME = 1000  # characters; names of modules are a tenth of that

Ways = NDArray[np.float64]
Items = Any  # re._parser.SubPattern

_parser = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


class _TooManyError(Exception):
    pass


def searcher(pattern: str, names: Iterable[str], flag: str = "--freeze") -> Callable[[str], object]:
    """`re.compile(pattern).search`, for these names. `flag` is the one that has the pattern.

    Raises:
        UsageError: on these names it could take for ever.
    """
    names = set(names)
    longest = max(map(len, names), default=0)
    if longest > LONGEST_NAME:
        raise UsageError(
            f"{flag} does not look at names of {longest:,} characters",
            f"A name in this file is that long, and {LONGEST_NAME:,} are the most.",
            f"Leave {flag} out, or name the parameters otherwise.",
            code="SM162",
        )
    items, left = _parser.parse(pattern), float(STEPS)
    try:
        plain = not any("\n" in name for name in names)
        if plain and _Count(items, longest).steps(left) * len(names) <= STEPS:
            return re.compile(pattern).search
    except (_TooManyError, RecursionError):
        pass
    for name in names:
        try:
            left -= _Count(items, len(name), name).steps(left)
        except (_TooManyError, RecursionError):
            raise UsageError(
                f"{flag} '{pattern}' would take too long",
                f"Python tries more than {STEPS:,} ways to match it with names such as '{name:.60}'.",
                "Repeat nothing that is repeated already: 'a+' instead of '(a+)+', one '.*' instead of '.*.*'.",
                code="SM162",
            ) from None
    return re.compile(pattern).search


class _Count:
    """The steps of a search in a text of `length`: of `text`, or of any without line breaks."""

    def __init__(self, items: Items, length: int, text: str | None = None) -> None:
        self.items, self.length = items, length
        exact = text is not None and not items.state.flags & re.IGNORECASE
        self.codes = np.array([ord(c) for c in text]) if exact and text is not None else None
        self.lines = text is not None and "\n" in text
        self.taken, self.turns = 0.0, 0

    def steps(self, most: float) -> float:
        self.most = most
        self._run(self.items, np.ones(self.length + 1))
        return self.taken

    def _take(self, steps: float) -> None:
        self.taken += steps
        if self.taken > self.most or self.turns > TURNS:
            raise _TooManyError

    def _run(self, items: Items, at: Ways) -> Ways:
        """From the ways to each position before the items to those behind them."""
        for op, what in items:
            if not at.any():
                break
            self.turns += 1
            self._take(float(at.sum()))
            at = self._item(str(op), what, at)
        return at

    def _item(self, op: str, what: Any, at: Ways) -> Ways:
        if op in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
            return self._character(op, what, at)
        if op == "AT":
            return self._anchored(str(what), at)
        if op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            low, high, items = what
            return self._repeat(int(low), int(high), items, at)
        if op == "BRANCH":
            return self._sum(what[1], at)
        if op == "SUBPATTERN":
            if what[1] & re.IGNORECASE:
                self.codes = None
            return self._run(what[-1], at)
        if op == "ATOMIC_GROUP":
            return self._run(what, at)
        if op in ("ASSERT", "ASSERT_NOT"):  # whether it matches is all that is left of it
            direction, items = what
            back = items.getwidth()[0] if direction < 0 else 0
            self._run(items, np.concatenate([at[back:], np.zeros(min(back, len(at)))]))
            return at
        if op == "GROUPREF_EXISTS":
            return self._sum([items for items in what[1:] if items is not None], at) + at
        raise _TooManyError  # references to groups, and what a later Python has

    def _character(self, op: str, what: Any, at: Ways) -> Ways:
        ways = np.zeros_like(at)
        ways[1:] = at[:-1]
        if op == "LITERAL" and self.codes is not None:
            ways[1:] *= self.codes == what
        return ways

    def _anchored(self, where: str, at: Ways) -> Ways:
        """Only the first position, or the last two (a line break may be behind), where lines do not matter."""
        if self.lines or where not in ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING"):
            return at
        ways = np.zeros_like(at)
        kept = slice(0, 1) if "BEGINNING" in where else slice(-1, None)
        ways[kept] = at[kept]
        return ways

    def _sum(self, branches: Iterable[Items], at: Ways) -> Ways:
        ways = np.zeros_like(at)
        for items in branches:
            ways += self._run(items, at)
        return ways

    def _repeat(self, low: int, high: int, items: Items, at: Ways) -> Ways:
        if len(items) == 1 and str(items[0][0]) in ("NOT_LITERAL", "IN", "ANY"):  # as below, all turns at once
            self._take(float(_within(at, 0, high).sum()))
            return _within(at, low, high)
        ways = np.zeros_like(at)
        # where nothing is read, `re` turns as often as it has to, and once more before it sees that it does not move
        last = high if items.getwidth()[1] else min(high, low + 2)
        turn = 0
        while at.any():
            if turn >= low:
                ways += at
            if turn == last:
                break
            at, turn = self._run(items, at), turn + 1
        self._take(float(ways.sum()))
        return ways


def _within(at: Ways, low: int, high: int) -> Ways:
    """For each position the sum of those that are `low` to `high` before it."""
    sums, here = np.concatenate([[0.0], np.cumsum(at)]), np.arange(len(at))
    ways: Ways = sums[np.maximum(here - low + 1, 0)] - sums[np.maximum(here - high, 0)]
    return ways
