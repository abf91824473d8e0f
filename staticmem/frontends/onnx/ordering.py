"""Nodes of an ONNX file in an order in which each reads what earlier ones have made, and in that of the code.

ONNX asks for that order (onnx/docs/IR.md, "Graphs"), and `onnx.checker` refuses others. The ONNX Runtime sorts them
itself (`Graph::Resolve`), and some tools rely on it: `onnxruntime.transformers.float16` appends its casts to the end.

Between branches ONNX leaves the order open, and a peak depends on it. PyTorch's exporters write nodes as the code ran
and number them on the way, so their names still tell the code's order where a tool has written another one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from staticmem.ir.graph import Note
from staticmem.ir.onnx_graph import Node

NOTE = Note(
    "warning",
    "SM274",
    "the nodes of the file are not in the order that ONNX asks for: they were sorted, as the ONNX Runtime does",
)


NUMBERED = Note(
    "warning",
    "SM274",
    "the nodes of the file are not in the order in which PyTorch's exporter numbered them: they were put back into it",
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


def in_order_of_code(nodes: Sequence[Node]) -> list[Node] | None:
    """Nodes of PyTorch's exporters as their names number them; None where they stand so already."""
    numbered = list(_numbered(nodes).values())
    if not any(_falls(numbers) for numbers in numbered) and not _has_torn_call(nodes):
        return None
    order = _order_by_numbers(nodes, [*numbered, *_order_by_constants(nodes)]) or _order_by_numbers(nodes, numbered)
    if order is None or order == list(range(len(nodes))):
        return None
    return [nodes[index] for index in order]


def _numbered(nodes: Sequence[Node]) -> Mapping[str, list[tuple[int, int]]]:
    """Nodes that an exporter counted together, in the order of the file: (number, position).

    The TorchScript exporter counts `/path/Relu`, `/path/Relu_1`: for each path and op; `torch.export` counts its calls
    (`node_relu`, `node_relu_1`). Nodes that a call was decomposed to (`node_Reshape_12`) are not among them, nor those
    of PyTorch before 1.13 (`Reshape_12`): the exporters themselves move them.
    """
    groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, node in enumerate(nodes):
        stem, _, digits = node.name.rpartition("_")
        if not digits.isdecimal():
            stem, digits = node.name, "0"
        if node.op == "Constant" or stem in ("", node.op, f"node_{node.op}"):
            continue
        groups[stem].append((int(digits), index))
    return groups


def _order_by_constants(nodes: Sequence[Node]) -> list[list[tuple[int, int]]]:
    """Nodes in the order of the constants that they alone read: exporters write a constant where its reader's turn is.
    Optimisers share constants and move them, so that this is asked of files alone that are put back anyway."""
    made_at = {node.outputs[0]: node for node in nodes if node.op == "Constant" and node.outputs}
    readers: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        for name in node.inputs:
            if name in made_at:
                readers[name].append(index)
    groups: dict[str, dict[int, int]] = defaultdict(dict)  # by the name without its number: reader -> number
    for name, indices in readers.items():
        stem, _, digits = made_at[name].name.rpartition("_")
        if len(indices) == 1 and digits.isdecimal():
            numbers = groups[stem]
            numbers[indices[0]] = max(int(digits), numbers.get(indices[0], 0))
    return [[(number, index) for index, number in numbers.items()] for numbers in groups.values()]


def _falls(numbers: Sequence[tuple[int, int]]) -> bool:
    return any(later[0] < earlier[0] for earlier, later in itertools.pairwise(numbers))


def _has_torn_call(nodes: Sequence[Node]) -> bool:
    """Whether nodes of another module stand within a call of a module without children, by the paths in names of the
    TorchScript exporter. A module whose nodes are numbered may be called twice, and tells nothing."""
    last: dict[str, int] = {}
    torn: set[str] = set()
    several: set[str] = set()
    place = -1
    for node in nodes:
        path, slash, name = node.name.rpartition("/")
        if not slash or node.op == "Constant":
            continue
        place += 1
        if name.rpartition("_")[2].isdecimal():
            several.add(path)
        if last.setdefault(path, place) < place - 1:
            torn.add(path)
        last[path] = place
    parents = {path.rpartition("/")[0] for path in last}
    return bool(torn - several - parents - {""})


def _order_by_numbers(nodes: Sequence[Node], numbered: Sequence[Sequence[tuple[int, int]]]) -> list[int] | None:
    """Positions of nodes such that numbers rise and makers come before readers; what both leave open is as Python
    evaluates an expression, operand after operand. None where there is no such order."""
    makers = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    before: list[list[int]] = []
    for index, node in enumerate(nodes):
        needed = dict.fromkeys(makers[name] for name in node.inputs if makers.get(name, index) != index)
        before.append(list(needed))
    for group in numbered:
        positions = [index for _, index in sorted(group)]
        for earlier, later in itertools.pairwise(positions):
            before[later].insert(0, earlier)
    readers = [0] * len(nodes)
    for needed_ones in before:
        for index in needed_ones:
            readers[index] += 1
    # from the last node to the first: what the last placed one reads last stands right before it, constants first
    free = sorted((i for i, count in enumerate(readers) if not count), key=lambda i: nodes[i].name)
    order: list[int] = []
    while free:
        index = free.pop()
        order.append(index)
        freed: list[int] = []
        for maker in before[index]:
            readers[maker] -= 1
            if not readers[maker]:
                freed.append(maker)
        free.extend(sorted(freed, key=lambda i: nodes[i].op == "Constant"))
    return order[::-1] if len(order) == len(nodes) else None
