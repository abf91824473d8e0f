"""The flow network of the minimum cut, with vertices merged wherever an edge without a limit decides their side.

`solve_min_cut` of torch/_functorch/partitioners.py has two vertices for each node, `in` and `out`. A node that the
backward computes stands with both on the side of the sink, one that only the forward computes with both on that of the
source. A node that is saved is cut: its `in` stands on the side of the source, its `out` on that of the sink. The edges
from an `out` to the `in` of each reader have no limit: what reads a value on the side of the source stands there too.
"""

from __future__ import annotations

from staticmem.compiler.partition.bans import Bans
from staticmem.compiler.partition.classify import Classified
from staticmem.eager.strides import Form
from staticmem.errors import StaticmemError
from staticmem.ir.record import record

UNLIMITED = -1
FARTHEST = 100  # `get_node_weight`: bytes * 1.1 ** max(min(dist_from_bw, 100), 1)
GROWTH = [1.1**distance for distance in range(FARTHEST + 1)]

SOURCE, SINK = 0, 1  # vertices


@record(frozen=True, slots=True)
class Network:
    """Vertices are numbers; every one can reach the sink.

    Attributes:
        vertex_in, vertex_out: the vertex that stands for each node's `in` and `out`. For one that cannot reach the sink
            the source stands: it is on that side of the cut nearest the sink.
        edges: capacity between two vertices, in weighted bytes, or `UNLIMITED`.
    """

    vertex_in: list[int]
    vertex_out: list[int]
    edges: dict[tuple[int, int], int]


def weights(facts: Classified, bans: Bans) -> list[int]:
    """The cost of saving each node, in weighted bytes; `UNLIMITED` for one that cannot be saved (`get_node_weight`)."""
    static = set(facts.joint.static_primals)
    result = []
    for i, node in enumerate(facts.nodes):
        if not isinstance(node.form, Form):
            weight = UNLIMITED
        elif node in static:
            weight = 0  # treat_parameters_as_free_to_save of torch/_functorch/config.py
        else:
            weight = int(facts.sizes[i] * GROWTH[max(min(facts.distance[i], FARTHEST), 1)])
            if not bans.is_materialized(i):
                weight *= 2
        result.append(weight)
    return result


def build(facts: Classified, bans: Bans) -> Network:
    """The network of a classified graph.

    Raises:
        StaticmemError: a value is needed in the backward that can neither be saved nor computed again.
    """
    weight = weights(facts, bans)
    computed = [after or region > 0 for after, region in zip(facts.after_tangents, facts.must_recompute, strict=True)]
    from_source = _with_source(facts, bans, weight, computed)
    count = len(facts.nodes)
    vertex_in, vertex_out = [SINK] * count, [SINK] * count
    edges: dict[tuple[int, int], int] = {}
    last = SINK
    for i in range(count - 1, -1, -1):
        if computed[i]:
            if from_source[i]:
                raise _no_cut(facts, i)
            continue
        targets = {vertex_in[user]: None for user in facts.users[i]}
        targets.pop(SOURCE, None)
        if facts.gradient[i] or SINK in targets:
            out = SINK
        elif not targets:
            out = SOURCE
        elif len(targets) == 1:  # in the cut nearest the sink both stand on one side
            out = next(iter(targets))
        else:
            last += 1
            out = last
            for target in targets:
                edges[out, target] = UNLIMITED
        vertex_out[i] = out
        if from_source[i] or out == SOURCE or weight[i] == 0:
            vertex_in[i] = SOURCE
            if weight[i] == UNLIMITED and out == SINK:
                raise _no_cut(facts, i)
        elif weight[i] == UNLIMITED:
            vertex_in[i] = out
            continue
        else:
            last += 1
            vertex_in[i] = last
        if weight[i] > 0 and out != SOURCE:
            edge = vertex_in[i], out
            edges[edge] = edges.get(edge, 0) + weight[i]
    return Network(vertex_in, vertex_out, edges)


def _with_source(facts: Classified, bans: Bans, weight: list[int], computed: list[bool]) -> list[bool]:
    """Whose `in` an edge without a limit from the source reaches: banned nodes, and what reads a banned tuple."""
    reached = [i in bans.reasons for i in range(len(facts.nodes))]
    for i, users in enumerate(facts.users):
        if reached[i] and weight[i] == UNLIMITED and not computed[i]:
            for user in users:
                reached[user] = True
    return reached


def _no_cut(facts: Classified, i: int) -> StaticmemError:
    """PyTorch fails there too: "AOT Autograd failed to partition the joint forward-backward graph"."""
    return StaticmemError(
        f"the graph cannot be cut into a forward and a backward at {facts.nodes[i].target}",
        "Its backward needs a value that can neither be saved nor computed again; torch.compile fails there as well.",
        "Analyse the model without compilation.",
    )
