"""Which nodes of a joint graph are of the forward, which of the backward, and how far each is from it.

Sources: `classify_nodes`, `_size_of`, `cleanup_recompute_tags` and the loop for `dist_from_bw` in
`min_cut_rematerialization_partition` of torch/_functorch/partitioners.py.
"""

from __future__ import annotations

from staticmem.compiler.graphs import JointGraph
from staticmem.compiler.partition.cse import OpTypes, live_nodes, types_of
from staticmem.eager.strides import Form, numel
from staticmem.ir.record import record
from staticmem.tracing.nodes import SAVED, Node, Result

FAR = 10**9  # the distance of what no node of the backward reads


def bytes_of(form: Result) -> int:
    """Bytes of a value by its elements, as `_size_of` counts: an expanded view weighs as much as its copy would."""
    if isinstance(form, Form):
        return numel(form.shape) * form.dtype.itemsize
    return sum(bytes_of(item) for item in form) if isinstance(form, tuple) else 0


@record(frozen=True, slots=True)
class Classified:
    """Facts of each node, by its index in `nodes`.

    Attributes:
        joint: without dead code, merged.
        nodes: of `joint`, in order.
        users: indices of the nodes that read it, in order.
        inputs: indices of the nodes that it reads, each once.
        returned: an output of the graph is this node.
        types: of its target.
        sizes: bytes.
        forward: an output of the forward, or a write of it, depends on it (`required_fw_nodes`); inputs always.
        order: its place among those of the forward, else -1 (`fw_order`).
        after_tangents: it depends on a tangent (`tangents_closure`).
        gradient: it is an output of the backward.
        distance: edges to the nearest node that is not of the forward (`dist_from_bw`).
        must_recompute: region of `torch.utils.checkpoint` that computes it again; 0: none; `SAVED`: it is saved, by a
            selective one or between two regions.
    """

    joint: JointGraph
    nodes: tuple[Node, ...]
    users: list[list[int]]
    inputs: list[list[int]]
    returned: list[bool]
    types: list[OpTypes]
    sizes: list[int]
    forward: list[bool]
    order: list[int]
    after_tangents: list[bool]
    gradient: list[bool]
    distance: list[int]
    must_recompute: list[int]

    @property
    def has_backward(self) -> bool:
        return any(self.after_tangents) or any(self.gradient)


def classify(joint: JointGraph) -> Classified:
    """Facts of the nodes of a joint graph that `cse.merged` gave."""
    nodes = joint.nodes
    count = len(nodes)
    index = {node: i for i, node in enumerate(nodes)}
    users: list[list[int]] = [[] for _ in nodes]
    inputs = [[index[read] for read in node.inputs] for node in nodes]
    for i, reads in enumerate(inputs):
        for read in reads:
            users[read].append(i)
    returned = [False] * count
    gradient = [False] * count
    for place, output in enumerate(joint.outputs):
        if output is not None:
            returned[index[output]] = True
            gradient[index[output]] |= place >= joint.forward_outputs
    after_tangents = [False] * count
    for node in joint.tangents:
        after_tangents[index[node]] = True
    for i in range(count):
        if after_tangents[i]:
            for user in users[i]:
                after_tangents[user] = True
    forward = [False] * count
    for node in (
        *joint.primals,
        *live_nodes(
            [node for node in nodes if not after_tangents[index[node]]], joint.outputs[: joint.forward_outputs]
        ),
    ):
        forward[index[node]] = True
    order, position = [-1] * count, 0
    for i in range(count):
        if forward[i]:
            order[i] = position
            position += 1
    return Classified(
        joint,
        nodes,
        users,
        inputs,
        returned,
        [types_of(node.target) for node in nodes],
        [bytes_of(node.form) for node in nodes],
        forward,
        order,
        after_tangents,
        gradient,
        _distances(forward, users),
        _recomputed(nodes, users),
    )


def _distances(forward: list[bool], users: list[list[int]]) -> list[int]:
    distance = [0] * len(forward)
    for i in range(len(forward) - 1, -1, -1):
        if forward[i]:
            distance[i] = min([FAR, *(distance[user] + 1 for user in users[i])])
    return distance


def _recomputed(nodes: tuple[Node, ...], users: list[list[int]]) -> list[int]:
    """`cleanup_recompute_tags`: where one region reads another's node directly, that node is saved, so that two
    checkpointed blocks in a row keep what stands between them."""
    regions = [node.must_recompute for node in nodes]
    if any(regions):
        for i, region in enumerate(regions):
            if region > 0 and any(regions[user] > region for user in users[i]):
                regions[i] = SAVED
    return regions
