"""The step of one rank under a parallel strategy, as a step like any other: trace, graph, notes.

The batch of the graph is what one rank works on at a time: a device's own batch of data parallelism, a micro-batch of a
pipeline. What a strategy changes is in one file each, with its sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir.dtypes import DType, bfloat16, float16
from staticmem.ir.graph import Note
from staticmem.parallel import ddp, facts, fsdp, pipeline, tensor, zero, zero3
from staticmem.parallel.rewrite import Rewrite
from staticmem.scenario.step import TITLES

DEFAULTS = zero.ZeroConfig()
MOST_DEVICES = 65536  # a typing mistake beyond it
MIXED_BY_ITSELF = ("zero1", "zero2", "zero3", "fsdp")  # strategies with mixed precision of their own

_STREAMS = (
    "buffers of collectives are replayed in the allocator's pool of the compute stream; PyTorch keeps a pool for each "
    "stream, so reserved memory can be higher by what they take"
)


@dataclass(frozen=True)
class Strategy:
    """One of `names.STRATEGIES` over `devices` ranks.

    `mixed` says that the step was run in 16-bit precision by the strategy's own mixed precision (FSDP2's
    MixedPrecisionPolicy, DeepSpeed's bf16 or fp16): shards and optimizer state are in float32. `micro_batches` is for
    pipelines; None: as many as keep every stage busy.
    """

    name: str
    devices: int
    mixed: bool = False
    micro_batches: int | None = None
    bucket_view: bool = False
    zero: zero.ZeroConfig = DEFAULTS

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MOST_DEVICES:
            raise UsageError(
                f"--devices {self.devices} is out of range",
                f"It is a number of GPUs from 1 to {MOST_DEVICES:,}.",
                "Example: --parallel zero3 --devices 8",
                code="SM181",
            )


def on_rank(result: StepResult, strategy: Strategy) -> StepResult:
    """The step as the rank that needs the most memory runs it.

    Raises:
        UsageError: the strategy does not apply to this model or this many devices; the message says why.
    """
    if strategy.devices == 1:
        return result
    training = any(name == "backward" for name, _ in result.trace.phases)
    if not training and strategy.name in ("ddp", "zero1", "zero2"):
        text = f"{TITLES[strategy.name]} changes nothing in inference: every device has the whole model"
        return _with_notes(result, [text])
    rewrite = Rewrite(result.trace)
    listed = facts.weights(rewrite)
    graph = result.graph
    paths = facts.blocks(graph, {w.name: w.numel for w in listed})
    name, ranks = strategy.name, strategy.devices
    if name == "ddp":
        said = ddp.apply(rewrite, listed, bucket_view=strategy.bucket_view)
    elif name in ("zero1", "zero2"):
        said = zero.apply(rewrite, listed, ranks, int(name[-1]), strategy.zero)
    elif name == "zero3":
        said = zero3.apply(rewrite, listed, zero3.uses(result.trace, graph), ranks, strategy.zero)
        said.append(_STREAMS)
    elif name == "fsdp":
        compute = _compute(result) if strategy.mixed else None
        precision = fsdp.Precision(compute, fsdp.MIXED, fsdp.MIXED) if compute is not None else fsdp.Precision()
        found = facts.runs(result.trace, facts.groups_of_ops(graph, paths))
        said = fsdp.apply(rewrite, listed, paths, found, ranks, precision, _forward_ends(result))
        if not paths:
            said.append("no blocks that repeat: the whole model is one group, gathered at once")
        said.append(_STREAMS)
    elif name == "tp":
        said = _tensor(rewrite, listed, result, paths, ranks)
    else:
        return _slowest_stage(result, listed, paths, strategy)
    return _with_notes(replace(result, trace=rewrite.build()), said)


def _tensor(
    rewrite: Rewrite, listed: list[facts.Weight], result: StepResult, paths: tuple[str, ...], ranks: int
) -> list[str]:
    shapes = {name: value.shape for name, value in result.graph.values.items() if value.shape is not None}
    made = tensor.plan(result.graph, paths, ranks, shapes)
    if not made.columns:
        reason = made.whole_blocks[0] if made.whole_blocks else "no blocks that repeat"
        raise UsageError(
            f"tensor parallel over {ranks} devices does not apply to this model",
            f"No block can be split ({reason}).",
            "Try fewer devices, or --parallel fsdp.",
            code="SM182",
        )
    return tensor.apply(rewrite, listed, made, ranks)


def _slowest_stage(
    result: StepResult, listed: list[facts.Weight], paths: tuple[str, ...], strategy: Strategy
) -> StepResult:
    """The stage with the highest peak."""
    stages = strategy.devices
    if len(paths) < stages:
        raise UsageError(
            f"a pipeline of {stages} stages does not apply to this model",
            f"It has {len(paths)} blocks that repeat, and a stage is at least one.",
            f"Use --devices {max(len(paths), 1)} or fewer.",
            code="SM182",
        )
    from staticmem.liveness import liveness

    training = any(name == "backward" for name, _ in result.trace.phases)
    micro = (strategy.micro_batches or 2 * stages) if training else 1
    of_ops = pipeline.stages_of_ops(result.graph, paths, stages)
    best, highest = result, -1
    for stage in (0, stages - 1):  # those between have fewer micro-batches than the first, and no head
        rewrite = Rewrite(result.trace)
        said = pipeline.apply(rewrite, facts.weights(rewrite), result.graph, of_ops, stage, stages, micro)
        made = replace(result, trace=rewrite.build())
        peak = liveness(made.trace).peak_bytes
        if peak > highest:
            best, highest = _with_notes(made, said), peak
    return best


def _compute(result: StepResult) -> DType | None:
    """The 16-bit type that most parameters are in."""
    sizes = dict.fromkeys((float16, bfloat16), 0)
    for buffer in result.trace.buffers:
        if buffer.category == "parameter" and buffer.dtype in sizes:
            sizes[buffer.dtype] += prod(buffer.shape)
    largest = max(sizes, key=lambda dtype: sizes[dtype])
    return largest if sizes[largest] else None


def _forward_ends(result: StepResult) -> dict[int, int]:
    """For each forward phase the tick at which the model has returned: the first allocation of the loss."""
    trace = result.trace
    ends: dict[int, int] = {}
    starts = [tick for _, tick in trace.phases]
    last: dict[int, int] = {}
    segment = 0
    for buffer in trace.buffers:
        while segment + 1 < len(starts) and buffer.born >= starts[segment + 1]:
            segment += 1
        if trace.phases[segment][0] != "forward":
            continue
        if trace.kernels[buffer.kernel].op >= 0:
            last[segment] = buffer.born
            ends.pop(segment, None)
        else:
            ends.setdefault(segment, buffer.born)
    return ends


def _with_notes(result: StepResult, said: list[str]) -> StepResult:
    notes = tuple(Note("assumption", "SM350", text) for text in said)
    return replace(result, notes=(*result.notes, *notes))
