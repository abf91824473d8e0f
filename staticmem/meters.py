"""From live tensors to what a card shows: allocated, reserved and device memory of a step, each as a band.

Allocated is the replay of the process through PyTorch's caching allocator with the workspaces that kernels take;
reserved what that allocator holds; device adds the CUDA context and what libraries load. `hardware` has the constants.
"""

from __future__ import annotations

from dataclasses import dataclass

from staticmem.allocators import process, reserved_band, simulate
from staticmem.allocators.peaks import joined, peaks
from staticmem.hardware import gpus, profile
from staticmem.hardware.band import Band
from staticmem.hardware.gpus import Gpu
from staticmem.hardware.kernels import KernelWorkspaces, Setup
from staticmem.hardware.sizing import Verdict, verdict
from staticmem.training.step import StepResult


@dataclass(frozen=True)
class DeviceMeters:
    """Bytes at the peaks of three steps from the start of a process, and whether a card has them."""

    gpu: Gpu
    allocated: Band
    reserved: Band
    device: Band
    context: Band  # the part of device that exists before the first tensor
    verdict: Verdict


def on_device(result: StepResult, query: str) -> DeviceMeters:
    """The device meters of a step on a card (`h100-sxm-80gb`, `24GB`).

    Raises:
        UsageError: no card of that name.
    """
    gpu = gpus.find(query)
    known = profile.load()
    setup = Setup(architecture=gpu.architecture, profile=known)
    replayed = process(result.trace, KernelWorkspaces(result.trace, result.graph, setup))
    nominal = simulate(replayed.events, fallbacks=replayed.fallbacks)
    jittered = reserved_band(replayed, nominal=nominal)
    allocated, reserved = [nominal.peak_allocated], [nominal.peak_reserved, jittered.low, jittered.high]
    if replayed.bounds:
        calls = joined(replayed.calls, len(replayed.sizes))
        for most in (False, True):
            bound = peaks(calls, replayed.bound(most))
            allocated.append(bound.allocated)
            reserved.append(bound.reserved)
    # blocks are not split below 1 MiB, so a smaller workspace can leave a larger block: the bounds are of all replays
    allocated_band = Band(min(allocated), allocated[0], max(allocated))
    expected = jittered.expected
    reserved_bounds = Band(min(*reserved, expected), expected, max(*reserved, expected))
    context = known.overhead(gpu)
    device = reserved_bounds.plus(context)
    floor = None
    if device.expected > gpu.usable:  # under pressure the allocator gives cached segments back and tries again
        replay = simulate(replayed.events, capacity=gpu.usable - context.expected, fallbacks=replayed.fallbacks)
        floor = device.expected if replay.oom is not None else gpu.usable
    return DeviceMeters(gpu, allocated_band, reserved_bounds, device, context, verdict(device, gpu.usable, floor))
