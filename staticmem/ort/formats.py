"""The report of a session of the ONNX Runtime for a terminal; the verdict comes first."""

from __future__ import annotations

from staticmem.frontends.architectures import model_name
from staticmem.ort.report import SessionBand, SessionReport
from staticmem.report.formats import JSON, Format
from staticmem.report.formats.report import note_list
from staticmem.report.model import Band
from staticmem.report.text import PLAIN, Text, View
from staticmem.report.verdict import fit_lines, shape_text, with_article, worst_case

_NAMES = {
    "weights": "weights in the arena",
    "packed_weights": "packed copies of weights",
    "pattern_block": "block of the memory pattern",
    "tensors": "tensors beside the block",
    "cached": "held in reserve",
    "weights_outside": "weights outside the arena",
    "inputs": "inputs",
    "context": "CUDA context",
    "libraries": "libraries",
}


def render(report: SessionReport, view: View = PLAIN) -> str:
    """The report as text with a final newline."""
    if view.quiet:
        return view.line(verdict(report, view))
    text = Text(view)
    text.answer(*verdict_lines(report, view))
    _model(text, report)
    text.heading("Meters")
    text.columns(_meters(report, view), right=(1,))
    text.heading("What it is made of")
    text.columns([(_NAMES[n], view.size(b), "") for n, b in report.peak.by_category.items() if b], right=(1,))
    if report.top_nodes:
        text.heading("Nodes at which most is requested (first run)")
        text.columns([(f"{n.op} {n.name}", view.size(n.requested_bytes), "") for n in report.top_nodes], right=(1,))
    if report.assumptions:
        note_list(text, "Assumptions", report.assumptions)
    if report.warnings:
        note_list(text, "Warnings", report.warnings, heading="yellow")
    return text.end()


def verdict(report: SessionReport, view: View = PLAIN) -> str:
    """The answer on one line, with the session that it is of."""
    answer, *more = verdict_lines(report, view)
    return " ".join([f"{answer.removesuffix('.')} ({_session_name(report)}).", *more])


def verdict_lines(report: SessionReport, view: View = PLAIN) -> list[str]:
    """Whether the session fits, and what it needs; then what its tensors and its arena take."""
    peak, gpu = report.peak, report.gpu
    where = f" at {peak.at_op} {peak.at_node}" if peak.at_node else ""
    held = view.size(peak.held_bytes)
    tensors = f"Its tensors peak at {view.size(peak.tensors_bytes)}{where}, its arena holds {held}."
    if peak.host_bytes is not None:
        return [f"Needs {view.size(peak.host_bytes)} of main memory with weights and inputs.", tensors]
    need, bounds = peak.device_bytes or 0, peak.bands.get("device")
    band = Band(bounds.low, bounds.high) if bounds is not None and bounds.high is not None else None
    bound = "Nothing bounds its need from above, and it" if bounds is not None and band is None else "This"
    if gpu is not None:
        answer, *reasons = fit_lines(gpu, need, band, view)
    else:
        most = worst_case(need, band, None, view)
        answer, reasons = f"Needs {view.size(need)} of GPU memory{most}, on {with_article(str(report.device))}.", []
    return [answer, *reasons, f"{bound} was not compared with a GPU.", tensors]


def _session_name(report: SessionReport) -> str:
    """`ONNX Runtime (CUDA), model.onnx, batch 8`."""
    scenario = report.scenario
    batch = "" if scenario.batch is None else f", batch {scenario.batch}"
    return f"ONNX Runtime ({scenario.provider.upper()}), {model_name(report.model.path)}{batch}"


def _model(text: Text, report: SessionReport) -> None:
    model, scenario = report.model, report.scenario
    text.heading(_session_name(report))
    rows = [("file", f"{model.path} ({model.format}, {model.producer})")]
    rows += [(f"input {t.name}", shape_text(f"{t.dtype} ", t.shape)) for t in model.inputs]
    rows.append(("nodes", f"{model.nodes:,} ({scenario.executed_graph})"))
    options = [f"{name}={value}" for name, value in scenario.options.items() if value is not None]
    if not text.view.verbose:
        options = [option for option in options if not option.endswith("=True")]
    rows.append(("session", f"onnxruntime {scenario.version}, {scenario.provider.upper()}, {scenario.runs} runs"))
    rows.append(("options", ", ".join(options)))
    text.columns(rows)


def _meters(report: SessionReport, view: View) -> list[tuple[str, str, str]]:
    peak = report.peak
    at = f"at {peak.at_op} {peak.at_node}, first run" if peak.at_node else ""
    rows: list[tuple[str, int | None, str]] = [
        ("tensors", peak.tensors_bytes, at),
        ("requested", peak.requested_bytes, "last run, weights in the arena included"),
        ("workspace", peak.workspace_bytes, "the most that one kernel takes for itself"),
    ]
    arena = report.scenario.options.get("enable_cpu_mem_arena") is not False
    held = "by the arena after the last run" if arena else "at most at one moment: there is no arena"
    rows.append(("held", peak.held_bytes, held))
    rows.append(("device", peak.device_bytes, f"{report.device}, not verified"))
    rows.append(("main memory", peak.host_bytes, "without the code of the process"))
    keys = {"main memory": "host"}
    return [
        (name, view.size(nbytes), _bounded(peak.bands.get(keys.get(name, name)), text, view))
        for name, nbytes, text in rows
        if nbytes is not None
    ]


def _bounded(band: SessionBand | None, text: str, view: View) -> str:
    """A row's text with the bounds of its meter, where it has some."""
    if band is None:
        return text
    most = "no upper bound" if band.high is None else f"at most {view.size(band.high)}"
    return f"{text}; at least {view.size(band.low)}, {most}"


FORMATS = (Format("table", "txt", render), JSON)
