"""Prices: from a user's own file, or those of clouds by the hour, which the extra gpuhunt (MPL-2.0) fetches if asked.

The package has none itself.

version: 1
currency: EUR
prices:
  l40s: {buy: 8000, hour: 1.05}
  h100-sxm-80gb: {hour: 2.4}

Or the same as CSV, with one currency throughout:

gpu,buy,hour,currency
l40s,8000,1.05,EUR
h100-sxm-80gb,,2.4,EUR

Of clouds, prices alone are asked: names and memory of an offer say which card of ours it is of, and no figure of memory
is taken from it. An offer does not say of an A100 or H100 whether it is an SXM or a PCIe card: such a price is of both.
"""

from __future__ import annotations

import csv
import datetime
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from staticmem import files
from staticmem.devices.documents import CODE, MAX_BYTES, keys_of, read_yaml, table, text
from staticmem.devices.gpus import Gpu, near
from staticmem.errors import UsageError
from staticmem.report.sizing import Price
from staticmem.units import GIB


def prices_of(word: str, cards: Mapping[str, Gpu]) -> dict[str, Price]:
    """Prices by the slug of a card: of a file, or of clouds for the word `gpuhunt`.

    Raises:
        UsageError: as `load` and `current`.
    """
    return current(cards) if word == SOURCE else load(word, cards)


def load(file: str, cards: Mapping[str, Gpu]) -> dict[str, Price]:
    """Prices by the slug of a card.

    Raises:
        UsageError: the file cannot be read, or names a card that is not in the catalog.
    """
    path = Path(file)
    document = _read_csv(path) if path.suffix.lower() == ".csv" else read_yaml(path)
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


def _read_csv(path: Path) -> dict[str, Any]:
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


SOURCE = "gpuhunt"
_LEFT_OUT = re.compile(r"-(?:pcie|sxm|\d+gb)(?=-|$)")  # of a slug: what names of offers do not have
_SAME = 0.1  # gpuhunt says 270 GB of a B300 where NVIDIA says 288: as a fraction


def current(cards: Mapping[str, Gpu], today: datetime.date | None = None) -> dict[str, Price]:
    """The lowest price of each card by the hour, in dollars, on demand (no spot instances).

    Raises:
        UsageError: gpuhunt is not installed, or does not answer (SM408).
    """
    try:
        import gpuhunt
    except ImportError as error:
        hint = "pip install gpuhunt, or give a file: --prices prices.yaml."
        raise UsageError(f"--prices {SOURCE} needs the package gpuhunt", str(error), hint, "SM408") from error
    logging.getLogger("gpuhunt").setLevel(
        logging.CRITICAL
    )  # it logs a traceback for each provider that is out of reach
    try:
        offers = gpuhunt.query(min_gpu_count=1, spot=False)
    except Exception as error:  # whatever its providers and the network raise
        text = " ".join(str(error).split())[:200] or type(error).__name__
        hint = "Try again later, or give a file: --prices prices.yaml."
        raise UsageError("gpuhunt gives no prices", f"{text}.".replace("..", "."), hint, "SM408") from error
    return lowest(offers, cards, (today or datetime.date.today()).isoformat())


def lowest(offers: Iterable[Any], cards: Mapping[str, Gpu], day: str) -> dict[str, Price]:
    """The lowest price of each card among offers (`gpuhunt.CatalogItem`), for one GPU."""
    named: dict[str, list[Gpu]] = {}
    for card in cards.values():
        named.setdefault(_LEFT_OUT.sub("", card.slug).replace("-", ""), []).append(card)
    prices: dict[str, Price] = {}
    for offer in offers:
        count, memory, hour = offer.gpu_count, offer.gpu_memory, offer.price
        if not offer.gpu_name or not count or not memory or not hour or hour <= 0:
            continue
        each = round(hour / count, 4)
        for card in named.get(offer.gpu_name.lower(), ()):
            if abs(memory * GIB / card.nominal - 1) > _SAME:
                continue
            cheapest = prices.get(card.slug)
            if cheapest is None or cheapest.hour is None or each < cheapest.hour:
                prices[card.slug] = Price("USD", None, each, f"{offer.provider}, {day}")
    return prices
