"""From live tensors to what a card shows: allocated, reserved and device memory of a step, each as a band.

Allocated is the replay of the process through PyTorch's caching allocator with the workspaces that kernels take;
reserved what that allocator holds; device adds the CUDA context and loaded libraries (`gpus`, `profile`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from staticmem.allocators.band import REPLAYS, WIDTH, is_quick, quick_band, reserved_band
from staticmem.allocators.band import ReservedBand as Jittered
from staticmem.allocators.from_trace import process_of_trace
from staticmem.allocators.peaks import LargePool, Outline, outline
from staticmem.allocators.process import Process
from staticmem.allocators.settings import DEFAULTS, Settings
from staticmem.devices.gpus import Gpu
from staticmem.devices.kernels import KernelWorkspaces, Setup
from staticmem.devices.sizing import Verdict, verdict
from staticmem.engine.step import StepResult
from staticmem.ir.record import record
from staticmem.units import Band

if TYPE_CHECKING:
    from staticmem.allocators.result import Replay

# The replays of a band are independent of one another and cost the same; a long process gets fewer of them.
LONG, REPLAYS_OF_LONG = 200_000, 3  # calls of the process


@record(frozen=True)
class Device:
    """A card and the software on it: `setup` decides workspaces, `settings` the allocator, its profile the context."""

    gpu: Gpu
    setup: Setup
    settings: Settings = DEFAULTS


@record(frozen=True)
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
    """Three steps from the start of the process, and their replay with every placement.

    On a card that is too small for them the record ends where the allocation fails.
    """
    process = process_on(result, device)
    replay = _replay(process, device, None)
    if replay.peak_reserved > _capacity(device):
        replay = _replay(process, device, _capacity(device))
    return process, replay


def process_on(result: StepResult, device: Device) -> Process:
    """The allocator's calls of three steps."""
    return process_of_trace(result.trace, KernelWorkspaces(result.trace, device.setup))


def _capacity(device: Device) -> int:
    return max(device.gpu.usable - device.setup.profile.overhead(device.gpu).expected, 0)


def _replay(process: Process, device: Device, capacity: int | None) -> Replay:
    """Replays with `capacity` bytes, None: without limit. The memory fraction is of the whole card in either case."""
    from staticmem.allocators.cuda_caching import simulate  # PyTorch's default settings need none of it

    total = device.gpu.usable
    return simulate(process.events, device.settings, capacity, total=total, fallbacks=process.fallbacks)


def usable_on(device: Device) -> int:
    """Bytes that the process may take of the card: all that CUDA gives, or the allocator's fraction and the context."""
    gpu, overhead = device.gpu, device.setup.profile.overhead(device.gpu)
    return min(gpu.usable, int(device.settings.per_process_memory_fraction * gpu.usable) + overhead.expected)


def on_device(result: StepResult, device: Device, spread: tuple[int, int] = (0, 0)) -> DeviceMeters:
    """The device meters of a step. `spread`: bytes by which the live peak may be lower, and higher, where the file
    leaves open what the model's code keeps or runs in place: all bands are wider by as much."""
    process = process_on(result, device)
    nominal: Outline | Replay
    if is_quick(process, device.settings):
        nominal, retries = outline(process.calls, process.sizes), 0
        allocated, reserved = _quick_bands(process, nominal)
    else:
        nominal, retries, allocated, reserved = _whole(process, device)
    gpu, profile = device.gpu, device.setup.profile
    context = profile.overhead(gpu)
    less, more = spread
    allocated = Band(allocated.low - less, allocated.expected, allocated.high + more)
    reserved = Band(reserved.low - less, reserved.expected, reserved.high + more)
    needed = reserved.plus(context)
    floor = None
    usable = usable_on(device)
    if needed.expected > usable:  # under pressure the allocator gives cached segments back and tries again
        pressed = _replay(process, device, _capacity(device))
        floor = needed.expected if pressed.oom is not None else usable
        retries = pressed.retries
    mark = process.mark_at(nominal.peak_reserved_at)
    parts = _parts(result, process, nominal)
    parts["cached"] = reserved.expected - nominal.peak_allocated
    parts["context"] = profile.context(gpu).expected
    parts["libraries"] = profile.libraries.expected
    return DeviceMeters(
        allocated, reserved, needed, context, verdict(needed, usable, floor), parts, mark.step, mark.phase, retries
    )


def _whole(process: Process, device: Device) -> tuple[Replay, int, Band, Band]:
    """With settings that are not PyTorch's defaults: the replay, its retries, allocated and reserved memory."""
    from staticmem.allocators.cuda_caching import simulate

    nominal = _replay(process, device, None)
    if nominal.oom is not None:  # the memory fraction is too small: what it would need without
        device = replace(device, settings=replace(device.settings, per_process_memory_fraction=1.0))
        nominal = _replay(process, device, None)
    total = device.gpu.usable
    jittered = reserved_band(process, device.settings, total=total, replays=_replays(process), nominal=nominal)
    bounds = [
        simulate(process.served(process.bound(most)), device.settings, total=total)
        for most in (False, True)
        if process.bounds
    ]
    allocated, reserved = _joint(
        nominal, jittered, [(outcome.peak_allocated, outcome.peak_reserved) for outcome in bounds]
    )
    return nominal, nominal.retries, allocated, reserved


def _quick_bands(process: Process, nominal: Outline) -> tuple[Band, Band]:
    """Allocated and reserved memory with PyTorch's default settings."""
    pool = LargePool(process, nominal, 1 + WIDTH)
    jittered = quick_band(process, nominal, pool, _replays(process))
    bounds = []
    for most in (False, True) if process.bounds else ():
        sizes = process.bound(most)
        bounds.append(pool.peaks([sizes[id] for id in pool.ids]))
    return _joint(nominal, jittered, bounds)


def _replays(process: Process) -> int:
    return REPLAYS if len(process.calls) <= LONG else REPLAYS_OF_LONG


def _joint(nominal: Replay | Outline, jittered: Jittered, bounds: Sequence[tuple[int, int]]) -> tuple[Band, Band]:
    """Joins the bands of all replays: as blocks are not split below 1 MiB, a smaller workspace can leave a larger
    block."""
    allocated = [nominal.peak_allocated, *(bound[0] for bound in bounds)]
    reserved = [jittered.low, jittered.high, *(bound[1] for bound in bounds)]
    expected = max(jittered.expected, nominal.peak_allocated)
    return (
        Band(min(allocated), nominal.peak_allocated, max(allocated)),
        Band(max(min(*reserved, expected), min(allocated)), expected, max(*reserved, expected)),
    )


def _parts(result: StepResult, process: Process, nominal: Replay | Outline) -> dict[str, int]:
    """Bytes of allocated memory at its peak by category."""
    parts: Counter[str] = Counter()
    categories, origins = result.trace.buffers.categories, process.origins.buffers
    for id, requested, block in _alive(process, nominal):
        size = -(-requested // 512) * 512
        parts[categories[origins[id]] if origins[id] >= 0 else "workspace"] += size
        parts["rounding"] += block - size
    return dict(parts)


def _alive(process: Process, nominal: Replay | Outline) -> Iterator[tuple[int, int, int]]:
    """(id, bytes asked for, bytes of the block) of what is allocated where allocated memory peaks, oldest first."""
    time = nominal.peak_allocated_at
    if isinstance(nominal, Outline):
        alive: dict[int, None] = {}
        for call in process.calls[: time + 1]:
            if call >= 0:
                alive[call] = None
            else:
                del alive[~call]
        blocks = nominal.blocks
        yield from ((id, process.sizes[id], blocks[id]) for id in alive if blocks[id])
        return
    for placement in nominal.placements():
        if placement.born > time:
            break
        if placement.alive(time):
            yield placement.id, placement.requested, placement.size
