"""From live tensors to what a card shows: allocated, reserved and device memory of a step, each as a band.

Allocated is the replay of the process through PyTorch's caching allocator with the workspaces that kernels take;
reserved what that allocator holds; device adds the CUDA context and loaded libraries (`gpus`, `profile`).

What is expected is the replay on the memory of the card: where it is short, the allocator gives cached blocks back and
tries again, and a convolution takes a plan with less workspace (docs/adr/0021). Only a step that runs out of memory all
the same is expected at what it would take without a limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from staticmem.allocators.band import LONG, Pools, Replays, is_quick
from staticmem.allocators.from_trace import loaded_packed, process_of_trace
from staticmem.allocators.patterns import Patterns
from staticmem.allocators.peaks import Outline
from staticmem.allocators.process import Process
from staticmem.allocators.settings import DEFAULTS, MIN_BLOCK, SMALL_SIZE, Settings
from staticmem.devices.architectures import Needs, Standing, standing
from staticmem.devices.gpus import THREADS, Gpu
from staticmem.devices.kernels import KernelWorkspaces, Setup
from staticmem.devices.sizing import Fit, Verdict, verdict
from staticmem.engine.step import StepResult
from staticmem.frontends.recent import Recent
from staticmem.ir.dtypes import bfloat16, float8_e4m3fn
from staticmem.ir.record import record
from staticmem.ops.registry import ANY_HEADS, EFFICIENT, FROM_AMPERE, PADDED_HEADS
from staticmem.scenario.optimizers import STATE_IN_FLOAT8
from staticmem.scenario.step import Scenario
from staticmem.units import Band

if TYPE_CHECKING:
    from staticmem.allocators.result import Replay

_GROWS = "aten.cat.default"  # the kernel by which a dynamic cache grows


@record(frozen=True)
class Device:
    """A card and the software on it: `setup` decides workspaces, `settings` the allocator, its profile the context.

    `bounded` is False where the card only stands for its architecture: then as much memory as is asked for is there.
    """

    gpu: Gpu
    setup: Setup
    settings: Settings = DEFAULTS
    bounded: bool = True


@record(frozen=True)
class DeviceMeters:
    """Bytes at the peaks of three steps from the start of a process, and whether a card has them.

    `unlimited` is what would be reserved on a card with room for all. `parts` adds up to `device` as expected: live
    tensors by category where allocated memory peaks, `workspace`, `rounding` (what blocks are larger than tensors),
    `cached` (reserved beyond allocated: cached blocks and fragmentation), `context` and `libraries`. `step` and `phase`
    say where reserved memory peaks; `retries` how often the allocator gave cached memory back to have enough, and
    `returned` how many bytes in all.
    """

    allocated: Band
    reserved: Band
    device: Band
    context: Band  # the part of device that exists before the first tensor
    verdict: Verdict
    unlimited: int
    parts: Mapping[str, int]
    step: int
    phase: str
    retries: int
    returned: int

    def widened(self, less: int, more: int) -> DeviceMeters:
        """With a live peak that may be so many bytes lower, and higher, as the file leaves open what the model's code
        keeps or runs in place. No band of a step that the card has the memory for is above that memory."""
        outcome = self.verdict.widened(less, more)
        most = outcome.needed.high
        return replace(
            self,
            allocated=self.allocated.widened(less, more).at_most(most - self.context.low),
            reserved=self.reserved.widened(less, more).at_most(most - self.context.low),
            device=outcome.needed,
            verdict=outcome,
        )


def replayed(result: StepResult, device: Device) -> tuple[Process, Replay]:
    """Three steps from the start of the process, and their replay with every placement.

    On a card that is too small for them the record ends where the allocation fails.
    """
    process = process_on(result, device)
    return process, replay_on(process, device, capacity_of(device))


def process_on(result: StepResult, device: Device, patterns: Patterns | None = None) -> Process:
    """The allocator's calls of three steps; `patterns` has those of other cards and batches."""
    workspaces = KernelWorkspaces(result.trace, device.setup)
    return (
        process_of_trace(result.trace, workspaces) if patterns is None else patterns.process(result.trace, workspaces)
    )


class Unlimited:
    """A step on a card with enough memory for it. With PyTorch's default settings (`is_quick`) nothing of it depends on
    the card but the setup.

    `process` are the allocator's calls, and `replays` the nominal one and those of its bands. The allocator's
    settings may be a limit of their own, which is left out where the process runs out of memory for it.
    """

    def __init__(self, result: StepResult, device: Device, shared: SharedReplays | None = None) -> None:
        self.process = process_on(result, device, shared.patterns if shared is not None else None)
        self.is_quick = is_quick(self.process, device.settings)
        if self.is_quick:
            self.replays = Replays(self.process, None) if shared is None else shared.quick(self.process)
            return
        settings = device.settings
        nominal = replay_on(self.process, device, None)
        if nominal.oom is not None:
            settings = replace(settings, per_process_memory_fraction=1.0)
            nominal = replay_on(self.process, replace(device, settings=settings), None)
        total = device.gpu.usable if device.bounded else None
        self.replays = Replays(self.process, nominal, settings, total)


def highest_need(
    result: StepResult, device: Device, unlimited: Callable[[StepResult, Device], Unlimited]
) -> Band | None:
    """The expected and the highest of what `on_device` reserves with enough memory, by replays that count segments
    alone; None where more than those decide it. The lower end is what is expected."""
    roomy = unlimited(result, device)
    decodes = any(name == "decode" for name, _ in result.trace.phases)
    if not roomy.is_quick or result.trace.loading or decodes:
        return None
    nominal, highest = roomy.replays.nominal_reserved[0], roomy.replays.reserved[1]
    others = [unlimited(result, other).replays.nominal_reserved[0] for other in alternatives(device)]
    return Band(nominal, nominal, max(highest, *others, nominal))


def alternatives(device: Device) -> Iterator[Device]:
    """The card as it would be with the workspaces of other architectures, where another chip stands in for its own: no
    table says whose its libraries take, so bands reach to what is expected with any of them."""
    setup = device.setup
    for name in device.gpu.alternatives:
        sized = replace(setup.multiprocessors, threads=THREADS[name])
        yield replace(device, setup=replace(setup, architecture=name, multiprocessors=sized))


def usable_on(device: Device) -> int:
    """Bytes that the process may take of the card: all that CUDA gives, or the allocator's fraction and the context."""
    gpu, overhead = device.gpu, device.setup.profile.overhead(device.gpu)
    return min(gpu.usable, int(device.settings.per_process_memory_fraction * gpu.usable) + overhead.expected)


def capacity_of(device: Device) -> int | None:
    """Bytes that the allocator can take of the card, None: no limit."""
    if not device.bounded:
        return None
    return max(device.gpu.usable - device.setup.profile.overhead(device.gpu).expected, 0)


class SharedReplays:
    """Steps on cards with enough memory for them, for many questions on one model: cards with the same setup have the
    same replays, unless settings of the allocator look at the card, and other batches the same pattern of calls. So do
    cards of two architectures whose kernels take the same workspaces."""

    STEPS, REPLAYS = 24, 64  # that are kept, some 2 MiB each for a step of a thousand ops
    CALLS = 20_000  # replays of more are not kept, as they would take hundreds of MiB together

    def __init__(self) -> None:
        self.patterns, self.pools = Patterns(), Pools()
        self._steps: Recent[tuple[StepResult, Unlimited]] = Recent(self.STEPS)
        self._replays: Recent[Replays] = Recent(self.REPLAYS)

    def unlimited(self, result: StepResult, device: Device) -> Unlimited:
        """The step on a card; what was asked last of it is kept. The software of all devices is the same."""
        of_setup = id(result), device.setup.architecture, device.setup.multiprocessors
        of_card = (*of_setup, device.gpu.slug, device.bounded)
        kept = self._steps.get(of_setup) or self._steps.get(of_card)
        if kept is not None:
            return kept[1]
        roomy = Unlimited(result, device, self)
        if len(roomy.process.calls) <= LONG:
            self._steps.put(of_setup if roomy.is_quick else of_card, (result, roomy))
        return roomy

    def quick(self, process: Process) -> Replays:
        """The replays of a process with PyTorch's default settings: all that they look at is in their key. The process
        that is kept with them holds its calls, so that no others have their place in memory."""
        if len(process.calls) > self.CALLS:
            return Replays(process, None)
        bounds = tuple(process.bounds.items()), tuple(process.strays.items())
        key = id(process.calls), process.sizes, process.scales, bounds
        replays = self._replays.get(key)
        if replays is None:
            replays = Replays(process, None, pools=self.pools)
            self._replays.put(key, replays)
        return replays


def replay_on(process: Process, device: Device, capacity: int | None) -> Replay:
    """The replay of a process with every placement, on `capacity` bytes. The memory fraction is of the whole card, and
    of nothing where it is no limit."""
    from staticmem.allocators.cuda_caching import simulate  # PyTorch's default settings need none of it

    total = device.gpu.usable if device.bounded else None
    return simulate(process.events, device.settings, capacity, total=total, fallbacks=process.fallbacks)


def needs_of(result: StepResult) -> Needs:
    """What a step needs of a chip."""
    buffers, names = result.trace.buffers, result.trace.kernels.names
    types = {form.dtype for form in set(buffers.forms)}
    float8 = result.runs_triton and float8_e4m3fn in types
    if bfloat16 not in types:
        return Needs(compiled=result.runs_triton, compiled_float8=float8, attention=_describe_attention(result))
    of_ampere = {index for index, name in enumerate(names) if name in FROM_AMPERE}
    fused = ""
    for kernel, form in zip(buffers.kernels, buffers.forms, strict=True) if of_ampere else ():
        if kernel in of_ampere and form.dtype is bfloat16:
            fused = FROM_AMPERE[names[kernel]]
            break
    # a compiled optimizer reads parameters, which autocast leaves in float32
    half = result.compiled is not None or (
        result.runs_triton
        and any(
            f.dtype is bfloat16
            for f, kind in zip(buffers.forms, buffers.categories, strict=True)
            if kind == "parameter"
        )
    )
    any_heads = ANY_HEADS if _describe_attention(result) == ANY_HEADS else ""  # padded ones are of `fused` here
    return Needs(
        bfloat16=True,
        autocast=result.autocast is bfloat16,
        compiled=result.runs_triton,
        compiled_bfloat16=half,
        compiled_float8=float8,
        fused=fused,
        attention=any_heads,
    )


def needs_said(scenario: Scenario) -> Needs:
    """What a step needs of a chip, as far as its scenario says it: `needs_of` where it was not run."""
    cast, autocast = scenario.dtype is bfloat16, scenario.amp is bfloat16
    return Needs(
        bfloat16=cast or autocast,
        autocast=autocast,
        compiled=scenario.runs_triton,
        compiled_bfloat16=(cast and scenario.runs_triton) or (autocast and bool(scenario.compile)),
        compiled_float8=scenario.training and scenario.optimizer == STATE_IN_FLOAT8,
    )


def _describe_attention(result: StepResult) -> str:
    """Why cards before compute capability 8.0 run another kernel of attention; empty where they do not."""
    reasons = [why for _, why in result.choices]
    endings = (PADDED_HEADS, ANY_HEADS, EFFICIENT)
    return next((text for text in endings if any(why.endswith(text) for why in reasons)), "")


def standing_on(result: StepResult, device: Device, needs: Needs | None = None) -> Standing:
    """Whether a step runs on a card with its software, whatever its memory; `needs` are those of the step."""
    return standing(device.gpu, device.setup.torch, needs_of(result) if needs is None else needs)


_SEGMENT = 2 << 20  # the allocator takes multiples of it from the driver
_STEPS_OF_LONG = 256  # the least memory for a long process is looked for in so many steps


def least_usable(roomy: Unlimited, device: Device) -> int:
    """The least usable memory of a card that holds a step which this card does not hold: replays with a limit, in which
    the allocator gives cached memory back and convolutions take smaller plans, tell. Whole segments of 2 MiB."""
    process, context = roomy.process, device.setup.profile.overhead(device.gpu).expected
    step = _SEGMENT
    highest = -(-roomy.replays.nominal.peak_reserved // step)
    if len(process.calls) > LONG:
        step *= max(highest // _STEPS_OF_LONG, 1)
        highest = -(-roomy.replays.nominal.peak_reserved // step)
    # a fraction of the card is a limit of its own, which `usable_on` has
    free = replace(device, settings=replace(device.settings, per_process_memory_fraction=1.0))
    fails = max(usable_on(device) - context, 0) // step

    def holds(count: int) -> bool:
        return replay_on(process, free, count * step).oom is None

    return context + step * (fails + 1 + bisect_left(range(fails + 1, highest), True, key=holds))


def on_device(
    result: StepResult,
    device: Device,
    unlimited: Callable[[StepResult, Device], Unlimited] = Unlimited,
    progress: Callable[[int, int], None] | None = None,
    least: bool = True,
) -> DeviceMeters:
    """The device meters of a step. Bands are without what the file leaves open (`DeviceMeters.widened`).

    `unlimited` may know the step on a card with enough memory already; `progress` is as in `Replays.bands`; `least`:
    look for the least memory that holds a step which does not fit.
    """
    roomy = unlimited(result, device)
    process, free = roomy.process, roomy.replays.nominal
    allocated, reserved = roomy.replays.bands(progress)
    for other in alternatives(device):
        like = unlimited(result, other).replays.nominal
        allocated, reserved = allocated.reaching(like.peak_allocated), reserved.reaching(like.peak_reserved)
    if result.trace.loading:  # a checkpoint may have its weights packed
        as_packed = loaded_packed(process)
        plain = Replays(as_packed, None).nominal if roomy.is_quick else replay_on(as_packed, device, None)
        allocated, reserved = allocated.reaching(plain.peak_allocated), reserved.reaching(plain.peak_reserved)
    grown = sum_slack_of_caches(result) if process.mark_at(free.peak_allocated_at).phase == "decode" else 0
    allocated, reserved = allocated.widened(0, grown), reserved.widened(0, grown)
    context, usable = device.setup.profile.overhead(device.gpu), usable_on(device)
    nominal: Outline | Replay = free
    pressed = _replay_pressed(roomy, device, free.peak_reserved)
    if pressed is not None:
        nominal = pressed
        allocated, reserved = allocated.around(nominal.peak_allocated), reserved.around(nominal.peak_reserved)
    retries, returned = (nominal.retries, nominal.returned) if not isinstance(nominal, Outline) else (0, 0)
    needed = reserved.plus_unrelated(context)
    mark = process.mark_at(nominal.peak_reserved_at)
    parts = _parts(result, process, nominal)
    parts["cached"] = reserved.expected - nominal.peak_allocated
    parts["context"] = device.setup.profile.context(device.gpu).expected
    parts["libraries"] = device.setup.profile.libraries.expected
    outcome = verdict(needed, usable, tight=retries > 0, standing=standing_on(result, device))
    if least and device.bounded and outcome.memory is Fit.DOES_NOT_FIT:
        outcome = replace(outcome, least=least_usable(roomy, device))
    meters = DeviceMeters(
        allocated, reserved, needed, context, outcome, free.peak_reserved, parts, mark.step, mark.phase, retries,
        returned,
    )  # fmt: skip
    return meters.widened(0, 0)


def expected_need(roomy: Unlimited, device: Device) -> int:
    """The expected need of `on_device`, without the replays of its band."""
    reserved = roomy.replays.nominal_reserved[0]
    pressed = _replay_pressed(roomy, device, reserved)
    return (reserved if pressed is None else pressed.peak_reserved) + device.setup.profile.overhead(device.gpu).expected


def _replay_pressed(roomy: Unlimited, device: Device, reserved: int) -> Replay | None:
    """The replay on a card with less memory than the step would take, which is `reserved` and the context; None where
    it has that, or the step runs out of memory: then the one without a limit says what is expected."""
    context = device.setup.profile.overhead(device.gpu).expected
    if not device.bounded or reserved + context <= usable_on(device):
        return None
    pressed = replay_on(roomy.process, device, capacity_of(device))
    return pressed if pressed.oom is None else None


def sum_slack_of_caches(result: StepResult) -> int:
    """The most by which blocks of caches may be larger than their tensors in the last decode step, which is predicted
    as if the cache were new. It has grown token by token, each time out of other free blocks, of which less than 1 MiB
    is left whole (`should_split` in c10/cuda/CUDACachingAllocator.cpp)."""
    trace, start = result.trace, dict(result.trace.phases).get("decode")
    if start is None:
        return 0
    buffers, names = trace.buffers, trace.kernels.names
    decode = range(bisect_left(buffers.born, start), len(buffers))
    tensors = sum(names[buffers.kernels[id]] == _GROWS and buffers.nbytes[id] > SMALL_SIZE for id in decode)
    return tensors * (SMALL_SIZE - MIN_BLOCK)


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
