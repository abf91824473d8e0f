"""Levers as a table for people: what to do, what it saves, what it costs."""

from __future__ import annotations

from staticmem.report.style import Style
from staticmem.report.sweep import NUMERICS, TRAINING, LeverRow, Levers, cheapest
from staticmem.units import format_bytes

_CHANGES = {NUMERICS: "numerics", TRAINING: "training"}


def render(found: Levers, style: Style, units: str = "binary") -> str:
    """The table, what to add to the command line for each, and the answer as the last line."""
    header = ["saves", "compute", "peak", *(["fit"] if found.gpu else []), "changes", "do"]
    base = ["", "", _peak(found.base, units), *([found.base.fit or ""] if found.gpu else []), "", "(as asked)"]
    cells = [header, base, *(_cells(found, row, units) for row in found.rows)]
    widths = [max(len(style.plain(row[i])) for row in cells) for i in range(len(header))]
    lines = []
    for number, row in enumerate(cells):
        left = [i >= 3 for i in range(len(row))]
        text = "  ".join(
            style.plain(cell).ljust(width) if is_left else style.plain(cell).rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        lines.append(style.paint(text, "bold") if number == 0 else text)
    lines += ["", "Flags"]
    lines += [style.plain(f"  {row.does}: {row.flags}") for row in found.rows if row.flags]
    lines += ["", style.paint(style.plain(verdict(found, units)), "bold")]
    return "\n".join(lines) + "\n"


def _cells(found: Levers, row: LeverRow, units: str) -> list[str]:
    saved = f"{'-' if row.saved_bytes > 0 else '+'}{format_bytes(abs(row.saved_bytes), units)}"
    compute = f"{row.compute:+.0%}" if round(row.compute, 2) else "0%"
    fit = [row.fit or ""] if found.gpu else []
    return [saved, compute, _peak(row, units), *fit, _CHANGES.get(row.changes, "-"), row.does]


def _peak(row: LeverRow, units: str) -> str:
    return format_bytes(row.live_bytes if row.device_bytes is None else row.device_bytes, units)


def verdict(found: Levers, units: str = "binary") -> str:
    """The one line: the cheapest lever within the budget, else the one that saves most."""
    meter = "on the device" if found.gpu else "live tensor memory"
    base = f"{_peak(found.base, units)} {meter} as asked"
    if found.budget_bytes is not None:
        limit = format_bytes(found.budget_bytes, units)
        need = found.base.live_bytes if found.base.device_bytes is None else found.base.device_bytes
        if need <= found.budget_bytes:
            return f"{base}, which is within {limit} without a change."
        best = cheapest(found)
        if best is None:
            return f"{base}; no lever alone brings it within {limit}."
        cost = f"{best.compute:+.0%} compute" if round(best.compute, 2) else "no more compute"
        changed = "" if best.changes not in _CHANGES else f", changes {_CHANGES[best.changes]}"
        return f"{base}; within {limit} at least cost: {best.does} ({_peak(best, units)}, {cost}{changed})."
    if not found.rows or found.rows[0].saved_bytes <= 0:
        return f"{base}; no lever saves anything."
    best = next((row for row in found.rows if row.changes not in _CHANGES), found.rows[0])
    saved = format_bytes(max(best.saved_bytes, 0), units)
    cost = f" at {best.compute:+.0%} compute" if round(best.compute, 2) else ""
    which = "what saves most" if best.changes in _CHANGES else "what saves most with the same result"
    changed = f" (changes {_CHANGES[best.changes]})" if best.changes in _CHANGES else ""
    return f"{base}; {which}: {best.does}, {saved}{cost}{changed}."
