"""The minimum cut nearest the sink: what the forward saves.

PyTorch's own solver (torch/_functorch/_activation_checkpointing/min_cut.py) and networkx take the same one of equal
cuts: on the side of the sink stands what can still reach the sink when the flow is maximal. Parts of the network that
meet in the source and the sink alone are solved one by one, and equal ones, the layers of a model, once.

The flow network of the minimum cut, with vertices merged wherever an edge without a limit decides their side.

`solve_min_cut` of torch/_functorch/partitioners.py has two vertices for each node, `in` and `out`. A node that the
backward computes stands with both on the side of the sink, one that only the forward computes with both on that of the
source. A node that is saved is cut: its `in` stands on the side of the source, its `out` on that of the sink. The edges
from an `out` to the `in` of each reader have no limit: what reads a value on the side of the source stands there too.
"""

from __future__ import annotations

from collections import defaultdict, deque

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
    from_source = _mark_side_of_source(facts, bans, weight, computed)
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


def _mark_side_of_source(facts: Classified, bans: Bans, weight: list[int], computed: list[bool]) -> list[bool]:
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


Edge = tuple[int, int, int]  # from, to, capacity

SMALL = 100  # edges; the largest piece of ResNet, MobileNet, Swin, ViT, BERT and GPT-2 has 30


def saved_by_cut(network: Network) -> list[int]:
    """Indices of the nodes that are cut, in order."""
    on_sink_side = sink_side(network.edges)
    return [
        i
        for i, (start, end) in enumerate(zip(network.vertex_in, network.vertex_out, strict=True))
        if start not in on_sink_side and end in on_sink_side
    ]


def sink_side(edges: dict[tuple[int, int], int]) -> set[int]:
    """Vertices on the side of the sink, in the cut nearest to it. Every edge leads to a smaller number or from the
    source."""
    after: dict[int, list[int]] = defaultdict(list)
    for start, end in edges:
        after[start].append(end)
    fed = _fed(after)
    side = {SINK}
    pieces: dict[int, list[Edge]] = defaultdict(list)
    piece_of = _pieces(edges, fed)
    for (start, end), capacity in edges.items():
        if start in fed and (start, end) != (SOURCE, SINK):
            pieces[piece_of[start if start != SOURCE else end]].append((start, end, capacity))
    solved: dict[tuple[Edge, ...], frozenset[int]] = {}
    for piece in pieces.values():
        names = {SOURCE: SOURCE, SINK: SINK}
        renamed = tuple(
            [
                (names.setdefault(start, len(names)), names.setdefault(end, len(names)), capacity)
                for start, end, capacity in piece
            ]
        )
        if renamed not in solved:
            solved[renamed] = solve_small(renamed) if len(renamed) <= SMALL else solve_large(renamed)
        on_sink_side = solved[renamed]
        side.update(vertex for vertex, name in names.items() if name in on_sink_side)
    for vertex in sorted(after.keys() - fed):  # nothing flows on their edges
        if not side.isdisjoint(after[vertex]):
            side.add(vertex)
    return side


def _fed(after: dict[int, list[int]]) -> set[int]:
    """Vertices that the source reaches."""
    fed, stack = {SOURCE, SINK}, [SOURCE]
    while stack:
        for end in after.get(stack.pop(), ()):
            if end not in fed:
                fed.add(end)
                stack.append(end)
    return fed


def _pieces(edges: dict[tuple[int, int], int], fed: set[int]) -> dict[int, int]:
    """A number for each vertex, the same for those that are connected without the source and the sink."""
    parent: dict[int, int] = {vertex: vertex for edge in edges for vertex in edge}

    def root(vertex: int) -> int:
        while parent[vertex] != vertex:
            parent[vertex] = vertex = parent[parent[vertex]]
        return vertex

    for start, end in edges:
        if start > SINK and end > SINK and start in fed:
            parent[root(start)] = root(end)
    return {vertex: root(vertex) for vertex in parent}


def solve_small(edges: tuple[Edge, ...]) -> frozenset[int]:
    """The side of the sink, by shortest augmenting paths (Edmonds and Karp): quick where there are few edges."""
    limit = sum(capacity for _, _, capacity in edges if capacity != UNLIMITED) + 1
    left: dict[int, dict[int, int]] = defaultdict(dict)
    for start, end, capacity in edges:
        left[start][end] = left[start].get(end, 0) + (limit if capacity == UNLIMITED else capacity)
        left[end].setdefault(start, 0)
    while True:
        towards_sink = _towards_sink(left)
        if SOURCE not in towards_sink:
            return frozenset(towards_sink)
        path, vertex = [], SOURCE
        while vertex != SINK:
            path.append((vertex, towards_sink[vertex]))
            vertex = towards_sink[vertex]
        amount = min([left[start][end] for start, end in path])
        for start, end in path:
            left[start][end] -= amount
            left[end][start] += amount


def _towards_sink(left: dict[int, dict[int, int]]) -> dict[int, int]:
    """The vertices that can reach the sink where capacity is left, each with the next one on a shortest way."""
    following = {SINK: SINK}
    queue = deque([SINK])
    while queue:
        end = queue.popleft()
        for start in left[end]:
            if start not in following and left[start][end] > 0:
                following[start] = end
                queue.append(start)
    return following


def solve_large(edges: tuple[Edge, ...]) -> frozenset[int]:
    """The same by networkx, which takes longer to import than the small pieces of a model take together."""
    from networkx import DiGraph, minimum_cut
    from networkx.algorithms.flow import boykov_kolmogorov  # the fastest one on large pieces: 5 against 12 and 23 s

    graph = DiGraph()
    for start, end, capacity in edges:
        if capacity == UNLIMITED:
            graph.add_edge(start, end)
        else:
            graph.add_edge(start, end, capacity=capacity)
    _, (_, on_sink_side) = minimum_cut(graph, SOURCE, SINK, flow_func=boykov_kolmogorov)
    return frozenset(on_sink_side)
