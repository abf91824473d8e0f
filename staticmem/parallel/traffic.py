"""Bytes that a rank sends in a step: what a strategy costs beside memory. No time follows from them.

Ring collectives over N ranks: an all-gather of n bytes, and a reduce-scatter of them, send n (N - 1) / N from each
rank, an all-reduce twice that (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005;
nccl-tests, doc/PERFORMANCE.md, has the same factors). Which collectives a strategy runs: section 7 of the ZeRO paper
(Rajbhandari et al., 2020) and, for FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`unshard` in the
forward and again in the backward, `post_backward`). Buffers and norms of gradients are small beside that, and left out.
"""

from __future__ import annotations


def sent_bytes(
    strategy: str | None, devices: int, gathered: int, reduced: int, updated: int, micro_batches: int
) -> int:
    """Bytes from one rank in a step of the optimizer.

    Args:
        gathered: bytes of all parameters as a forward takes them.
        reduced: bytes of all gradients as they are summed.
        updated: bytes of the trained parameters as a forward takes them.
        micro_batches: forwards of a step. DDP sums gradients in the last (`no_sync` in the others), the others in each.

    Raises:
        ValueError: what this strategy sends is not known here.
    """
    if strategy is None or devices == 1:
        return 0
    share = (devices - 1) / devices
    if strategy == "ddp":
        return round(2 * share * reduced)
    if strategy in ("zero1", "zero2"):  # stage 1 sums at the end of the accumulation, stage 2 in each micro-batch
        times = micro_batches if strategy == "zero2" else 1
        return round(share * (times * reduced + updated))
    if strategy in ("zero3", "fsdp"):
        return round(share * micro_batches * (2 * gathered + reduced))
    raise ValueError(strategy)
