"""A record as a table for people."""

from __future__ import annotations

from staticmem.units import format_bytes as in_units
from staticmem.validate.record import Meter, Record


def render(record: Record, units: str = "binary") -> str:
    """Lines of text: what ran, the meters, the worst nodes, notes, and the verdict last."""
    runtime, device = record.runtime, record.device
    lines = [
        f"{_plain(record.model['name'])}  ({runtime['name']} {runtime['version']}, {runtime['provider']})",
        f"  device   {device['kind']}, {_plain(device['name'])}",
    ]
    for name, shape in record.scenario["inputs"].items():
        lines.append(f"  input    {_plain(name)} [{', '.join(str(s) for s in shape)}]")
    lines += [f"  runs     {record.scenario['runs']}", ""]
    rows = [("Meter", "predicted", "measured", "difference", "")]
    rows += [_row(meter, units) for meter in record.meters]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 4)), row[4]]
        lines.append("  ".join(cells).rstrip())
    nodes = record.nodes
    if nodes.compared:
        what = "Ops: live bytes" if runtime["name"] == "torch" else "Nodes: requested bytes"
        lines += ["", f"{what} equal at {nodes.equal:,} of {nodes.compared:,}"]
        for worst in nodes.worst:
            change = f"{worst.measured - worst.predicted:+,} bytes"
            lines.append(f"  run {worst.run}  {worst.op} {_plain(worst.name)}  {change}")
    for text in record.explanations:
        lines += ["", _plain(text)]
    if record.notes:
        lines += ["", "Notes"]
        lines += [f"  - {_plain(note['text'])} [{note['code']}]" for note in record.notes]
    lines += ["", f"Verdict: {record.verdict}."]
    return "\n".join(lines) + "\n"


def _row(meter: Meter, units: str) -> tuple[str, str, str, str, str]:
    predicted = "-"
    if meter.low is not None and meter.high is not None:
        predicted = in_units(meter.low, units)
        if meter.high != meter.low:
            predicted += f" to {in_units(meter.high, units)}"
    measured = "-" if meter.measured is None else in_units(meter.measured, units)
    difference = meter.difference
    shown = "" if difference is None else "0" if difference == 0 else f"{difference:+,} bytes"
    return meter.name, predicted, measured, shown, meter.note


def _plain(text: object) -> str:
    return "".join(c if c.isprintable() else " " for c in str(text))
