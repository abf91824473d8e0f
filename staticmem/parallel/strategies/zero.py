"""DeepSpeed's ZeRO: a rank has a part of the optimizer state, in stage 2 of gradients, in stage 3 of parameters too.

Sources, DeepSpeed 0.19, in deepspeed/runtime. Stages 1 and 2, zero/stage_1_and_2.py: `__init__` (16-bit parameters
flattened into one buffer of a multiple of 2 x ranks elements; the fp32 master is a clone of the rank's partition, in
fp32 training too), `setup_buckets` (a buffer of `reduce_bucket_size` elements in backward, two with `overlap_comm`,
whose default is off in these stages), `copy_gradients_to_ipg`, `copy_grads_in_partition`, `step` (the partition's
gradients, flattened, then in fp32). Stage 1 without overlap reduces after backward: until then every gradient is there.

Stage 3, in which each module's parameters are gathered when it works, zero/stage3.py: `__init__` (a bucket of
`reduce_bucket_size` elements and a flat buffer for the partition's gradients from the start),
`_create_fp32_partitions` (a master copy unless the model is in fp32), `_create_fp16_sub_groups`,
`_prepare_fp32_grad_for_sub_group`; zero/partition_parameters.py (partitions are padded to a multiple of the ranks;
parameters of at most `param_persistence_threshold` elements stay whole); zero/partitioned_param_coordinator.py
(`fetch_sub_module`, prefetch of `prefetch_bucket_size` elements while fewer than `max_live_parameters` are there;
`__params_to_release`: what is used again within `max_reuse_distance` elements stays);
comm/coalesced_collectives.py (`reduce_scatter_coalesced` copies a bucket of several gradients). Defaults are those of
zero/config.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from staticmem.eager.trace import Trace
from staticmem.engine.step import StepResult
from staticmem.ir.dtypes import DType, float32
from staticmem.ir.graph import Graph
from staticmem.parallel.blocks import names_of_parameters
from staticmem.parallel.division import STREAMS, Traffic, WholeStep, ZeroConfig
from staticmem.parallel.rewrite import AFTER, BEFORE, END_OF_PHASE, GATHERING, Piece, Position, Rewrite, Weight
from staticmem.scenario.strategies import GRADIENTS, STRATEGIES
from staticmem.units import ceil_div

ALIGNMENT = 2  # elements; nccl_start_alignment_factor


@dataclass(frozen=True)
class Partition:
    """One flat tensor of the optimizer: `numel` elements of this rank, of parameters in `dtype`."""

    numel: int
    dtype: DType

    @property
    def master(self) -> DType:
        """The type of the optimizer's own copy, its state and the gradients that it reads."""
        return float32 if self.dtype.itemsize < float32.itemsize else self.dtype

    @property
    def master_bytes(self) -> int:
        return self.master.nbytes(self.numel)


# -- stages 1 and 2 ----------------------------------------------------------------------------------------------


def apply_to_states(rewrite: Rewrite, weights: list[Weight], ranks: int, stage: int, config: ZeroConfig) -> list[str]:
    """Stage 1 or 2."""
    trained = [w for w in weights if w.trained]
    if not trained:
        return ["ZeRO: nothing is trained, so every rank has the whole model"]
    dtype = trained[0].storage.dtype
    numel = ceil_div(sum(w.numel for w in trained), ALIGNMENT * ranks) * ALIGNMENT * ranks
    part = Partition(numel // ranks, dtype)
    rewrite.drop(*(weight.storage for weight in trained))
    nbytes, holder = dtype.nbytes(numel), "all parameters in one buffer"
    call = "ZeRO flat parameters"
    rewrite.add("parameters, flat", nbytes, dtype, (0, BEFORE), call, holder, category="parameter")
    _add_master(rewrite, part)
    _replace_states(rewrite, trained, [part])
    backward = rewrite.span("backward")
    assert backward is not None
    start, end = backward
    _add_bucket(rewrite, dtype, (start, BEFORE), config, died=(end, END_OF_PHASE))
    name, nbytes, at = "gradients of the partition", dtype.nbytes(part.numel), (end, END_OF_PHASE)
    if stage == 2:
        at = (start, BEFORE)
    holder = "gradients of this rank's partition"
    own = rewrite.add(name, nbytes, dtype, at, "ZeRO gradients", holder, category="gradient")
    if stage == 2:
        for gradient in (g for weight in trained for g in weight.gradients):
            rewrite.end(gradient, (gradient.born[0], AFTER))
    _update(rewrite, trained, [(part, own)])
    return [f"ZeRO-{stage}: a rank updates {part.numel:,} of {numel:,} elements; DeepSpeed's default sizes of buckets"]


def _add_bucket(
    rewrite: Rewrite, dtype: DType, born: Position, config: ZeroConfig, died: Position | None = None
) -> None:
    size = config.reduce_bucket_size
    holder = f"gradients on their way to the ranks (reduce_bucket_size {size:,})"
    rewrite.add("reduce bucket", dtype.nbytes(size), dtype, born, "ZeRO bucket", holder, died=died)


def _add_master(rewrite: Rewrite, part: Partition) -> None:
    """The optimizer's own copy of the partition."""
    call, holder = "ZeRO master weights", "the optimizer's copy of this rank's partition"
    at, size = rewrite.setup, part.master_bytes
    rewrite.add("master weights", size, part.master, at, call, holder, category="optimizer_state")


def _replace_states(rewrite: Rewrite, trained: list[Weight], parts: list[Partition]) -> None:
    """State of each parameter becomes state of each flat partition; the kinds are those of the first that has all."""
    kinds: dict[str, Piece] = {}
    for weight in trained:
        for piece in weight.states:
            kinds.setdefault(piece.name.rpartition(".")[2], piece)
        rewrite.drop(*weight.states)
    shapes = {w.name: w.shape for w in trained}
    for kind, piece in kinds.items():
        whole = piece.shape == shapes.get(piece.name.rpartition(".")[0])
        call, holder = "ZeRO optimizer state", f"optimizer state ({kind}) of this rank's partition"
        for number, part in enumerate(parts):
            dtype = part.master if piece.dtype.is_floating_point else piece.dtype
            name, nbytes = f"partition {number}.{kind}", dtype.nbytes(part.numel if whole else 1)
            rewrite.add(name, nbytes, dtype, rewrite.setup, call, holder, category="optimizer_state")


def _update(rewrite: Rewrite, trained: list[Weight], parts: list[tuple[Partition, Piece | None]]) -> None:
    """The optimizer's step: one partition after the other; `parts` has the gradients that are freed once read.

    The lists that the implementation makes (`_foreach_sqrt`) have one tensor, the partition.
    """
    span = rewrite.span("optimizer")
    if span is None:
        return
    calls: dict[int, str] = {}
    for weight in trained:
        for gradient in weight.gradients:
            rewrite.end(gradient, (span[0], BEFORE))
        for piece in weight.temporaries:
            if piece.kernel is not None:
                calls[piece.kernel] = rewrite.trace.kernels[piece.kernel].name
        rewrite.drop(*weight.temporaries)
    at = (span[0], AFTER)

    def add(name: str, dtype: DType, call: str) -> Piece:
        holder = "gradients of the partition for the optimizer"
        return rewrite.add(name, dtype.nbytes(part.numel), dtype, at, call, holder, category="gradient")

    for part, gradients in parts:
        read = flat = add("gradients, flat", part.dtype, "aten.cat.default")
        if part.master is not part.dtype:
            read = add(f"gradients, {part.master.name}", part.master, "aten._to_copy.default")
            rewrite.end(flat, at)
        if gradients is not None:
            rewrite.end(gradients, at)
        size, holder = part.master_bytes, "a list of the optimizer's step"
        lists = [
            rewrite.add(f"({name})", size, part.master, at, name, holder, category="temporary")
            for name in dict.fromkeys(calls.values())
        ]
        for piece in (*lists, read):
            rewrite.end(piece, at)


# -- stage 3 -----------------------------------------------------------------------------------------------------

Use = tuple[int, int, tuple[str, ...]]  # tick of the first and behind the last allocation, and the parameters


def uses(trace: Trace, graph: Graph) -> list[Use]:
    """The intervals in which modules with parameters run, and these parameters: DeepSpeed hooks every module."""
    names = names_of_parameters(graph)
    own: dict[str, dict[str, None]] = {}
    modules = [op.modules[-1].path if op.modules else "" for op in graph.ops]
    for op, module in zip(graph.ops, modules, strict=True):
        for ref in op.refs():
            if ref in names:
                own.setdefault(module, {}).setdefault(names[ref])
    first = dict(reversed(trace.phases)).get("forward", 0)
    listed: list[Use] = []
    at = ""
    for buffer in trace.buffers:
        kernel = trace.kernels[buffer.kernel]
        if buffer.born < first or kernel.phase == "optimizer" or not 0 <= kernel.op < len(modules):
            continue
        module = modules[kernel.op]
        if listed and module == at:
            listed[-1] = (listed[-1][0], buffer.born + 1, listed[-1][2])
        elif module in own:
            listed.append((buffer.born, buffer.born + 1, tuple(own[module])))
        at = module
    return listed


def apply_to_parameters(
    rewrite: Rewrite, weights: list[Weight], modules: Sequence[Use], ranks: int, config: ZeroConfig
) -> list[str]:
    """Stage 3. `modules` is what `uses` gives."""
    trained = [w for w in weights if w.trained]
    dtype = weights[0].storage.dtype
    whole = {w.name for w in weights if w.numel <= config.param_persistence_threshold}
    share = {w.name: ceil_div(w.numel, ranks) for w in weights}
    rewrite.drop(*(w.storage for w in weights if w.name not in whole))
    parts = sub_groups([share[w.name] for w in trained], config.sub_group_size)
    partitions = [Partition(numel, dtype) for numel in parts]
    frozen = sum(share[w.name] for w in weights if not w.trained)
    call, holder = "ZeRO partition", "this rank's part of the parameters"
    for number, numel in enumerate([*parts, frozen] if frozen else parts):
        name, size = f"partition {number}", dtype.nbytes(numel)
        rewrite.add(name, size, dtype, (0, BEFORE), call, holder, category="parameter")
    _fetch(rewrite, {w.name: w for w in weights if w.name not in whole}, modules, config)
    if not trained:
        return [f"ZeRO-3: a rank keeps 1/{ranks} of the parameters"]
    for part in partitions:
        if part.master is not dtype:
            _add_master(rewrite, part)
    _replace_states(rewrite, trained, partitions)
    name, holder = "gradients of the partition", "gradients of this rank's partition, kept between steps"
    rewrite.add(name, dtype.nbytes(sum(parts)), dtype, rewrite.setup, "ZeRO gradients", holder)
    _add_bucket(rewrite, dtype, rewrite.setup, config)
    _reduce(rewrite, trained, config)
    _update(rewrite, trained, [(part, None) for part in partitions])
    few = f"{len(whole)} parameters of at most {config.param_persistence_threshold:,} elements stay whole"
    return [f"ZeRO-3: a rank keeps 1/{ranks} of the parameters; {few}; DeepSpeed's default sizes of buckets"]


def sub_groups(sizes: Sequence[int], limit: int) -> list[int]:
    """Elements of the groups that the optimizer updates in turn; a parameter that fills a group is its last."""
    groups: list[int] = []
    filling = 0
    for size in sizes:
        filling += size
        if filling >= limit:
            groups.append(filling)
            filling = 0
    return [*groups, filling] if filling else groups


def _fetch(rewrite: Rewrite, split: dict[str, Weight], modules: Sequence[Use], config: ZeroConfig) -> None:
    """Adds gathered parameters, from their fetch, which may be a prefetch, to the use after which they are released."""
    live: dict[str, Piece] = {}  # gathered now; each is released with its last use at the latest
    numel = {name: weight.numel for name, weight in split.items()}
    present = 0
    passed = [0, *accumulate(sum(numel.get(name, 0) for name in names) for _, _, names in modules)]
    following_use = _next_uses(modules)
    for index, (start, end, names) in enumerate(modules):
        for name in names:
            if name in split and name not in live:
                live[name] = _gather(rewrite, split[name], start)
                present += numel[name]
        ahead, following = 0, index + 1
        limit = min(config.prefetch_bucket_size, config.max_live_parameters - present)
        while following < len(modules) and ahead < limit:
            for name in modules[following][2]:
                if name in split and name not in live:
                    live[name] = _gather(rewrite, split[name], start)
                    present += numel[name]
                    ahead += numel[name]
            following += 1
        for name in names:
            next_use = following_use[index].get(name)
            soon = next_use is not None and passed[next_use] - passed[index + 1] < config.max_reuse_distance
            if name in live and not soon:
                rewrite.end(live.pop(name), (end, BEFORE))
                present -= numel[name]


def _next_uses(modules: Sequence[Use]) -> list[dict[str, int]]:
    """For each use, the index of the next use of each of its parameters."""
    latest: dict[str, int] = {}
    following: list[dict[str, int]] = []
    for index in range(len(modules) - 1, -1, -1):
        names = modules[index][2]
        following.append({name: latest[name] for name in names if name in latest})
        latest.update(dict.fromkeys(names, index))
    return following[::-1]


def _gather(rewrite: Rewrite, weight: Weight, tick: int) -> Piece:
    storage, call, holder = weight.storage, "ZeRO all-gather", "gathered for the module that works"
    return rewrite.add(
        weight.name, storage.nbytes, storage.dtype, (tick, BEFORE), call, holder, category="parameter", stream=GATHERING
    )


def _reduce(rewrite: Rewrite, trained: list[Weight], config: ZeroConfig) -> None:
    """Gradients go into the bucket as they arrive; a full bucket is copied for its reduce-scatter."""
    arriving = sorted(((g, w) for w in trained for g in w.gradients), key=lambda pair: pair[0].born)
    backward = rewrite.span("backward")
    assert backward is not None
    filled: list[int] = []

    def flush(position: tuple[int, int]) -> None:
        if len(filled) > 1:
            dtype, holder = trained[0].storage.dtype, "the reduce-scatter of a bucket"
            size = dtype.nbytes(sum(filled))
            copy = rewrite.add("bucket, copied", size, dtype, position, "aten.cat.default", holder)
            rewrite.end(copy, position)
        filled.clear()

    for gradient, weight in arriving:
        at = (gradient.born[0], AFTER)
        if filled and sum(filled) + weight.numel > config.reduce_bucket_size:
            flush(at)
        rewrite.end(gradient, at)
        filled.append(weight.numel)
    flush((backward[1], END_OF_PHASE))


class Zero:
    """The stages of ZeRO."""

    def divide(self, step: WholeStep) -> StepResult:
        ranks, config = step.strategy.devices, step.strategy.zero
        facts = STRATEGIES[step.strategy.name]
        if facts.divides_parameters:
            modules = uses(step.result.trace, step.result.graph)
            notes = apply_to_parameters(step.rewrite, step.weights, modules, ranks, config)
            return step.of_rank([*notes, STREAMS])
        stage = 2 if GRADIENTS in facts.divides else 1
        return step.of_rank(apply_to_states(step.rewrite, step.weights, ranks, stage, config))

    def sent_bytes(self, name: str, traffic: Traffic) -> float:
        """Stage 1 sums gradients at the end of the accumulation, the others in each micro-batch."""
        facts = STRATEGIES[name]
        if facts.divides_parameters:
            return traffic.share * traffic.micro_batches * (2 * traffic.gathered + traffic.reduced)
        times = traffic.micro_batches if GRADIENTS in facts.divides else 1
        return traffic.share * (times * traffic.reduced + traffic.updated)


DIVISION = Zero()
