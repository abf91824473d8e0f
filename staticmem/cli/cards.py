"""Flags that choose cards of the catalog; shared by `gpus` and `size`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from staticmem.cli.values import positive
from staticmem.errors import UsageError

if TYPE_CHECKING:
    from staticmem.devices.gpus import Gpu


def add_filters(parser: argparse.ArgumentParser, own_file: bool) -> None:
    """The group "cards"; `own_file` adds `--gpus-file` where no other group of the verb has it."""
    cards = parser.add_argument_group("cards")
    cards.add_argument("--vendor", action="append", metavar="NAME", help="only NVIDIA, AMD or Intel; repeatable")
    cards.add_argument("--min-memory", metavar="SIZE", help="only cards sold with at least so much: 24GB")
    cards.add_argument("--max-memory", metavar="SIZE", help="only cards sold with at most so much")
    cards.add_argument("--year", type=positive("--year"), metavar="YEAR", help="only cards of this year or later")
    cards.add_argument(
        "--class", dest="card_class", action="append", metavar="CLASS",
        help="only consumer, workstation or 'data centre' cards; repeatable",
    )  # fmt: skip
    if own_file:
        cards.add_argument("--gpus-file", metavar="FILE", help="YAML with cards of your own, over those of the package")


def choose(args: argparse.Namespace, names: Sequence[str] = ()) -> list[Gpu]:
    """The cards that the flags leave, or those of `names`, by memory and name.

    Raises:
        UsageError: a flag's value is not known, or nothing is left.
    """
    from staticmem.devices import gpus
    from staticmem.scenario.request import known

    file = args.gpus_file
    cards = [gpus.find(name, file=file) for name in names] if names else list(gpus.catalog(file).values())
    if args.vendor:
        wanted = {known("vendor", word, tuple(v.lower() for v in gpus.VENDORS)) for word in args.vendor}
        cards = [card for card in cards if card.vendor.lower() in wanted]
    if args.card_class:
        words = {known("class", word, gpus.CLASSES) for word in args.card_class}
        cards = [card for card in cards if card.price_class in words]
    least, most = _size("--min-memory", args.min_memory), _size("--max-memory", args.max_memory)
    cards = [card for card in cards if card.nominal >= (least or 0) and (most is None or card.nominal <= most)]
    if args.year:
        cards = [card for card in cards if card.year is not None and card.year >= args.year]
    if not cards:
        raise UsageError(
            "no card is left", "The filters exclude all of the catalog.", "See 'staticmem gpus'.", code="SM183"
        )
    return sorted(cards, key=lambda card: (card.nominal, card.usable, card.slug))


def _size(flag: str, text: str | None) -> int | None:
    from staticmem.devices.gpus import parse_size

    if text is None:
        return None
    found = parse_size(text)
    if found is None:
        raise UsageError(
            f"{flag} '{text}' is not a size",
            "It is a number with GB, GiB, MB or MiB.",
            f"Example: {flag} 24GB",
            "SM110",
        )
    return found
