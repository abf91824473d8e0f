"""The step of one rank under a parallel strategy, as a step like any other: trace, graph, notes.

The batch of the graph is that of one rank's forward: a device's own batch of data parallelism, a micro-batch of a
pipeline. Each strategy has a file with its sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import HALVES, DType
from staticmem.ir.graph import Graph, Note, Region
from staticmem.liveness import liveness
from staticmem.ops.experts import ALL_TO_ALL
from staticmem.parallel import blocks, context, ddp, fsdp, pipeline, tensor, zero
from staticmem.parallel.rewrite import COMMUNICATION, Rewrite, Weight
from staticmem.passes.expert_parallel import expert_parameters
from staticmem.scenario.adapters import in_type_of_layers, lora_of, lora_text
from staticmem.scenario.losses import AUTO
from staticmem.scenario.request import Request
from staticmem.scenario.step import OF_TRANSFORMERS, RUNS_PARTS, TITLES, ContextShare, ExpertShare

DEFAULTS = zero.ZeroConfig()
MOST_DEVICES = 65536  # more is taken for a typing mistake
MIXED_BY_ITSELF = ("zero1", "zero2", "zero3", "fsdp")  # strategies with mixed precision of their own

ADAPTER = ".lora_"  # in the names of what PEFT trains: `adapter_layer_names` of peft/tuners/lora/layer.py
_STREAMS = (
    "what is gathered and reduced is allocated on streams of the collectives, of which the allocator keeps pools that "
    "the step cannot use: they are in reserved memory"
)


@dataclass(frozen=True)
class Strategy:
    """One of `scenario.parallel.STRATEGIES` over `devices` ranks; without a name, the sequence alone is divided.

    `mixed` says that the step was run in 16-bit precision by the strategy's own mixed precision. DeepSpeed's bf16 or
    fp16 has master weights and optimizer state in float32. FSDP2's MixedPrecisionPolicy leaves shards and their state
    in the types that the model has: `model` is the type that it was cast to as a whole, `adapters` that of adapters
    beside its layers (None: as the file has it). `micro_batches` is for pipelines; None: as many as keep every stage
    busy. `expert_ranks` share the experts of each layer, of which the step that is split has the share of one; that of
    `context` has a part of the sequence.
    """

    name: str
    devices: int
    mixed: bool = False
    micro_batches: int | None = None
    bucket_view: bool = False
    expert_ranks: int = 1
    context: ContextShare | None = None
    zero: zero.ZeroConfig = DEFAULTS
    model: DType | None = None
    adapters: DType | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MOST_DEVICES:
            raise UsageError(
                f"--devices {self.devices} is out of range",
                f"It is a number of GPUs from 1 to {MOST_DEVICES:,}.",
                "Example: --parallel zero3 --devices 8",
                "SM181",
            )


def strategy_of(request: Request) -> Strategy:
    """The strategy of a request, with its options.

    Raises:
        UsageError: no number of devices was given.
    """
    if request.parallel is None:
        return Strategy("", request.context_parallel or 1)
    if request.devices is None:
        raise UsageError(
            f"--parallel {request.parallel} needs --devices",
            "What a device holds depends on how many share the work.",
            f"Example: --parallel {request.parallel} --devices 8; 'staticmem size' finds the fewest.",
            code="SM180",
        )
    micro_batches = request.accumulate if request.accumulate > 1 else None
    mixed, experts = _mixed_precision(request), request.expert_parallel or 1
    adapters = lora_of(lora_text(request.lora)).fixed_dtype if request.lora is not None else None
    return Strategy(
        request.parallel, request.devices, mixed, micro_batches, expert_ranks=experts,
        model=dtypes.parse(request.dtype) if request.dtype is not None else None, adapters=adapters,
    )  # fmt: skip


def _mixed_precision(request: Request) -> bool:
    """Whether the strategy's own mixed precision runs the step: FSDP2's policy under `amp`, DeepSpeed's bf16 and fp16
    under `amp` and `dtype`."""
    if request.parallel not in MIXED_BY_ITSELF:
        return False
    options = (request.amp,) if request.parallel == "fsdp" else (request.amp, request.dtype)
    return any(option is not None and option.lower() not in ("none", "fp32", "float32") for option in options)


def on_one_device(request: Request, worst: bool = False) -> Request:
    """The request of the step that the strategy splits: a rank computes in 16 bit where the strategy casts, the model
    is within DDP, a pipeline's step is one micro-batch, and experts are those of one rank. Ranks that run
    parts of a model have no loss of its own. `worst`: at the worst load of experts."""
    one = replace(request, parallel=None, devices=None, expert_parallel=None)
    if request.expert_parallel is not None and request.expert_parallel > 1:
        one = replace(one, experts=ExpertShare(request.expert_parallel, worst))
    if _mixed_precision(request):
        if request.amp is not None and request.amp.lower() != "none":
            one = replace(one, amp=None, dtype=request.amp)
        if one.lora is not None:  # parameters of all types are cast: by the policy of FSDP2 when they are gathered, by
            # `module.bfloat16()` of DeepSpeed's runtime/engine.py (`_configure_distributed_model`) at the start
            one = replace(one, lora=in_type_of_layers(lora_text(one.lora)))
    if request.parallel == "ddp" and request.devices != 1:
        one = replace(one, within_ddp=True)
    if request.parallel in RUNS_PARTS and request.loss == OF_TRANSFORMERS:
        one = replace(one, loss=AUTO)
    return replace(one, accumulate=1) if request.parallel == "pp" else one


def on_rank(result: StepResult, strategy: Strategy) -> StepResult:
    """The step as the rank that needs the most memory runs it.

    Raises:
        UsageError: the strategy does not apply to this model or this many devices; the message says why.
    """
    if strategy.devices == 1:
        return result
    share = strategy.context
    if not strategy.name:
        rewrite = Rewrite(result.trace)
        if share is not None:
            context.apply(rewrite, share)
        text = "ranks of context parallelism add their gradients up in place: that is the training loop's task"
        return _with_notes(replace(result, trace=rewrite.build()), [text])
    training = any(name == "backward" for name, _ in result.trace.phases)
    if not training and strategy.name in ("ddp", "zero1", "zero2"):
        text = f"{TITLES[strategy.name]} changes nothing in inference: every device has the whole model"
        return _with_notes(result, [text])
    rewrite = Rewrite(result.trace)
    weights = rewrite.weights()
    graph = result.graph
    paths = blocks.repeated_blocks(graph, {w.name: w.numel for w in weights})
    name, ranks = strategy.name, strategy.devices
    if not weights and name not in RUNS_PARTS:  # those say themselves what they cannot split
        text = f"{TITLES[name]} changes nothing: the model has no parameters, which it would share out"
        return _with_notes(result, [text])
    if name == "ddp":
        notes = ddp.apply(rewrite, weights, bucket_view=strategy.bucket_view)
    elif name in ("zero1", "zero2"):
        notes = zero.apply_to_states(rewrite, weights, ranks, int(name[-1]), strategy.zero)
    elif name == "zero3":
        modules = zero.uses(result.trace, graph)
        notes = [*zero.apply_to_parameters(rewrite, weights, modules, ranks, strategy.zero), _STREAMS]
    elif name == "fsdp":
        regions = result.compiled.regions if result.compiled is not None else ()
        paths = _units(paths, regions)
        groups = blocks.blocks_of_ops(graph, paths)
        _check_regions(regions, paths, groups)
        compute = _compute(result) if strategy.mixed else None
        precision = fsdp.Precision()
        if compute is not None:
            precision = fsdp.Precision(compute, _types_before(graph, strategy), fsdp.REDUCE)
            buffers = {} if strategy.model in HALVES else {b.fqn: b.value for b in graph.buffers}
            declared = buffers | {value.name: value for value in graph.inputs}
            fsdp.keep_types(rewrite, declared, compute)
        runs = blocks.runs(result.trace, groups)
        experts = None
        if strategy.expert_ranks > 1:
            names = frozenset(expert_parameters(graph))
            for piece in rewrite.pieces:
                if piece.kernel is not None and rewrite.trace.kernels[piece.kernel].name == ALL_TO_ALL:
                    piece.category = COMMUNICATION
            experts = fsdp.Experts(names, strategy.expert_ranks, ranks // strategy.expert_ranks)
        notes = [*fsdp.apply(rewrite, weights, paths, runs, ranks, precision, experts), _STREAMS]
        if share is not None:
            context.apply(rewrite, share)
    elif name == "tp":
        notes = _tensor(rewrite, weights, result, paths, ranks)
    else:
        return _largest_stage(result, paths, strategy, training)
    return _with_notes(replace(result, trace=rewrite.build()), notes)


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


def _tensor(
    rewrite: Rewrite, weights: list[Weight], result: StepResult, paths: tuple[str, ...], ranks: int
) -> list[str]:
    shapes = {name: value.shape for name, value in result.graph.values.items() if value.shape is not None}
    split = tensor.plan(result.graph, paths, ranks, shapes)
    if not split.columns:
        reason = split.whole_blocks[0] if split.whole_blocks else "no blocks that repeat"
        what = f"tensor parallel over {ranks} devices does not apply to this model"
        raise UsageError(what, f"No block can be split ({reason}).", "Try fewer devices, or --parallel fsdp.", "SM182")
    return tensor.apply(rewrite, weights, split, ranks)


def _largest_stage(result: StepResult, paths: tuple[str, ...], strategy: Strategy, training: bool) -> StepResult:
    """The stage with the highest peak."""
    stages = strategy.devices
    if len(paths) < stages:
        raise UsageError(
            f"a pipeline of {stages} stages does not apply to this model",
            f"It has {len(paths)} blocks that repeat, and a stage is at least one.",
            f"Use --devices {max(len(paths), 1)} or fewer.",
            code="SM182",
        )
    micro = (strategy.micro_batches or 2 * stages) if training else 1
    of_ops = pipeline.stages_of_ops(result.graph, paths, stages)
    best, highest = result, -1
    for stage in (0, stages - 1):  # those between have fewer micro-batches than the first, and no head
        rewrite = Rewrite(result.trace)
        notes = pipeline.apply(rewrite, result.graph, of_ops, stage, stages, micro)
        trace = rewrite.build()
        peak = liveness(trace).peak_bytes
        if peak > highest:
            best, highest = _with_notes(replace(result, trace=trace), notes), peak
    return best


def _compute(result: StepResult) -> DType | None:
    """The 16-bit type that most parameters are in."""
    sizes = dict.fromkeys(HALVES, 0)
    for buffer in result.trace.buffers:
        if buffer.category == "parameter" and buffer.dtype in sizes:
            sizes[buffer.dtype] += prod(buffer.shape)
    largest = max(sizes, key=lambda dtype: sizes[dtype])
    return largest if sizes[largest] else None


def _with_notes(result: StepResult, texts: list[str]) -> StepResult:
    return replace(result, notes=(*result.notes, *(Note("assumption", "SM350", text) for text in texts)))
