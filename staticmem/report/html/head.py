"""The top of the page: the verdict, the meters, and the cards."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.frontends.architectures import model_name
from staticmem.report.html.beside import CardRow
from staticmem.report.html.page import esc, name, section, stacked_bar, table, template
from staticmem.report.model import GpuFit, Report
from staticmem.report.sweep import CANNOT_RUN
from staticmem.report.text import View
from staticmem.report.verdict import (
    PHASES,
    category_name,
    fit_reasons,
    largest_text,
    of_card,
    place,
    returned_text,
    shortage,
    step_name,
    unsaid_text,
    with_article,
    worst_case,
)

# from the bottom of a stack: what stays for the whole step first, so that what changes lies on level ground
ORDER = ("parameter", "buffer", "optimizer_state", "input", "gradient", "activation", "temporary", "communication")
BEYOND = ("workspace", "rounding", "cached", "context", "libraries")
_BEYOND_NAMES = {
    "workspace": "workspaces of kernels",
    "rounding": "rounding of blocks",
    "cached": "cached and fragmented",
    "context": "CUDA context",
    "libraries": "loaded libraries",
}
_PLURALS = {"temporary": "temporaries"}
_PLURALS |= {part: f"{part}s" for part in ("parameter", "buffer", "gradient", "activation", "input")}
_MARKS = {"fits": "✓", "tight": "≈", "does not fit": "✗", "cannot run it": "✗"}
_METERS = {
    "live": ("live tensors", "what PyTorch holds in tensors; exact where the graph is known"),
    "allocated": ("allocated", "torch.cuda.memory_allocated: blocks of live tensors, and workspaces of kernels"),
    "reserved": ("reserved", "torch.cuda.memory_reserved: what the caching allocator took from the driver"),
    "device": ("device", "what nvidia-smi shows for the process: reserved, CUDA context, libraries"),
}


def part_name(category: str) -> str:
    return _BEYOND_NAMES.get(category, category_name(category))


def top_bar(sections: Sequence[tuple[str, str]]) -> str:
    """The bar above everything: links to the sections, and what the page can do."""
    links = "".join(f'<a href="#{id}">{esc(title)}</a>' for id, title in sections)
    return template("top_bar.html", links=links)


def verdict(report: Report, cards: Sequence[CardRow], view: View) -> str:
    """The headline, and what follows from it in a sentence or two."""
    peak, at = report.peak, place(report.peak)
    model = name(model_name(report.model.path))
    step = esc(step_name(report)).replace(esc(model_name(report.model.path)), model, 1)
    when = f", when {name(at)} runs" if at else ""
    largest = max(peak.by_category, key=lambda key: peak.by_category[key], default="")
    share = peak.by_category.get(largest, 0) / peak.live_bytes if peak.live_bytes else 0
    largest_share = f" {share:.0%} of that is {_PLURALS.get(largest, esc(category_name(largest)))}." if share else ""
    live = f'<span id="peak-bytes" data-bytes="{peak.live_bytes}">{view.size(peak.live_bytes)}</span>'
    alive = f"{peak.tensors:,} tensors at the peak, {esc(PHASES.get(peak.phase, peak.phase))}{when}.{largest_share}"
    need, gpu = peak.device_bytes, report.gpu
    if need is None:
        head, lead = f"{live} {_small('of live tensors')}", f"They are {alive} {_smallest(cards, view)}"
    elif gpu is None:
        card = f"on {with_article(report.device.name)}, which is assumed" if report.device else "of GPU memory"
        most = worst_case(need, peak.bands.get("device"), None, view)
        head = f"{view.size(need)} {_small(f'{card}{most}')}"
        lead = f"{live} of it are {alive} {_smallest(cards, view)}"
    else:
        uses, of, usable = of_card(need, gpu.usable_bytes, view).partition(" of ")
        uses = view.size(need) if view.size(need).startswith(uses) else uses
        head = f"{uses} {_small(f'{of.lstrip()}{usable} on {with_article(gpu.name)}')}"
        lead = f"{_outcome(report, gpu, need, view)} {live} of it are {alive}"
    lead = f"{lead} {esc(unsaid_text(report, view))}".rstrip()
    return f'<div class="verdict"><p class="eyebrow">{step}</p><h1>{head}</h1><p class="lead">{lead}</p></div>'


def _small(text: str) -> str:
    return f'<span class="of">{esc(text)}</span>'


def _outcome(report: Report, gpu: GpuFit, need: int, view: View) -> str:
    """Whether the requested card fits the step, at most by how much of it, and on which condition."""
    mark = f'<strong class="{_cls(gpu.fit)}">{_MARKS[gpu.fit]} {esc(gpu.fit)}</strong>'
    if gpu.obstacle:
        return f"{mark}: {esc(gpu.obstacle)}."
    band = report.peak.bands.get("device")
    if gpu.missing_bytes:
        return f"{mark}: {shortage(gpu, need, band, view).removeprefix('needs ')}."
    reasons = " ".join(fit_reasons(gpu, band, returned_text(report.device, view)))
    most = worst_case(need, band, gpu.usable_bytes, view)
    return f"{mark}{esc(most)}. {esc(reasons)} {esc(largest_text(report, view))}".rstrip()


def _smallest(cards: Sequence[CardRow], view: View) -> str:
    """The smallest card with enough memory."""
    fitting = next((card for card in cards if card.fit == "fits" and not card.condition), None)
    if fitting is not None:
        return (
            f"The smallest GPU here that has room is the {esc(fitting.name)} ({view.size(fitting.headroom)} to spare)."
        )
    return "No GPU of the catalog has the memory." if cards else ""


def meters(report: Report, view: View) -> str:
    """Four bars on one scale, with bands, and what the device meter consists of."""
    peak = report.peak
    values = {key: getattr(peak, f"{key}_bytes") for key in _METERS}
    expected: dict[str, int] = {key: value for key, value in values.items() if value is not None}
    scale = max([*expected.values(), *(band.high for band in peak.bands.values()), 1])
    rows = []
    for key, value in expected.items():
        title, says = _METERS[key]
        band = peak.bands.get(key)
        open_ = band is not None and band.high > band.low
        bounds = f"{view.size(band.low)} to {view.size(band.high)}" if band and open_ else f"{value:,} B"
        if band and open_ and view.size(band.low) == view.size(band.high):
            bounds = f"within {view.size(band.high - band.low)}"
        whisker = (band.low / scale, band.high / scale) if band and open_ else None
        parts = _parts(report, key, value, scale, view)
        label = f"{title}: {view.size(value)}" + (f", {bounds}" if open_ else "")
        rows.append(
            f'<div class="meter" id="meter-{key}"><div class="meter-name"><dfn title="{esc(says)}">{title}</dfn>'
            f"<small>{esc(says)}</small></div>"
            f'<div class="meter-bar">{stacked_bar(parts, label, whisker)}</div>'
            f'<div class="meter-value"><b data-bytes="{value}">{view.size(value)}</b>'
            f"<small>{bounds}</small></div></div>"
        )
    present = [part for part in (*ORDER, *BEYOND) if peak.by_category.get(part) or peak.device_by_category.get(part)]
    legend = "".join(f'<span class="key"><i class="c-{part}"></i>{esc(part_name(part))}</span>' for part in present)
    device = report.device
    lead = ""
    if device is not None:
        lead = (
            f"Allocated, reserved and device memory are peaks over three steps from the start of a process on "
            f"{'an assumed' if device.assumed else 'the'} {esc(device.name)}, PyTorch {esc(device.torch_version)}, "
            f"cuDNN {esc(device.cudnn_version)}. Lines over the bars are bands: what is known of workspaces, "
            "fragmentation and the context."
        )
    return section(
        "meters", "Four meters", f'<div class="meters">{"".join(rows)}</div><p class="keys">{legend}</p>', lead
    )


def _parts(report: Report, key: str, value: int, scale: int, view: View) -> list[tuple[str, float, str]]:
    """The segments of a meter's bar; one where the report has no parts."""
    peak = report.peak
    parts: dict[str, int] = {}
    if key == "live":
        parts = {part: peak.by_category.get(part, 0) for part in ORDER}
    elif peak.device_by_category:
        shown = {"allocated": BEYOND[:2], "reserved": BEYOND[:3], "device": BEYOND}[key]
        parts = {part: peak.device_by_category.get(part, 0) for part in (*ORDER, *shown)}
    if sum(parts.values()) != value:
        return [("c-plain", value / scale, view.size(value))]
    return [(f"c-{part}", size / scale, f"{part_name(part)}: {view.size(size)}") for part, size in parts.items()]


def _cls(fit: str) -> str:
    return {"fits": "fits", "tight": "tight"}.get(fit, "short")


def _chip(card: CardRow) -> str:
    return f"{card.stands_for}, as {card.architecture}" if card.stands_for else card.architecture


def fit_table(cards: Sequence[CardRow], view: View) -> str:
    """The card of the report, and those that can run the step, the smallest first: what each has and needs."""
    if not cards:
        return ""
    rows, classes = [], []
    for card in cards:
        need = min(card.expected / card.usable, 1.0)
        band = f"{view.size(card.low)} to {view.size(card.high)}"
        label = f"{card.expected / card.usable:.0%} of {card.name}"
        mark = f'<strong class="{_cls(card.fit)}" title="{esc(card.why)}">{_MARKS[card.fit]} {esc(card.fit)}</strong>'
        mark += f" <small>with {esc(card.condition)}</small>" if card.condition else ""
        margin = f"{view.size(abs(card.headroom))} {'free' if card.headroom >= 0 else 'short'}"
        assumed = f' <abbr title="assumed, no source: {esc(", ".join(card.assumed))}">*</abbr>' if card.assumed else ""
        bands = (card.low / card.usable, card.high / card.usable)
        bar = stacked_bar([(f"b-{_cls(card.fit)}", need, label)], label, bands)
        needs = f'<span title="{band}">{view.size(card.expected)}</span>'
        chip = f"<small>{esc(_chip(card))}</small>"
        rows.append((f"{esc(card.name)}{assumed}", chip, view.size(card.usable), needs, bar, mark, margin))
        classes.append("asked" if card.asked else "")
    heads = ("GPU", "Arch", "Usable", "Needs", "Share of the GPU", "Verdict", "Margin")
    grid = table(heads, rows, id="cards", right=(2, 3, 6), classes=classes, caption="GPU fit")
    fitting, able = sum(card.fit == "fits" for card in cards), sum(card.fit != CANNOT_RUN for card in cards)
    lead = (
        f"The step fits on {fitting} of the {able} GPUs that can run it, at the upper estimate and with 5 % to spare. "
        "Hover over a need for its band; a star marks figures without a source. "
        "Where there is no data for a chip, the one named in Arch is used."
    )
    return section("fit", "Does it fit?", f'<div class="tall">{grid}</div>', lead)
