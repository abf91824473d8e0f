"""A record as a table for people."""

from __future__ import annotations

from staticmem.report.formats import Format
from staticmem.report.text import PLAIN, View, columns, printable
from staticmem.validate.record import Meter, Record


def render(record: Record, view: View = PLAIN) -> str:
    """Lines of text: what ran, the meters, the worst nodes, notes, and the verdict last."""
    verdict = f"Verdict: {record.verdict}."
    if view.quiet:
        return view.line(verdict)
    runtime, device = record.runtime, record.device
    lines = [
        f"{printable(record.model['name'])}  ({runtime['name']} {runtime['version']}, {runtime['provider']})",
        f"  device   {device['kind']}, {printable(device['name'])}",
    ]
    for name, shape in record.scenario["inputs"].items():
        lines.append(f"  input    {printable(name)} [{', '.join(str(s) for s in shape)}]")
    lines += [f"  runs     {record.scenario['runs']}", ""]
    rows = [("Meter", "predicted", "measured", "difference", ""), *[_row(meter, view) for meter in record.meters]]
    lines += columns(rows, view.style, right=(1, 2, 3))
    nodes = record.nodes
    if nodes.compared:
        what = "Ops: live bytes" if runtime["name"] == "torch" else "Nodes: requested bytes"
        lines += ["", f"{what} equal at {nodes.equal:,} of {nodes.compared:,}"]
        for worst in nodes.worst:
            change = f"{worst.measured - worst.predicted:+,} bytes"
            lines.append(f"  run {worst.run}  {worst.op} {printable(worst.name)}  {change}")
    for text in record.explanations:
        lines += ["", printable(text)]
    if record.notes:
        lines += ["", "Notes"]
        lines += [f"  - {printable(note['text'])} [{note['code']}]" for note in record.notes]
    return "\n".join([*lines, "", verdict]) + "\n"


def _row(meter: Meter, view: View) -> tuple[str, str, str, str, str]:
    predicted = "-"
    if meter.low is not None and meter.high is not None:
        predicted = view.size(meter.low)
        if meter.high != meter.low:
            predicted += f" to {view.size(meter.high)}"
    measured = "-" if meter.measured is None else view.size(meter.measured)
    difference = meter.difference
    shown = "" if difference is None else "0" if difference == 0 else f"{difference:+,} bytes"
    return meter.name, predicted, measured, shown, meter.note


def _json(record: Record, view: View) -> str:
    return record.dumps()


FORMATS = (Format("table", "txt", render), Format("json", "json", _json))
