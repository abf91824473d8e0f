"""Forward and backward graphs from the nodes that are saved.

Sources: `_extract_fwd_bwd_modules`, `_extract_graph_with_inputs_outputs` and `reordering_to_mimic_autograd_engine` of
torch/_functorch/partitioners.py, `raise_getitems` of torch/_functorch/compile_utils.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from staticmem.compiler.graphs import JointGraph, NodeGraph, Partition
from staticmem.compiler.partition.cse import ancestors, copied, live_nodes
from staticmem.ir.record import record
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, Node


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
        tuple(_getitems_raised(_in_order_of_engine(joint, backward, placeholders))),
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


def _in_order_of_engine(joint: JointGraph, backward: list[Node], placeholders: set[Node]) -> list[Node]:
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
