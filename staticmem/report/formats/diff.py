"""A diff as text for a terminal, and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.report.diff import Change, ReportDiff, TensorChange
from staticmem.report.formats import Format
from staticmem.report.markdown import code, details, escape, table
from staticmem.report.sweep import CANNOT_RUN
from staticmem.report.text import PLAIN, Text, View, columns
from staticmem.report.verdict import category_name, shape_text, tensor_name

Row = tuple[str, str, str, str]
TOP = 10  # modules, and tensors of each kind
INCOMPLETE = (
    "Tensors are not compared: a saved report lists its largest only. Save it with --explain-peak for all of them."
)


def headline(d: ReportDiff, view: View = PLAIN) -> str:
    """`Peak grows by 1.20 GiB (+8.0 %), from 15.00 GiB to 16.20 GiB; no longer fits an L4.`"""
    live = d.live
    assert live.before is not None
    assert live.after is not None
    assert live.delta is not None
    share = f" ({_percent(live)})" if live.before else ""
    return f"Peak {change_text(live.before, live.after, view, share)}{_fit(d)}."


def change_text(before: int, after: int, view: View, share: str = "") -> str:
    """`grows by 1.20 GiB, from 15.00 GiB to 16.20 GiB`: what a number of bytes does; `share` stands behind the change,
    and sizes that look the same are told once."""
    if after == before:
        return f"stays at {view.size(after)}"
    verb = "grows" if after > before else "shrinks"
    start, end = view.size(before), view.size(after)
    return f"{verb} by {view.size(abs(after - before))}{share}, from {start}{f' to {end}' * (end != start)}"


def _fit(d: ReportDiff) -> str:
    before, after = d.before, d.after
    if before.gpu is None or after.gpu is None or before.gpu != after.gpu or before.fit == after.fit:
        return ""
    if after.fit == CANNOT_RUN:
        return f"; now it cannot run on: {after.gpu}"
    if after.fit == "does not fit":
        return f"; no longer fits: {after.gpu}"
    return f"; now {'tight' if after.fit == 'tight' else 'fits'}: {after.gpu}"


def _percent(c: Change) -> str:
    assert c.before
    assert c.delta is not None
    return f"{c.delta / c.before:+.1%}".replace("%", " %")


def _signed(n: int | None, view: View) -> str:
    return "-" if n is None else f"{'+' if n > 0 else ''}{view.size(n)}"


def _size(n: int | None, view: View) -> str:
    return "-" if n is None else view.size(n)


def _row(c: Change, view: View, name: str = "") -> Row:
    share = f"  {_percent(c)}" if c.before and c.delta and abs(c.delta) < 100 * c.before else ""
    return name or c.name, _size(c.before, view), _size(c.after, view), f"{_signed(c.delta, view)}{share}"


def meter_rows(d: ReportDiff, view: View) -> list[Row]:
    return [_row(c, view) for c in (*d.meters, d.parameters) if c.before is not None or c.after is not None]


def _tensor(t: TensorChange, view: View) -> Row:
    shapes = [shape_text(t.dtype, s) for s in (t.before_shape, t.after_shape) if s is not None]
    change = shapes[0] if len(set(shapes)) == 1 else " -> ".join(shapes)
    before = None if t.before_shape is None else t.before
    after = None if t.after_shape is None else t.after
    name = f"{tensor_name(t.module, t.name)}  {change}"
    return name, _size(before, view), _size(after, view), _signed(t.delta, view)


def sections(d: ReportDiff, view: View) -> list[tuple[str, list[Row]]]:
    """What changed beside the meters: a title and its rows."""
    top = view.top or TOP
    parts = [("Categories at the peak", [_row(c, view, category_name(c.name)) for c in d.categories])]
    modules = [_row(c, view, c.name or "(outside of modules)") for c in d.modules[:top]]
    parts.append((f"Modules at the peak{_more(d.modules, top)}", modules))
    for title, tensors in (("New", d.new), ("Gone", d.gone), ("Changed", d.changed)):
        rows = [_tensor(t, view) for t in tensors[:top]]
        parts.append((f"{title} tensors at the peak{_more(tensors, top)}", rows))
    return [(title, rows) for title, rows in parts if rows]


def _more(rows: Sequence[object], top: int) -> str:
    return f" (and {len(rows) - top:,} more: --top N)" if len(rows) > top else ""


def render(d: ReportDiff, view: View = PLAIN) -> str:
    """Text with a final newline; the headline comes first."""
    if view.quiet:
        return view.line(headline(d, view))
    text = Text(view)
    text.answer(headline(d, view))
    text.heading("Before and after")
    for mark, side in (("-", d.before), ("+", d.after)):
        text.add(f"  {mark} {side.step}: peak in {side.phase}, {side.peak_at or 'nothing allocated'}")
    if d.settings:
        text.heading("Settings")
        for name, before, after in d.settings:
            text.add(f"  {name}: {before} -> {after}")
    for title, rows in (("Memory", meter_rows(d, view)), *sections(d, view)):
        text.heading(title)
        text.lines += columns(rows, view.style, right=(1, 2), indent="  ", colour=_colour)
    if not d.complete:
        text.lines.append("")
        text.add(INCOMPLETE)
    return text.end()


def _colour(row: int, column: int, text: str) -> str:
    if column != 3 or text == "-":
        return ""
    return {"+": "red", "-": "green"}.get(text[:1], "")


def render_markdown(d: ReportDiff, view: View = PLAIN) -> str:
    """Markdown with a final newline: headline first, the meters, the rest folded."""
    heads = ("", "before", "after", "change")
    parts = [f"**{escape(headline(d, view))}**", table(heads, meter_rows(d, view))]
    parts.append("\n".join(f"- {name}: {code(side.step)}" for name, side in (("before", d.before), ("after", d.after))))
    if d.settings:
        parts.append(table(("setting", "before", "after"), [(code(n), code(b), code(a)) for n, b, a in d.settings]))
    folded = []
    for title, rows in sections(d, view):
        named = rows if title.startswith("Categories") else [(code(row[0]), *row[1:]) for row in rows]
        folded.append(f"{title}\n\n{table(heads, named)}")
    if folded:
        parts.append(details("Categories, modules, tensors", "\n\n".join(folded)))
    if not d.complete:
        parts.append(escape(INCOMPLETE))
    return "\n\n".join(parts) + "\n"


FORMATS = (Format("table", "txt", render), Format("md", "md", render_markdown))
