"""DistributedDataParallel: every rank has the whole step, and buckets in which gradients are summed.

Sources: torch/nn/parallel/distributed.py (`_sync_module_buffers`), torch/csrc/distributed/c10d/reducer.cpp
(`compute_bucket_assignment_by_size`: a bucket is closed by the gradient that fills it; `rebuild_buckets`: from the
second step on in the order in which gradients arrive).
"""

from __future__ import annotations

from collections.abc import Iterable

from staticmem.engine.step import StepResult
from staticmem.ir.dtypes import DType
from staticmem.parallel.division import Traffic, WholeStep
from staticmem.parallel.rewrite import AFTER, Rewrite, Weight
from staticmem.scenario.step import DDP_BUCKET, DDP_FIRST_BUCKET


def assign_buckets(gradients: Iterable[tuple[int, DType]]) -> list[tuple[int, DType]]:
    """Bytes of the buckets of gradients (bytes, type) in the order of their arrival; a bucket has one type."""
    buckets: list[tuple[int, DType]] = []
    filling: dict[DType, int] = {}
    closed: set[DType] = set()
    for nbytes, dtype in gradients:
        size = filling.pop(dtype, 0) + nbytes
        if size >= (DDP_BUCKET if dtype in closed else DDP_FIRST_BUCKET):
            buckets.append((size, dtype))
            closed.add(dtype)
        else:
            filling[dtype] = size
    return buckets + [(size, dtype) for dtype, size in filling.items()]


def apply(rewrite: Rewrite, weights: list[Weight], *, bucket_view: bool = False) -> list[str]:
    """Adds what DDP keeps. `bucket_view` is `gradient_as_bucket_view=True`: gradients are views of the buckets."""
    arriving = sorted((g for w in weights for g in w.gradients[:1]), key=lambda g: g.born)
    buckets = assign_buckets((g.nbytes, g.dtype) for g in arriving)
    holder = "DDP's reducer, for the all-reduce of gradients"
    for number, (nbytes, dtype) in enumerate(buckets):
        rewrite.add(f"bucket {number}", nbytes, dtype, rewrite.setup, "DDP bucket", holder)
    if bucket_view:
        for gradient in arriving:
            rewrite.end(gradient, (gradient.born[0], AFTER))
    buffers = [p for p in rewrite.pieces if p.category == "buffer"]
    call, holder = "DDP broadcast of buffers", "DDP's broadcast of the model's buffers"
    for dtype in dict.fromkeys(p.dtype for p in buffers if p.shape):
        nbytes = sum(p.nbytes for p in buffers if p.dtype is dtype)
        rewrite.add("buffers, flattened", nbytes, dtype, rewrite.start, call, holder, died=(rewrite.first, AFTER))
    gradients = "the gradients are views of them" if bucket_view else "beside the gradients"
    return [f"DDP: {len(buckets)} buckets of at most 25 MiB and the gradient that fills them, {gradients}"]


class Ddp:
    """Every rank runs the whole step."""

    def divide(self, step: WholeStep) -> StepResult:
        return step.of_rank(apply(step.rewrite, step.weights, bucket_view=step.strategy.bucket_view))

    def sent_bytes(self, name: str, traffic: Traffic) -> float:
        """Gradients are summed in the last micro-batch (`no_sync` in the others)."""
        return 2 * traffic.share * traffic.reduced


DIVISION = Ddp()
