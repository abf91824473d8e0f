"""The checkpoints inside of compiled code, and how they mark nodes: computed again in the backward, or saved.

A node has the number of the outermost checkpoint around it (`ac_graph_id`). A selective one asks its policy at each
ATen call, before decompositions, and marks all nodes that the call adds.

Source: torch/utils/checkpoint.py (`_CachingTorchDispatchMode.__torch_dispatch__`, where it `is_compiling`),
torch/_higher_order_ops/wrap.py (`TagActivationCheckpoint`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence

from staticmem.ir.graph import Region
from staticmem.ops.traces.registry import called_by
from staticmem.scenario.checkpointing import Policy
from staticmem.tracing.nodes import GETITEM, SAVED, Node


class Checkpointed:
    """Checkpoints, in order, outer ones first."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.outer: list[Region] = []
        for region in regions:
            if not self.outer or region.start >= self.outer[-1].end:
                self.outer.append(region)
        self.starts = [region.start for region in self.outer]
        self.policies: dict[tuple[str, ...], Policy] = {}

    def number(self, op: int) -> int:
        """The number of the outermost checkpoint that an op is in, from 1; 0 for none."""
        place = bisect_right(self.starts, op)
        return place if place and op < self.outer[place - 1].end else 0

    def policy(self, number: int) -> Policy | None:
        """What a selective checkpoint saves; None of one that saves nothing."""
        saves = self.outer[number - 1].saves if number else ()
        return self.policies.setdefault(saves, Policy(saves)) if saves else None


class Marks:
    """Marks the nodes of one trace that selective checkpoints save."""

    def __init__(self, checkpoints: Checkpointed) -> None:
        self.checkpoints = checkpoints
        self.counts: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def mark(self, nodes: Sequence[Node], number: int, op: str) -> None:
        """`nodes` are what the op (`aten::silu`) has added in the checkpoint."""
        policy = self.checkpoints.policy(number)
        if policy is None:
            return
        counts, called = self.counts[number], called_by(op)
        whole = bool(called) and all(node.base.removeprefix("aten::") != called for node in nodes)
        if whole and policy.keeps(called, counts):
            for node in nodes:
                node.must_recompute = SAVED
            return
        for node in nodes:
            if node.target == GETITEM:
                saved = node.inputs[0].must_recompute == SAVED
            else:
                saved = policy.keeps(node.target.removeprefix("aten::"), counts)
            if saved:
                node.must_recompute = SAVED
