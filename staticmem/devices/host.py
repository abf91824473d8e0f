"""The memory of the process on the host: what it has after its imports, while it loads, in a step and while it saves.

Constants are resident memory of real processes (`scripts/host/host_processes.py`) or published readings. What a
process holds of tensors follows from the code of PyTorch and DeepSpeed that makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist

from staticmem.ir.record import record
from staticmem.scenario.device import BUILT, GATHERED, MAPPED, ON_GPU, PRETRAINED, READ, HostOptions
from staticmem.units import NOTHING, Band, exactly

MIB = 1 << 20
# `import torch` of the CUDA build of PyTorch 2.14.1 (x86-64 Linux, Python 3.11): 519,764 KiB resident; a nightly build
# of 2.2: 322,040 KiB (https://github.com/pytorch/pytorch/issues/113326). Other modules of a program: at most as
# much again
IMPORTS = Band(314 * MIB, 508 * MIB, 1016 * MIB)
# what transformers 5.24 adds with a causal model, without the code of one architecture
TRANSFORMERS = Band(20 * MIB, 26 * MIB, 200 * MIB)
# what the first `optimizer.step()` imports: torch._dynamo, by decorators of torch.optim (156,628 KiB in 2.14.1)
TRAINING = Band(0, 153 * MIB, 200 * MIB)
# what the CUDA context adds on the host: 114 MiB where kernels are loaded lazily, 1694 MiB where all are at once
# (issue 113326, RTX 3090); 1203 MiB at the first call of a job (https://github.com/pytorch/pytorch/issues/106511)
CONTEXT = Band(114 * MIB, 1203 * MIB, 1694 * MIB)
# what a forked worker of a data loader has beside the samples of a batch: 15.5 MiB in 2.14.1. It copies pages of the
# dataset whose objects it touches, which is not knowable (https://github.com/pytorch/pytorch/issues/13246)
WORKER = Band(8 * MIB, 15 * MIB, 64 * MIB)
FLOAT32 = 4  # bytes of DeepSpeed's master weights, and of each state
DEEPSPEED_SUBGROUP = 1_000_000_000  # elements: `sub_group_size` of deepspeed/runtime/zero/config.py
LOADING, IN_STEP, SAVING = "loading", "step", "saving"
SHARED = "batches in shared memory"


def pinned(nbytes: int) -> int:
    """Bytes of a block of pinned memory: the next power of two (`allocate` of ATen/core/CachingHostAllocator.h,
    `pinned_max_round_threshold_mb` has no limit by default)."""
    return 1 << max(nbytes - 1, 0).bit_length() if nbytes else 0


@record(frozen=True)
class Offload:
    """What lives on the host through all steps: `pageable` and `pinned` bytes, and what an update adds for a moment."""

    pageable: int = 0
    pinned: int = 0
    update: int = 0


def torchao_offload(trained: Sequence[int], states: int) -> Offload:
    """A copy of each parameter and of its gradient in pinned memory, and the state of PyTorch's optimizer on the CPU,
    which keeps up to four temporaries of a parameter (torchao/optim/cpu_offload.py, `CPUOffloadOptimizer.__init__`)."""
    return Offload(states, 2 * sum(map(pinned, trained)), 4 * max(trained, default=0))


def fsdp_offload(parameters: Sequence[int], trained: Sequence[int], states: int) -> Offload:
    """Shards in pinned memory (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`), and of those
    that are `trained` gradients, which a copy that waits for nothing pins too (ATen/native/TensorConversions.cpp,
    `_to_copy`); the optimizer on the CPU is as torchao's."""
    blocks = (*parameters, *trained)
    return Offload(states, sum(map(pinned, blocks)), 4 * max(trained, default=0))


def deepspeed_offload(numel: int, itemsize: int, largest: int, states: int, stage: int) -> Offload:
    """A rank's partition of `numel` elements of `itemsize` bytes, with so many `states` in float32.

    Stages 1 and 2 (deepspeed 0.19.6, runtime/zero/stage_1_and_2.py): master weights, their 16-bit copy and gradients
    are pinned, as is a buffer of the `largest` parameter; states of DeepSpeedCPUAdam are not. Stage 3 (stage3.py):
    master weights are pageable, and the first step has a buffer of gradients of a sub-group besides.
    """
    whole = FLOAT32 * numel
    if stage < 3:
        blocks = (whole, whole, itemsize * numel, itemsize * largest)
        return Offload(states * whole, sum(map(pinned, blocks)), whole)  # pinned from a copy, which is freed
    groups = [DEEPSPEED_SUBGROUP] * (numel // DEEPSPEED_SUBGROUP) + [numel % DEEPSPEED_SUBGROUP]
    gradients = sum(pinned(FLOAT32 * group) for group in groups)
    return Offload((1 + states) * whole, gradients + pinned(itemsize * numel), FLOAT32 * max(groups))


@record(frozen=True)
class HostNeeds:
    """What decides the memory of a process. Bytes.

    Attributes:
        stored: of each tensor of the checkpoint; `shard` is the largest file of it.
        batch: of each tensor of a batch.
        activations: that are on the CPU during a step, and whether they are `activations_pinned`.
        state: what a save writes, all ranks together: parameters, and the state of the optimizer; 0: nothing is saved.
        base: what is there before anything is loaded, by part.
        own: tensors that the process holds itself, as on a machine without a GPU.
    """

    base: Mapping[str, Band]
    stored: Sequence[int] = ()
    shard: int = 0
    batch: Sequence[int] = ()
    offload: Offload = Offload()
    activations: int = 0
    activations_pinned: bool = False
    state: int = 0
    own: Band = NOTHING
    context: Band = CONTEXT
    training: bool = True


@record(frozen=True)
class HostMoment:
    """One moment: its parts, and bytes of files that are mapped and of memory that is pinned in it."""

    name: str
    parts: Mapping[str, Band]
    mapped: int = 0
    pinned: int = 0

    @property
    def total(self) -> Band:
        """The sum, whose parts are uncertain for unrelated reasons."""
        result = NOTHING
        for part in self.parts.values():
            result = result.plus_unrelated(part)
        return result


def moments(needs: HostNeeds, options: HostOptions, saves: bool = True) -> tuple[HostMoment, ...]:
    """The moments of a process, in their order. `saves`: it writes the checkpoint, as rank 0 does."""
    offload = needs.offload
    running = {**needs.base, "CUDA": needs.context}
    if needs.training:
        running["optimizer's code"] = TRAINING
    lasting = {
        "tensors": needs.own,
        "optimizer": exactly(offload.pageable),
        "pinned optimizer": exactly(offload.pinned),
    }
    loader, loader_pinned = data_loader(needs.batch, options)
    activations = activations_of(needs)
    in_step = {**running, **lasting, **loader, "activations": activations, "update": exactly(offload.update)}
    pinned_bytes = offload.pinned + loader_pinned
    largest = max(needs.stored, default=0)
    copied = exactly(needs.state if options.saving == GATHERED else largest) if saves else NOTHING
    saving = {**running, **lasting, **loader, "checkpoint": copied}
    of_step = pinned_bytes + (activations.expected if needs.activations_pinned else 0)
    always = (loading(needs, options), HostMoment(IN_STEP, in_step, 0, of_step))
    return (*always, HostMoment(SAVING, saving, 0, pinned_bytes)) if needs.state else always


def loading(needs: HostNeeds, options: HostOptions) -> HostMoment:
    """While parameters come to the GPU. A model that was made on the CPU is there as a whole; `torch.load` reads the
    file besides; a mapped file is read into the page cache, which the system can take back."""
    whole, how = sum(needs.stored), options.loading
    parts = {**needs.base, "CUDA": needs.context.at_most(needs.context.expected)}
    mapped = 0
    if how in (BUILT, READ, MAPPED):
        parts["parameters"] = exactly(whole)
    if how == READ:
        parts["checkpoint"] = exactly(needs.shard or whole)
    if how == MAPPED:
        mapped = needs.shard or whole
    if how == PRETRAINED:  # tensors are copied out of the file, or stay in it, by their types
        parts["parameters"] = Band(0, whole, whole)
        mapped = needs.shard or whole
    assert how in (BUILT, READ, MAPPED, PRETRAINED, ON_GPU)
    return HostMoment(LOADING, parts, mapped)


def activations_of(needs: HostNeeds) -> Band:
    """Saved tensors on the CPU; of pinned ones each takes a block of at most twice its size."""
    nbytes = needs.activations
    return Band(nbytes, nbytes + nbytes // 2, 2 * nbytes) if needs.activations_pinned else exactly(nbytes)


def data_loader(batch: Sequence[int], options: HostOptions) -> tuple[dict[str, Band], int]:
    """Batches and workers of a data loader, and how much of them is pinned.

    Without workers the loop holds a batch while the samples of the next are joined. With workers `prefetch` of each are
    in shared memory and one is with the loop, or two while it asks for the next (torch/utils/data/dataloader.py,
    `_try_put_index`, `_process_data`); each worker keeps the samples of a batch. Where a thread pins them, batches that
    wait are in pinned memory, and one is being copied.
    """
    nbytes = sum(batch)
    if not nbytes:
        return {}, 0
    blocks = sum(map(pinned, batch))
    if not options.workers:
        copies = 2 * blocks if options.pin_memory else 0
        return {"batches": Band(2 * nbytes + copies, 3 * nbytes + copies, 4 * nbytes + copies)}, copies
    count, waiting = options.workers, options.workers * options.prefetch
    parts = {"workers": Band(count * WORKER.low, count * (WORKER.expected + nbytes), count * (WORKER.high + nbytes))}
    if not options.pin_memory:
        parts[SHARED] = Band(2 * nbytes, (waiting + 1) * nbytes, (waiting + 2) * nbytes)
        return parts, 0
    most = (waiting + 2) * blocks
    parts["batches"] = Band(2 * blocks, (waiting + 1) * blocks + nbytes, most + (waiting + 2) * nbytes)
    return parts, (waiting + 1) * blocks


def limit(need: Band, confidence: float) -> int:
    """Bytes that are enough with a confidence: the upper end of the band is taken to hold with 95 %, and what a process
    needs to be spread as a normal distribution above what is expected."""
    share = NormalDist().inv_cdf(confidence) / NormalDist().inv_cdf(0.95)
    return need.expected + max(round((need.high - need.expected) * share), 0)
