"""The verdict on a report, and names of categories, steps, places and tensors, for all formats that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from staticmem.frontends.architectures import model_name
from staticmem.liveness.why import short
from staticmem.report import model
from staticmem.report.text import PLAIN, View
from staticmem.scenario.strategies import STRATEGIES
from staticmem.units import MIB

if TYPE_CHECKING:
    from staticmem.report.run import RunReport

OPTIMIZER_NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
CATEGORY_NAMES = {"optimizer_state": "optimizer state"}

METER = (
    "Live tensor memory is what PyTorch holds in tensors, each rounded up to 512 bytes. The allocator's cache and "
    "fragmentation, workspaces of cuBLAS and cuDNN and the CUDA context come on top: nvidia-smi shows more."
)
METERS = {  # where each meter is read on a real machine
    "live": "tensors",
    "allocated": "max_memory_allocated()",
    "reserved": "max_memory_reserved()",
    "device": "nvidia-smi",
}


def category_name(category: str) -> str:
    return CATEGORY_NAMES.get(category, category)


def optimizer_name(scenario: model.ScenarioInfo) -> str:
    """`Adam`, `SGD with momentum 0.9`, `AdamW (fused)`; empty without one."""
    if scenario.optimizer is None:
        return ""
    name = OPTIMIZER_NAMES.get(scenario.optimizer, scenario.optimizer)
    if scenario.momentum:
        name += f" with momentum {scenario.momentum:g}"
    if scenario.compile_optimizer:
        return f"{name} (compiled)"
    return name if scenario.optimizer_impl == "foreach" else f"{name} ({scenario.optimizer_impl})"


def compiled_rows(report: model.Report, view: View) -> list[tuple[str, str]]:
    """What torch.compile made of the step, as rows of a title and a text; none of an eager step."""
    compiled = report.compiled
    if compiled is None:
        return []
    rows = [("torch.compile", f"{plural(compiled.graphs, 'graph')}, by the rules of PyTorch {compiled.torch}")]
    if report.scenario.mode == "train":
        rows.append(("saved", f"{view.size(compiled.saved_bytes)} for the backward"))
        rows.append(("computed again", f"{view.size(compiled.recomputed_bytes)} in the backward"))
    if compiled.cuda_graphs:
        copied = f"over {view.size(compiled.copied_bytes)} of copied inputs"
        rows.append(("CUDA graphs", f"{compiled.cuda_graphs} in a pool of their own, {copied}"))
    if compiled.eager_ops:
        rows.append(("not compiled", f"{plural(compiled.eager_ops, 'op')} between the graphs"))
    return rows


def cache_rows(report: model.Report, view: View) -> list[tuple[str, str]]:
    """What the cache of `generate` takes, as rows of a title and a text; none of another step."""
    asked = report.generation
    if asked is None:
        return []
    rows = [
        ("generated", f"{plural(asked.new_tokens, 'token')} after a prompt of {asked.prompt:,}"),
        ("cache", f"{asked.cache}, {plural(asked.layers, 'layer')}, {plural(asked.cached_tokens, 'token')} a sequence"),
        ("one token", view.size(asked.token_bytes)),
        ("one sequence", view.size(asked.sequence_bytes)),
    ]
    return [*rows, ("all sequences", view.size(asked.cache_bytes))]


def place(at: model.Peak | model.PhasePeak) -> str:
    """`threshold_backward in layer4.2.relu`; empty where nothing was allocated."""
    if not at.at_op:
        return ""
    return f"{short(at.at_op)} in {at.module}" if at.module else short(at.at_op)


def step_name(report: model.Report) -> str:
    """`training resnet50.pt2, batch 32, Adam`; an assumed batch is marked."""
    scenario = report.scenario
    names = {"train": "training", "generate": "generation with"}
    parts = [f"{names.get(scenario.mode, 'inference of')} {model_name(report.model.path)}"]
    if scenario.batch is not None:
        assumed = any(note.code == "SM301" for note in report.assumptions)
        parts.append(f"batch {scenario.batch}{' (assumed)' if assumed else ''}")
    if scenario.mode == "train":
        parts.append(optimizer_name(scenario) or "no optimizer")
    if report.generation is not None:
        asked = report.generation
        parts.append(f"{plural(asked.new_tokens, 'token')} after {asked.prompt:,}, {asked.cache} cache")
    if scenario.dtype is not None:
        parts.append(f"in {scenario.dtype}")
    if scenario.amp is not None:
        parts.append(f"autocast to {scenario.amp}")
    if scenario.compile:
        parts.append(
            "compiled" if report.scenario.compile == ("all",) else f"{' and '.join(scenario.compile)} compiled"
        )
        if scenario.compile_mode != "default":
            parts[-1] += f" ({scenario.compile_mode})"
    if scenario.parallel is not None:
        parts.append(f"{_title(scenario.parallel)}, one of {scenario.devices} devices")
    if scenario.replicas is not None:
        parts.append(plural(scenario.replicas, "replica"))
    if scenario.expert_parallel is not None:
        parts.append(f"experts over {scenario.expert_parallel} ranks")
    if scenario.context_parallel is not None:
        parts.append(f"sequence over {scenario.context_parallel} ranks")
    return ", ".join(parts)


def share(part: int, whole: int) -> str:
    """`12.3%`; of nothing it is 0.0%."""
    return f"{part / max(whole, 1):.1%}"


def of_size(parts: Mapping[str, int]) -> list[tuple[str, int]]:
    """What is more than nothing, the largest first; equal sizes by name."""
    return sorted(filter(itemgetter(1), parts.items()), key=_size_and_name)


def _size_and_name(part: tuple[str, int]) -> tuple[int, str]:
    return -part[1], part[0]


def host_lines(host: model.HostInfo, view: View) -> list[str]:
    """What the process needs on the host, when, and of what; then what a node needs."""
    size = view.size
    when = {"loading": "while it loads", "step": "in the step", "saving": "while it saves"}[host.moment]
    lines = [f"needs {size(host.bytes)} of the host's memory{worst_case(host.bytes, host.band, None, view)}, {when}"]
    parts = sorted(host.parts.items(), key=lambda part: -part[1])
    lines.append(", ".join([f"{name} {size(nbytes)}" for name, nbytes in parts]))
    if host.pinned_bytes:
        lines.append(f"{size(host.pinned_bytes)} of pinned memory, in blocks of powers of two")
    if host.mapped_bytes:
        lines.append(f"{size(host.mapped_bytes)} of a mapped file besides, which the system can take back")
    chance = f"{100 * host.confidence:g} % confidence"
    lines.append(f"a node with {plural(host.processes, 'GPU')}: {size(host.limit_bytes)} with {chance}")
    return lines


def meter_rows(peak: model.Peak, view: View) -> list[tuple[str, str, str]]:
    """The meters of the report: name, expected peak, and the band where its ends do not look the same."""
    rows = []
    for name in METERS:
        expected, band = getattr(peak, f"{name}_bytes"), peak.bands.get(name)
        if expected is not None:
            low, high = view.size(band.low if band else expected), view.size(band.high if band else expected)
            rows.append((name, view.size(expected), f"{low} to {high}" if low != high else ""))
    return rows


def phase_rows(phases: model.Phases) -> list[tuple[str, int, str, int | None]]:
    """The phases of a step: name, bytes, where the peak is, and the activations that are kept at the forward's end for
    a backward."""
    kept = phases.forward_end_activation_bytes if phases.backward is not None else None
    rows: list[tuple[str, int, str, int | None]] = [("before the step", phases.start_bytes, "", None)]
    first = "forward" if phases.decode is None else "prefill"
    rows.append((f"{first}, peak", phases.forward.peak_bytes, place(phases.forward), None))
    rows.append((f"{first}, end", phases.forward_end_bytes, "", kept))
    if phases.first_call_bytes is not None:
        rows.append(("first call, peak", phases.first_call_bytes, "no result of a call before is held", None))
    later = (
        ("backward, peak", phases.backward), ("optimizer, peak", phases.optimizer),
        ("last step, peak", phases.decode),
    )  # fmt: skip
    for name, peak in later:
        if peak is not None:
            rows.append((name, peak.peak_bytes, place(peak), None))
    return rows


def shape_text(dtype: str, shape: Sequence[int]) -> str:
    """`float32[8, 3, 224, 224]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def tensor_name(module: str, name: str) -> str:
    """`layer1.0.conv1: conv2d_1`; a name that begins with the module's says it already."""
    return f"{module}: {name}" if module and not name.startswith(module) else name


def joined(why: Sequence[str]) -> str:
    """Reasons on one line; "saved for the backward of" once."""
    prefix = "saved for the backward of "
    saved = [reason.removeprefix(prefix) for reason in why if reason.startswith(prefix)]
    parts = [prefix + ", ".join(saved)] if saved else []
    return "; ".join([*parts, *[reason for reason in why if not reason.startswith(prefix)]])


def tflops_text(by_type: Mapping[str, float]) -> str:
    """The dense 16-bit figure, else that of float32."""
    return next((f"{by_type[name]:g} {name}" for name in ("bf16", "fp16", "fp32") if name in by_type), "")


def plural(n: int, word: str) -> str:
    """`1 tensor`, `860 tensors`."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def verdict(report: model.Report, view: View = PLAIN) -> str:
    """The answer on one line, with the step that it is of."""
    answer, *reasons = verdict_lines(report, view)
    return " ".join([f"{answer.removesuffix('.')} ({step_name(report)}).", *reasons])


def verdict_lines(report: model.Report, view: View = PLAIN) -> list[str]:
    """The answer: whether the step fits, what it needs and at most; then what that hangs on, a sentence each."""
    peak, gpu = report.peak, report.gpu
    at = place(peak)
    where = f"{PHASES.get(peak.phase, peak.phase)}{f' ({at})' if at else ''}"
    live = view.size(peak.live_bytes)
    subject = "inference " if report.scenario.mode == "infer" else ""  # else the step has said that it is training
    if peak.device_bytes is None:
        most = worst_case(peak.live_bytes, peak.bands["live"], None, view)
        return [f"Its tensors need {live}{most} at the peak, {where}."]
    need, band = peak.device_bytes, peak.bands.get("device")
    if gpu is None:
        card, needs = report.device.name if report.device else "a card", f"{subject}needs".capitalize()
        most = worst_case(need, band, None, view)
        return [
            f"{needs} {view.size(need)} of GPU memory{most}, on {with_article(card)}, which is assumed.",
            f"{live} of it are tensors at the peak, {where}.",
        ]
    largest = largest_text(report, view)
    return [*fit_lines(gpu, need, band, view, returned_text(report.device, view), subject), *[largest] * bool(largest)]


def fit_lines(
    gpu: model.GpuFit, need: int, band: model.Band | None, view: View, returned: str = "", subject: str = ""
) -> list[str]:
    """Whether a card runs the step and what of it the step needs; then why it is tight, and on which condition it runs.

    Args:
        need: bytes on the device that are expected.
        returned: the sentence on cached memory that PyTorch frees.
        subject: what needs it, with a space behind it, where that is said.
    """
    card, uses = with_article(gpu.name), of_card(need, gpu.usable_bytes, view)
    most = worst_case(need, band, gpu.usable_bytes, view)
    if gpu.obstacle:
        return [f"Cannot run on {card}: {gpu.obstacle}.", f"Without that, it would need {uses}{most}."]
    if gpu.fit == "does not fit":
        lines = [f"Does not fit {card}: {subject}{shortage(gpu, need, band, view)}."]
        if band is not None and band.low <= gpu.usable_bytes:
            lines.append(f"In the best case it needs {view.size(band.low)}, which fits.")
        return lines
    on = " on a condition" if gpu.condition else ""
    verb = "Fits" if gpu.fit == "fits" else "Tight on"
    return [f"{verb} {card}{on}: {subject}needs {uses}{most}.", *fit_reasons(gpu, band, returned)]


def fit_reasons(gpu: model.GpuFit, band: model.Band | None, returned: str) -> list[str]:
    """Why a card is tight, unless its worst case says it, and on which condition it runs the step: a sentence each."""
    why = "" if band is not None and band.high >= gpu.usable_bytes else gpu.why
    only = f"It runs there only with {gpu.condition}." if gpu.condition else ""
    return list(filter(None, (returned or (f"{why[:1].upper()}{why[1:]}." if why else ""), only)))


PHASES = {  # when the peak is
    "setup": "before the step",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
    "decode": "in the last decode step",
}


def of_card(need: int, usable: int, view: View) -> str:
    """`23.4 of 23.6 GiB`; where both look the same, the difference: `all but 12.0 MiB of 23.6 GiB`."""
    needed, given = view.size(need), view.size(usable)
    if needed == given:
        rest = f"all but {view.size(usable - need)} of" if need < usable else "all of"
        return f"{rest} {given}" if need <= usable else f"{view.size(need - usable)} more than {given}"
    number, _, unit = needed.rpartition(" ")
    return f"{number if given.endswith(f' {unit}') else needed} of {given}"


def worst_case(need: int, band: model.Band | None, usable: int | None, view: View) -> str:
    """`, at most 10.9 GiB` or `, in the worst case all of it`: how a need goes on; empty where it looks the same."""
    high = need if band is None else band.high
    if usable is not None and need < usable <= high:
        return ", in the worst case all of it"
    most = view.size(high)
    if most == view.size(need):
        return ""
    if usable is not None and need < usable and most == view.size(usable):
        return f", in the worst case all but {view.size(usable - high)}"
    return f", at most {most}"


def in_cache(fewer: int, saved: int, view: View) -> str:
    """What follows a lever that takes `fewer` bytes of tensors and saves less than half of them on the device: blocks
    of the allocator's cache had room for them."""
    if saved < 0 or fewer <= max(2 * saved, MIB):
        return ""
    return f" (its tensors are {view.size(fewer)} less, most of it in cached blocks)"


def shortage(gpu: model.GpuFit, need: int, band: model.Band | None, view: View) -> str:
    """`needs a card with 23.4 GiB, at most 25.1 GiB; this one is 1.38 GiB short`: the least that holds it, where
    PyTorch frees its cache, and the end of the band; without a search for the least `needs 23.4 of 22.0 GiB`."""
    short = f"{view.size(gpu.missing_bytes)} short"
    if gpu.least_usable_bytes is not None:
        least = gpu.least_usable_bytes
        most = worst_case(least, band, None, view) if band is not None and band.high > least else ""
        return f"needs a card with {view.size(least)}{most}; this one is {short}"
    uses = of_card(need, gpu.usable_bytes, view)
    return f"needs {uses}" if " more than " in uses else f"needs {uses}, {short}"


# What a file does not say of training, by the note of it: in a few words, and the flag that says there is none
UNSAID: Mapping[str, tuple[str, str, str]] = {
    "SM315": ("what is frozen", "nothing is frozen", "--freeze none"),
    "SM334": ("what is frozen", "nothing is frozen", "--freeze none"),
    "SM386": ("what runs in checkpoints", "nothing runs in checkpoints", "--checkpoint none"),
}


def unsaid_text(report: model.Report, view: View) -> str:
    """Why the step may need much less, and what settles it; empty where the file says it all."""
    open_facts = dict.fromkeys(UNSAID[note.code] for note in report.assumptions if note.code in UNSAID)
    band = report.peak.bands["live"]
    low = view.size(report.peak.bands.get("device", band).low)
    if band.low < report.peak.live_bytes and any(note.code == "SM326" for note in report.assumptions):
        return f"It may need as little as {low}: sizes that are in the data are as large as they can get (SM326)."
    if not open_facts or band.low == band.high:
        return ""
    named, absent, flags = zip(*open_facts, strict=True)
    return (
        f"It may need as little as {low}: the file does not say "
        f"{' and '.join(named)}. If {' and '.join(absent)}, add {' '.join(flags)}."
    )


def _title(strategy: str) -> str:
    """How a strategy is written; one that a saved report of another version names stays as it is."""
    return STRATEGIES[strategy].title if strategy in STRATEGIES else strategy


def next_step(report: model.Report) -> str:
    """What to ask next, by the answer. Of an ONNX file in inference: many run those elsewhere than in PyTorch."""
    if report.model.format != "onnx" or report.scenario.mode != "infer":
        return _next_verb(report)
    engine = "The figures are PyTorch's; --runtime onnxruntime --provider cuda gives those of the ONNX Runtime."
    return f"{_next_verb(report)} {engine}".lstrip()


def _next_verb(report: model.Report) -> str:
    gpu = report.gpu
    if gpu is None:
        return "Next: --gpu NAME says whether a card holds it; `staticmem size` compares cards."
    if gpu.obstacle:
        return "Next: `staticmem size` compares cards."
    if gpu.fit != "fits":
        return "Next: `staticmem levers` shows what makes it smaller, `staticmem size` which cards hold it."
    if largest_of(report) is None and report.scenario.batch is not None:
        return "Next: --max-batch finds the largest batch; `staticmem size` compares cards."
    return ""


def with_article(name: str) -> str:
    """`an L4`, `a T4`, `a GeForce RTX 4090`: letters that are spoken one by one begin as they are called."""
    word = name.partition(" ")[0]
    spelled = word.upper() == word
    return f"{'an' if word[:1] in ('AEFHILMNORSX' if spelled else 'AEIO') else 'a'} {name}"


def returned_text(
    device: model.DeviceInfo | RunReport | None, view: View, meanwhile: str = "the three steps replayed"
) -> str:
    """What PyTorch has to free so that it fits, as a sentence; empty where that is nothing."""
    if device is None or not device.retries:
        return ""
    times = {1: "once", 2: "twice"}.get(device.retries, f"{device.retries:,} times")
    freed = view.size(device.returned_bytes)
    return f"It fits only because PyTorch frees {freed} of cached memory ({times} in {meanwhile})."


def largest_of(report: model.Report) -> model.LargestSize | None:
    """The largest batch or size of a dimension that was asked for."""
    if report.max_batch is not None:
        return model.LargestSize.of_batch(report.max_batch)
    return report.max_dim


def largest_text(report: model.Report, view: View = PLAIN) -> str:
    """`The largest batch that fits is 234 ...`; empty where it was not computed."""
    largest = largest_of(report)
    if largest is None:
        return ""
    name = view.style.plain(largest.dim)
    if largest.size == 0:
        return f"No {name} fits."
    beyond = "the model takes none larger" if largest.size < model.MOST_BATCH else "larger ones are not tried"
    need = largest.device_bytes or 0
    if largest.next_device_bytes is not None:
        beyond = f"{largest.next_size:,} needs {view.size(largest.next_device_bytes)}"
        if view.size(largest.next_device_bytes) == view.size(need):
            beyond = f"{largest.next_size:,} needs {view.size(largest.next_device_bytes - need)} more"
    safe = f"{largest.safe_size:,} is safe: its upper estimate is at most 95 % of the card."
    if not largest.safe_size:
        safe = "None is safe: the upper estimate of each is above 95 % of the card."
    return f"The largest {name} that fits is {largest.size:,} ({view.size(need)}; {beyond}). {safe}"
