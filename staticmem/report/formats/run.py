"""The memory of a run as a table for people, in a terminal and in Markdown, and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from staticmem.report.formats import Format, csv_format
from staticmem.report.markdown import escape, table
from staticmem.report.run import InstantReport, LargestLengths, LengthsInfo, RunReport
from staticmem.report.text import PLAIN, Text, View, columns
from staticmem.report.verdict import fit_lines, host_lines, plural, returned_text, with_article, worst_case

RUNS_OUT = "runs out"


def render(run: RunReport, view: View = PLAIN) -> str:
    """The answer, a line for each instant, and what makes the run fit."""
    answer, *reasons = verdict_lines(run, view)
    if view.quiet:
        return view.line(answer)
    text = Text(view)
    text.answer(answer, *reasons)
    head, *lines = columns(list(_cells(run, view)), view.style, right=range(2, 7), optional=(6, 5))
    text.lines += ["", view.style.paint(head, "bold"), *lines]
    for note in notes_of(run, view):
        text.lines.append("")
        text.wrap(note)
    if run.host is not None:
        text.lines.append("")
        text.wrap(f"Host: {host_lines(run.host, view)[0]}.")
    if run.changes:
        text.heading("Fits with")
        for change in run.changes:
            text.add(f"  {change.does}: {view.size(change.device_bytes)}")
    text.add_assumptions(run.assumed)
    return text.end()


def render_markdown(run: RunReport, view: View = PLAIN) -> str:
    """The answer, and the table of instants."""
    answer = escape(" ".join(verdict_lines(run, view)))
    heads, *rows = [[escape(cell) for cell in row] for row in _cells(run, view)]
    changes = "".join(f"\n- fits with {escape(one.does)}: {view.size(one.device_bytes)}" for one in run.changes)
    assumed = "".join(f"\n- assumed: {escape(one)}" for one in run.assumed)
    many = "".join(f"\n- {escape(note)}" for note in notes_of(run, view))
    return f"**{answer}**\n\n{table(heads, rows)}\n{many}{changes}{assumed}\n"


def verdict_lines(run: RunReport, view: View) -> list[str]:
    """Whether the run fits and what it needs, then where: a sentence each."""
    out = next((one for one in run.instants if one.runs_out), None)
    where = f"It needs the most in '{run.peak}'"
    if out is not None:
        after = f" after {plural(out.ran, 'step')}" if out.ran and out.times > 1 else ""
        where = f"It runs out of memory in '{out.name}'{after}"
    where += f", which took less before '{run.cause}'." if run.cause else "."
    if run.gpu is None:
        most = worst_case(run.device_bytes, run.device, None, view)
        need = (
            f"Needs {view.size(run.device_bytes)} of GPU memory{most}, on {with_article(run.card)}, which is assumed."
        )
        return [need, where]
    freed = returned_text(run, view, "the run")
    return [*fit_lines(run.gpu, run.device_bytes, run.device, view, freed), where]


def notes_of(run: RunReport, view: View) -> Iterator[str]:
    """What there is to say of instants beside their figures."""
    for one in run.instants:
        if one.lengths is not None:
            yield lengths_text(one, one.lengths, view)
        if one.full_after:
            full = f"which is full after about {one.full_after:,} batches"
            yield f"'{one.name}' keeps what it gathers on the GPU, {full}."
    if run.largest is not None:
        yield largest_text(run.largest, view)


def largest_text(largest: LargestLengths, view: View) -> str:
    """The largest token budget, or batch, and what is the worst with it."""
    of = "token budget" if largest.of == "tokens" else largest.of
    if not largest.size:
        return f"Not even a {of} of {largest.fails_at:,} fits."
    fails = f", and {largest.fails_at:,} does not" if largest.fails_at else ""
    worst = f"The longest batch is {largest.worst_batch:,} x {largest.worst_length:,}, and the run meets a sample as"
    worst += f" long with a probability of {100 * largest.worst_chance:.3g} % (seed {largest.seed})."
    most = view.size(largest.device_high_bytes)
    return f"The largest {of} that fits is {largest.size:,}, with at most {most}{fails}. {worst}"


def lengths_text(one: InstantReport, lengths: LengthsInfo, view: View) -> str:
    """What there is to say of the lengths of an instant."""
    steps = f"'{one.name}': {lengths.dim} of {lengths.least:,} to {lengths.most:,} (median {lengths.median:,})"
    reached = f"reserved memory reaches {view.size(lengths.reserved_bytes)}"
    when = f"in step {lengths.settled_after:,} of {one.times:,}"
    worst = f"{lengths.worst_batch:,} x {lengths.worst_length:,}, the longest batch that the data allow"
    worst += f"; a run of {one.times:,} meets one as long with a probability of {100 * lengths.worst_chance:.3g} %"
    ran = f"{lengths.shapes_run:,} of {lengths.shapes:,} shapes were run"
    if lengths.rounds_up:
        ran += "; the others have the steps of larger ones"
    elif lengths.rounded_bytes:
        ran += f"; in the others tensors of at most {view.size(lengths.rounded_bytes)} are as in larger ones"
    return f"{steps}; {reached} {when}. Two more steps have {worst}. {ran}."


def _cells(run: RunReport, view: View) -> Iterator[list[str]]:
    yield ["instant", "model", "live", "device", "at most", "left", "cached", ""]
    for one, status in with_status(run):
        sizes = [one.live_bytes, one.device_bytes, one.device_high_bytes, one.left_bytes, one.cached_bytes]
        name = f"{one.name} x {one.times}" if one.times > 1 else one.name
        yield [name, one.model, *map(view.size, sizes), status]


def with_status(run: RunReport) -> Iterator[tuple[InstantReport, str]]:
    """The instants, and what becomes of each on a card that has not enough memory."""
    is_over = False
    for one in run.instants:
        if one.runs_out:
            is_over = True
            yield one, RUNS_OUT
        else:
            yield one, "not reached" if is_over else ""


def csv_rows(run: RunReport) -> Iterator[Sequence[object]]:
    """A header and a row for each instant."""
    names = [field.name for field in fields(InstantReport) if field.name != "lengths"]
    yield names
    for one in run.instants:
        yield [getattr(one, name) for name in names]


FORMATS = (Format("table", "txt", render), csv_format(csv_rows), Format("md", "md", render_markdown))
