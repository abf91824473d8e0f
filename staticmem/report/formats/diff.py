"""A diff as text for a terminal, and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.report.diff import Change, ReportDiff, TensorChange
from staticmem.report.markdown import code, details, escape, table
from staticmem.report.style import Style
from staticmem.report.verdict import category_name
from staticmem.units import format_bytes

Row = tuple[str, str, str, str]


def headline(d: ReportDiff, units: str = "binary") -> str:
    """`Peak grows by 1.20 GiB (+8.0 %), from 15.00 GiB to 16.20 GiB; no longer fits an L4.`"""
    live = d.live
    assert live.before is not None
    assert live.after is not None
    assert live.delta is not None
    sizes = f"from {format_bytes(live.before, units)} to {format_bytes(live.after, units)}"
    if live.delta == 0:
        text = f"Peak stays at {format_bytes(live.after, units)}"
    else:
        share = f" ({_percent(live)})" if live.before else ""
        verb = "grows" if live.delta > 0 else "shrinks"
        text = f"Peak {verb} by {format_bytes(abs(live.delta), units)}{share}, {sizes}"
    return f"{text}{_fit(d)}."


def _fit(d: ReportDiff) -> str:
    before, after = d.before, d.after
    if before.gpu is None or after.gpu is None or before.gpu != after.gpu or before.fit == after.fit:
        return ""
    if after.fit == "does not fit":
        return f"; no longer fits: {after.gpu}"
    return f"; now {'tight' if after.fit == 'tight' else 'fits'}: {after.gpu}"


def _percent(c: Change) -> str:
    assert c.before
    assert c.delta is not None
    return f"{c.delta / c.before:+.1%}".replace("%", " %")


def _signed(n: int | None, units: str) -> str:
    if n is None:
        return "-"
    return f"{'+' if n > 0 else ''}{format_bytes(n, units)}"


def _row(c: Change, units: str, name: str = "") -> Row:
    def size(n: int | None) -> str:
        return "-" if n is None else format_bytes(n, units)

    share = f"  {_percent(c)}" if c.before and c.delta and abs(c.delta) < 100 * c.before else ""
    return name or c.name, size(c.before), size(c.after), f"{_signed(c.delta, units)}{share}"


def render(d: ReportDiff, style: Style | None = None, units: str = "binary", top: int = 10) -> str:
    """Text with a final newline; the headline is its last line. `top` modules and tensors of each kind."""
    style = style or Style()
    lines: list[str] = []

    def heading(text: str) -> None:
        lines.extend([*([""] if lines else []), style.paint(style.plain(text), "bold")])

    def rows(rows: Sequence[Row]) -> None:
        cells = [tuple(style.plain(cell) for cell in row) for row in rows]
        wide = [max(len(row[i]) for row in cells) for i in range(4)]
        for name, before, after, delta in cells:
            colour = "red" if delta.startswith("+") else "green" if delta.startswith("-") and delta != "-" else ""
            painted = style.paint(delta, *([colour] if colour else []))
            lines.append(f"  {name:<{wide[0]}}  {before:>{wide[1]}}  {after:>{wide[2]}}  {painted}".rstrip())

    heading("Before and after")
    for mark, side in (("-", d.before), ("+", d.after)):
        lines.append(style.plain(f"  {mark} {side.step}: peak in {side.phase}, {side.peak_at or 'nothing allocated'}"))
    if d.settings:
        heading("Settings")
        lines += [style.plain(f"  {name}: {before} -> {after}") for name, before, after in d.settings]
    heading("Memory")
    rows([_row(c, units) for c in (*d.meters, d.parameters) if c.before is not None or c.after is not None])
    if d.categories:
        heading("Categories at the peak")
        rows([_row(c, units, category_name(c.name)) for c in d.categories])
    if d.modules:
        heading(f"Modules at the peak{_more(d.modules, top)}")
        rows([_row(c, units, c.name or "(outside of modules)") for c in d.modules[:top]])
    for title, tensors in (("New", d.new), ("Gone", d.gone), ("Changed", d.changed)):
        if tensors:
            heading(f"{title} tensors at the peak{_more(tensors, top)}")
            rows([_tensor(t, units) for t in tensors[:top]])
    if not d.complete:
        lines += ["", "A saved report lists its largest tensors only: save it with --explain-peak for all of them."]
    lines += ["", style.paint(style.plain(headline(d, units)), "bold")]
    return "\n".join(lines) + "\n"


def _more(rows: Sequence[object], top: int) -> str:
    return f" (and {len(rows) - top:,} more: --top N)" if len(rows) > top else ""


def _tensor(t: TensorChange, units: str) -> Row:
    shapes = [f"[{', '.join(map(str, s))}]" for s in (t.before_shape, t.after_shape) if s is not None]
    shown = shapes[0] if len(set(shapes)) == 1 else " -> ".join(shapes)
    name = f"{t.module}: {t.name}" if t.module and not t.name.startswith(t.module) else t.name
    sides = ((t.before_shape, t.before), (t.after_shape, t.after))
    sizes = ["-" if shape is None else format_bytes(n, units) for shape, n in sides]
    return f"{name}  {shown}", sizes[0], sizes[1], _signed(t.delta, units)


def render_markdown(d: ReportDiff, units: str = "binary", top: int = 10) -> str:
    """Markdown with a final newline: headline first, the meters, the rest folded."""
    heads = ("", "before", "after", "change")
    meters = [_row(c, units) for c in (*d.meters, d.parameters) if c.before is not None or c.after is not None]
    parts = [f"**{escape(headline(d, units))}**", table(heads, meters)]
    parts.append("\n".join(f"- {name}: {code(side.step)}" for name, side in (("before", d.before), ("after", d.after))))
    if d.settings:
        parts.append(table(("setting", "before", "after"), [(code(n), code(b), code(a)) for n, b, a in d.settings]))
    folded = [table(heads, [_row(c, units, category_name(c.name)) for c in d.categories])] if d.categories else []
    if d.modules:
        folded.append(table(heads, [_row(c, units, code(c.name or "(outside of modules)")) for c in d.modules[:top]]))
    for title, tensors in (("New", d.new), ("Gone", d.gone), ("Changed", d.changed)):
        if tensors:
            rows = [(code(row[0]), *row[1:]) for row in (_tensor(t, units) for t in tensors[:top])]
            folded.append(f"{title} tensors at the peak{_more(tensors, top)}\n\n{table(heads, rows)}")
    if folded:
        parts.append(details("Categories, modules, tensors", "\n\n".join(folded)))
    return "\n\n".join(parts) + "\n"
