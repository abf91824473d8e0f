"""Prices from a user's own file; the package has none, and nothing is fetched.

version: 1
currency: EUR
prices:
  l40s: {buy: 8000, hour: 1.05}
  h100-sxm-80gb: {hour: 2.4}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staticmem.devices.documents import CODE, keys_of, read_yaml, table, text
from staticmem.devices.gpus import Gpu, near
from staticmem.errors import UsageError
from staticmem.report.sizing import Price


def load(file: str, cards: Mapping[str, Gpu]) -> dict[str, Price]:
    """Prices by the slug of a card.

    Raises:
        UsageError: the file cannot be read, or names a card that is not in the catalogue.
    """
    path = Path(file)
    document = read_yaml(path)
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


def _amount(fields: Mapping[str, Any], key: str, path: Path, where: str) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise UsageError(f"{path}: {where}.{key} is {value!r:.40}", "A price above zero is needed.", code=CODE)
    return float(value)
