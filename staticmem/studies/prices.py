"""Prices from a user's own file; the package has none, and only `cloud_prices` fetches some, where it is asked.

version: 1
currency: EUR
prices:
  l40s: {buy: 8000, hour: 1.05}
  h100-sxm-80gb: {hour: 2.4}

Or the same as CSV, with one currency throughout:

gpu,buy,hour,currency
l40s,8000,1.05,EUR
h100-sxm-80gb,,2.4,EUR
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staticmem import files
from staticmem.devices.documents import CODE, MAX_BYTES, keys_of, read_yaml, table, text
from staticmem.devices.gpus import Gpu, near
from staticmem.errors import UsageError
from staticmem.report.sizing import Price


def prices_of(word: str, cards: Mapping[str, Gpu]) -> dict[str, Price]:
    """Prices by the slug of a card: of a file, or of clouds for the word `gpuhunt`.

    Raises:
        UsageError: as `load` and `cloud_prices.current`.
    """
    from staticmem.studies import cloud_prices

    return cloud_prices.current(cards) if word == cloud_prices.SOURCE else load(word, cards)


def load(file: str, cards: Mapping[str, Gpu]) -> dict[str, Price]:
    """Prices by the slug of a card.

    Raises:
        UsageError: the file cannot be read, or names a card that is not in the catalogue.
    """
    path = Path(file)
    document = _of_csv(path) if path.suffix.lower() == ".csv" else read_yaml(path)
    keys_of(document, path, required=("version", "currency", "prices"))
    currency = text(document["currency"], path, "currency")
    prices: dict[str, Price] = {}
    for slug, value in table(document["prices"], path, "prices").items():
        where = f"prices.{slug}"
        if slug not in cards:
            raise UsageError(f"{path}: {where} is no GPU", "", near(str(slug), cards), CODE)
        fields = table(value, path, where)
        keys_of(fields, path, required=(), optional=("buy", "hour"), where=where)
        prices[str(slug)] = Price(currency, _amount(fields, "buy", path, where), _amount(fields, "hour", path, where))
    return prices


def _of_csv(path: Path) -> dict[str, Any]:
    """What a CSV file says, in the form of the YAML."""
    try:
        lines = files.read(path, MAX_BYTES).decode("utf-8-sig").splitlines()
        reader = csv.DictReader(lines, strict=True)
        heads, rows = reader.fieldnames or (), list(reader)
    except OSError as error:
        raise files.unreadable(path, error, CODE) from error
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{path} is not CSV", " ".join(str(error).split())[:200], code=CODE) from error
    columns = ("gpu", "buy", "hour", "currency")
    what = f"{path} is no list of prices"
    if sorted(heads) != sorted(columns):
        raise UsageError(what, f"Its first line does not name the columns {', '.join(columns)}.", code=CODE)
    prices: dict[str, Any] = {}
    currencies: dict[str, None] = {}
    for number, row in enumerate(rows, 2):
        if set(row) != set(columns) or None in row.values():
            raise UsageError(what, f"Row {number} does not have {len(columns)} columns.", code=CODE)
        currencies[row["currency"].strip()] = None
        fields = {name: _number(row[name].strip()) for name in ("buy", "hour") if row[name].strip()}
        if row["gpu"].strip() in prices:
            raise UsageError(f"{path}: row {number} has {row['gpu'].strip():.40} again", "", code=CODE)
        prices[row["gpu"].strip()] = fields
    if len(currencies) > 1:
        hint = "Convert the prices to one of them."
        raise UsageError(f"{path} has {len(currencies)} currencies", "Prices are compared.", hint, CODE)
    return {"version": 1, "currency": next(iter(currencies), "?"), "prices": prices}


def _number(word: str) -> float | str:
    """A number; the word itself where it is none, which is refused with its place."""
    try:
        return float(word)
    except ValueError:
        return word


def _amount(fields: Mapping[str, Any], key: str, path: Path, where: str) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise UsageError(f"{path}: {where}.{key} is {value!r:.40}", "A price above zero is needed.", code=CODE)
    return float(value)
