"""A sweep as a table for people, in a terminal and in Markdown, and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from staticmem.frontends.architectures import model_name
from staticmem.report.formats import Format, csv_format
from staticmem.report.markdown import escape, table
from staticmem.report.model import CATEGORIES, LargestBatch
from staticmem.report.sweep import CANNOT_RUN, MAY_FIT, CardFit, Sweep, SweepRow
from staticmem.report.text import PLAIN, Text, View, columns
from staticmem.report.verdict import of_card

_COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red", "may fit": "dim"}
_LEFT = ("name", "model", "phase", "fit")
_FIGURES = """
    fit allocated_bytes reserved_bytes device_bytes device_low_bytes device_high_bytes headroom_bytes missing_bytes
    obstacle why condition least_usable_bytes
""".split()
_LARGEST = "batch device_bytes next_device_bytes safe_batch live_batch".split()
_LARGEST_DIM = "dim size device_bytes next_size next_device_bytes safe_size live_size".split()


def render(sweep: Sweep, view: View = PLAIN) -> str:
    """What it comes to, the table, and errors below it."""
    if view.quiet:
        return view.line(verdict(sweep, view))
    text, style, (heads, *rows) = Text(view), view.style, cells_of(sweep, view)
    text.answer(verdict(sweep, view))
    right = [i for i, name in enumerate(heads) if not name.startswith(_LEFT)]
    head, *lines = columns(
        [heads, *rows], style, right, optional=[heads.index("phase"), heads.index("live")], colour=_colour
    )
    text.lines += ["", style.paint(head, "bold"), *lines]
    for row in sweep.rows:
        if row.error is not None:
            text.wrap(f"{row.index + 1}: {row.error.what}. {row.error.why} [{row.error.code}]", "    ", "  ")
    text.add_assumptions(sweep.assumed)
    return text.end()


def render_markdown(sweep: Sweep, view: View = PLAIN) -> str:
    """What it comes to, and the table."""
    heads, *rows = [[escape(cell) for cell in row] for row in cells_of(sweep, view)]
    assumed = "".join(f"\n- assumed: {escape(one)}" for one in sweep.assumed)
    return f"**{escape(verdict(sweep, view))}**\n\n{table(heads, rows)}\n{assumed}{chr(10) * bool(assumed)}"


def _colour(row: int, column: int, text: str) -> str:
    return _COLOURS.get(text.split(",")[0].strip(), "") if row else ""


def cells_of(sweep: Sweep, view: View) -> Iterator[list[str]]:
    """The header, then a row for each configuration."""
    named, several = any(row.name for row in sweep.rows), len(sweep.models) > 1
    axes = [axis for axis in sweep.axes if axis != "model"]
    device = "device" in sweep.meters
    heads = ["#", *["name"] * named, *["model"] * several, *axes, "live", "phase"]
    largest = largest_name(sweep)
    for gpu in sweep.gpus:
        heads += [gpu, "fit"] if device else [f"fit {gpu}"]
        heads += [f"max {view.style.plain(largest)}", "safe"] if largest else []
    yield heads
    for row in sweep.rows:
        cells = [str(row.index + 1), *[row.name or ""] * named, *[model_name(row.model)] * several]
        cells += [setting(row, axis) for axis in axes]
        analysed = row.error is None and row.live_bytes is not None
        cells += [view.size(row.live_bytes or 0), row.phase or ""] if analysed else ["error", ""]
        for card in row.cards:
            if device:
                cells += ["" if card.device_bytes is None else view.size(card.device_bytes), fit_text(card, view)]
            else:
                cells.append(card.fit)
            if largest:
                cells += _largest(card)
        yield [*cells, *[""] * (len(heads) - len(cells))]


def largest_name(sweep: Sweep) -> str:
    """What the largest size of was asked for: `batch`, or the name of a dimension; empty for nothing."""
    dims = (card.largest.dim for row in sweep.rows for card in row.cards if card.largest is not None)
    return next(dims, "")


def _largest(card: CardFit) -> list[str]:
    """The largest size and the largest safe one; nothing for a card that cannot run the step."""
    return ["", ""] if card.largest is None else [str(card.largest.size), str(card.largest.safe_size)]


def setting(row: SweepRow, axis: str) -> str:
    value = row.settings.get(axis, "-")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def fit_text(card: CardFit, view: View) -> str:
    """`fits, 3.10 GiB left`, with `‡` behind it on a condition, `does not fit, 1.20 GiB short`, or `cannot run it`."""
    if card.obstacle:
        return card.fit
    if card.condition and not card.missing_bytes:
        return f"{card.fit}, {view.size(card.headroom_bytes)} left ‡"
    if card.missing_bytes:
        return f"{card.fit}, {view.size(card.missing_bytes)} short"
    return f"{card.fit}, {view.size(card.headroom_bytes)} left"


def verdict(sweep: Sweep, view: View = PLAIN) -> str:
    """The one line that a user came for: on each card how many fit, and the largest that does; or the largest batch."""
    count = len(sweep.rows)
    failed = sum(row.error is not None for row in sweep.rows)
    parts = [f"{count:,} configuration{'s' if count != 1 else ''}"]
    if failed:
        parts.append(f"{failed:,} could not be analysed")
    good = [row for row in sweep.rows if row.live_bytes is not None]
    if good and not sweep.gpus:
        peaks = [_live(row) for row in good]
        parts.append(f"live peaks from {view.size(min(peaks))} to {view.size(max(peaks))}")
    sentence = ", ".join(parts)
    for number, gpu in enumerate(sweep.gpus):
        cards = [(row, row.cards[number]) for row in good]
        largest = [(row, card.max_batch) for row, card in cards if card.max_batch is not None]
        sentence += _batches(sweep, gpu, largest) if largest else _fitting(sweep, gpu, cards, view)
    return sentence + "."


def _batches(sweep: Sweep, gpu: str, rows: Sequence[tuple[SweepRow, LargestBatch]]) -> str:
    """What `--max-batch` found on a card: the configuration with the largest safe batch."""
    row, largest = max(rows, key=lambda pair: (pair[1].safe_batch, pair[1].batch))
    which = f" ({describe(sweep, row)})" if len(rows) > 1 else ""
    safe = f"{largest.safe_batch:,} safe" if largest.safe_batch else "none safe"
    return (
        f"; the largest batch on {gpu} is {largest.batch:,}, {safe}{which}" if largest.batch else f"; none fits {gpu}"
    )


def _fitting(sweep: Sweep, gpu: str, cards: Sequence[tuple[SweepRow, CardFit]], view: View) -> str:
    """How many fit a card, the largest of them, and how many are tight, which is not to fit."""
    word = "fits" if "device" in sweep.meters else MAY_FIT
    fitting = [(row, card) for row, card in cards if card.fit == word]
    verb = "fit" if word == "fits" and len(fitting) > 1 else word
    tight = sum(card.fit == "tight" for _, card in cards)
    also = f", {tight:,} {'is' if tight == 1 else 'are'} tight" if tight else ""
    if tight:
        whys = dict.fromkeys(card.why for _, card in cards if card.fit == "tight" and card.why)
        also += f" ({'; '.join(whys)})" if whys else ""
    conditions = dict.fromkeys(card.condition for _, card in cards if card.condition and card.fit in (word, "tight"))
    also += f" (‡ only with {'; or '.join(conditions)})" if conditions else ""
    unable = [card for _, card in cards if card.fit == CANNOT_RUN]
    also += f"; {gpu} cannot run {len(unable):,} of them ({unable[0].obstacle})" if unable else ""
    if not fitting:
        return f"; none fits {gpu}{also}"
    row, card = max(fitting, key=lambda pair: (pair[1].device_bytes or 0, _live(pair[0])))
    need = card.device_bytes if card.device_bytes is not None else row.live_bytes or 0
    uses = of_card(need, card.usable_bytes, view)
    return f"; {len(fitting):,} {verb} {gpu}, the largest with {uses} ({describe(sweep, row)}){also}"


def describe(sweep: Sweep, row: SweepRow) -> str:
    """`batch 64, adam`: what tells a row from the others."""
    if row.name:
        return row.name
    parts = []
    for axis in sweep.axes:
        value = model_name(row.model) if axis == "model" else setting(row, axis)
        parts.append(value if axis in ("model", "optimizer", "mode") else f"{axis} {value}")
    return ", ".join(parts) or model_name(row.model)


def _live(row: SweepRow) -> int:
    return row.live_bytes or 0


def csv_rows(sweep: Sweep) -> Iterator[Sequence[object]]:
    """A header and a row for each configuration; columns of cards have their name in brackets."""
    settings = list(dict.fromkeys(name for row in sweep.rows for name in row.settings if name != "mode"))
    categories = list(dict.fromkeys((*CATEGORIES, *(name for row in sweep.rows for name in row.by_category))))
    heads = ["index", "name", "model", "mode", *settings, "live_bytes", "phase", *(f"{c}_bytes" for c in categories)]
    heads += ["forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes", "method"]
    name = largest_name(sweep)
    largest = _LARGEST_DIM if name else []
    if name == "batch":
        largest = _LARGEST
    prefix = "max_batch" if name == "batch" else "max_dim"
    for gpu in sweep.gpus:
        heads += [f"{name}[{gpu}]" for name in _FIGURES]
        heads += [f"{prefix}[{gpu}]" if field == "batch" else f"{prefix}_{field}[{gpu}]" for field in largest]
    yield [*heads, "error"]
    for row in sweep.rows:
        cells: list[object] = [row.index, row.name, row.model, row.mode, *(row.settings.get(s) for s in settings)]
        cells += [row.live_bytes, row.phase, *(row.by_category.get(c) for c in categories)]
        cells += [row.forward_peak_bytes, row.backward_peak_bytes, row.optimizer_peak_bytes, row.method]
        for number in range(len(sweep.gpus)):
            card = row.cards[number] if row.cards else None
            cells += [getattr(card, name, None) for name in _FIGURES]
            cells += [getattr(getattr(card, prefix, None), field, None) for field in largest]
        yield [*cells, None if row.error is None else f"{row.error.what} [{row.error.code}]"]


FORMATS = (Format("table", "txt", render), csv_format(csv_rows), Format("md", "md", render_markdown))
