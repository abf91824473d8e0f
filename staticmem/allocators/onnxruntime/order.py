"""The order in which the runtime executes nodes.

Source: onnxruntime/core/graph/graph_viewer.cc (default order) and graph.cc, Graph::ReverseDFSFrom: a depth-first walk
from the last nodes to the first ones that lists a node when all it depends on is listed.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.allocators.onnxruntime.graph import ExecNode


def execution_order(nodes: Sequence[ExecNode]) -> list[int]:
    """Positions in `nodes` in the order of execution, for a graph that no optimizer touched.

    A graph that the runtime saved after optimizing it (`optimized_model_filepath`) is in that order already.
    """
    made = {name: position for position, node in enumerate(nodes) for name in node.outputs if name}
    sources: list[list[int]] = []
    read: set[int] = set()
    for node in nodes:
        found = sorted({made[n] for n in (*node.inputs, *node.implicit) if n in made}, key=lambda p: nodes[p].index)
        sources.append(found)
        read.update(found)
    stack = [(position, False) for position in range(len(nodes)) if position not in read]
    visited: set[int] = set()
    order: list[int] = []
    while stack:
        position, leaving = stack.pop()
        if leaving:
            order.append(position)
            continue
        if position in visited:
            continue
        visited.add(position)
        stack.append((position, True))
        stack.extend((source, False) for source in sources[position] if source not in visited)
    return order
