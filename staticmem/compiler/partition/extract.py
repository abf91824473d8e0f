"""Forward and backward graphs from the nodes that are saved.

Sources: `_extract_fwd_bwd_modules`, `_extract_graph_with_inputs_outputs` and `reordering_to_mimic_autograd_engine` of
torch/_functorch/partitioners.py, `raise_getitems` of torch/_functorch/compile_utils.py.

Partitions for an `activation_memory_budget` below 1: what is worth computing again to save memory.

1 is what `torch.compile` saves by default, 0 saves nothing but the inputs. Between them a knapsack chooses which of the
banned nodes are saved, by their bytes and by the FLOPs that computing them again takes.

Sources: `choose_saved_values_set` and `estimate_runtime` (mode "flops") of torch/_functorch/partitioners.py;
`dp_knapsack` of torch/_functorch/_activation_checkpointing/knapsack.py, the default solver ("dp" in
torch/_functorch/config.py); Where no banned node can be computed again 2.15
takes the cut of the most aggressive options, 2.13 saves the inputs alone: here it is as in 2.15.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from staticmem.compiler.graphs import JointGraph, NodeGraph, Partition
from staticmem.compiler.partition.bans import Bans, Options
from staticmem.compiler.partition.classify import FAR, classify
from staticmem.compiler.partition.cse import ancestors, copied, live_nodes, merged, storages
from staticmem.compiler.partition.cut import build, saved_by_cut
from staticmem.eager.strides import Form
from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.ops.traces.registry import flops
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, SAVED, Node


@record(frozen=True, slots=True)
class Halves:
    """Both graphs in nodes of the joint graph: what each computes, in order, and what is saved between them."""

    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    saved: tuple[Node, ...]


def halves(joint: JointGraph, saved: Sequence[Node]) -> Halves:
    """What each graph computes when these nodes are saved; those that no gradient reads are dropped."""
    gradients = joint.outputs[joint.forward_outputs :]
    placeholders = {*saved, *joint.tangents}
    needed = ancestors(gradients, placeholders)
    # attributes of `ctx` come last: autograd does not check whether somebody has written to them
    saved = sorted([node for node in saved if node in needed], key=lambda node: node.on_ctx)
    backward = [node for node in joint.nodes if node in needed and node not in placeholders]
    forward = live_nodes(_without(joint.nodes, joint.tangents), [*joint.outputs[: joint.forward_outputs], *saved])
    return Halves(
        tuple(_getitems_raised([node for node in forward if node.target != PLACEHOLDER])),
        tuple(_getitems_raised(_order_as_engine(joint, backward, placeholders))),
        tuple(saved),
    )


def partition_of(joint: JointGraph, parts: Halves) -> Partition:
    """The two graphs, the backward with nodes of its own."""
    forward = NodeGraph((*joint.primals, *parts.forward), (*joint.outputs[: joint.forward_outputs], *parts.saved))
    replaced: dict[Node, Node] = {}
    for node in (*parts.saved, *joint.tangents):
        replaced[node] = Node(PLACEHOLDER, (), node.form, op=node.op, name=node.name)
    computed_before = set(parts.forward)
    recomputed = []
    for node in parts.backward:
        replaced[node] = new = copied(node, replaced)
        new.recomputed = node in computed_before
        if new.recomputed:
            recomputed.append(new)
    gradients = joint.outputs[joint.forward_outputs :]
    backward = NodeGraph(
        tuple(replaced.values()), tuple(None if node is None else replaced[node] for node in gradients)
    )
    return Partition(forward, backward, parts.saved, tuple(recomputed))


def _without(nodes: Iterable[Node], dropped: Iterable[Node]) -> list[Node]:
    """The nodes that depend on none of these."""
    lost = set(dropped)
    kept = []
    for node in nodes:
        if node in lost or any(read in lost for read in node.inputs):
            lost.add(node)
        else:
            kept.append(node)
    return kept


def _order_as_engine(joint: JointGraph, backward: list[Node], placeholders: set[Node]) -> list[Node]:
    """From the first reader of a tangent on, each node right behind those of the forward that it needs again: the
    forward's stand before it in the joint graph, and would all be alive at once."""
    tangents = set(joint.tangents)
    first = next((i for i, node in enumerate(backward) if not tangents.isdisjoint(node.inputs)), None)
    if first is None:
        if tangents.isdisjoint(output for output in joint.outputs if output is not None):
            return backward
        first = len(backward)
    place = {node: i for i, node in enumerate(backward)}
    done = set(placeholders)
    result: list[Node] = []
    gradients = [output for output in joint.outputs[joint.forward_outputs :] if output is not None]
    for roots in [*([node] for node in backward[first:]), gradients]:
        pulled: list[Node] = []
        stack = roots
        while stack:
            cur = stack.pop()
            if cur not in done:
                done.add(cur)
                pulled.append(cur)
                stack.extend(cur.inputs)
        pulled.sort(key=place.__getitem__)
        result.extend(pulled)
    return result


def _getitems_raised(nodes: list[Node]) -> list[Node]:
    """Each getitem right behind the node that it takes an item of."""
    items: dict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.target == GETITEM:
            items[node.inputs[0]].append(node)
    result = []
    stack: list[Node] = []
    computed = set(nodes)
    for node in nodes:
        if node.target == GETITEM and node.inputs[0] in computed:
            continue
        stack.append(node)
        while stack:
            cur = stack.pop()
            result.append(cur)
            stack.extend(reversed(items.get(cur, ())))
    return result


GIGA = 1e9  # `estimate_activations_size`
STEPS = 10000  # `dp_knapsack` rounds sizes to this part of what a budget can save

# `choose_saved_values_set`: what is allowed to be computed again, in steps.
DEFAULT = Options()
MORE = Options(used_far_apart=False, long_fusible_chains=False, materialized_backward=False)
MOST = Options(used_far_apart=False, long_fusible_chains=False, materialized_backward=False, not_in_allowlist=False)


class Partitioner:
    """Partitions of one joint graph, for any budget; what budgets share is computed once."""

    def __init__(self, joint: JointGraph) -> None:
        self.facts = classify(merged(joint))

    def partition(self, budget: float = 1.0) -> Partition:
        """The forward and the backward for a budget.

        Raises:
            UsageError: the budget is not between 0 and 1.
            StaticmemError: the graph has no cut.
        """
        nodes = self.facts.nodes
        joint = self.facts.joint
        return partition_of(joint, halves(joint, [nodes[i] for i in self.saved_values(budget)]))

    def saved_values(self, budget: float = 1.0) -> list[int]:
        """Indices of the nodes that are saved, in order, those among them that no gradient reads too."""
        if not 0 <= budget <= 1:
            raise UsageError(
                f"an activation memory budget of {budget}",
                "It is the share of memory that the default partition saves, from 0 to 1.",
                "Choose 0.5 to halve it, or 1 for the default.",
            )
        if not self.facts.has_backward:
            return []
        if budget == 0:
            return self._inputs
        if budget == 1 or self._bytes(self._default) <= self._bytes(self._inputs):
            return self._default
        for saved in (self._saved(MORE), self._saved(MOST)):
            if self._ratio(saved) < budget:
                return saved
        if not self.candidates:
            return self._saved(MOST)
        again = self._chosen(budget)
        return saved_by_cut(build(self.facts, Bans(self.facts, MOST, again)))

    @cached_property
    def candidates(self) -> list[int]:
        """Banned nodes that could be computed again, the largest first (`all_recomputable_banned_nodes`)."""
        facts = self.facts
        storage = storages(facts.nodes)
        given = {storage[node] for node in facts.joint.primals}
        indices = [
            i
            for i in self._most_banned
            if facts.distance[i] < FAR
            and facts.must_recompute[i] != SAVED
            and (not isinstance(facts.nodes[i].form, Form) or storage[facts.nodes[i]] not in given)
        ]
        return sorted(indices, key=lambda i: -facts.sizes[i])

    @cached_property
    def _inputs(self) -> list[int]:
        given = set(self.facts.joint.primals)
        return [i for i, node in enumerate(self.facts.nodes) if node in given]

    @cached_property
    def _default(self) -> list[int]:
        return self._saved(DEFAULT)

    @cached_property
    def _most_banned(self) -> list[int]:
        return list(Bans(self.facts, MOST).reasons)

    @cached_property
    def _saved_by(self) -> dict[Options, list[int]]:
        return {}

    def _saved(self, options: Options) -> list[int]:
        if options not in self._saved_by:
            self._saved_by[options] = saved_by_cut(build(self.facts, Bans(self.facts, options)))
        return self._saved_by[options]

    def _bytes(self, saved: Sequence[int]) -> float:
        return sum(self.facts.sizes[i] for i in saved) / GIGA

    @property
    def _range(self) -> float:
        return self._bytes(self._default) - self._bytes(self._inputs)

    def _ratio(self, saved: Sequence[int]) -> float:
        return (self._bytes(saved) - self._bytes(self._inputs)) / self._range

    def _chosen(self, budget: float) -> set[int]:
        """Candidates that are computed again."""
        span = self._range
        sizes = [round(self.facts.sizes[i] / GIGA / span * STEPS) for i in self.candidates]
        saved = knapsack(sizes, [runtime(self.facts.nodes[i]) for i in self.candidates], round(budget * STEPS))
        return {i for i, is_saved in zip(self.candidates, saved, strict=True) if not is_saved}


def knapsack(sizes: Sequence[int], values: Sequence[float], limit: int) -> list[bool]:
    """Which items of the greatest value fit, with the ties and the 32-bit sums of `dp_knapsack`."""
    import numpy as np

    best = np.zeros(limit + 1, np.float32)
    taken = np.zeros((len(sizes), limit + 1), np.bool_)
    for i, (size, value) in enumerate(zip(sizes, np.array(values, np.float32), strict=True)):
        before = best
        best = before.copy()
        if size == 0:
            best = before + value
        elif size <= limit:
            best[size:] = np.maximum(before[size:], before[:-size] + value)
        np.not_equal(best, before, out=taken[i])
    result = [False] * len(sizes)
    left = limit
    for i in range(len(sizes) - 1, -1, -1):
        if taken[i, left]:
            result[i] = True
            left -= sizes[i]
    return result


def runtime(node: Node) -> int:
    """What the knapsack takes for the time of a node: its FLOPs, at least 1."""
    return max(flops(node), 1)
