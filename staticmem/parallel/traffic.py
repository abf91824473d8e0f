"""Bytes that a rank sends in a step: what a strategy costs beside memory. No time follows from them.

Ring collectives over N ranks: an all-gather of n bytes, and a reduce-scatter of them, send n (N - 1) / N from each
rank, an all-reduce twice that (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005;
nccl-tests, doc/PERFORMANCE.md, has the same factors). Which collectives a strategy runs: section 7 of the ZeRO paper
(Rajbhandari et al., 2020) and, for FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`unshard` in the
forward and again in the backward, `post_backward`). Buffers and norms of gradients are small beside that, and left out.
"""

from __future__ import annotations

from staticmem.parallel.division import Traffic
from staticmem.parallel.strategies import division_of


def sent_bytes(
    strategy: str | None, devices: int, gathered: int, reduced: int, updated: int, micro_batches: int
) -> int:
    """Bytes from one rank in a step of the optimizer; the arguments are those of `Traffic`.

    Raises:
        ValueError: what this strategy sends is not known here.
    """
    if strategy is None or devices == 1:
        return 0
    traffic = Traffic(devices, gathered, reduced, updated, micro_batches)
    return round(division_of(strategy).sent_bytes(strategy, traffic))
