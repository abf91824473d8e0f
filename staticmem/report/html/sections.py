"""The sections below the verdict: charts (drawn by the page's script), tables, and what the numbers rest on."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.report.html.beside import Extras, WhatIf
from staticmem.report.html.head import ORDER, part_name
from staticmem.report.html.page import asset, esc, name, section, stacked_bar, table, template
from staticmem.report.model import HostInfo, NoteInfo, Report, TensorEntry, TensorInfo
from staticmem.report.sweep import SAME, LeverRow
from staticmem.report.text import View
from staticmem.report.verdict import cache_rows, compiled_rows, host_lines, phase_rows, shape_text
from staticmem.report.verdict import share as percent
from staticmem.units import format_count

MINUS = "\u2212"
ROWS = 2000  # tensors in the table, which the filter searches; the timeline and the JSON have more


def _chart(id: str, label: str, tools: str = "") -> str:
    """Where a canvas goes; the script fills it."""
    return template("chart.html", id=id, label=esc(label), tools=tools)


def timeline_section(report: Report) -> str:
    lead = (
        "Every tensor of the step, stacked by category. The axis counts allocations and releases, not time. "
        "The dashed line is the peak."
    )
    tools = '<label>Compare with <select id="capacity"></select></label><span class="legend" id="legend"></span>'
    return section(
        "timeline", "Memory over the step", _chart("timeline-chart", "Live memory over the step", tools), lead
    )


def address_section(extras: Extras, view: View) -> str:
    addresses = extras.addresses
    if addresses is None:
        return ""
    lead = (
        f"Where PyTorch's caching allocator puts them: step {addresses.step} of a replayed process, "
        f"{view.size(addresses.reserved_bytes)} reserved in {len(addresses.rows):,} segments "
        f"({esc(addresses.setting)}). "
        "A band across is a segment; grey in it is memory that is held and not used."
        + (' <strong class="short">The next allocation fails: the GPU is full.</strong>' if addresses.failed else "")
    )
    return section("addresses", "Address map", _chart("address-chart", "Segments of the allocator over the step"), lead)


def peak_section(report: Report, view: View) -> str:
    """What the peak consists of: categories, phases, tensors."""
    peak, rows = report.peak, []
    for part, size in sorted(peak.by_category.items(), key=lambda part: -part[1]):
        if size:
            share, text = size / max(peak.live_bytes, 1), percent(size, peak.live_bytes)
            bar = stacked_bar([(f"c-{esc(part)}", share, "")], f"{part_name(part)}: {text}")
            rows.append((_key(part), view.size(size), text, bar))
    categories = table(("Category", "Bytes", "Share", ""), rows, right=(1, 2), caption="Categories at the peak")
    both = f'<div class="two"><div>{categories}</div><div>{_phases(report, view)}</div></div>'
    return section("peak", "Alive at the peak", both + _tensors(report, view))


def _phases(report: Report, view: View) -> str:
    rows = []
    for title, nbytes, at, kept in phase_rows(report.phases):
        beside = name(at) if at else ""
        if kept is not None:
            beside = f"{view.size(kept)} of activations kept"
        rows.append((title, view.size(nbytes), beside))
    phases = table(("Phase", "Bytes", ""), rows, right=(1,), caption="Phases")
    tables = (("Compiled code", compiled_rows(report, view)), ("Keys and values", cache_rows(report, view)))
    for heading, more in tables:
        if more:
            phases += table((heading, ""), [(esc(title), esc(text)) for title, text in more], caption=heading)
    return phases


def _tensors(report: Report, view: View) -> str:
    entries: Sequence[TensorEntry] = (report.alive or report.top_tensors)[:ROWS]
    rows = []
    for entry in entries:
        shape = f'<span class="shape">{esc(shape_text(entry.dtype, entry.shape))}</span>'
        why = "<br>".join(esc(why) for why in entry.why[:4]) + ("<br>…" if len(entry.why) > 4 else "")
        names = (name(entry.name), name(entry.module), name(entry.op))
        rows.append((view.size(entry.bytes), _key(entry.category), *names, shape, why))
    heads = ("Bytes", "Category", "Tensor", "Module", "Op", "Type and shape", "Why it is alive")
    grid = table(heads, rows, id="tensors", right=(0,), caption="Largest tensors at the peak")
    rest = report.peak.tensors - len(entries)
    more = f"The {len(entries)} largest; {rest:,} more are in the chart above." if rest > 0 else "All of them."
    tools = (
        '<div class="head"><h3>Largest tensors</h3><input type="search" id="tensor-filter" class="needs-script" '
        'placeholder="Filter" aria-label="Filter the tensors"></div>'
    )
    count_line = '<p class="lead" id="tensor-found" role="status"></p>'
    return f'{tools}<p class="lead">{more}</p>{count_line}<div class="tall">{grid}</div>'


def _key(category: str) -> str:
    return f'<span class="key"><i class="c-{esc(category)}"></i>{esc(part_name(category))}</span>'


def module_section(report: Report, view: View) -> str:
    """The icicle, and the same as a table for readers that have no script, and for print."""
    live, rows = max(report.peak.live_bytes, 1), []
    for row in report.peak.by_module[:30]:
        sizes = [(part, row.by_category.get(part, 0)) for part in ORDER]
        parts = [(f"c-{part}", size / live, f"{part_name(part)}: {view.size(size)}") for part, size in sizes]
        text = percent(row.bytes, live)
        module = name(row.module) if row.module else "the model itself"
        rows.append((module, view.size(row.bytes), text, stacked_bar(parts, text)))
    grid = table(("Module (its own)", "Bytes", "Share", ""), rows, right=(1, 2), caption="Modules at the peak")
    summary = f"The {len(rows)} largest modules as a table"
    body = template("icicle.html", id="icicle", label="Memory at the peak by module", summary=summary, table=grid)
    lead = "From left to right: the model, its modules, theirs. Choose one to see it alone; Backspace goes back."
    return section("modules", "By module", body, lead)


def owner_section(report: Report, view: View) -> str:
    """Who holds what is alive at the peak: the icicle of owners with their modules, and the same as tables."""
    if not report.owners:
        return ""
    live, rows = max(report.peak.live_bytes, 1), []
    for row in report.owners:
        sizes: dict[str, int] = {}
        for module in row.by_module:
            for part, nbytes in module.by_category.items():
                sizes[part] = sizes.get(part, 0) + nbytes
        parts = [(f"c-{part}", sizes.get(part, 0) / live, part_name(part)) for part in ORDER]
        text = percent(row.bytes, live)
        kept = f"<br><small>kept by {esc(' and '.join(row.kept_by))}</small>" if row.kept_by else ""
        freed = view.size(row.retained_bytes)
        rows.append((f"{esc(row.owner)}{kept}", view.size(row.bytes), freed, text, stacked_bar(parts, text)))
    grid = table(
        ("Owner", "Holds alone", "Freed if it lets go", "Share", ""),
        rows,
        right=(1, 2, 3),
        caption="Owners at the peak",
    )
    held = [(name(row.owner), view.size(row.bytes), view.size(row.retained_bytes)) for row in report.modules[:30]]
    if held:
        grid += table(
            ("Module", "Its owners hold alone", "Freed if they let go"),
            held,
            right=(1, 2),
            caption="Modules whose owners hold memory at the peak",
        )
    body = template(
        "icicle.html", id="owners-icicle", label="Memory at the peak by owner", summary="As tables", table=grid
    )
    lead = "From left to right: the process, the owners that would need to let go, the modules that their memory is of."
    return section("owners", "By owner", body, lead)


def what_if_section(what_if: WhatIf | None) -> str:
    if what_if is None:
        return ""
    title = "What if"
    if not what_if.settings:
        return section("what-if", title, f"<p>No sliders for this model: {esc(what_if.reason)}.</p>")
    lead = (
        "The peak of live tensors for other settings, computed here from its closed form: every buffer has "
        "<i>base + slope \u00d7 batch</i> bytes, rounded up to 512. The figures are those of "
        "<code>staticmem analyze</code>, to the byte. Allocator, workspaces and context come on top."
    )
    return section("what-if", title, asset("what_if.html"), lead)


def lever_section(levers: Sequence[LeverRow], peak: int, view: View) -> str:
    """What changes of the step would save, the most helpful first."""
    saving = sorted((lever for lever in levers if lever.live_bytes < peak), key=lambda lever: lever.live_bytes)
    if not saving:
        return ""
    rows = []
    for lever in saving:
        saved, share = peak - lever.live_bytes, lever.live_bytes / peak
        compute = "" if not lever.compute else f"{'+' if lever.compute > 0 else MINUS}{abs(lever.compute):.0%}"
        note = f"<br><small>{esc(lever.note)}</small>" if lever.note else ""
        bar = stacked_bar([("c-plain", share, "")], f"{share:.0%} of the peak")
        command, changes = f"<code>{esc(lever.command)}</code>", "" if lever.changes == SAME else esc(lever.changes)
        sizes = (view.size(lever.live_bytes), f"{MINUS}{view.size(saved)}")
        rows.append((f"{esc(lever.does)}{note}", command, bar, *sizes, compute, changes))
    heads = ("Lever", "Command", "Peak with it", "", "Saves", "Compute", "Changes")
    grid = table(heads, rows, id="lever-table", right=(3, 4, 5), caption="Levers")
    lead = "Each alone, the rest as it is, analysed in full: the peak of live tensors with it."
    return section("levers", "Levers", f'<div class="tall">{grid}</div>', lead)


def host_section(host: HostInfo, view: View) -> str:
    """The memory of the process on the host."""
    lines = "".join(f"<li>{esc(line)}</li>" for line in host_lines(host, view))
    return section("host", "On the host", f"<ul>{lines}</ul>")


def basis_section(report: Report, extras: Extras, view: View) -> str:
    """Assumptions, warnings, coverage, inputs: what the numbers rest on."""
    ops = report.coverage.ops
    total = max(ops.ruled + ops.transparent + ops.unknown, 1)
    covered = (
        f"<p>{ops.ruled + ops.transparent:,} of {total:,} ops are known"
        + (
            f'; <strong class="tight">{ops.unknown:,} are not</strong>, and are sized with caution.'
            if ops.unknown
            else "."
        )
        + "</p>"
    )
    if report.coverage.unknown:
        rows = [(name(row.op), f"{row.count:,}", view.size(row.bytes)) for row in report.coverage.unknown]
        covered += table(("Unknown op", "Count", "Bytes of results"), rows, right=(1, 2), caption="Unknown ops")
    blocks = [f"<h3>Coverage</h3>{covered}"]
    blocks += [
        f"<h3>{title}</h3>{_notes(notes)}"
        for title, notes in (
            ("Warnings", report.warnings),
            ("Assumptions", report.assumptions),
            ("Notes", report.notes),
        )
        if notes
    ]
    if extras.left_out:
        blocks.append(
            f"<h3>Left out of this page</h3><ul>{''.join(f'<li>{esc(text)}</li>' for text in extras.left_out)}</ul>"
        )
    return section("basis", "What the numbers rest on", "".join(blocks))


def _notes(notes: Sequence[NoteInfo]) -> str:
    items = (
        f"<li>{esc(note.text)}{f' <small>({note.count:,} places)</small>' if note.count > 1 else ''} "
        f"<code>{esc(note.code)}</code></li>"
        for note in notes
    )
    return f'<ul class="notes">{"".join(items)}</ul>'


def model_section(report: Report, extras: Extras, view: View) -> str:
    """The file, its inputs and outputs, and the command."""
    model, parameters = report.model, report.parameters
    rows = [("input", *_tensor(spec)) for spec in model.inputs] + [("output", *_tensor(spec)) for spec in model.outputs]
    grid = table(("", "Name", "Type and shape", "In the file"), rows, caption="Inputs and outputs")
    facts = (
        f"<p>{name(model.path)}: {esc(model.format)}, {esc(model.producer)}, {view.size(model.file_bytes)}, "
        f"{model.ops:,} ops, {format_count(parameters.count)} parameters ({parameters.count:,}, "
        f"{view.size(parameters.bytes)}).</p>"
    )
    digest = f'<p>SHA-256 <code class="digest">{esc(model.sha256)}</code></p>' if model.sha256 else ""
    command = ""
    if extras.command:
        command = (
            '<h3>Reproduce</h3><div class="command"><pre id="command"><code>'
            f"{esc(extras.command)}</code></pre>"
            '<button type="button" id="copy" class="needs-script">Copy</button></div>'
        )
    return section("model", "Model and command", facts + digest + grid + command)


def _tensor(spec: TensorInfo) -> tuple[str, str, str]:
    shape = f'<span class="shape">{esc(spec.dtype)}[{", ".join(map(str, spec.shape))}]</span>'
    symbolic = f"[{', '.join(map(str, spec.symbolic))}]" if spec.symbolic else ""
    return name(spec.name), shape, name(symbolic) if symbolic else ""
