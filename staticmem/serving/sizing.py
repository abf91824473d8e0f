"""Which cards serve so many requests of a length at once, and how many of each: `size --mode serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from staticmem.devices.gpus import Gpu
from staticmem.errors import UsageError
from staticmem.report.formats import JSON, Format
from staticmem.report.model import NoteInfo
from staticmem.report.sizing import Price
from staticmem.report.text import PLAIN, Text, View
from staticmem.report.verdict import with_article
from staticmem.scenario.request import Request
from staticmem.serving.engine import MEASURED_ON
from staticmem.serving.study import MOST_RANKS, WAYS, Served, check_concurrency, chip_of, enough_for, is_covered, served

SCHEMA = "staticmem.serve-sizing/1"


@dataclass(frozen=True, slots=True)
class ServeCard:
    """A card, and the fewest of it that serve what was asked; null where eight do not. `parallel` is how they share the
    model ("": one card). `certain` is false where the low end of the band holds fewer requests. `concurrency` and
    `kv_cache_tokens` are of these cards, of eight where they do not do, and 0 where the engine does not start. `price`
    is that of one card, as the user has it; `why` says why the cards do not do.
    """

    slug: str
    name: str
    usable_bytes: int
    devices: int | None
    parallel: str
    certain: bool
    concurrency: float
    kv_cache_tokens: int
    price: Price | None
    why: str


@dataclass(frozen=True, slots=True)
class ServeSizing:
    """The cards, those that do first: with prices the cheapest first, else the fewest and the smallest."""

    schema: str
    model: str
    engine: str
    version: str
    concurrency: int
    max_len: int
    recommendation: str
    cards: tuple[ServeCard, ...]
    warnings: tuple[NoteInfo, ...]


def serve_sizing(
    path: str, request: Request, concurrency: int, cards: Sequence[Gpu], prices: Mapping[str, Price], *, named: bool
) -> ServeSizing:
    """The fewest cards of each kind that serve `concurrency` requests of `--max-len` at once. Cards that the user has
    `named` have a row though the engine's rules are not for them.

    Raises:
        UsageError: no card is covered; and as `serving.study.serve_report`.
        ModelFileError: the model is not covered.
    """
    if not any(map(is_covered, cards)):
        raise UsageError(
            "no GPU is left", "Covered are cards of NVIDIA from Volta on.", "See 'staticmem gpus'.", "SM183"
        )
    check_concurrency(request, concurrency)
    asked = served(path, request)
    if (request.max_len or 0) > asked.decoder.positions:
        what = f"--max-len {request.max_len}: the model has {asked.decoder.positions:,} positions"
        raise UsageError(what, "The engine refuses longer requests.", "Give a smaller --max-len.", "SM602")
    rows = [_row(asked, card, concurrency, prices.get(card.slug)) for card in cards if is_covered(card) or named]
    rows.sort(key=_worth)
    length = request.max_len or asked.decoder.usual
    title, version = asked.rules.data["title"], asked.rules.version
    answer, warnings = _recommended(rows, concurrency, length), tuple(_warnings(cards))
    return ServeSizing(SCHEMA, path, title, version, concurrency, length, answer, tuple(rows), warnings)


def _warnings(cards: Sequence[Gpu]) -> Iterator[NoteInfo]:
    others = [card for card in cards if is_covered(card) and chip_of(card) != MEASURED_ON]
    if others:
        text = "engines were read on the chip of the H100: figures of other cards have its memory outside of PyTorch"
        yield NoteInfo("SM603", f"{text}, with wider bands; the engine's own log settles them", len(others))


def _row(asked: Served, card: Gpu, concurrency: int, price: Price | None) -> ServeCard:
    if not is_covered(card):
        why = "The engine's rules are not for it."
        return ServeCard(card.slug, card.name, card.usable, None, "", False, 0.0, 0, price, why)
    why, tokens, held = "", 0, 0.0
    for count, parallel in _ways(asked.request):
        ranks = {"devices": count, "parallel": parallel} if parallel else {}
        engine = asked.on(card, **ranks)
        engine = asked.on(card, **ranks, **enough_for(engine, concurrency))
        refusal = engine.refusal()
        if refusal is not None:
            of = f"{count} cards: " if count > 1 else ""
            doubt = "" if engine.refusal("high") is not None else " Within its bands it may start."
            why = why if held else f"{of}{refusal.message}{doubt}"
            continue
        tokens, held = engine.tokens.expected, round(engine.concurrency, 2)
        why = f"{held:,.2f} requests at once, with {count} cards"
        if held >= concurrency:
            certain = engine.refusal("low") is None and engine.held("low") >= concurrency
            return ServeCard(card.slug, card.name, card.usable, count, parallel, certain, held, tokens, price, "")
    return ServeCard(card.slug, card.name, card.usable, None, "", False, held, tokens, price, why)


def _ways(request: Request) -> Iterator[tuple[int, str]]:
    """Numbers of cards and how they share a model: where none is asked for by layers, then by stages."""
    for count in [request.devices] if request.devices else [1, 2, 4, MOST_RANKS]:
        if count == 1:
            yield count, ""
        else:
            yield from ((count, way) for way in ([request.parallel] if request.parallel else WAYS))


def _worth(row: ServeCard) -> tuple[bool, float, int, int, str]:
    """Cards that do come first; of these those whose price is known and least."""
    cost = (row.price.hour or row.price.buy) if row.price is not None else None
    count = row.devices or MOST_RANKS
    return row.devices is None, float("inf") if cost is None else cost * count, count, row.usable_bytes, row.slug


def _recommended(rows: Sequence[ServeCard], concurrency: int, length: int) -> str:
    best = rows[0]
    what = f"{concurrency:,} requests of {length:,} tokens at once"
    if best.devices is None:
        return f"No {MOST_RANKS} cards of a kind serve {what}."
    cards = with_article(best.name) if best.devices == 1 else f"{best.devices} x {best.name}"
    how = f" (--parallel {best.parallel} --devices {best.devices})" if best.parallel else ""
    sure = "" if best.certain else " at the middle of its band, which its low end does not reach"
    verb = "serves" if best.devices == 1 else "serve"
    return f"{cards[0].upper()}{cards[1:]} {verb} {what}{sure}{how}."


def render(sizing: ServeSizing, view: View = PLAIN) -> str:
    """The recommendation, and a row a card."""
    if view.quiet:
        return view.line(sizing.recommendation)
    text = Text(view)
    text.answer(sizing.recommendation)
    text.heading(
        f"{sizing.engine} {sizing.version}: {sizing.concurrency:,} requests of {sizing.max_len:,} tokens at once"
    )
    priced = any(row.price is not None for row in sizing.cards)
    heads = ["GPU", "usable", "cards", "at once", "tokens", *["price"] * priced, ""]
    text.columns([heads, *(_cells(row, priced, view) for row in sizing.cards)], right=range(1, 5 + priced))
    text.wrap(f"cards: the fewest of 1, 2, 4 and {MOST_RANKS}; at once, tokens: what the cache of these holds.")
    for note in sizing.warnings:
        text.wrap(f"{note.code}  {note.text}.")
    return text.end()


def _cells(row: ServeCard, priced: bool, view: View) -> list[str]:
    count = "-" if row.devices is None else str(row.devices)
    note = row.why if row.certain or row.devices is None else "not at the low end of its band"
    holds = [f"{row.concurrency:,.2f}", f"{row.kv_cache_tokens:,}"] if row.kv_cache_tokens else ["-", "-"]
    cells = [row.name, view.size(row.usable_bytes), count, *holds]
    return [*cells, *[_price(row)] * priced, note]


def _price(row: ServeCard) -> str:
    """Of all cards that are needed."""
    if row.price is None or row.devices is None:
        return ""
    cost = row.price.hour if row.price.hour is not None else row.price.buy
    unit = "an hour" if row.price.hour is not None else "to buy"
    return "" if cost is None else f"{cost * row.devices:,.2f} {row.price.currency} {unit}"


FORMATS = (Format("table", "txt", render), JSON)
