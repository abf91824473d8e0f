"""Cuts a joint graph into a forward and a backward as PyTorch's `min_cut_rematerialization_partition` does.

    JointGraph ─► cse ─► classify ─► bans ─► cut ─► extract ─► Partition
                                       └─ budget ─┘

Source: torch/_functorch/partitioners.py of PyTorch 2.15, with the defaults of torch/_functorch/config.py.
"""

from __future__ import annotations

from staticmem.compiler.graphs import JointGraph, Partition
from staticmem.compiler.partition.extract import Partitioner

__all__ = ["Partitioner", "partition"]


def partition(joint: JointGraph, budget: float = 1.0) -> Partition:
    """The forward and the backward of a joint graph, for an `activation_memory_budget`.

    Raises:
        UsageError: the budget is not between 0 and 1.
        StaticmemError: the graph has no cut.
    """
    return Partitioner(joint).partition(budget)
