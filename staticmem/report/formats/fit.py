"""How a step fits a card: the answer, what it gives up and costs, and the settings of each library as they are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from staticmem.errors import UsageError
from staticmem.report.fit import Fit, Way
from staticmem.report.formats import Format
from staticmem.report.formats.report import let_go
from staticmem.report.markdown import code, escape, table
from staticmem.report.model import Band
from staticmem.report.settings import LIBRARIES
from staticmem.report.sweep import CANNOT_RUN, NUMERICS, TRAINING
from staticmem.report.text import PLAIN, Text, View
from staticmem.report.verdict import of_card, with_article, worst_case
from staticmem.scenario.strategies import STRATEGIES, titles
from staticmem.units import three_digits

CHANGES = {NUMERICS: "changes numerics", TRAINING: "changes training"}
_HEADS = ("settings", "file", "needs", "at most", "fit")


def render(result: Fit, view: View = PLAIN) -> str:
    """The answer and what to do next, then what it gives up, its cost, the settings and commands."""
    if view.quiet:
        return view.line(answer(result, view))
    text = Text(view)
    text.answer(answer(result, view), advice(result))
    if result.way.concessions and result.way.fit != CANNOT_RUN:
        text.heading("Against the step as asked" if result.fits else "The nearest that was tried")
        for line in concessions(result):
            text.wrap(line, indent="    ", first="  - ")
    text.heading("A step on one device")
    text.columns([("", title, value) for title, value in costs(result, view)], right=(2,))
    text.add_assumptions(result.assumed)
    let_go(text, result.let_go)
    if result.settings:
        text.heading("Settings")
        text.columns([_HEADS, *rows(result, view)], right=(2, 3))
        for one in result.settings:
            for note in one.notes:
                text.wrap(f"{one.file}: {note}", indent="    ", first="  - ")
        text.heading("Predicted by, and as a gate")
        text.add(f"  {result.way.analyze}")
        text.add(f"  {result.way.check}")
    return text.end()


def answer(result: Fit, view: View = PLAIN) -> str:
    """The sentence that a user came for."""
    way, card, usable = result.way, with_article(result.gpu_name), result.usable_bytes
    if way.fit == CANNOT_RUN:
        return f"Cannot run on {card}: {way.why}."
    only = f" It runs there only with {way.condition}." if way.condition else ""
    on = " on a condition" if only else ""
    needs = f"{how(way, result.samples)} needs {of_card(way.device_bytes, usable, view)}"
    most = worst_case(way.device_bytes, Band(way.device_low_bytes, way.device_high_bytes), usable, view)
    if result.fits:
        return f"Fits {card}{on}: {needs}{most}.{only}"
    if way.fit == "tight":
        return f"Tight on {card}{on}, which is not safe: {needs}{most} ({way.why}).{only}"
    return f"Does not fit {card}: {needs}, {view.size(way.missing_bytes)} short."


def how(way: Way, samples: int) -> str:
    """`batch 512 as 4 micro-batches of 128`, `batch 512 on 4 devices (FSDP2), 128 each`."""
    text = f"batch {samples:,}"
    if way.devices > 1:
        title = f" ({STRATEGIES[way.parallel].title})" if way.parallel is not None else ""
        text += f" on {way.devices:,} devices{title}"
    if way.accumulate > 1:
        return f"{text} as {way.accumulate:,} micro-batches of {way.batch:,}{' each' if way.devices > 1 else ''}"
    return f"{text}, {way.batch:,} each" if way.devices > 1 else text


def advice(result: Fit) -> str:
    """What to do next."""
    if result.fits:
        names = [one.library for one in result.settings]
        listed = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        return f"-f {listed} prints its settings, --write DIR writes all."
    if result.would_fit:
        return f"It would fit with {' '.join(f'--allow {word}' for word in result.would_fit)}."
    if result.way.fit == CANNOT_RUN:
        return "Try another GPU, or the PyTorch that runs it (--torch-version): 'staticmem size' compares them."
    more = "" if result.way.devices > 1 else "more devices (--devices N), or "
    return f"Try {more}another GPU: 'staticmem size' says which hold it."


def concessions(result: Fit) -> Iterator[str]:
    for one in result.way.concessions:
        yield f"{one.what} ({CHANGES[one.changes]})" if one.changes in CHANGES else one.what


def costs(result: Fit, view: View) -> list[tuple[str, str]]:
    """Operations and bytes of a step, as rows of a title and a value."""
    cost, listed = result.cost, [("operations", f"{three_digits(result.cost.operations / 1e12)} TFLOP")]
    if cost.again_operations:
        listed.append(("of them computed again", f"{three_digits(cost.again_operations / 1e12)} TFLOP"))
    if result.way.devices > 1:
        listed.append(("sent to other devices", view.size(cost.sent_bytes)))
    return listed


def rows(result: Fit, view: View) -> list[tuple[str, ...]]:
    """A row for each library's settings."""
    return [
        (one.library, one.file, view.size(one.device_bytes), view.size(one.device_high_bytes), one.fit)
        for one in result.settings
    ]


def render_markdown(result: Fit, view: View = PLAIN) -> str:
    """The answer, what it gives up, the cost, and the settings with their commands and notes."""
    parts = [f"**{escape(answer(result, view))}**", escape(advice(result))]
    if result.way.concessions:
        parts.append("\n".join(f"- {escape(line)}" for line in concessions(result)))
    parts.append(table(["a step on one device", ""], [(escape(a), escape(b)) for a, b in costs(result, view)]))
    parts += [f"- assumed: {escape(text)}" for text in result.assumed]
    if result.settings:
        cells = [(code(a), code(b), *map(escape, more)) for a, b, *more in rows(result, view)]
        parts.append(table(list(_HEADS), cells))
        notes = [f"- {code(one.file)}: {escape(note)}" for one in result.settings for note in one.notes]
        parts += ["\n".join(notes)] if notes else []
        parts.append(f"Predicted by {code(result.way.analyze)}; as a gate: {code(result.way.check)}")
    return "\n\n".join(parts) + "\n"


def settings_text(library: str, result: Fit, view: View = PLAIN) -> str:
    """The text of one library's settings.

    Raises:
        UsageError: there are none.
    """
    for one in result.settings:
        if one.library == library:
            return one.text
    title, strategies = LIBRARIES[library].title, LIBRARIES[library].strategies
    why = f"{answer(result, view)}" if not result.fits else f"Its settings are those of {titles(tuple(strategies))}."
    raise UsageError(f"there are no {title} settings for this", why, advice(result), "SM295")


# the suffixes of the table and of Markdown give those; settings are asked for by name
FORMATS = (
    Format("table", "txt", render),
    Format("md", "md", render_markdown),
    *(Format(name, "", partial(settings_text, name)) for name in LIBRARIES),
)
