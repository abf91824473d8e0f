"""The step as a NetworkX graph: which kernel made a buffer, and which owners held it over which ticks.

Nodes are `("kernel", i)`, `("buffer", i)` (indices of the trace) and `("owner", kind, who, op)`. Edges are
kernel -> buffer (`born`) and buffer -> owner (`start`, `end`; two holds of one owner are one edge over both). A buffer
that no owner took has an edge to the scope of its kernel, `("owner", "scope", kernel name, op)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from staticmem.eager.trace import Trace

if TYPE_CHECKING:
    import networkx as nx


def step_graph(trace: Trace) -> nx.DiGraph:
    """The graph of a step. `end` is in ticks; `trace.ticks` where an owner never lets go."""
    import networkx as nx

    graph = nx.DiGraph(ticks=trace.ticks)
    for index, kernel in enumerate(trace.kernels):
        graph.add_node(("kernel", index), name=kernel.name, phase=kernel.phase, op=kernel.op)
    for buffer in trace.buffers:
        graph.add_node(("buffer", buffer.id), nbytes=buffer.size, category=buffer.category, name=buffer.name)
        graph.add_edge(("kernel", buffer.kernel), ("buffer", buffer.id), born=buffer.born)
    held = set()
    for hold in trace.holds:
        held.add(hold.buffer)
        end = trace.ticks if hold.end is None else hold.end
        source, target = ("buffer", hold.buffer), ("owner", hold.kind, hold.who, hold.op)
        known = graph.get_edge_data(source, target)
        start = hold.start
        if known is not None:
            start, end = min(start, known["start"]), max(end, known["end"])
        graph.add_edge(source, target, start=start, end=end)
    for buffer in trace.buffers:
        if buffer.id not in held:
            kernel = trace.kernels[buffer.kernel]
            end = trace.ticks if buffer.died is None else buffer.died
            scope = ("owner", "scope", kernel.name, kernel.op)
            graph.add_edge(("buffer", buffer.id), scope, start=buffer.born, end=end)
    return graph


def intervals(graph: nx.DiGraph) -> dict[int, tuple[int, int]]:
    """[born, died) of every buffer, read off the graph: born at the kernel's edge, died at the last owner's."""
    found: dict[int, tuple[int, int]] = {}
    for node in graph.nodes:
        if node[0] == "buffer":
            born = min(edge["born"] for *_, edge in graph.in_edges(node, data=True))
            found[node[1]] = (born, max(edge["end"] for *_, edge in graph.out_edges(node, data=True)))
    return found
