"""FSDP2 (`fully_shard` on every block and on the model): parameters, gradients and optimizer state in shards.

A parameter is split along its first dimension, padded to a multiple of the ranks. A block is gathered in front of its
forward and of its backward; the last group, of all that is in no block, stays gathered from its forward to the end of
its backward. Sources: torch/distributed/fsdp/_fully_shard of PyTorch 2.13:

- _fsdp_param.py, `_init_sharded_param`: shards, padded; `alloc_all_gather_outputs`.
- _fsdp_collectives.py, `foreach_all_gather` (one flat output for a block, copied into each parameter; in bytes where
  their types differ),
  `foreach_reduce` (flat input of all gradients of a block, one flat output that the sharded gradients are views of).
  Each backward reduces its own gradients: `_take_unsharded_grads_to_reduce` leaves None in the unsharded parameters, so
  that those of the next micro-batch are taken as the first were, and `foreach_reduce` adds shards to shards.
  What is gathered is allocated on the stream of its copies (`get_all_gather_streams`), sharded gradients on that of the
  reduction: the allocator keeps a pool of each, which the others cannot use.
- _fsdp_param_group.py, `wait_for_unshard` (in forward a block's flat output stays until the next block is copied out),
  `_backward_prefetch`, `post_backward` (one reduce-scatter input waits at a time).
- _fsdp_state.py, `_root_post_forward`, `_root_post_backward_final_callback`.

Where the ranks are groups that have the whole model each (hybrid sharding), a shard of gradients is summed over the
groups in place, and stays in the type of the sum until the backward has ended: `AllReduceState`, `finalize_backward`.

Under `CPUOffloadPolicy` shards, their gradients and the optimizer are on the CPU: a shard is copied to the GPU for each
all-gather (`all_gather_inputs` of _fsdp_param.py; each in the type of the shard, then cast), and what is reduced is
copied out and freed (`foreach_reduce`).

Under expert parallelism a block has two groups, its experts over fewer ranks than all else (`shard_placement_fn`), and
each block gathers the next one, in the forward too: `apply_fsdp_to_decoder` of torchtitan/distributed/fsdp.py at
b5bcd76, which also divides no gradients (`set_gradient_divide_factor(1.0)`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import TypeAlias

from staticmem.eager.reasons import Reason
from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir.dtypes import HALVES, DType, float32, uint8
from staticmem.ir.graph import Graph, Region, Value
from staticmem.ops.experts import ALL_TO_ALL
from staticmem.parallel import blocks
from staticmem.parallel.blocks import ROOT, Run, block_of_name, forward_ends
from staticmem.parallel.division import STREAMS, Strategy, Traffic, WholeStep
from staticmem.parallel.rewrite import (
    BEFORE,
    COMMUNICATION,
    END_OF_PHASE,
    GATHERING,
    REDUCING,
    Piece,
    Position,
    Rewrite,
    Weight,
)
from staticmem.parallel.strategies import context
from staticmem.passes.requested.expert_parallel import expert_parameters
from staticmem.units import ceil_div

ADAPTER = ".lora_"  # in the names of what PEFT trains: `adapter_layer_names` of peft/tuners/lora/layer.py


@dataclass(frozen=True)
class Precision:
    """`MixedPrecisionPolicy`: `compute` is the type of gathered parameters, `reduce` that in which gradients are
    summed. Shards have the types that parameters had before, by name in `shards`; their gradients and state have these
    too (`orig_dtype` of _fsdp_param.py)."""

    compute: DType | None = None  # None: as the parameter is
    shards: Mapping[str, DType] = field(default_factory=dict)
    reduce: DType | None = None

    def of_shards(self, weight: Weight, otherwise: DType) -> DType:
        return self.shards.get(weight.name, otherwise)


OFFLOADED = (
    "CPUOffloadPolicy: shards of parameters, gradients and optimizer state are on the CPU; buffers are to be moved to "
    "the GPU before fully_shard"
)
REDUCE = float32  # under mixed precision: `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)`


@dataclass(frozen=True)
class Experts:
    """Parameters of experts, of which `ranks` have a share each; that share is divided over `shards` of the devices."""

    names: frozenset[str]
    ranks: int
    shards: int


def shard_numel(shape: tuple[int, ...], ranks: int, dim: int = 0) -> int:
    """Elements of one rank's shard with its padding (rank 0 has a full one)."""
    return ceil_div(shape[dim], ranks) * prod(shape[:dim]) * prod(shape[dim + 1 :]) if shape else 1


class _Group:
    """The parameters that are gathered together. Shards are parts of dimension `dim`."""

    def __init__(self, name: str, listed: list[Weight], ranks: int, precision: Precision, dim: int = 0) -> None:
        self.name, self.weights, self.ranks, self.precision, self.dim = name, listed, ranks, precision, dim
        self.shards = {id(w): shard_numel(w.shape, ranks, dim) for w in listed}
        self.numel = sum(self.shards.values())
        self.label = name or "the model's own parameters"
        self.flat: Piece | None = None  # the output of an all-gather that waits to be copied out
        self.gathered: list[Piece] = []

    def compute(self, weight: Weight) -> DType:
        """The type in which a parameter is gathered. Packed numbers stay as they are (`init_dtype_attrs`)."""
        dtype = weight.storage.dtype
        return self.precision.compute or dtype if dtype.is_floating_point else dtype

    def cast(self) -> list[Weight]:
        """The parameters whose shards have another type, of which a copy is gathered."""
        return [w for w in self.weights if self.precision.of_shards(w, w.storage.dtype) is not self.compute(w)]


_Units: TypeAlias = "dict[str, list[_Group]]"  # by block: its groups in the order of their all-gathers


class _Fsdp:
    def __init__(self, rewrite: Rewrite, units: _Units, precision: Precision, explicit: bool) -> None:
        self.r, self.units, self.precision, self.explicit = rewrite, units, precision, explicit
        self.waiting: Piece | None = None  # flat output of the group before, in forward
        self.reducing: list[Piece] = []  # reduce-scatter inputs of the block before, in backward
        self.reduced: set[str] = set()  # groups with sharded gradients, to which those of a later backward are added
        self.summed: list[Piece] = []  # sums of gradients over replicas, which are held until the backward has ended
        self.replicated = False
        self.offloaded = False

    def unshard(self, unit: list[_Group], at: Position, forward: bool) -> None:
        """Gathers the groups of a unit one after the other, and copies each out."""
        for group in unit:
            self.gather(group, at)
            self.copy_out(group, at, forward)

    def prefetch(self, unit: list[_Group], at: Position, forward: bool = False) -> None:
        for group in unit if forward else reversed(unit):
            self.gather(group, at)

    def gather(self, group: _Group, at: Position) -> None:
        if group.flat is not None or group.gathered or not group.weights or group.ranks == 1:
            return
        holder = f"the all-gather of {group.label}"
        copies = self._copy_in(group, at, holder) if self.offloaded else []
        types = {group.compute(weight) for weight in group.weights}
        dtype = types.pop() if len(types) == 1 else uint8
        if (copied := group.cast()) and not self.offloaded:
            compute = group.compute(copied[0])
            shards = f"{holder}: its shards in {compute.name}"
            nbytes = compute.nbytes(sum(group.shards[id(weight)] for weight in copied))
            copies.append(self.r.add("shards, cast", nbytes, compute, at, "FSDP cast", shards, stream=GATHERING))
        nbytes = group.ranks * sum(group.compute(w).nbytes(group.shards[id(w)]) for w in group.weights)
        group.flat = self.r.add("all-gather", nbytes, dtype, at, "FSDP all-gather", holder, stream=GATHERING)
        for copy in copies:
            self.r.end(copy, at)

    def _copy_in(self, group: _Group, at: Position, holder: str) -> list[Piece]:
        """The shards on the GPU, in the type in which they are gathered."""
        copies = []
        for weight in group.weights:
            kept, compute = self.precision.of_shards(weight, weight.storage.dtype), group.compute(weight)
            call, numel = "FSDP copy of a shard from the CPU", group.shards[id(weight)]
            shard = self.r.add(weight.name, kept.nbytes(numel), kept, at, call, holder, stream=GATHERING)
            copies.append(shard)
            if kept is not compute:
                nbytes = compute.nbytes(numel)
                copies[-1] = self.r.add(weight.name, nbytes, compute, at, "FSDP cast", holder, stream=GATHERING)
                self.r.end(shard, at)
        return copies

    def copy_out(self, group: _Group, at: Position, forward: bool) -> None:
        alone = group.ranks == 1 and not group.gathered  # its shards are all there is
        if group.flat is None and not alone:
            return
        call, holder = "FSDP copy-out", f"gathered for {group.label}"
        temporary: list[Piece] = []
        copied = {id(weight) for weight in group.cast()} if alone else set()
        for weight in group.weights:
            dtype = group.compute(weight)
            nbytes = dtype.nbytes(group.shards[id(weight)] * group.ranks)
            if id(weight) in copied:
                of = f"a shard of {group.label} in {dtype.name}"
                temporary.append(self.r.add("shard, cast", nbytes, dtype, at, "FSDP cast", of))
                for cast in temporary[:-1]:
                    self.r.end(cast, at)
            group.gathered.append(self.r.add(weight.name, nbytes, dtype, at, call, holder, category="parameter"))
            if group.dim and not alone:  # its parts are joined in a second copy
                temporary.append(self.r.add(weight.name, nbytes, dtype, at, call, f"{holder}: parts of shards"))
        for piece in temporary:
            self.r.end(piece, at)
        if forward and self.waiting is not None:  # a variable of `wait_for_unshard` has it until the copies are made
            self.r.end(self.waiting, at)
            self.waiting = None
        if group.flat is not None and forward:
            self.waiting = group.flat
        elif group.flat is not None:
            self.r.end(group.flat, at)
        group.flat = None

    def reshard(self, group: _Group, at: Position) -> None:
        for piece in group.gathered:
            self.r.end(piece, at)
        group.gathered = []

    def reduce(self, unit: list[_Group], at: Position, segment: tuple[int, int]) -> None:
        """The end of a unit's backward: each group is resharded, and its gradients reduce-scattered, if it has any."""
        for group in reversed(unit):
            self.reshard(group, at)
            if group is unit[-1]:
                for piece in self.reducing:
                    self.r.end(piece, at)
                self.reducing = []
            self._reduce(group, at, segment)

    def _reduce(self, group: _Group, at: Position, segment: tuple[int, int]) -> None:
        grads = [(w, g) for w in group.weights for g in w.gradients if segment[0] <= g.born[0] < segment[1]]
        if not grads:
            return
        dtype = self.precision.reduce or grads[0][1].dtype
        numel = sum(group.shards[id(w)] for w, _ in grads)
        nbytes, holder = dtype.nbytes(numel * group.ranks), f"the reduce-scatter of {group.label}"
        joined = self._joined(group, grads, at) if group.dim and group.ranks > 1 else []
        self.reducing.append(self.r.add("reduce-scatter", nbytes, dtype, at, "FSDP reduce-scatter", holder))
        gradients = [gradient for _, gradient in grads]
        # the variable of a loop over gradients, which a group of one rank does not run, has the last one to the end
        last = gradients.pop() if group.ranks > 1 else None
        for piece in joined or gradients:
            piece.died = None
            self.r.end(piece, at)
        first = group.name not in self.reduced and not self.offloaded  # what is copied out is freed
        self.reduced.add(group.name)
        kept = self.precision.of_shards(grads[0][0], dtype)
        output = summed = self._sharded_gradients(group, numel, dtype, at, "FSDP reduce-scatter output")
        if group.ranks == 1 and self.explicit:  # copied, divided by 1
            divided = self.r.add("reduce-scatter", nbytes, dtype, at, "aten.div.Tensor", holder)
            self.r.end(divided, at)
        if kept is not dtype:
            output = self._sharded_gradients(group, numel, kept, at, "FSDP cast of gradients")
        if last is not None:
            last.died = None
            self.r.end(last, at)
        if output is not summed or not first:
            self.summed.append(summed)
        if output is not summed and not first:  # added to the gradients of the micro-batches before
            self.r.end(output, at)
        while self.summed and not self.replicated:
            self.r.end(self.summed.pop(), at)

    def _joined(self, group: _Group, grads: list[tuple[Weight, Piece]], at: Position) -> list[Piece]:
        """Gradients whose parts along `dim` are put behind each other: a copy of each. A variable holds each
        until the next one is copied."""
        copies: list[Piece] = []
        holder = f"the reduce-scatter of {group.label}: parts of a gradient"
        for index, (weight, gradient) in enumerate(grads):
            if index:
                grads[index - 1][1].died = None
                self.r.end(grads[index - 1][1], at)
            name, size = f"{weight.name}.grad", gradient.nbytes
            copies.append(self.r.add(name, size, gradient.dtype, at, "aten.cat.default", holder))
        return copies

    def shard_old_gradients(self, group: _Group) -> None:
        """Gradients that the step before left are views of one output too."""
        old = [(w, g) for w in group.weights for g in w.gradients if g.born[0] < self.r.first]
        if not old:
            return
        if self.offloaded:
            self.r.drop(*[g for _, g in old])
            return
        dtype = self.precision.of_shards(old[0][0], old[0][1].dtype)
        numel = sum(group.shards[id(w)] for w, _ in old)
        output = self._sharded_gradients(group, numel, dtype, self.r.setup, "FSDP reduce-scatter output")
        ends = [g.died for _, g in old]
        if None in ends:
            self.reduced.add(group.name)
        else:
            output.died = max(end for end in ends if end is not None)
        self.r.drop(*[g for _, g in old])

    def _sharded_gradients(self, group: _Group, numel: int, dtype: DType, at: Position, call: str) -> Piece:
        name, holder = f"{group.label}, sharded gradients", f"sharded gradients of {group.label}"
        return self.r.add(name, dtype.nbytes(numel), dtype, at, call, holder, category="gradient", stream=REDUCING)

    def forward(self, runs: list[Run], end: int) -> None:
        root = self.units.get(ROOT)
        start = (runs[0].start, BEFORE)
        if root is not None:
            self.unshard(root, start, True)
        order = list(dict.fromkeys(run.group for run in runs if run.group != ROOT and run.group in self.units))
        for i, run in enumerate(runs):
            unit = self.units.get(run.group)
            if run.group == ROOT or unit is None:
                continue
            self.unshard(unit, (run.start, BEFORE), True)
            following = order.index(run.group) + 1
            if self.explicit and following < len(order):
                self.prefetch(self.units[order[following]], (run.start, BEFORE), forward=True)
            after = runs[i + 1].start if i + 1 < len(runs) else end
            for group in unit:
                self.reshard(group, (after, BEFORE))
        if self.waiting is not None:
            self.r.end(self.waiting, (end, BEFORE))
            self.waiting = None

    def backward(self, runs: list[Run], segment: tuple[int, int]) -> None:
        """Blocks are gathered when their gradient arrives, and each prefetches the next one."""
        order = [name for name in dict.fromkeys(run.group for run in runs) if name != ROOT and name in self.units]
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for i, run in enumerate(runs):
            first.setdefault(run.group, run.start)
            last[run.group] = runs[i + 1].start if i + 1 < len(runs) else segment[1]
        events = sorted(
            [((first[name], BEFORE), 1, name) for name in order] + [((last[name], BEFORE), 0, name) for name in order],
            key=lambda e: (e[0], e[1]),
        )
        if ROOT in self.units and order:
            self.prefetch(self.units[order[0]], (runs[0].start, BEFORE))
        for at, opens, name in events:
            unit = self.units[name]
            if not opens:
                self.reduce(unit, at, segment)
                continue
            self.unshard(unit, at, False)
            following = order.index(name) + 1
            if following < len(order):
                self.prefetch(self.units[order[following]], at)
        end = (segment[1], END_OF_PHASE)
        if ROOT in self.units:
            self.reduce(self.units[ROOT], end, segment)
        for piece in (*self.reducing, *self.summed):
            self.r.end(piece, end)
        self.reducing, self.summed = [], []


def keep_types(rewrite: Rewrite, declared: Mapping[str, Value], compute: DType) -> None:
    """`MixedPrecisionPolicy` casts parameters, and copies of the model's inputs, each for one forward; inputs and
    buffers keep the types that they are `declared` with (`_pre_forward` of _fsdp_state.py, `cast_forward_inputs`)."""
    starts = [tick for name, tick in rewrite.trace.phases if name == "forward"]
    for piece in [p for p in rewrite.pieces if p.category in ("input", "buffer") and p.dtype is compute]:
        value = declared.get(piece.name)
        if value is None or value.dtype is compute:
            continue
        if piece.category == "input":
            for start, after in pairwise([*starts, rewrite.trace.ticks]):
                ends = [h.end for h in piece.holds if h.kind is not Reason.MODEL and start <= h.start < after]
                at, end = (start, BEFORE), max([start, *(tick for tick in ends if tick is not None)])
                call, holder = "FSDP cast of inputs", "the forward of the model"
                rewrite.add(piece.name, piece.nbytes, compute, at, call, holder, died=(end, BEFORE), category="input")
        piece.dtype, piece.nbytes = value.dtype, value.dtype.nbytes(prod(piece.shape))


def apply(
    rewrite: Rewrite,
    weights: list[Weight],
    paths: tuple[str, ...],
    runs: list[Run],
    ranks: int,
    precision: Precision,
    experts: Experts | None = None,
    replicas: int = 1,
    *,
    offloaded: bool = False,
) -> list[str]:
    """Shards the step over `ranks`, as each of some `replicas` does; its blocks at `paths` work in these runs. Of
    `experts` the step has the share of one rank. `offloaded`: shards and what is trained of them are on the CPU.

    Raises:
        UsageError: the experts' shards would not be even.
    """
    rewrite.separate_gradients(weights)
    members: dict[str, list[Weight]] = {}
    for weight in weights:
        members.setdefault(block_of_name(weight.name, paths), []).append(weight)
    units = {name: _groups(name, owned, ranks, precision, experts) for name, owned in members.items()}
    groups = [group for unit in units.values() for group in unit]
    for group in groups:
        for weight in group.weights:
            _shard(rewrite, weight, group.shards[id(weight)], precision)
            if offloaded:
                rewrite.drop(weight.storage, *weight.states, *weight.temporaries)
    fsdp = _Fsdp(rewrite, units, precision, experts is not None)
    fsdp.replicated = replicas > 1
    fsdp.offloaded = offloaded
    for group in groups:
        fsdp.shard_old_gradients(group)
    model_returns = forward_ends(rewrite.trace)
    bounds = [*(tick for _, tick in rewrite.trace.phases), rewrite.trace.ticks]
    for segment in dict.fromkeys(run.segment for run in runs):
        part = [run for run in runs if run.segment == segment]
        if part[0].phase == "forward":
            fsdp.forward(part, model_returns.get(segment, bounds[segment + 1]))
        else:
            fsdp.backward(part, (bounds[segment], bounds[segment + 1]))
    if not rewrite.span("backward") and ROOT in units:
        for group in units[ROOT]:
            fsdp.reshard(group, (rewrite.trace.ticks, END_OF_PHASE))
    largest = max(groups, key=lambda g: g.numel * g.ranks)
    notes = [f"FSDP2: {len(groups)} groups; the largest is {largest.label}"]
    if any(not w.storage.dtype.is_floating_point for w in weights):
        notes.append("FSDP2 divides packed weights; their statistics (absmax) are no parameters and are on every rank")
    return notes if paths else [*notes, "no blocks that repeat: the whole model is one group, gathered at once"]


def _groups(name: str, owned: list[Weight], ranks: int, precision: Precision, experts: Experts | None) -> list[_Group]:
    """The groups of a unit. Where there are more devices than experts, these are divided along their second dimension,
    which has to be even (`_init_sharded_param`)."""
    own = [w for w in owned if experts is not None and w.name in experts.names]
    others = [w for w in owned if w not in own]
    groups = [_Group(name, others, ranks, precision)] if others or not own else []
    if experts is None or not own:
        return groups
    dim = int(ranks > own[0].shape[0] * experts.ranks)
    for weight in own:
        if dim and weight.shape[dim] % experts.shards:
            raise UsageError(
                f"--expert-parallel {experts.ranks} does not apply to {ranks} devices",
                f"The {weight.shape[dim]} rows of {weight.name} cannot be divided over {experts.shards} ranks evenly.",
                "Try fewer devices, or more ranks of expert parallelism.",
                code="SM109",
            )
    of_experts = _Group(f"{name} (experts)" if name else "experts", own, experts.shards, precision, dim)
    return [*groups, of_experts]


def _shard(rewrite: Rewrite, weight: Weight, numel: int, precision: Precision) -> None:
    """Storage, state and optimizer temporaries of one rank."""

    def kept(piece: Piece) -> DType:
        return precision.of_shards(weight, piece.dtype) if piece.dtype is precision.compute else piece.dtype

    share = numel / max(weight.numel, 1)
    for piece in (weight.storage, *weight.states, *weight.temporaries):
        dtype = kept(piece)
        if piece.shape == weight.shape:
            piece.nbytes, piece.dtype = dtype.nbytes(numel), dtype
        elif prod(piece.shape) > 1:  # factored or block-wise state
            piece.nbytes = ceil_div(round(piece.nbytes * share * dtype.itemsize), piece.dtype.itemsize)


class Fsdp:
    """`fully_shard` on the repeated blocks and on the model; beside it ranks may share experts, and sequences."""

    def divide(self, step: WholeStep) -> StepResult:
        graph, rewrite, result = step.result.graph, step.rewrite, step.result
        regions = result.compiled.regions if result.compiled is not None else ()
        paths = _units(step.paths, regions)
        groups = blocks.blocks_of_ops(graph, paths)
        _check_regions(regions, paths, groups)
        precision = _apply_policy(step) if step.strategy.mixed else Precision()
        runs = blocks.runs(result.trace, groups)
        experts = _share_experts(step) if step.strategy.expert_ranks > 1 else None
        replicas = step.strategy.replicas
        shards = step.strategy.devices // replicas
        offloaded = step.strategy.offload
        notes = apply(rewrite, step.weights, paths, runs, shards, precision, experts, replicas, offloaded=offloaded)
        if offloaded:
            notes.append(OFFLOADED)
            others = tuple([note for note in result.notes if note.code != "SM314"])
            step = replace(step, result=replace(result, notes=others))
        if replicas > 1:
            notes.append(f"the devices are {replicas} groups, each of which has the whole model in {shards} shards")
        if step.strategy.context is not None:
            context.apply(rewrite, step.strategy.context)
        return step.of_rank([*notes, STREAMS])

    def sent_bytes(self, name: str, traffic: Traffic) -> float:
        shards = traffic.devices // traffic.replicas
        within = (shards - 1) / shards * (2 * traffic.gathered + traffic.reduced)
        among = 2 * (traffic.replicas - 1) / traffic.replicas * traffic.reduced / shards
        return traffic.micro_batches * (within + among)


def _apply_policy(step: WholeStep) -> Precision:
    """The types of a step under `MixedPrecisionPolicy`; buffers and inputs keep theirs."""
    compute = _compute(step.result)
    if compute is None:
        return Precision()
    graph = step.result.graph
    buffers = {} if step.strategy.model in HALVES else {b.fqn: b.value for b in graph.buffers}
    keep_types(step.rewrite, buffers | {value.name: value for value in graph.inputs}, compute)
    return Precision(compute, _types_before(graph, step.strategy), REDUCE)


def _share_experts(step: WholeStep) -> Experts:
    """The parameters of experts; what their tokens are sent through is communication."""
    for piece in step.rewrite.pieces:
        if piece.kernel is not None and step.rewrite.trace.kernels[piece.kernel].name == ALL_TO_ALL:
            piece.category = COMMUNICATION
    ranks = step.strategy.expert_ranks
    return Experts(frozenset(expert_parameters(step.result.graph)), ranks, step.strategy.devices // ranks)


def _types_before(graph: Graph, strategy: Strategy) -> dict[str, DType]:
    """The types of floating-point parameters before FSDP2's policy casts them, by name."""
    types = {}
    for parameter in graph.parameters:
        dtype = parameter.value.dtype
        if dtype.is_floating_point:
            own = strategy.adapters if ADAPTER in parameter.fqn else None
            types[parameter.fqn] = own or strategy.model or dtype
    return types


def _units(paths: tuple[str, ...], regions: Sequence[Region]) -> tuple[str, ...]:
    """The modules that FSDP2 gathers by themselves: the repeated blocks, or the compiled modules where each of the
    blocks is in one of them. Trainers compile and shard the same modules."""
    compiled = tuple(dict.fromkeys([region.name for region in regions]))
    if len(compiled) < 2 or not all(blocks.block_of_name(f"{path}.", compiled) != blocks.ROOT for path in paths):
        return paths
    return compiled


def _check_regions(regions: Sequence[Region], paths: tuple[str, ...], groups: Sequence[str]) -> None:
    """FSDP2 gathers and reshards in hooks around the modules that are its units, which compiled code must not contain.

    Raises:
        UsageError: a region of compiled code has a unit within it.
    """
    for region in regions:
        unit = blocks.block_of_name(f"{region.name}.", paths)  # as of a parameter of it
        inside = next((group for group in groups[region.start : region.end] if group not in (unit, blocks.ROOT)), None)
        if inside is not None:
            raise UsageError(
                f"{region.name or 'the model'} is compiled as one, and {inside} within it is a unit of FSDP2",
                "Its hooks, which gather and free parameters, break the compiled graph, in ways that are not covered.",
                "Name the class of the blocks, or of modules within them, with --compile.",
                code="SM169",
            )


def _compute(result: StepResult) -> DType | None:
    """The 16-bit type that most parameters are in."""
    sizes = dict.fromkeys(HALVES, 0)
    for buffer in result.trace.buffers:
        if buffer.category == "parameter" and buffer.dtype in sizes:
            sizes[buffer.dtype] += prod(buffer.shape)
    largest = max(sizes, key=lambda dtype: sizes[dtype])
    return largest if sizes[largest] else None


DIVISION = Fsdp()
