"""The meters of a card beside the live one: which card and software a request means, and what the report says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from staticmem.allocators.settings import parse_settings
from staticmem.devices import gpus, profile
from staticmem.devices.conv_workspace import OLD_CUDNN
from staticmem.devices.gpus import Gpu
from staticmem.devices.kernels import Setup
from staticmem.devices.meters import Device, DeviceMeters, replayed
from staticmem.devices.reductions import Multiprocessors
from staticmem.devices.sizing import Verdict
from staticmem.report.model import DEVICE_CATEGORIES, Band, DeviceInfo, GpuFit, NoteInfo, Report
from staticmem.scenario.request import Request
from staticmem.units import format_bytes
from staticmem.version import torch_release

if TYPE_CHECKING:
    from staticmem.engine.step import StepResult
    from staticmem.report.formats.report_viewers import Replayed

DEFAULT_GPU = "h100-sxm-80gb"  # a card of gpus.DEFAULT_ARCHITECTURE, where none is named

_SOURCES = "their constants have sources, but were not verified on hardware (docs/hardware.md)"


def device_of(request: Request) -> Device:
    """The card and its software.

    Raises:
        UsageError: no such card, or an option that is not understood.
        CudnnError: --cudnn library is given, and there is no libcudnn.
    """
    gpu = gpus.find(request.gpu or DEFAULT_GPU, file=request.gpus_file)
    software = profile.load(Path(request.profile) if request.profile is not None else None)
    software = replace(software, libraries=software.libraries.plus(profile.NCCL[request.communicators]))
    cudnn = None
    if request.cudnn == "library":
        from staticmem.devices.cudnn import Cudnn  # opens libcudnn

        cudnn = Cudnn()
    torch = request.torch_version or profile.DEFAULT_TORCH
    software = software.loaded(torch, request.module_loading)
    setup = Setup(
        gpu.architecture,
        torch,
        allow_tf32=request.tf32,
        channels_last=request.channels_last,
        benchmark=request.cudnn_benchmark,
        cudnn=cudnn,
        profile=software,
        multiprocessors=Multiprocessors(gpu.processors, gpus.THREADS[gpu.architecture]),
    )
    return Device(gpu, setup, parse_settings(request.alloc_conf), bounded=request.gpu is not None)


def without_device(report: Report) -> Report:
    text = "the graph is large: allocated, reserved and device memory are worked out if --gpu asks for them"
    return replace(report, assumptions=(*report.assumptions, NoteInfo("SM406", text, 1)))


def with_device(
    report: Report, request: Request, device: Device, meters: DeviceMeters, spread: tuple[int, int]
) -> Report:
    """The report with the meters of a card beside the live one; `spread`, what the file leaves open, widens bands."""
    meters = meters.widened(*spread)
    bands = dict(report.peak.bands)
    for name in ("allocated", "reserved", "device", "context"):
        band = getattr(meters, name)
        bands[name] = Band(band.low, band.high)
    peak = replace(
        report.peak,
        bands=bands,
        allocated_bytes=meters.allocated.expected,
        reserved_bytes=meters.reserved.expected,
        device_bytes=meters.device.expected,
        context_bytes=meters.context.expected,
        device_by_category={**dict.fromkeys(DEVICE_CATEGORIES, 0), **meters.parts},
    )
    shared = _shared_memory(device.gpu) if request.gpu is not None and device.gpu.unified else ()
    notes = (*report.assumptions, _note(request, device), *shared)
    fit = gpu_fit(device.gpu, meters.verdict) if request.gpu is not None else None
    warnings = report.warnings if request.gpu is None else (*report.warnings, *_standing(device.gpu, meters.verdict))
    info = _info(request, device, meters)
    return replace(report, peak=peak, gpu=fit, device=info, assumptions=notes, warnings=warnings)


def _standing(card: Gpu, outcome: Verdict) -> Sequence[NoteInfo]:
    """Why a card cannot run the step, or runs it on a condition."""
    stands = outcome.standing
    if stands.obstacle:
        return (NoteInfo("SM285", f"the {card.name} cannot run it: {stands.obstacle}", 1),)
    if stands.condition:
        return (NoteInfo("SM414", f"the {card.name} runs it with {stands.condition}: {stands.reason}", 1),)
    return ()


def gpu_fit(card: Gpu, outcome: Verdict) -> GpuFit:
    """A verdict as the report has it."""
    return GpuFit(card.slug, card.name, card.architecture, card.usable, assumed=card.assumed, **outcome.said)


def _info(request: Request, device: Device, meters: DeviceMeters) -> DeviceInfo:
    setup, asked = device.setup, device.setup.cudnn
    version = setup.profile.cudnn(setup.torch) if asked is None else asked.name
    return DeviceInfo(
        request.gpu is None,
        device.gpu.name,
        device.gpu.architecture,
        setup.torch,
        version,
        "tables" if asked is None else "library",
        setup.allow_tf32,
        setup.channels_last,
        setup.benchmark,
        request.alloc_conf,
        meters.step,
        meters.phase,
        meters.retries,
        meters.returned,
    )


def _shared_memory(card: Gpu) -> Sequence[NoteInfo]:
    """A note on a card whose memory the CPU shares."""
    free, whole = format_bytes(card.usable), format_bytes(card.nominal)
    text = f"the {card.name} shares its memory with the CPU: {free} of {whole} are taken to be free, which programs and"
    return (NoteInfo("SM286", f"{text} the page cache change (give what is free as --gpu 90GiB)", 1),)


def _note(request: Request, device: Device) -> NoteInfo:
    text = f"allocated, reserved and device memory are for this GPU: {device.gpu.name}"
    others = gpus.variants(request.gpu, request.gpus_file) if request.gpu is not None else []
    if others:
        text += f" ('{request.gpu}' may also mean {', '.join(others)})"
    text = ": ".join((text, *device.gpu.unsaid))
    modules = device.setup.profile.modules
    loading = request.module_loading or modules.loading(torch_release(device.setup.torch))
    if loading == profile.EAGER:
        text += ", and all kernels of CUDA modules are loaded with the context (--module-loading eager)"
    cudnn = device.setup.profile.cudnn(device.setup.torch)
    if device.setup.cudnn is None and int(cudnn.partition(".")[0]) < OLD_CUDNN:
        text += f", and convolutions have the workspaces of later versions than cuDNN {cudnn}, which may take more"
    if request.gpu is None:
        return NoteInfo("SM405", f"{text}, as --gpu names no other GPU; {_SOURCES}", 1)
    return NoteInfo("SM404", f"{text}; {_SOURCES}", 1)


def replay_of(request: Request, result: StepResult) -> Replayed:
    """The process of a step as the allocator replays it, for the viewers of other tools."""
    from staticmem.report.formats.report_viewers import Replayed  # late: other formats need none of it

    device = device_of(request)
    process, replay = replayed(result, device)
    return Replayed(process, replay, result.trace, result.graph, device.settings)
