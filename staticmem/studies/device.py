"""The meters of a card beside the live one: which card and software a request means, and what the report says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from staticmem.allocators.settings import parse_settings
from staticmem.devices import communicators, gpus, profile
from staticmem.devices.kernels import Setup
from staticmem.devices.meters import Device, DeviceMeters, on_device
from staticmem.devices.modules import EAGER
from staticmem.devices.reductions import Multiprocessors
from staticmem.engine.step import StepResult
from staticmem.report.model import DEVICE_CATEGORIES, Band, DeviceInfo, GpuFit, NoteInfo, Report
from staticmem.scenario.request import Request

if TYPE_CHECKING:
    from staticmem.devices.cudnn import Cudnn

DEFAULT_GPU = "h100-sxm-80gb"  # a card of gpus.DEFAULT_ARCHITECTURE, where nobody names one
LIMIT = 1_000_000  # ticks of a trace; beyond it a replay has to be asked for (--gpu)

_SOURCES = "their constants have sources, but were not verified on hardware (docs/hardware.md)"


def device_of(request: Request) -> Device:
    """The card and its software.

    Raises:
        UsageError: no such card, or a word that is not understood.
        CudnnError: libcudnn was asked for and is not there.
    """
    gpu = gpus.find(request.gpu or DEFAULT_GPU, file=request.gpus_file)
    known = profile.load(Path(request.profile) if request.profile is not None else None)
    if request.parallel is not None:
        known = replace(known, libraries=known.libraries.plus(communicators.NCCL))
    torch = request.torch_version or profile.DEFAULT_TORCH
    known = known.loaded(torch, request.module_loading)
    setup = Setup(
        gpu.architecture, torch, allow_tf32=request.tf32, channels_last=request.channels_last,
        benchmark=request.cudnn_benchmark, cudnn=_library(request), profile=known,
        multiprocessors=Multiprocessors(gpu.processors, gpus.THREADS[gpu.architecture]),
    )  # fmt: skip
    return Device(gpu, setup, parse_settings(request.alloc_conf))


def _library(request: Request) -> Cudnn | None:
    if request.cudnn != "library":
        return None
    from staticmem.devices.cudnn import Cudnn

    return Cudnn()


def with_device(report: Report, result: StepResult, request: Request) -> Report:
    """The report with the meters of a card beside the live one."""
    if request.gpu is None and result.trace.ticks > LIMIT:
        text = "the graph is large: allocated, reserved and device memory are worked out if --gpu asks for them"
        return replace(report, assumptions=(*report.assumptions, NoteInfo("SM406", text, 1)))
    device = device_of(request)
    bands, live = dict(report.peak.bands), report.peak.live_bytes
    found = on_device(result, device, (live - bands["live"].low, bands["live"].high - live))
    for name in ("allocated", "reserved", "device", "context"):
        band = getattr(found, name)
        bands[name] = Band(band.low, band.high)
    peak = replace(
        report.peak,
        bands=bands,
        allocated_bytes=found.allocated.expected,
        reserved_bytes=found.reserved.expected,
        device_bytes=found.device.expected,
        context_bytes=found.context.expected,
        device_by_category={**{name: found.parts.get(name, 0) for name in DEVICE_CATEGORIES}, **_further(found)},
    )
    notes = (*report.assumptions, *_notes(request, device))
    fit = _fit(device, found) if request.gpu is not None else None
    return replace(report, peak=peak, gpu=fit, device=_info(request, device, found), assumptions=notes)


def _further(found: DeviceMeters) -> dict[str, int]:
    """Categories that only some steps have: buffers of collectives."""
    return {name: size for name, size in found.parts.items() if name not in DEVICE_CATEGORIES}


def _fit(device: Device, found: DeviceMeters) -> GpuFit:
    card, outcome = device.gpu, found.verdict
    return GpuFit(
        card.slug, card.name, card.architecture, card.usable, outcome.fit.value, max(outcome.headroom, 0),
        outcome.missing, card.assumed,
    )  # fmt: skip


def _info(request: Request, device: Device, found: DeviceMeters) -> DeviceInfo:
    setup, asked = device.setup, device.setup.cudnn
    version = setup.profile.cudnn(setup.torch) if asked is None else asked.name
    return DeviceInfo(
        request.gpu is None, device.gpu.name, device.gpu.architecture, setup.torch, version,
        "tables" if asked is None else "library", setup.allow_tf32, setup.channels_last, setup.benchmark,
        request.alloc_conf, found.step, found.phase, found.retries,
    )  # fmt: skip


def _notes(request: Request, device: Device) -> list[NoteInfo]:
    text = f"allocated, reserved and device memory are for this card: {device.gpu.name}"
    modules = device.setup.profile.modules
    loading = request.module_loading or modules.loading(profile.version(device.setup.torch))
    if loading == EAGER:
        text += ", and all kernels of CUDA modules are loaded with the context (--module-loading eager)"
    if request.gpu is None:
        return [NoteInfo("SM405", f"{text}, as --gpu names no other card; {_SOURCES}", 1)]
    return [NoteInfo("SM404", f"{text}; {_SOURCES}", 1)]
