"""Sentences that every human-readable format shares: names of things, and the verdict."""

from __future__ import annotations

import os

from staticmem.liveness.why import short
from staticmem.report.model import Peak, PhasePeak, Report, ScenarioInfo
from staticmem.scenario.step import TITLES
from staticmem.units import format_bytes

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


def optimizer_name(scenario: ScenarioInfo) -> str:
    """`Adam`, `SGD with momentum 0.9`, `AdamW (fused)`; empty without one."""
    if scenario.optimizer is None:
        return ""
    name = OPTIMIZER_NAMES.get(scenario.optimizer, scenario.optimizer)
    if scenario.momentum:
        name += f" with momentum {scenario.momentum:g}"
    return name if scenario.optimizer_impl == "foreach" else f"{name} ({scenario.optimizer_impl})"


def place(at: Peak | PhasePeak) -> str:
    """`threshold_backward in layer4.2.relu`; empty where nothing was allocated."""
    if not at.at_op:
        return ""
    return f"{short(at.at_op)} in {at.module}" if at.module else short(at.at_op)


def step_name(report: Report) -> str:
    """`training resnet50.pt2, batch 32, Adam`; a batch that nobody gave is marked."""
    scenario = report.scenario
    parts = [f"{'training' if scenario.mode == 'train' else 'inference of'} {os.path.basename(report.model.path)}"]
    if scenario.batch is not None:
        assumed = any(note.code == "SM301" for note in report.assumptions)
        parts.append(f"batch {scenario.batch}{' (assumed)' if assumed else ''}")
    if scenario.mode == "train":
        parts.append(optimizer_name(scenario) or "no optimizer")
    if scenario.dtype is not None:
        parts.append(f"in {scenario.dtype}")
    if scenario.amp is not None:
        parts.append(f"autocast to {scenario.amp}")
    if scenario.parallel is not None:
        parts.append(f"{TITLES.get(scenario.parallel, scenario.parallel)}, one of {scenario.devices} devices")
    return ", ".join(parts)


def share(part: int, whole: int) -> str:
    """`12.3%`; of nothing it is 0.0%."""
    return f"{part / max(whole, 1):.1%}"


def verdict(report: Report, units: str = "binary") -> str:
    """The one line that a user came for."""
    at = place(report.peak)
    where = f"{_PHASES.get(report.peak.phase, report.peak.phase)}{f' ({at})' if at else ''}"
    size = format_bytes(report.peak.live_bytes, units)
    line = f"Peak {size} live tensor memory in {where} — {step_name(report)}."
    gpu = report.gpu
    if gpu is None:
        return line
    device = format_bytes(report.peak.device_bytes or 0, units)
    left = format_bytes(gpu.headroom_bytes, units)
    missing = format_bytes(gpu.missing_bytes, units)
    tight = f"{left} to spare"
    if gpu.missing_bytes:
        tight = f"{missing} over, which the allocator can serve by giving cached memory back"
    outcome = {
        "fits": f"fits a {gpu.name} with {left} to spare",
        "tight": f"is tight on a {gpu.name}: {tight}",
        "does not fit": f"does not fit a {gpu.name}: {missing} short",
    }[gpu.fit]
    largest = largest_batch(report, units)
    return f"{line} On the device {device}, which {outcome}.{f' {largest}' if largest else ''}"


def largest_batch(report: Report, units: str = "binary") -> str:
    """`The largest batch on l4 is 234 ...`; empty where it was not asked for."""
    found = report.max_batch
    if found is None:
        return ""
    if found.batch == 0:
        need = "" if found.next_device_bytes is None else f": {format_bytes(found.next_device_bytes, units)} are needed"
        return f"No batch fits {found.gpu}{need}."
    behind = "the model takes none larger"
    if found.next_device_bytes is not None:
        behind = f"{found.batch + 1} needs {format_bytes(found.next_device_bytes, units)}"
    safe = f"{found.safe_batch} is" if found.safe_batch else "none is"
    return (
        f"The largest batch on {found.gpu} is {found.batch} "
        f"({format_bytes(found.device_bytes or 0, units)}; {behind}); "
        f"{safe} within 95 % of it with all that is uncertain."
    )


_PHASES = {"setup": "what exists before the step", "optimizer": "the optimizer step"}
