"""The report of a session for a terminal; the verdict is the last line."""

from __future__ import annotations

from staticmem.report.model import NoteInfo
from staticmem.report.session import SessionReport
from staticmem.report.style import Style
from staticmem.units import format_bytes

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


def render(report: SessionReport, style: Style | None = None, units: str = "binary", verbose: bool = False) -> str:
    """The report as text with a final newline."""
    return _Text(report, style or Style(), units, verbose).text()


def verdict(report: SessionReport, units: str = "binary") -> str:
    """The one line that a user came for."""
    peak, scenario = report.peak, report.scenario
    batch = "" if scenario.batch is None else f", batch {scenario.batch}"
    name = report.model.path.replace("\\", "/").rsplit("/", 1)[-1]
    where = f" at {peak.at_op} {peak.at_node}" if peak.at_node else ""
    line = (
        f"Peak {format_bytes(peak.tensors_bytes, units)} tensors{where}, {format_bytes(peak.held_bytes, units)} held — "
        f"ONNX Runtime ({scenario.provider.upper()}), {name}{batch}."
    )
    if peak.host_bytes is not None:
        return f"{line} With weights and inputs {format_bytes(peak.host_bytes, units)} of main memory."
    line = f"{line} On the device {_device(report, units)}, not verified"
    if report.gpu is None:
        return f"{line}."
    left, missing = (format_bytes(n, units) for n in (report.gpu.headroom_bytes, report.gpu.missing_bytes))
    outcome = {
        "fits": f"fits a {report.gpu.name} with {left} to spare",
        "tight": f"is tight on a {report.gpu.name}: {left} to spare at the expected need",
        "does not fit": f"does not fit a {report.gpu.name}: {missing} short",
    }[report.gpu.fit]
    return f"{line}; it {outcome}."


def _device(report: SessionReport, units: str) -> str:
    band = report.peak.bands.get("device")
    expected = format_bytes(report.peak.device_bytes or 0, units)
    if band is None:
        return expected
    high = "no upper bound" if band.high is None else f"to {format_bytes(band.high, units)}"
    return f"{expected} ({format_bytes(band.low, units)} {'' if band.high is not None else 'at least, '}{high})"


class _Text:
    def __init__(self, report: SessionReport, style: Style, units: str, verbose: bool) -> None:
        self.report, self.style, self.units, self.verbose = report, style, units, verbose
        self.lines: list[str] = []

    def text(self) -> str:
        self.model()
        self.meters()
        self.categories()
        self.nodes()
        self.notes("Assumptions", self.report.assumptions)
        self.notes("Warnings", self.report.warnings, "yellow")
        self.lines += ["", self.style.paint(self.style.plain(verdict(self.report, self.units)), "bold")]
        return "\n".join(self.lines) + "\n"

    def size(self, nbytes: int) -> str:
        return format_bytes(nbytes, self.units)

    def heading(self, text: str, colour: str = "bold") -> None:
        if self.lines:
            self.lines.append("")
        self.lines.append(self.style.paint(self.style.plain(text), colour))

    def pairs(self, rows: list[tuple[str, str]], right: bool = False) -> None:
        rows = [(self.style.plain(name), self.style.plain(text)) for name, text in rows]
        width = max((len(name) for name, _ in rows), default=0)
        room = max((len(text.split("  ")[0]) for _, text in rows), default=0) if right else 0
        for name, text in rows:
            first, gap, rest = text.partition("  ")
            self.lines.append(f"  {name:<{width}}  {first:>{room}}{gap}{rest}".rstrip())

    def model(self) -> None:
        model, scenario = self.report.model, self.report.scenario
        self.heading(f"{model.path}  ({model.format}, {model.producer})")
        rows = [(f"input {t.name}", f"{t.dtype} [{', '.join(str(n) for n in t.shape)}]") for t in model.inputs]
        rows.append(("nodes", f"{model.nodes:,} ({scenario.executed_graph})"))
        options = [f"{name}={value}" for name, value in scenario.options.items() if value is not None]
        if not self.verbose:
            options = [text for text in options if not text.endswith("=True")]
        rows.append(("session", f"onnxruntime {scenario.version}, {scenario.provider.upper()}, {scenario.runs} runs"))
        rows.append(("options", ", ".join(options)))
        self.pairs(rows)

    def meters(self) -> None:
        peak = self.report.peak
        self.heading("Meters")
        at = f"  at {peak.at_op} {peak.at_node}, first run" if peak.at_node else ""
        rows = [("tensors", f"{self.size(peak.tensors_bytes)}{at}")]
        rows.append(("requested", f"{self.size(peak.requested_bytes)}  last run, weights in the arena included"))
        if peak.workspace_bytes is not None:
            rows.append(("workspace", f"{self.size(peak.workspace_bytes)}  the most that one kernel takes for itself"))
        arena = self.report.scenario.options.get("enable_cpu_mem_arena") is not False
        held = "by the arena after the last run" if arena else "at most at one moment: there is no arena"
        rows.append(("held", f"{self.size(peak.held_bytes)}  {held}"))
        if peak.device_bytes is not None:
            rows.append(("device", f"{self.size(peak.device_bytes)}  {self.report.device}, not verified"))
        if peak.host_bytes is not None:
            rows.append(("main memory", f"{self.size(peak.host_bytes)}  without the code of the process"))
        self.pairs(rows, right=True)

    def categories(self) -> None:
        self.heading("What it is made of")
        self.pairs([(_NAMES[n], self.size(b)) for n, b in self.report.peak.by_category.items() if b], right=True)

    def nodes(self) -> None:
        if not self.report.top_nodes:
            return
        self.heading("Nodes at which most is requested (first run)")
        self.pairs([(f"{n.op} {n.name}", self.size(n.requested_bytes)) for n in self.report.top_nodes], right=True)

    def notes(self, title: str, notes: tuple[NoteInfo, ...], colour: str = "bold") -> None:
        import textwrap

        if not notes:
            return
        self.heading(title, colour)
        width = min(self.style.width or 100, 120)
        for note in notes:
            self.lines += textwrap.wrap(
                self.style.plain(f"{note.text} [{note.code}]"), width, initial_indent="  - ", subsequent_indent="    ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
