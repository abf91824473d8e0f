"""Cuts a joint graph into a forward and a backward as PyTorch's `min_cut_rematerialization_partition` does.

    JointGraph ─► cse ─► classify ─► bans ─► cut ─► extract ─► Partition
                                       └─ budget ─┘

Source: torch/_functorch/partitioners.py of PyTorch 2.15, with the defaults of torch/_functorch/config.py.
"""

from __future__ import annotations

from staticmem.compiler.nodes import JointGraph, Partition
from staticmem.compiler.partition.bans import Bans, Options
from staticmem.compiler.partition.classify import Classified, classify
from staticmem.compiler.partition.cse import merged
from staticmem.compiler.partition.cut import saved_by_cut
from staticmem.compiler.partition.extract import halves, partition_of
from staticmem.compiler.partition.network import build


def partition(joint: JointGraph) -> Partition:
    """The forward and the backward of a joint graph.

    Raises:
        StaticmemError: the graph has no cut.
    """
    facts = classify(merged(joint))
    return partition_of(facts.joint, halves(facts.joint, [facts.nodes[i] for i in saved_values(facts)]))


def saved_values(facts: Classified) -> list[int]:
    """Indices of the nodes that the forward saves for the backward (`choose_saved_values_set`)."""
    if not facts.has_backward:
        return []
    return saved_by_cut(build(facts, Bans(facts, Options())))
