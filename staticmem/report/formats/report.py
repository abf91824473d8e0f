"""The report for a terminal: sections from the model to the verdict, which is the last line."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.report.model import BEYOND_LIVE, NoteInfo, PhasePeak, Report, TensorEntry
from staticmem.report.style import Style
from staticmem.report.verdict import METER, METERS, category_name, optimizer_name, place, share, verdict
from staticmem.units import format_bytes, format_count

_BAR = 24  # columns
_COLOURS = {
    "parameter": "blue", "gradient": "yellow", "optimizer_state": "cyan", "activation": "green", "temporary": "red",
}  # fmt: skip


def render(
    report: Report, style: Style | None = None, units: str = "binary", verbose: bool = False, explain: bool = False
) -> str:
    """The report as text with a final newline. `explain` lists everything alive at the peak by module."""
    return _Table(report, style or Style(), units, verbose).text(explain)


class _Table:
    def __init__(self, report: Report, style: Style, units: str, verbose: bool) -> None:
        self.report, self.style, self.units, self.verbose = report, style, units, verbose
        self.lines: list[str] = []

    def text(self, explain: bool) -> str:
        self.model()
        self.categories()
        self.device()
        self.phases()
        if explain:
            self.explain()
        else:
            self.tensors()
        self.multipliers()
        self.textbook()
        self.coverage()
        self.notes("Assumptions", self.report.assumptions)
        if self.verbose:
            self.notes("Notes on the file", self.report.notes)
        self.notes("Warnings", self.report.warnings, "yellow")
        self.lines += ["", *self.wrapped(METER, ""), ""]
        self.lines.append(self.style.paint(self.style.plain(verdict(self.report, self.units)), "bold"))
        return "\n".join(self.lines) + "\n"

    # -- helpers -------------------------------------------------------------------------------------------------

    def size(self, n: int) -> str:
        return format_bytes(n, self.units)

    def heading(self, text: str) -> None:
        if self.lines:
            self.lines.append("")
        self.lines.append(self.style.paint(self.style.plain(text), "bold"))

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        width = max((len(name) for name, _ in rows), default=0)
        for name, text in rows:
            self.lines.append(f"  {name:<{width}}  {self.style.plain(text)}".rstrip())

    def wrapped(self, text: str, indent: str, first: str | None = None) -> list[str]:
        """Lines of at most the terminal's width (100 where there is none), with a hanging indent."""
        import textwrap

        width = min(self.style.width or 100, 120)
        return textwrap.wrap(
            self.style.plain(text), width, initial_indent=indent if first is None else first, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip

    # -- sections ------------------------------------------------------------------------------------------------

    def model(self) -> None:
        model, scenario, parameters = self.report.model, self.report.scenario, self.report.parameters
        self.heading(f"{model.path}  ({model.format}, {model.producer})")
        rows = [(f"input {t.name}", _tensor(t.dtype, t.shape)) for t in model.inputs]
        rows += [(f"output {t.name}", _tensor(t.dtype, t.shape)) for t in model.outputs]
        rows = [(self.style.plain(name), text) for name, text in rows]
        by_dtype = ", ".join(
            name if len(parameters.by_dtype) == 1 else f"{name} {self.size(part.bytes)}"
            for name, part in parameters.by_dtype.items()
        )
        frozen = parameters.count - parameters.trainable_count
        trainable = f", {format_count(frozen)} of them frozen" if frozen else ""
        text = f"{format_count(parameters.count)} ({parameters.count:,}), {self.size(parameters.bytes)}"
        rows.append(("parameters", f"{text}{f' in {by_dtype}' if by_dtype else ''}{trainable}"))
        if scenario.mode == "train":
            step = f"training, {optimizer_name(scenario) or 'no optimizer'}, loss {scenario.loss}"
        else:
            step = "inference"
        for name, value in (("cast to", scenario.dtype), ("autocast to", scenario.amp)):
            step += f", {name} {value}" if value else ""
        rows.append(("step", step))
        self.pairs(rows)

    def categories(self) -> None:
        peak = self.report.peak
        at = place(peak)
        self.heading(f"Memory at the peak: {peak.phase}{f', {at}' if at else ''}")
        rows = sorted(((n, c) for c, n in peak.by_category.items() if n), key=lambda row: (-row[0], row[1]))
        sizes = [self.size(n) for n, _ in rows] + [self.size(peak.live_bytes)]
        wide = max(len(s) for s in sizes)
        for (nbytes, category), size in zip(rows, sizes, strict=False):
            part = min(nbytes / max(peak.live_bytes, 1), 1.0)
            bar = self.style.paint(self.style.bar(part, _BAR), _COLOURS.get(category, "dim"))
            of_all = share(nbytes, peak.live_bytes)
            self.lines.append(f"  {category_name(category):<15}  {size:>{wide}}  {of_all:>6}  {bar}".rstrip())
        self.lines.append(f"  {'total':<15}  {sizes[-1]:>{wide}}  {len_text(peak.tensors, 'tensor')}")
        band = peak.bands["live"]
        if band.low < band.high:
            text = f"between {self.size(band.low)} and {self.size(band.high)}, by what the code keeps in variables"
            self.lines.append(f"  {'band':<15}  {text}")

    def device(self) -> None:
        """The four meters, and what device memory has beyond live tensors."""
        report, peak = self.report, self.report.peak
        device, gpu = report.device, report.gpu
        if device is None:
            return
        usable = f"{self.size(gpu.usable_bytes)} usable" if gpu is not None else "assumed"
        self.heading(f"On the device: {device.name} ({usable}), PyTorch {device.torch_version}")
        rows = [("live", peak.live_bytes), ("allocated", peak.allocated_bytes or 0)]
        rows += [("reserved", peak.reserved_bytes or 0), ("device", peak.device_bytes or 0)]
        bands = [peak.bands[name] for name, _ in rows]
        sizes = [self.size(n) for _, n in rows]
        between = [f"{self.size(b.low)} to {self.size(b.high)}" if b.low < b.high else "" for b in bands]
        wide, wider = max(map(len, sizes)), max(map(len, between))
        for (name, _), size, bounds in zip(rows, sizes, between, strict=True):
            self.lines.append(f"  {name:<9}  {size:>{wide}}  {bounds:<{wider}}  {METERS[name]}".rstrip())
        parts = [(name, peak.device_by_category[name]) for name in BEYOND_LIVE]
        listed = ", ".join(f"{name} {self.size(n)}" for name, n in parts if n)
        self.lines += self.wrapped(f"beyond tensors: {listed}", "    ", "  ")

    def phases(self) -> None:
        phases = self.report.phases
        rows: list[tuple[str, int, str]] = [("before the step", phases.start_bytes, "")]

        def peak(name: str, at: PhasePeak | None) -> None:
            if at is not None:
                rows.append((name, at.peak_bytes, place(at)))

        peak("forward, peak", phases.forward)
        kept = self.size(phases.forward_end_activation_bytes)
        rows.append(("forward, end", phases.forward_end_bytes, f"{kept} of activations kept"))
        peak("backward, peak", phases.backward)
        peak("optimizer, peak", phases.optimizer)
        self.heading("Phases")
        sizes = [self.size(n) for _, n, _ in rows]
        wide = max(len(s) for s in sizes)
        for (name, _, text), size in zip(rows, sizes, strict=True):
            self.lines.append(f"  {name:<15}  {size:>{wide}}  {self.style.plain(text)}".rstrip())

    def tensors(self) -> None:
        top = self.report.top_tensors
        if not top:
            return
        rest = self.report.peak.tensors - len(top)
        self.heading("Largest tensors at the peak" + (f" (and {rest:,} more: --top N, --explain-peak)" if rest else ""))
        self.tensor_rows(top, "  ", True)

    def tensor_rows(self, entries: Sequence[TensorEntry], indent: str, module: bool) -> None:
        if not entries:
            return
        cells = []
        for e in entries:
            name = f"{e.module}: {e.name}" if module and e.module and not e.name.startswith(e.module) else e.name
            category, why = category_name(e.category), joined(e.why)
            shape = _tensor(e.dtype, e.shape)
            cells.append((self.size(e.bytes), category, name, shape, "" if why == category else why))
        cells = [tuple(self.style.plain(c) for c in row) for row in cells]  # type: ignore[misc]
        wide = [max(len(row[i]) for row in cells) for i in range(4)]
        wide[2], wide[3] = min(wide[2], 44), min(wide[3], 36)
        for size, category, name, shape, why in cells:
            left = f"{indent}{size:>{wide[0]}}  {category:<{wide[1]}}  {self.style.cut(name, wide[2]):<{wide[2]}}  "
            left += f"{self.style.cut(shape, wide[3]):<{wide[3]}}  "
            width = self.style.width
            if width is not None and width - len(left) < 24:  # a narrow terminal: the reason has its own line
                self.lines.append(self.style.cut(left.rstrip(), width))
                if why:
                    why = self.style.cut(f"{indent}{'':>{wide[0]}}  {why}", width)
                    self.lines.append(self.style.paint(why, "dim"))
            else:
                room = None if width is None else width - len(left)
                self.lines.append((left + self.style.paint(self.style.cut(why, room), "dim")).rstrip())

    def explain(self) -> None:
        """Everything alive at the peak, by module; small tensors of a module share a line."""
        self.heading("Alive at the peak, by module")
        by_module: dict[str, list[TensorEntry]] = {}
        for entry in self.report.alive:
            by_module.setdefault(entry.module, []).append(entry)
        for row in self.report.peak.by_module:
            entries = by_module.get(row.module, [])
            name = self.style.plain(row.module or "(outside of modules)")
            of_all = share(row.bytes, self.report.peak.live_bytes)
            self.lines.append(f"  {self.style.paint(name, 'bold')}  {self.size(row.bytes)}  {of_all}")
            shown = [e for e in entries if e.bytes >= 4096 or e.bytes >= row.bytes // 50] or entries[:1]
            self.tensor_rows(shown, "    ", False)
            small = entries[len(shown) :]
            if small:
                left = sum(e.bytes for e in small)
                self.lines.append(f"    {len_text(len(small), 'small tensor')}, {self.size(left)} together")
            unlisted = row.bytes - sum(e.bytes for e in entries)
            if unlisted > 0:  # a saved report has the largest tensors only
                self.lines.append(f"    {self.size(unlisted)} in tensors that this report does not list")

    def multipliers(self) -> None:
        m = self.report.multipliers
        rows = [
            ("peak / parameters", m.peak_over_parameters),
            ("(parameters + gradients + optimizer state) / parameters", m.state_over_parameters),
            ("backward peak / forward end", m.backward_over_forward),
            ("backward's addition / activations", m.backward_over_activations),
            ("optimizer step's addition / parameters", m.optimizer_step_over_parameters),
        ]
        known = [(name, f"{value:.2f}x") for name, value in rows if value is not None]
        if known:
            self.heading("Multipliers")
            self.pairs(known)

    def textbook(self) -> None:
        book = self.report.textbook
        if book is None:
            return
        self.heading("Textbook estimate (every result added up, no lifetimes)")
        rows = [
            ("parameters", self.size(book.parameter_bytes)),
            ("intermediates, forward", self.size(book.intermediate_bytes_forward)),
            ("intermediates, with backward", self.size(book.intermediate_bytes_with_backward)),
            ("total for this mode", self.size(book.total_bytes)),
            ("liveness says", self.size(self.report.peak.live_bytes)),
        ]
        self.pairs(rows)
        self.lines += self.wrapped(book.why_different, "  ")

    def coverage(self) -> None:
        ops = self.report.coverage.ops
        total = ops.ruled + ops.transparent + ops.unknown
        text = f"Coverage: {total - ops.unknown:,} of {len_text(total, 'op')} known"
        self.heading(text + (f" ({ops.transparent:,} allocate nothing)" if ops.transparent else ""))
        for row in self.report.coverage.unknown:
            line = f"  unknown: {row.op}, {len_text(row.count, 'call')}, {self.size(row.bytes)} of results"
            self.lines.append(self.style.paint(self.style.plain(line), "yellow"))

    def notes(self, title: str, notes: Sequence[NoteInfo], colour: str | None = None) -> None:
        if not notes:
            return
        self.heading(title)
        for note in notes:
            count = f" ({note.count} places)" if note.count > 1 else ""
            lines = self.wrapped(f"{note.text}{count} [{note.code}]", "    ", "  - ")
            self.lines += [self.style.paint(line, colour) if colour else line for line in lines]


def _tensor(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(str(n) for n in shape)}]"


def joined(why: Sequence[str]) -> str:
    """Reasons on one line; "saved for the backward of" once."""
    prefix = "saved for the backward of "
    saved = [reason.removeprefix(prefix) for reason in why if reason.startswith(prefix)]
    parts = [prefix + ", ".join(saved)] if saved else []
    return "; ".join([*parts, *(reason for reason in why if not reason.startswith(prefix))])


def len_text(n: int, word: str) -> str:
    """`1 tensor`, `860 tensors`."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"
