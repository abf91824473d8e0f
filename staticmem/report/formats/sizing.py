"""The sizing report in a terminal and as CSV: the recommendation, the cards, what would make the step smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from staticmem.report.formats import Format, csv_format
from staticmem.report.sizing import ACCUMULATE, FITS, TIGHT, CardRow, Count, Lever, Sizing
from staticmem.report.sweep import CANNOT_RUN
from staticmem.report.text import PLAIN, Text, View, columns
from staticmem.report.verdict import in_cache, tflops_text
from staticmem.scenario.strategies import STRATEGIES

# The cases, and what of them is exact, are those of docs/accuracy.md and internals/measurements.md; a test compares
LIVE_CASES, LIVE_EXACT, LIVE_MOST = "81", "99 %", "0.14 %"
_LIVE = (
    f"Live memory has the same bytes as PyTorch's in {LIVE_EXACT} of {LIVE_CASES} reference cases and is off by at "
    f"most {LIVE_MOST} in the others, for torch.export files; other files and models are in docs/accuracy.md."
)
_DEVICE = (
    "The memory of the allocator, workspaces and the context comes from published sources and was not verified on "
    "hardware; the band from low to high is its uncertainty."
)
_RANKS = (
    "Steps on several devices agree with PyTorch where that runs without GPUs (FSDP2, DDP); DeepSpeed, tensor and "
    "pipeline parallel follow their source."
)
ACCURACY = (_LIVE, _DEVICE, _RANKS)
_COLOURS = {"fits": "green", "tight": "yellow", "with checkpointing": "yellow"}
_HEADS = ("GPU", "usable", "needs", "at most", "", "headroom")
_SPARE = (1, 3)  # columns of _HEADS that a narrow terminal can do without: headroom says what `usable` leaves
_IF = "‡"  # marks a verdict that holds on a condition
_OUTCOME = 4  # the column of _HEADS that says whether the card fits
# columns of the CSV that are fields of a card
_FIELDS = """
    slug name vendor form architecture nominal_bytes nvml_bytes usable_bytes device_low_bytes device_bytes
    device_high_bytes fit headroom_bytes missing_bytes fit_with_checkpointing max_batch safe_batch
    safe_batch_with_checkpointing max_size safe_size safe_size_with_checkpointing
    device_compiled_bytes bandwidth_gb_s tdp_w link year price_class obstacle why condition least_usable_bytes
""".split()
_TYPES = "fp32 tf32 fp16 bf16 fp8 int8".split()


def render(sizing: Sizing, view: View = PLAIN) -> str:
    """The report as text with a final newline. `verbose` has every column and the assumptions."""
    if view.quiet:
        return view.line(sizing.recommendation.replace("\n", " "))
    text, style = Text(view), view.style
    text.answer(*sizing.recommendation.split("\n"))
    text.heading(f"Sizing: {sizing.step}")
    text.add(f"  {sizing.parameters:,} parameters, {view.size(sizing.live_bytes)} of live tensors at the peak")
    text.lines += ["", *_table(sizing, view)]
    if not sizing.exact_batches and any(row.largest[1] for row in sizing.cards):
        text.wrap("a larger one may be safe, by up to an eighth: --gpu NAME finds the largest", "    ", "  + ")
    if checkpointing(sizing):
        text.add(f"  † with every {sizing.blocks} checkpointed")
    for title, why, names in refusals(sizing):
        text.wrap(f"{title}: {why}: {names}", "    ", "  - ")
    for why, names in remarks(sizing):
        text.wrap(f"{why}: {names}", "    ", "  ")
    if sizing.levers:
        text.heading(f"What would make it smaller ({levers_meter(sizing)})")
        rows = [
            (f"-{view.size(lever.saved_bytes)}", lever_text(sizing, lever, view), lever.flags)
            for lever in sizing.levers
        ]
        text.lines += columns(rows, style, right=(0,), indent="  ", optional=(1,), whole=(2,), heads=False)
    for title, notes in (("Assumptions", sizing.assumptions if view.verbose else ()), ("Warnings", sizing.warnings)):
        if notes:
            text.heading(title)
            for note in notes:
                text.wrap(f"{note.text} [{note.code}]", "    ", "  - ")
    text.lines.append("")
    text.wrap(f"Live memory is exact where the graph is known; the rest is a band (data of {sizing.data_checked}).")
    return text.end()


def _table(sizing: Sizing, view: View) -> list[str]:
    batches = any(row.largest[1] is not None for row in sizing.cards)
    pairs = any(row.largest[2] is not None for row in sizing.cards)
    both = batches and sizing.exact_batches
    compiled = any(row.device_compiled_bytes is not None for row in sizing.cards)
    heads = [
        *_HEADS,
        *[f"max {view.style.plain(grown_name(sizing))}"] * both,
        *[f"safe {view.style.plain(grown_name(sizing))}"] * batches,
        *["checkpointed"] * pairs,
        *["compiled"] * compiled,
        *[strategy_title(name) for name in sizing.strategies],
    ]
    priced = any(row.price is not None for row in sizing.cards)
    heads += ["price"] * priced + (["GB/s", "TFLOPS", "W", "year", "class"] if view.verbose else [])
    rows = []
    for row in sizing.cards:
        cells = [row.name, *map(view.size, (row.usable_bytes, row.device_bytes, row.device_high_bytes)), outcome(row)]
        cells.append(view.size(row.headroom_bytes) if row.headroom_bytes else "")
        largest, safe, with_blocks = largest_texts(row, sizing)
        cells += [largest] * both + [safe] * batches + [with_blocks] * pairs
        cells += [view.size(row.device_compiled_bytes) if row.device_compiled_bytes is not None else ""] * compiled
        cells += [count_text(count) for count in row.counts]
        cells += [price_text(row) if row.price is not None else ""] * priced
        if view.verbose:
            cells += [str(row.bandwidth_gb_s or ""), tflops_text(row.tflops), str(row.tdp_w or "")]
            cells += [str(row.year or ""), row.price_class or ""]
        rows.append(cells)

    def colour(number: int, column: int, text: str) -> str:
        if column != _OUTCOME or number == 0 or sizing.cards[number - 1].slug == sizing.recommended:
            return ""
        return _COLOURS.get(text.removesuffix(f" {_IF}"), "red")

    right = [i for i in range(len(heads)) if i not in (0, _OUTCOME)]
    more = [column for column in range(len(heads) - 1, len(_HEADS) - 1, -1) if not heads[column].startswith("safe ")]
    spare = [*more, *_SPARE]
    lines = columns([heads, *rows], view.style, right, indent="  ", optional=spare, colour=colour)
    slugs = [row.slug for row in sizing.cards]
    lines[0] = view.style.paint(lines[0], "dim")
    if sizing.recommended in slugs:
        at = slugs.index(sizing.recommended) + 1
        lines[at] = view.style.paint(lines[at], "bold")
    return lines


def checkpointing(sizing: Sizing) -> bool:
    """Whether a count is with checkpointed blocks, so that `†` has to be explained."""
    return any(count.checkpointing for row in sizing.cards for count in row.counts)


def outcome(row: CardRow) -> str:
    """`fits`, `tight`, `fits ‡` (on a condition), `with checkpointing`, `short by 3.1 GiB`, or `cannot run it`."""
    if row.obstacle:
        return CANNOT_RUN
    if row.fit in (FITS, TIGHT):
        return f"{row.fit} {_IF}" if row.condition else row.fit
    if row.fit_with_checkpointing == FITS:
        return "with checkpointing"
    return f"short by {PLAIN.size(row.missing_bytes)}"


def remarks(sizing: Sizing) -> list[tuple[str, str]]:
    """Why cards are tight, on which condition cards run the step, and why others cannot: each once, with the names of
    those cards."""
    held = (FITS, TIGHT)
    return [
        *_group_by_text(sizing, lambda row: f"{TIGHT}, {row.why}" if row.fit == TIGHT else ""),
        *_group_by_text(
            sizing, lambda row: f"{_IF} only with {row.condition}" if row.condition and row.fit in held else ""
        ),
        *_group_by_text(sizing, lambda row: f"{CANNOT_RUN}, {row.obstacle}" if row.obstacle else ""),
    ]


def _group_by_text(sizing: Sizing, says: Callable[[CardRow], str]) -> list[tuple[str, str]]:
    """What is said of cards, each text once, with the names of those cards; nothing of those with an empty text."""
    names: dict[str, list[str]] = {}
    for row in sizing.cards:
        text = says(row)
        if text:
            names.setdefault(text, []).append(row.name)
    return [(text, ", ".join(listed)) for text, listed in names.items()]


def refusals(sizing: Sizing) -> list[tuple[str, str, str]]:
    """Why no number of cards is enough for a strategy, where a global batch was asked for: with names of cards."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in sizing.cards if sizing.global_batch is not None else ():
        for count in row.counts:
            if count.devices is None and not row.obstacle:
                names.setdefault((strategy_title(count.strategy), count.why), []).append(row.name)
    return [(title, why, ", ".join(listed)) for (title, why), listed in names.items()]


def strategy_title(name: str) -> str:
    return "accumulation" if name == ACCUMULATE else STRATEGIES[name].title


def count_text(count: Count) -> str:
    """`4`, `8†` (with checkpointing), `-`; of a global batch with the batch of each: `4 x 512`, `256, 8 times`."""
    if count.devices is None:
        return "-"
    mark = "†" if count.checkpointing else ""
    if count.batch is not None and count.strategy == ACCUMULATE:
        times = f"{count.accumulate:,} times" if count.accumulate > 1 else "once"
        return f"{count.batch:,}, {times}{mark}"
    if count.batch is not None:
        return f"{count.devices} x {count.batch:,}{mark}"
    return f"{count.devices}†" if count.checkpointing else str(count.devices)


def grown_name(sizing: Sizing) -> str:
    """What the largest sizes are of: `batch`, or a dimension of the file by its name."""
    return sizing.dim or "batch"


def largest_texts(row: CardRow, sizing: Sizing) -> tuple[str, str, str]:
    """Cells of the largest, the largest safe one, and that with checkpointing."""
    largest, safe, with_blocks = row.largest
    exact = sizing.exact_batches
    return batch_text(largest), batch_text(safe, exact), batch_text(with_blocks, exact)


def batch_text(batch: int | None, exact: bool = True) -> str:
    """`195`; `192+` where it is safe and larger ones may be; `-` where none is."""
    if batch is None:
        return ""
    if not batch:
        return "-"
    return f"{batch}" if exact else f"{batch}+"


def lever_peak(lever: Lever) -> int:
    """Bytes of the memory that levers are compared by."""
    return lever.live_bytes if lever.device_bytes is None else lever.device_bytes


def lever_text(sizing: Sizing, lever: Lever, view: View) -> str:
    """What a lever does, and why it saves less than its tensors."""
    return f"{lever.what}{in_cache(sizing.live_bytes - lever.live_bytes, lever.saved_bytes, view)}"


def levers_meter(sizing: Sizing) -> str:
    """What levers save: `device memory on the L4`, or live memory."""
    return f"device memory on the {sizing.levers_of}" if sizing.levers_of is not None else "live memory"


def price_text(row: CardRow, priced: bool = True) -> str:
    """The user's price; where no card is `priced`, the class."""
    if row.price is None:
        return "" if priced else row.price_class or ""
    parts = []
    if row.price.buy is not None:
        parts.append(f"{row.price.buy:,.0f} {row.price.currency}")
    if row.price.hour is not None:
        parts.append(f"{row.price.hour:g} {row.price.currency}/h")
    return ", ".join(parts) + (f" ({row.price.source})" if row.price.source else "")


def csv_rows(sizing: Sizing) -> Iterator[Sequence[object]]:
    """A header and a row a card."""
    shares = ("batch", "micro_batches") if sizing.global_batch is not None else ()
    counts = [f"{what}_{name}" for what in ("devices", "checkpointing", *shares) for name in sizing.strategies]
    yield [*_FIELDS, *counts, *(f"tflops_{name}" for name in _TYPES), "price_buy", "price_hour", "currency"]
    for row in sizing.cards:
        cells: list[object] = [getattr(row, name) for name in _FIELDS]
        cells += [count.devices for count in row.counts] + [int(count.checkpointing) for count in row.counts]
        if shares:
            cells += [count.batch for count in row.counts] + [count.accumulate for count in row.counts]
        cells += [row.tflops.get(name) for name in _TYPES]
        yield cells + ([None] * 3 if row.price is None else [row.price.buy, row.price.hour, row.price.currency])


FORMATS = (Format("table", "txt", render), csv_format(csv_rows))
