"""The step of one rank of a parallel job, from the words of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.parallel.rank import MIXED_BY_ITSELF, Strategy, on_rank

if TYPE_CHECKING:
    from staticmem.scenario.request import Request
    from staticmem.studies.study import Study


def rank_step(study: Study) -> StepResult:
    """The step that the rank with the most memory runs.

    Raises:
        UsageError: no number of devices was given, or the strategy does not apply.
    """
    request = study.request
    assert request.parallel is not None
    if request.devices is None:
        raise UsageError(
            f"--parallel {request.parallel} needs --devices",
            "What a device holds depends on how many share the work.",
            f"Example: --parallel {request.parallel} --devices 8; 'staticmem size' finds the fewest.",
            code="SM180",
        )
    strategy = strategy_of(request, request.parallel, request.devices)
    return on_rank(study.ask(on_one_device(request, request.parallel)).result, strategy)


def strategy_of(request: Request, name: str, devices: int) -> Strategy:
    """The strategy with what else the request says of it."""
    micro = request.accumulate if request.accumulate > 1 else None
    return Strategy(name, devices, mixed_precision(request, name), micro)


def mixed_precision(request: Request, name: str) -> bool:
    """Whether the strategy's own mixed precision runs the step: FSDP2's policy under `amp`, DeepSpeed's bf16 and fp16
    under `amp` and `dtype`."""
    if name not in MIXED_BY_ITSELF:
        return False
    words = (request.amp,) if name == "fsdp" else (request.amp, request.dtype)
    return any(word is not None and word.lower() not in ("none", "fp32", "float32") for word in words)


def on_one_device(request: Request, name: str) -> Request:
    """The request of the step that the strategy splits: a rank computes in 16 bit where the strategy casts, and a
    pipeline's step is one micro-batch."""
    one = replace(request, parallel=None, devices=None)
    if mixed_precision(request, name) and request.amp is not None and request.amp.lower() != "none":
        one = replace(one, amp=None, dtype=request.amp)
    return replace(one, accumulate=1) if name == "pp" else one
