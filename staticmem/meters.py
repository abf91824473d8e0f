"""From live tensors to what a card shows: allocated, reserved and device memory of a step, each as a band.

Allocated is the replay of the process through PyTorch's caching allocator with the workspaces that kernels take;
reserved what that allocator holds; device adds the CUDA context and what libraries load. `hardware` has the constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from staticmem.allocators import Process, Replay, Settings, process, reserved_band, simulate
from staticmem.allocators.cuda_caching import DEFAULTS
from staticmem.allocators.jitter import REPLAYS
from staticmem.allocators.peaks import joined, peaks
from staticmem.hardware.band import Band
from staticmem.hardware.gpus import Gpu
from staticmem.hardware.kernels import KernelWorkspaces, Setup
from staticmem.hardware.sizing import Verdict, verdict
from staticmem.training.step import StepResult

# The replays of a band are independent of one another and cost the same; a long process gets fewer of them.
LONG, REPLAYS_OF_LONG = 200_000, 3  # calls of the process


@dataclass(frozen=True)
class Device:
    """A card and the software on it: `setup` decides workspaces, `settings` the allocator, its profile the context."""

    gpu: Gpu
    setup: Setup
    settings: Settings = DEFAULTS


@dataclass(frozen=True)
class DeviceMeters:
    """Bytes at the peaks of three steps from the start of a process, and whether a card has them.

    `parts` adds up to `device.expected`: live tensors by category where allocated memory peaks, `workspace`, `rounding`
    (what blocks are larger than tensors), `cached` (reserved beyond allocated: cached blocks and fragmentation),
    `context` and `libraries`. `step` and `phase` say where reserved memory peaks; `retries` how often the allocator
    gave cached memory back on a card of this size.
    """

    allocated: Band
    reserved: Band
    device: Band
    context: Band  # the part of device that exists before the first tensor
    verdict: Verdict
    parts: Mapping[str, int]
    step: int
    phase: str
    retries: int


def replayed(result: StepResult, device: Device) -> tuple[Process, Replay]:
    """Three steps from the start of the process, and the allocator's whole record of them.

    On a card that is too small for them the record ends where the allocation fails.
    """
    found = _process(result, device)
    replay = _replay(found, device, None)
    if replay.peak_reserved > _capacity(device):
        replay = _replay(found, device, _capacity(device))
    return found, replay


def _process(result: StepResult, device: Device) -> Process:
    return process(result.trace, KernelWorkspaces(result.trace, result.graph, device.setup))


def _capacity(device: Device) -> int:
    return max(device.gpu.usable - device.setup.profile.overhead(device.gpu).expected, 0)


def _replay(found: Process, device: Device, capacity: int | None) -> Replay:
    """`capacity` None: as much as is asked for; the memory fraction is of the whole card all the same."""
    total = device.gpu.usable
    return simulate(found.events, device.settings, capacity, total=total, fallbacks=found.fallbacks)


def on_device(result: StepResult, device: Device) -> DeviceMeters:
    """The device meters of a step."""
    found = _process(result, device)
    nominal, free = _replay(found, device, None), device
    if nominal.oom is not None:  # the memory fraction is too small: what it would need without
        free = replace(device, settings=replace(device.settings, per_process_memory_fraction=1.0))
        nominal = _replay(found, free, None)
    allocated, reserved = _bands(found, nominal, free)
    gpu, known = device.gpu, device.setup.profile
    context = known.overhead(gpu)
    needed = reserved.plus(context)
    floor, retries = None, nominal.retries
    usable = min(gpu.usable, int(device.settings.per_process_memory_fraction * gpu.usable) + context.expected)
    if needed.expected > usable:  # under pressure the allocator gives cached segments back and tries again
        pressed = _replay(found, device, _capacity(device))
        floor = needed.expected if pressed.oom is not None else usable
        retries = pressed.retries
    mark = found.mark_at(nominal.peak_reserved_at)
    parts = _parts(result, found, nominal)
    parts["cached"] = reserved.expected - nominal.peak_allocated
    parts["context"] = known.context(gpu).expected
    parts["libraries"] = known.libraries.expected
    return DeviceMeters(
        allocated, reserved, needed, context, verdict(needed, usable, floor), parts, mark.step, mark.phase, retries
    )


def _bands(found: Process, nominal: Replay, device: Device) -> tuple[Band, Band]:
    """Allocated and reserved: blocks are not split below 1 MiB, so a smaller workspace can leave a larger block, and
    the bounds are those of all replays."""
    replays = REPLAYS if len(found.calls) <= LONG else REPLAYS_OF_LONG
    total = device.gpu.usable
    jittered = reserved_band(found, device.settings, total=total, replays=replays, nominal=nominal)
    allocated, reserved = [nominal.peak_allocated], [*jittered.values]
    calls: list[int] = []
    for most in (False, True) if found.bounds else ():
        sizes = found.bound(most)
        if device.settings == DEFAULTS and not found.empties:
            calls = calls or joined(found.calls, len(found.sizes))
            bound = peaks(calls, sizes)
            allocated.append(bound.allocated)
            reserved.append(bound.reserved)
        else:
            replay = simulate(found.served(sizes), device.settings, total=total)
            allocated.append(replay.peak_allocated)
            reserved.append(replay.peak_reserved)
    expected = max(jittered.expected, nominal.peak_allocated)
    return (
        Band(min(allocated), nominal.peak_allocated, max(allocated)),
        Band(min(*reserved, expected), expected, max(*reserved, expected)),
    )


def _parts(result: StepResult, found: Process, replay: Replay) -> dict[str, int]:
    """What allocated memory consists of at its peak."""
    parts: Counter[str] = Counter()
    time, buffers = replay.peak_allocated_at, result.trace.buffers
    for placement in replay.placements():
        if placement.born > time:
            break
        if placement.alive(time):
            origin = found.origins[placement.id]
            size = -(-placement.requested // 512) * 512
            parts[buffers[origin.buffer].category if origin.buffer >= 0 else "workspace"] += size
            parts["rounding"] += placement.size - size
    return dict(parts)
