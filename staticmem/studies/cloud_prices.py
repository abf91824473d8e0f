"""Current prices of clouds by the hour, from gpuhunt (MPL-2.0), an optional extra that fetches them.

It is asked for prices alone: names and memory of its offers say which card of ours they are of, and no figure of memory
is taken from it. An offer does not say of an A100 or H100 whether it is an SXM or a PCIe card: such a price is of both.
"""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from staticmem.devices.gpus import Gpu
from staticmem.errors import UsageError
from staticmem.report.sizing import Price
from staticmem.units import GIB

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
