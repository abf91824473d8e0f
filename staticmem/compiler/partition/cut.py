"""The minimum cut nearest the sink: what the forward saves.

PyTorch's own solver (torch/_functorch/_activation_checkpointing/min_cut.py) and networkx take the same one of equal
cuts: on the side of the sink stands what can still reach the sink when the flow is maximal. Parts of the network that
meet in the source and the sink alone are solved one by one, and equal ones, the layers of a model, once.
"""

from __future__ import annotations

from collections import defaultdict, deque

from staticmem.compiler.partition.network import SINK, SOURCE, UNLIMITED, Network

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
