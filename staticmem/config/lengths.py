"""Lengths of samples: a distribution, or a file of them, which is hostile input."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from itertools import islice

from staticmem import files
from staticmem.config.plan import DRAWN
from staticmem.errors import UsageError

MOST_NUMBERS = 5_000_000  # lengths that are read of a file
MOST_BYTES = 256 << 20  # of a file of lengths


def numbers_of(source: str, column: str = "", least: int = 1, most: int = 0, seed: int = 0) -> list[int]:
    """The lengths of a source, at least `least` and (unless 0) at most `most` tokens.

    Raises:
        UsageError: the source cannot be read, or has no longest sample (SM443).
    """
    drawn = DRAWN.fullmatch(source)
    if drawn is None:
        numbers = _read(source, column)
    else:
        if drawn[1] != "uniform" and not most:
            raise wrong(f"{drawn[1]}(...) has no longest sample", "Add `most: 4096`: longer ones are cut to it.")
        numbers = _draw(drawn[1], float(drawn[2]), float(drawn[3]), seed)
    high = most or max(numbers)
    return [min(max(number, least), high) for number in numbers]


_DRAWS = 10_000  # samples of a distribution, which a run goes through again and again


def _draw(kind: str, first: float, second: float, seed: int) -> list[int]:
    draw = random.Random(seed)  # noqa: S311 - lengths, no secrets
    chosen: dict[str, Callable[[], float]] = {
        "normal": lambda: draw.normalvariate(first, second),
        "lognormal": lambda: draw.lognormvariate(first, min(second, 20.0)),
        "uniform": lambda: draw.uniform(first, second),
    }
    return [int(min(max(chosen[kind](), 1), 1 << 30)) for _ in range(_DRAWS)]


def wrong(what: str, hint: str) -> UsageError:
    return UsageError(what, "The longest batch decides what a run needs.", hint, "SM443")


def _read(path: str, column: str) -> list[int]:
    """The numbers of a file.

    Raises:
        UsageError: it cannot be read, or has something else than whole numbers.
    """
    try:
        text = files.read(path, MOST_BYTES).decode("utf-8-sig")
    except FileNotFoundError as error:
        why = "Distributions are normal(mean, deviation), lognormal(mu, sigma) and uniform(least, most)."
        hint = "Example: normal(512, 128), or the path of a file."
        raise UsageError(f"'{path}' is neither a distribution nor a file", why, hint, "SM443") from error
    except (OSError, UnicodeDecodeError) as error:
        what, why = f"{path}: lengths cannot be read", f"{getattr(error, 'strerror', None) or error}."
        raise UsageError(what, why, "It is a distribution such as normal(512, 128), or a file.", "SM443") from error
    lines = islice(text.splitlines(), MOST_NUMBERS)
    try:
        if path.endswith((".jsonl", ".ndjson")):
            numbers = [json.loads(line)[column or "length"] for line in lines if line.strip()]
        elif path.endswith((".csv", ".tsv")):
            rows = csv.DictReader(lines, delimiter="\t" if path.endswith(".tsv") else ",")
            numbers = [row[column or "length"] for row in rows]
        else:
            numbers = [line for line in lines if line.strip()]
        lengths = [int(number) for number in numbers]
    except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        why = f"Its column or field '{column or 'length'}' has whole numbers ({type(error).__name__}: {error})."
        raise UsageError(f"{path} has no lengths", why, "Name the column: `column: n_tokens`.", "SM443") from error
    if not lengths or min(lengths) < 1:
        what = f"{path} has {'a length below 1' if lengths else 'no lengths'}"
        raise UsageError(what, "A sample has at least one token.", "Correct the file.", "SM443")
    return lengths
