"""What changes of the step would give: each lever alone, run as a step of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from staticmem.analysis.study import Study
from staticmem.errors import StaticmemError
from staticmem.report.html.extras import LeverRow

LIMIT = 3_000  # ops: every lever costs a step, and the levers of a larger graph more than a second


def lever_rows(study: Study) -> tuple[LeverRow, ...]:
    """The levers that apply and help, with their peaks of live bytes."""
    if not study.scenario.training or len(study.result.graph.ops) > LIMIT:
        return ()
    rows = []
    for name, flags, words, note in _levers(study):
        try:
            peak = study.ask(replace(study.request, gpu=None, **words)).lifetimes.peak_bytes
        except StaticmemError:
            continue  # a lever that this step cannot have
        if peak < study.lifetimes.peak_bytes:
            rows.append(LeverRow(name, flags, peak, note))
    return tuple(rows)


def _levers(study: Study) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Name, flags, fields of the request, and what has to be known."""
    scenario, batch = study.scenario, study.report.scenario.batch
    words: dict[str, Any]
    if scenario.amp is None and scenario.dtype is None:
        yield "mixed precision", "--amp bf16", {"amp": "bfloat16"}, "numerics change"
    if not scenario.checkpoint and not scenario.checkpoint_segments:
        note = "the largest Sequential runs its forward twice"
        yield "activation checkpointing", "--checkpoint-segments sqrt", {"checkpoint_segments": "sqrt"}, note
    if batch is not None and batch % 2 == 0:
        flags = f"--batch {batch // 2} --accumulate {2 * scenario.accumulate}"
        words = {"batch": batch // 2, "accumulate": 2 * scenario.accumulate}
        yield "gradient accumulation", flags, words, "the batch in twice as many parts; batch norm sees the parts"
    if scenario.optimizer in ("adam", "adamw"):
        name = f"{scenario.optimizer}-8bit"
        yield "8-bit optimizer state", f"--optimizer {name}", {"optimizer": name}, "needs bitsandbytes"
    if scenario.optimizer is not None and not scenario.offload_optimizer:
        note = "gradients and weights travel each step"
        yield "optimizer on the CPU", "--offload-optimizer", {"offload_optimizer": True}, note
    if scenario.optimizer is not None and scenario.optimizer_impl == "foreach":
        note = "its step makes no copies of the parameters"
        yield "fused optimizer", "--optimizer-impl fused", {"optimizer_impl": "fused"}, note
