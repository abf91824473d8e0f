"""The report of a step for a terminal: the answer, and then the sections that it follows from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from staticmem.report.formats import Format
from staticmem.report.model import BEYOND_LIVE, LetGo, NoteInfo, Report, TensorEntry
from staticmem.report.text import PLAIN, Text, View
from staticmem.report.verdict import (
    METER,
    METERS,
    UNSAID,
    cache_rows,
    category_name,
    compiled_rows,
    host_lines,
    joined,
    meter_rows,
    next_step,
    of_size,
    phase_rows,
    place,
    plural,
    shape_text,
    share,
    step_name,
    tensor_name,
    unsaid_text,
    verdict,
    verdict_lines,
)
from staticmem.scenario.compiling import WHOLE
from staticmem.units import format_count

_BAR = 24  # columns
_MOST_TENSORS = 8  # in the heading: a decoder that keeps keys and values has two for each of its layers
OUTSIDE, OTHERS = "(outside of modules)", "(others)"
_COLOURS = {
    "parameter": "blue",
    "gradient": "yellow",
    "optimizer_state": "cyan",
    "activation": "green",
    "temporary": "red",
}
_RATIOS = {
    "peak_over_parameters": "peak / parameters",
    "state_over_parameters": "(parameters + gradients + optimizer state) / parameters",
    "backward_over_forward": "backward peak / forward end",
    "backward_over_activations": "backward's addition / activations",
    "optimizer_step_over_parameters": "optimizer step's addition / parameters",
}


def render(report: Report, view: View = PLAIN) -> str:
    """The report as text with a final newline."""
    if view.quiet:
        return view.line(verdict(report, view))
    text = Text(view)
    text.answer(*verdict_lines(report, view), unsaid_text(report, view), next_step=next_step(report))
    _model(text, report)
    _categories(text, report)
    if report.device is not None:
        _device(text, report)
    if report.host is not None:
        text.heading("On the host")
        for line in host_lines(report.host, view):
            text.wrap(line, "    ", "  ")
    _phases(text, report)
    if report.compiled is not None:
        text.heading("Compiled code")
        text.columns([(f"{name:<15}", value) for name, value in compiled_rows(report, view)])
    if report.generation is not None:
        text.heading("Keys and values")
        text.columns([(f"{name:<15}", value) for name, value in cache_rows(report, view)])
    if view.explain:
        _explain(text, report)
    elif report.top_tensors:
        _tensors(text, report)
    if view.verbose:
        _multipliers(text, report)
    if report.textbook is not None:
        _textbook(text, report)
    _coverage(text, report)
    if report.assumptions:
        note_list(text, "Assumptions", report.assumptions, short=not view.verbose)
    if report.notes and view.verbose:
        note_list(text, "Notes on the file", report.notes)
    if report.warnings:
        note_list(text, "Warnings", report.warnings, "yellow")
    if view.verbose:
        text.lines.append("")
        text.wrap(METER)
    return text.end()


def _model(text: Text, report: Report) -> None:
    model, scenario, parameters, size = report.model, report.scenario, report.parameters, text.view.size
    step = step_name(report)
    text.heading(f"{step[:1].upper()}{step[1:]}")
    rows = [("file", f"{model.path} ({model.format}, {model.producer})")]
    for word, specs in (("input", model.inputs), ("output", model.outputs)):
        shown = len(specs) if text.view.verbose else _MOST_TENSORS
        rows += [(f"{word} {spec.name}", shape_text(spec.dtype, spec.shape)) for spec in specs[:shown]]
        if specs[shown:]:
            rows.append((f"{word}s", f"and {len(specs[shown:])} more (-v has them all)"))
    line = f"{format_count(parameters.count)} ({parameters.count:,}), {size(parameters.bytes)}"
    if len(parameters.by_dtype) == 1:
        line += f" in {next(iter(parameters.by_dtype))}"
    elif parameters.by_dtype:
        line += f" in {', '.join([f'{name} {size(part.bytes)}' for name, part in parameters.by_dtype.items()])}"
    frozen = parameters.count - parameters.trainable_count
    rows.append(("parameters", line + (f", {format_count(frozen)} of them frozen" if frozen else "")))
    runs = ("loss", f"{scenario.loss}") if scenario.mode == "train" else ("runs under", "torch.no_grad()")
    text.columns([*rows, runs])


def _categories(text: Text, report: Report) -> None:
    peak, size, style = report.peak, text.view.size, text.style
    at = place(peak)
    text.heading(f"Memory at the peak: {peak.phase}{f', {at}' if at else ''}")
    mark, rows = "█" if style.unicode else "#", []
    for category, nbytes in of_size(peak.by_category):
        length = round(min(nbytes / max(peak.live_bytes, 1), 1.0) * _BAR)
        bar = style.paint(mark * length, _COLOURS.get(category, "dim"))
        rows.append((category_name(category), nbytes, size(nbytes), share(nbytes, peak.live_bytes), bar))
    rows.append(("total", peak.live_bytes, size(peak.live_bytes), "", plural(peak.tensors, "tensor")))
    wide = max(map(len, list(zip(*rows, strict=True))[2]))
    for name, nbytes, rounded, of_all, bar in rows:
        exact = f"  {nbytes:>{len(f'{peak.live_bytes:,}')},} B" if text.view.verbose else ""
        text.lines.append(f"  {name:<15}  {rounded:>{wide}}{exact}  {of_all:>6}  {bar}".rstrip())
    band = peak.bands["live"]
    if band.low < band.high:
        between = f"between {size(band.low)} and {size(band.high)}, by {_left_open(report)}"
        text.wrap(between, " " * 19, f"  {'band':<15}  ")


def _left_open(report: Report) -> str:
    """What moves the peak within its band, in a few words."""
    scenario, codes = report.scenario, {note.code for note in report.assumptions}
    if scenario.expert_parallel is not None:
        return "the tokens that go to a rank's experts"
    if WHOLE in scenario.compile or scenario.parallel is not None:  # nothing else is open then
        return "the compiled code of some ops"
    if any(note.code == "SM388" for note in report.warnings):
        return "which call of the code it is"
    if "SM326" in codes:
        return "sizes that are in the data"
    unsaid = [UNSAID[code][0] for code in UNSAID if code in codes]
    if unsaid:
        return unsaid[0]
    return "what the code keeps in variables"


def _device(text: Text, report: Report) -> None:
    """The four meters, and what device memory has beyond live tensors."""
    peak, device, gpu, size = report.peak, report.device, report.gpu, text.view.size
    assert device is not None
    usable = f"{size(gpu.usable_bytes)} usable" if gpu is not None else "assumed"
    text.heading(f"On the device: {device.name} ({usable}), PyTorch {device.torch_version}")
    rows = [
        (f"{name:<9}", nbytes, between, METERS[name], *[f"{getattr(peak, f'{name}_bytes'):,} B"] * text.view.verbose)
        for name, nbytes, between in meter_rows(peak, text.view)
    ]
    text.columns(rows, right=(1, 4), whole=(2,), optional=(3,))
    parts = [f"{name} {size(nbytes)}" for name in BEYOND_LIVE if (nbytes := peak.device_by_category[name])]
    text.wrap(f"beyond tensors: {', '.join(parts)}", "    ", "  ")


def _phases(text: Text, report: Report) -> None:
    text.heading("Phases")
    rows = []
    for name, nbytes, at, kept in phase_rows(report.phases):
        beside = f"{text.view.size(kept)} of activations kept" if kept is not None else at
        rows.append((f"{name:<15}", text.view.size(nbytes), beside))
    text.columns(rows, right=(1,))


def _tensors(text: Text, report: Report) -> None:
    rest = report.peak.tensors - len(report.top_tensors)
    more = f" (and {rest:,} more: --top N, --explain-peak)" if rest else ""
    text.heading(f"Largest tensors at the peak{more}")
    _tensor_rows(text, report.top_tensors, "  ", True)


def _tensor_rows(text: Text, entries: Sequence[TensorEntry], indent: str, module: bool) -> None:
    style, width = text.style, text.style.width
    rows = []
    for e in entries:
        category, why = category_name(e.category), joined(e.why)
        name = tensor_name(e.module, e.name) if module else e.name
        row = (text.view.size(e.bytes), category, name, shape_text(e.dtype, e.shape), "" if why == category else why)
        rows.append([style.plain(cell) for cell in row])
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    wide[2], wide[3] = min(wide[2], 44), min(wide[3], 36)
    for size, category, name, shape, why in rows:
        left = f"{indent}{size:>{wide[0]}}  {category:<{wide[1]}}  {style.cut(name, wide[2]):<{wide[2]}}  "
        left += f"{style.cut(shape, wide[3]):<{wide[3]}}  "
        if width is not None and width - len(left) < 24:  # a narrow terminal: the reason has its own line
            text.lines.append(style.cut(left.rstrip(), width))
            if why:
                text.lines.append(style.paint(style.cut(f"{indent}{'':>{wide[0]}}  {why}", width), "dim"))
        else:
            room = None if width is None else width - len(left)
            text.lines.append((left + style.paint(style.cut(why, room), "dim")).rstrip())


def _owners(text: Text, report: Report) -> None:
    """Who holds what is alive at the peak, with the modules that it is of."""
    size, style = text.view.size, text.style
    text.heading("Who holds what is alive at the peak")
    rows = []
    for row in report.owners:
        kept = f"kept by {' and '.join(row.kept_by)}" if row.kept_by else ""
        if row.retained_bytes > row.bytes:
            kept = f"{size(row.retained_bytes)} are freed when it lets go"
        rows.append((style.plain(row.owner), size(row.bytes), share(row.bytes, report.peak.live_bytes), kept))
        groups = by_outer_module({module.module: module.bytes for module in row.by_module})
        if len(groups) > 1 and 20 * row.bytes >= report.peak.live_bytes:
            rows += [(f"  {style.plain(module or OUTSIDE)}", size(nbytes), "", "") for module, nbytes in groups]
    text.columns(rows, right=(1, 2), optional=(3,))
    let_go(text, report.let_go, [note.text for note in report.notes if note.code == "SM288"])


def let_go(text: Text, rows: Sequence[LetGo], unknown: Sequence[str] = ()) -> None:
    """The lines to write, each with what the peak is then; `unknown`: why there may be others."""
    size, lines = text.view.size, []
    for row in rows:
        peak = f"the peak falls by {size(row.saved_bytes)} to {size(row.live_bytes)}"
        lines.append(f"{row.does}: {peak}{f' ({row.note})' if row.note else ''}")
    if lines or unknown:
        text.heading("What the code could let go of")
    for line in (*lines, *unknown):
        text.wrap(line, indent="    ", first="  - ")


def by_outer_module(by_module: Mapping[str, int], least: float = 0.1) -> list[tuple[str, int]]:
    """Bytes of modules as those of the modules around them, the largest first. A module is divided where those within
    it that have at least `least` of all bytes have most of its own; what is smaller is in the last row, `OTHERS`."""
    limit = least * sum(by_module.values())
    rows = {OTHERS: 0}
    waiting = [("", dict(by_module))]
    while waiting:
        name, paths = waiting.pop()
        within: dict[str, dict[str, int]] = {}
        for path, nbytes in paths.items():
            rest = path[len(name) :].lstrip(".").partition(".")[0]
            within.setdefault(f"{name}.{rest}".strip("."), {})[path] = nbytes
        sums = {inner: sum(part.values()) for inner, part in within.items()}
        own, total = sums.pop(name, 0), sum(paths.values())
        large = [inner for inner, nbytes in sums.items() if nbytes >= limit]
        if 2 * (own + sum(sums[inner] for inner in large)) < total or not large:
            rows[name] = total
            continue
        waiting += [(inner, within[inner]) for inner in large]
        rows[name if own >= limit else OTHERS] = own + (0 if own >= limit else rows[OTHERS])
        rows[OTHERS] += sum(sums.values()) - sum(sums[inner] for inner in large)
    return sorted(((name, n) for name, n in rows.items() if n), key=lambda row: (row[0] == OTHERS, -row[1], row[0]))


def _explain(text: Text, report: Report) -> None:
    """Everything alive at the peak, by module; small tensors of a module share a line."""
    size, style = text.view.size, text.style
    if report.owners:
        _owners(text, report)
    text.heading("Alive at the peak, by module")
    by_module: dict[str, list[TensorEntry]] = {}
    for entry in report.alive:
        by_module.setdefault(entry.module, []).append(entry)
    for row in report.peak.by_module:
        entries = by_module.get(row.module, [])
        name = style.paint(style.plain(row.module or OUTSIDE), "bold")
        text.lines.append(f"  {name}  {size(row.bytes)}  {share(row.bytes, report.peak.live_bytes)}")
        listed = [e for e in entries if e.bytes >= 4096 or e.bytes >= row.bytes // 50] or entries[:1]
        if listed:
            _tensor_rows(text, listed, "    ", False)
        small = entries[len(listed) :]
        if small:
            text.add(f"    {plural(len(small), 'small tensor')}, {size(sum(e.bytes for e in small))} together")
        unlisted = row.bytes - sum(e.bytes for e in entries)
        if unlisted > 0:  # a saved report has the largest tensors only
            text.add(f"    {size(unlisted)} in tensors that this report does not list")


def _multipliers(text: Text, report: Report) -> None:
    rows = []
    for name, title in _RATIOS.items():
        ratio = getattr(report.multipliers, name)
        if ratio is not None:
            rows.append((title, f"{ratio:.2f}x"))
    if rows:
        text.heading("Multipliers")
        text.columns(rows)


def _textbook(text: Text, report: Report) -> None:
    book, size = report.textbook, text.view.size
    assert book is not None
    text.heading("Textbook estimate (every result added up, no lifetimes)")
    rows = (
        ("parameters", size(book.parameter_bytes)),
        ("intermediates, forward", size(book.intermediate_bytes_forward)),
        ("intermediates, with backward", size(book.intermediate_bytes_with_backward)),
        ("total for this mode", size(book.total_bytes)),
        ("liveness says", size(report.peak.live_bytes)),
    )
    text.columns(rows)
    text.wrap(book.why_different, "  ")


def _coverage(text: Text, report: Report) -> None:
    ops = report.coverage.ops
    total = ops.ruled + ops.transparent + ops.unknown
    silent = f" ({ops.transparent:,} allocate nothing)" if ops.transparent else ""
    text.heading(f"Coverage: {total - ops.unknown:,} of {plural(total, 'op')} known{silent}")
    for row in report.coverage.unknown:
        results = f"{text.view.size(row.bytes)} of results"
        text.add(f"  unknown: {row.op}, {plural(row.count, 'call')}, {results}", "yellow")


def note_list(
    text: Text, title: str, notes: Sequence[NoteInfo], colour: str = "", heading: str = "bold", short: bool = False
) -> None:
    """A section of notes: each in full, or in a line each, where the heading says how to read the rest."""
    lines = [f"{note.text}{f' ({note.count} places)' if note.count > 1 else ''}" for note in notes]
    width = text.style.width or 100
    if short:
        cut = [text.style.cut(line, width - _CODE_WIDTH) for line in lines]
        text.heading(f"{title}{' (-v has them in full)' if cut != lines else ''}", heading)
        for note, line in zip(notes, cut, strict=True):
            text.add(_NOTE.format(note.code, line), colour)
        return
    text.heading(title, heading)
    for note, line in zip(notes, lines, strict=True):
        text.wrap(line, _NOTE.format("", "     "), _NOTE.format(note.code, ""), colour)


_NOTE = "  {}  {}"  # a code, which has five characters, and the text
_CODE_WIDTH = 9
FORMATS = (Format("table", "txt", render),)
