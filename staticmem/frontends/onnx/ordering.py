"""Nodes of an ONNX file in an order in which each reads what earlier ones have made.

ONNX asks for that order (onnx/docs/IR.md, "Graphs"), and `onnx.checker` refuses others. The ONNX Runtime sorts them
itself (`Graph::Resolve`), and some tools rely on it: `onnxruntime.transformers.float16` appends its casts to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from staticmem.ir.graph import Note

NOTE = Note(
    "warning",
    "SM274",
    "the nodes of the file are not in the order that ONNX asks for: they were sorted, as the ONNX Runtime does",
)


def put_in_order(graph: Any) -> bool:
    """Sorts the nodes of a GraphProto and of the graphs within; whether anything was out of place. Nodes that read each
    other stay where they are."""
    changed = False
    for node in graph.node:
        for body in _bodies(node):
            changed = put_in_order(body) or changed
    order = _order([names_read(node) for node in graph.node], [list(node.output) for node in graph.node])
    if order is None:
        return changed
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([nodes[index] for index in order])
    return True


def _bodies(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.type == 5:
            yield attribute.g
        elif attribute.type == 10:
            yield from attribute.graphs


def names_read(node: Any) -> list[str]:
    """Names that a node needs, those that its bodies take from outside among them. Names that a body makes itself may
    be in it: a graph has no name twice."""
    names, todo = list(node.input), list(_bodies(node))
    while todo:
        graph = todo.pop()
        for inner in graph.node:
            names.extend(inner.input)
            todo.extend(_bodies(inner))
        names.extend(out.name for out in graph.output)
    return names


def _order(reads: Sequence[Sequence[str]], makes: Sequence[Sequence[str]]) -> list[int] | None:
    """Positions of nodes such that makers come before readers and all else stays; None where that is so already."""
    makers: dict[str, int] = {}
    for index, names in enumerate(makes):
        for name in names:
            if name:
                makers.setdefault(name, index)
    needs = [
        [makers[name] for name in dict.fromkeys(names) if makers.get(name, index) != index]
        for index, names in enumerate(reads)
    ]
    if all(maker < index for index, needed in enumerate(needs) for maker in needed):
        return None
    order: list[int] = []
    state = [0] * len(needs)  # 1: its makers are being placed, 2: placed
    for first in range(len(needs)):
        todo = [first]
        while todo:
            index = todo[-1]
            if state[index] == 0:
                state[index] = 1
                waiting = [maker for maker in needs[index] if state[maker] == 0]
                if any(state[maker] == 1 for maker in needs[index]):
                    return None  # they read each other
                todo.extend(reversed(waiting))
                continue
            todo.pop()
            if state[index] == 1:
                state[index] = 2
                order.append(index)
    return order
