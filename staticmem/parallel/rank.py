"""The step of one rank under a parallel strategy, as a step like any other: trace, graph, notes, bytes that it sends.

The batch of the graph is that of one rank's forward: a device's own batch of data parallelism, a micro-batch of a
pipeline. Each strategy has a file with its sources.

Traffic is what a strategy costs beside memory; no time follows from it.
Ring collectives over N ranks: an all-gather of n bytes, and a reduce-scatter of them, send n (N - 1) / N from each
rank, an all-reduce twice that (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005;
nccl-tests, doc/PERFORMANCE.md, has the same factors). Which collectives a strategy runs: section 7 of the ZeRO paper
(Rajbhandari et al., 2020) and, for FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`unshard` in the
forward and again in the backward, `post_backward`). Buffers and norms of gradients are small beside that, and left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from staticmem.engine.step import StepResult
from staticmem.ir import dtypes
from staticmem.parallel import blocks
from staticmem.parallel.division import Strategy, Traffic, WholeStep, with_notes
from staticmem.parallel.rewrite import Rewrite
from staticmem.parallel.strategies import context, division_of
from staticmem.scenario.adapters import in_type_of_layers, lora_of, lora_text
from staticmem.scenario.combinations import RANKS, check
from staticmem.scenario.losses import AUTO, OF_TRANSFORMERS
from staticmem.scenario.request import Request
from staticmem.scenario.strategies import STRATEGIES, ExpertShare, facts_of


def strategy_of(request: Request) -> Strategy:
    """The strategy of a request, with its options.

    Raises:
        UsageError: no number of devices was given.
    """
    if request.parallel is None:
        return Strategy("", request.context_parallel or 1)
    check(RANKS, request.given())
    assert request.devices is not None
    micro_batches = request.accumulate if request.accumulate > 1 else None
    mixed, experts = _mixed_precision(request), request.expert_parallel or 1
    adapters = lora_of(lora_text(request.lora)).fixed_dtype if request.lora is not None else None
    return Strategy(
        request.parallel,
        request.devices,
        mixed,
        micro_batches,
        expert_ranks=experts,
        replicas=request.replicas or 1,
        model=dtypes.parse(request.dtype) if request.dtype is not None else None,
        adapters=adapters,
        offload=request.offload_parameters,
    )


def _mixed_precision(request: Request) -> bool:
    """Whether the strategy's own mixed precision runs the step: FSDP2's policy under `amp`, DeepSpeed's bf16 and fp16
    under `amp` and `dtype`."""
    if request.parallel is None:
        return False
    options = [getattr(request, name) for name in STRATEGIES[request.parallel].casts]
    return any(option is not None and option.lower() not in ("none", "fp32", "float32") for option in options)


def on_one_device(request: Request, worst: bool = False) -> Request:
    """The request of the step that the strategy splits: a rank computes in 16 bit where the strategy casts, the model
    is within DDP, a pipeline's step is one micro-batch, and experts are those of one rank. Ranks that run
    parts of a model have no loss of its own. `worst`: at the worst load of experts."""
    alone: dict[str, Any] = {"parallel": None, "devices": None, "expert_parallel": None, "replicas": None}
    one = replace(request, **alone, offload_parameters=False)
    if request.offload_parameters and request.optimizer is not None:
        one = replace(one, offload_optimizer=True)
    if request.expert_parallel is not None and request.expert_parallel > 1:
        one = replace(one, experts=ExpertShare(request.expert_parallel, worst))
    if _mixed_precision(request):
        if request.amp is not None and request.amp.lower() != "none":
            one = replace(one, amp=None, dtype=request.amp)
        if one.lora is not None:  # parameters of all types are cast: by the policy of FSDP2 when they are gathered, by
            # `module.bfloat16()` of DeepSpeed's runtime/engine.py (`_configure_distributed_model`) at the start
            one = replace(one, lora=in_type_of_layers(lora_text(one.lora)))
    facts = facts_of(request.parallel)
    if facts is not None and facts.keeps_whole and request.devices != 1:
        one = replace(one, within_ddp=True)
    if facts is not None and facts.runs_parts and request.loss == OF_TRANSFORMERS:
        one = replace(one, loss=AUTO)
    return replace(one, accumulate=1) if facts is not None and facts.takes_micro_batches else one


def on_rank(result: StepResult, strategy: Strategy) -> StepResult:
    """The step as the rank that needs the most memory runs it.

    Raises:
        UsageError: the strategy does not apply to this model or this many devices; the message says why.
    """
    if strategy.devices == 1:
        return result
    if not strategy.name:
        return _divide_sequence(result, strategy)
    facts = STRATEGIES[strategy.name]
    training = any(name == "backward" for name, _ in result.trace.phases)
    if not training and not facts.divides_parameters:
        return with_notes(result, [f"{facts.title} changes nothing in inference: every device has the whole model"])
    rewrite = Rewrite(result.trace)
    weights = rewrite.weights()
    paths = blocks.repeated_blocks(result.graph, {w.name: w.numel for w in weights})
    if not weights and not facts.runs_parts:  # those say themselves what they cannot split
        text = f"{facts.title} changes nothing: the model has no parameters, which it would share out"
        return with_notes(result, [text])
    return division_of(strategy.name).divide(WholeStep(result, strategy, rewrite, weights, paths, training))


def _divide_sequence(result: StepResult, strategy: Strategy) -> StepResult:
    """The step of a rank of context parallelism alone."""
    rewrite = Rewrite(result.trace)
    if strategy.context is not None:
        context.apply(rewrite, strategy.context)
    text = "ranks of context parallelism add their gradients up in place: that is the training loop's task"
    return with_notes(replace(result, trace=rewrite.build()), [text])


def sent_bytes(
    strategy: str | None, devices: int, gathered: int, reduced: int, updated: int, micro_batches: int, replicas: int = 1
) -> int:
    """Bytes from one rank in a step of the optimizer; the arguments are those of `Traffic`.

    Raises:
        ValueError: what this strategy sends is not known here.
    """
    if strategy is None or devices == 1:
        return 0
    traffic = Traffic(devices, gathered, reduced, updated, micro_batches, replicas)
    return round(division_of(strategy).sent_bytes(strategy, traffic))
