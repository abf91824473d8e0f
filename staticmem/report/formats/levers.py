"""Levers as a table for people, in a terminal and in Markdown: what to do, what it saves, what it costs."""

from __future__ import annotations

from staticmem.devices.sizing import Fit
from staticmem.report.formats import Format
from staticmem.report.markdown import code, escape, table
from staticmem.report.sweep import CANNOT_RUN, NUMERICS, TRAINING, LeverRow, Levers, cheapest, need
from staticmem.report.text import PLAIN, Text, View, columns
from staticmem.report.verdict import in_cache

_OF_LIVE = " The budget was compared with live tensors alone; --gpu NAME compares device memory."
_CHANGES = {NUMERICS: "numerics", TRAINING: "training"}


def render(levers: Levers, view: View = PLAIN) -> str:
    """The answer, the table, and for each the command that predicts the step with it."""
    if view.quiet:
        return view.line(verdict(levers, view))
    text, sizes = Text(view), 3 + _moves(levers)
    text.answer(verdict(levers, view))
    optional = (sizes + (levers.gpu is not None), *[2] * _moves(levers))  # what changes, and what moves
    head, *lines = columns(_cells(levers, view), view.style, right=range(sizes), optional=optional)
    text.lines += ["", view.style.paint(head, "bold"), *lines]
    text.add_assumptions(levers.assumed)
    text.heading("Commands", "")
    for row in levers.rows:
        text.add(f"  {row.does}:")
        text.add(f"    {row.command}")
    return text.end()


def render_markdown(levers: Levers, view: View = PLAIN) -> str:
    """The answer, and the table with the command of each lever."""
    heads, base, *rows = [[escape(cell) for cell in row] for row in _cells(levers, view)]
    commands = [code(row.command) for row in levers.rows]
    cells = [[*row, command] for row, command in zip(rows, commands, strict=True)]
    listed = table([*heads, "command"], [[*base, ""], *cells])
    assumed = "".join([f"\n- assumed: {escape(text)}" for text in levers.assumed])
    return f"**{escape(verdict(levers, view))}**\n\n{listed}\n{assumed}{chr(10) * bool(assumed)}"


def _cells(levers: Levers, view: View) -> list[list[str]]:
    """The heads, the step as it was asked for, and a row for each lever."""
    fit, moves = levers.gpu is not None, _moves(levers)
    heads = ["saves", "compute", *["moves"] * moves, "peak", *["fit"] * fit, "changes", "do"]
    base = ["", "", *[""] * moves, _peak(levers.base, view), *[levers.base.fit or ""] * fit, "", "(as asked)"]
    rows = []
    for row in levers.rows:
        changes = _CHANGES.get(row.changes, "-")
        moved = view.size(row.moved_bytes) if row.moved_bytes else "-"
        sizes = (_saved(row, view), _compute(row), *[moved] * moves, _peak(row, view))
        cached = in_cache(levers.base.live_bytes - row.live_bytes, row.saved_bytes, view)
        rows.append([*sizes, *[row.fit or ""] * fit, changes, f"{row.does}{cached}"])
    return [heads, base, *rows]


def _moves(levers: Levers) -> bool:
    """Whether a lever moves bytes between the GPU and the CPU in each step."""
    return any(row.moved_bytes for row in levers.rows)


def _saved(row: LeverRow, view: View) -> str:
    return f"{'-' if row.saved_bytes > 0 else '+'}{view.size(abs(row.saved_bytes))}"


def _compute(row: LeverRow) -> str:
    return f"{row.compute:+.0%}" if round(row.compute, 2) else "0%"


def _costs(row: LeverRow, view: View) -> list[str]:
    moved = [f"{view.size(row.moved_bytes)} over the bus a step"] if row.moved_bytes else []
    return [f"{_compute(row)} compute"] * bool(round(row.compute, 2)) + moved


def _peak(row: LeverRow, view: View) -> str:
    return view.size(row.live_bytes if row.device_bytes is None else row.device_bytes)


def verdict(levers: Levers, view: View = PLAIN) -> str:
    """The one line: the cheapest lever within the budget, else the one that saves most."""
    where = "on the device" if levers.gpu else "in live tensors"
    base = f"As asked it needs {_peak(levers.base, view)} {where}{_standing(levers, view)}"
    if levers.base.fit == CANNOT_RUN and not levers.rows:
        return f"{base}. No lever makes it run."
    if levers.budget_bytes is not None:
        limit = view.size(levers.budget_bytes)
        if need(levers.base) <= levers.budget_bytes:
            return f"{base}. That is within {limit} without a change.{'' if levers.gpu else _OF_LIVE}"
        best = cheapest(levers)
        if best is None:
            return f"{base}. No lever alone brings it within {limit}."
        cost = " and ".join(_costs(best, view)) or "no more compute"
        changed = "" if best.changes not in _CHANGES else f", changes {_CHANGES[best.changes]}"
        return f"{base}. The cheapest way to {limit}: {best.does} ({_peak(best, view)}, {cost}{changed})."
    if not levers.rows or levers.rows[0].saved_bytes <= 0:
        return f"{base}. No lever saves anything."
    best = next((row for row in levers.rows if row.changes not in _CHANGES), levers.rows[0])
    saved = view.size(max(best.saved_bytes, 0))
    cost = f" at {' and '.join(_costs(best, view))}" if _costs(best, view) else ""
    which = "Most is saved by" if best.changes in _CHANGES else "With the same result most is saved by"
    changed = f" (changes {_CHANGES[best.changes]})" if best.changes in _CHANGES else ""
    return f"{base}. {which}: {best.does}, {saved}{cost}{changed}."


def _standing(levers: Levers, view: View) -> str:
    """The verdict on the step as asked, behind its need."""
    fit = levers.base.fit
    if fit == CANNOT_RUN:
        return f"; {levers.gpu} cannot run it: {levers.why}"
    condition = f", only with {levers.condition}" if levers.condition else ""
    if fit == Fit.DOES_NOT_FIT.value:
        return f" ({fit}, {view.size(levers.missing_bytes)} short{condition})"
    return f" ({fit}{f': {levers.why}' if levers.why else ''}{condition})" if levers.why or condition else ""


FORMATS = (Format("table", "txt", render), Format("md", "md", render_markdown))
