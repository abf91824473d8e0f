"""Sequences of tensors out of the way of inference, which keeps no sizes for their elements.

`slice_splits` has the common pair of a split and its elements; `flatten` follows every list through the graph: Python's
lists are no ops in PyTorch either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticmem.ir.graph import Value
from staticmem.ir.onnx_graph import Node

MAX_ITEMS = 10_000  # of a split: its number is the file's


def slice_splits(graph: Any, nodes: tuple[Node, ...], contents: dict[str, Any]) -> None:
    """Turns `SequenceAt(SplitToSequence(x, sizes), i)` of a GraphProto into the Slice that it is.

    `nodes` are the nodes of the graph in the same order; `contents` are known small tensors.
    """
    import onnx

    splits = {n.outputs[0]: n for n in nodes if n.op == "SplitToSequence"}
    if not splits:
        return
    constants = dict(contents)
    for node in nodes:
        if node.op == "Constant" and "value" in node.attrs:
            constants[node.outputs[0]] = node.attrs["value"]
        elif node.op == "Constant":
            constants[node.outputs[0]] = next(iter(node.attrs.values()), None)
    for node, proto in zip(nodes, graph.node, strict=True):
        if node.op != "SequenceAt" or node.inputs[0] not in splits:
            continue
        split = splits[node.inputs[0]]
        given = len(split.inputs) > 1 and bool(split.inputs[1])
        sizes = _ints(constants.get(split.inputs[1])) if given else (1,)
        index = _ints(constants.get(node.inputs[1]))
        if sizes is None or index is None or len(index) != 1 or index[0] < 0:
            continue
        if not given and not split.attrs.get("keepdims", 1):
            _select(graph, proto, split, index[0])
            continue
        scalar = len(sizes) == 1
        position = index[0]
        if not scalar and position >= len(sizes):
            continue
        start = position * sizes[0] if scalar else sum(sizes[:position])
        end = start + (sizes[0] if scalar else sizes[position])
        axis = split.attrs.get("axis", 0)
        names = []
        for part, value in (("start", start), ("end", end), ("axis", axis)):
            names.append(f"{node.outputs[0]}::{part}")
            graph.initializer.append(onnx.helper.make_tensor(names[-1], 7, [1], [value]))
        proto.op_type = "Slice"
        del proto.input[:]
        proto.input.extend([split.inputs[0], *names])
        del proto.attribute[:]


def _select(graph: Any, proto: Any, split: Node, index: int) -> None:
    """An element of a split into single entries without their axis: `unbind`."""
    import onnx

    name = f"{proto.output[0]}::index"
    graph.initializer.append(onnx.helper.make_tensor(name, 7, [], [index]))
    proto.op_type = "Gather"
    del proto.input[:]
    proto.input.extend([split.inputs[0], name])
    del proto.attribute[:]
    axis = split.attrs.get("axis", 0)
    proto.attribute.append(onnx.helper.make_attribute("axis", axis if isinstance(axis, int) else 0))


def _ints(value: Any) -> tuple[int, ...] | None:
    if value is None or isinstance(value, (str, float)):
        return None
    if isinstance(value, int):
        return (value,)
    if isinstance(value, tuple):
        return tuple(v for v in value if isinstance(v, int))
    return tuple(int(v) for v in value.reshape(-1)) if value.dtype.kind in "iu" else None


OPERATORS = (
    "SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceAt", "SequenceLength",
    "ConcatFromSequence", "SplitToSequence",
)  # fmt: skip


def has_sequences(graph: Any) -> bool:
    """Whether lists are more than splits whose elements are taken (which patterns know) at a GraphProto's top level."""
    simple = ("SplitToSequence", "SequenceAt")
    return any(
        node.op_type in OPERATORS and node.op_type not in simple and node.domain in ("", "ai.onnx")
        for node in graph.node
    )


def flatten(graph: Any, contents: Mapping[str, Any], values: Mapping[str, Value]) -> int:
    """Replaces operators on sequences whose elements are known by what they do to tensors; gives how many."""
    lists: dict[str, list[str]] = {}
    nodes = list(graph.node)
    del graph.node[:]
    replaced = 0
    for node in nodes:
        if node.domain in ("", "ai.onnx") and _list_op(graph, node, lists, contents, values):
            replaced += 1
        else:
            graph.node.append(node)
    read = {name for node in graph.node for name in node.input} | {out.name for out in graph.output}
    if read & lists.keys():  # something takes a whole list that was not followed: leave all as it was
        del graph.node[:]
        graph.node.extend(nodes)
        return 0
    return replaced


def _position(node: Any, at: int, contents: Mapping[str, Any], length: int) -> int | None:
    """A position among the inputs; the end where it is absent, None where it is unknown."""
    if at >= len(node.input) or not node.input[at]:
        return length
    position = _ints(contents.get(node.input[at]))
    if position is None or len(position) != 1:
        return None
    return position[0] + length if position[0] < 0 else position[0]


def _list_op(
    graph: Any, node: Any, lists: dict[str, list[str]], contents: Mapping[str, Any], values: Mapping[str, Value]
) -> bool:
    op = node.op_type
    if op == "Identity" and node.input[0] in lists:
        lists[node.output[0]] = lists[node.input[0]]
        return True
    if op in ("SequenceConstruct", "SequenceEmpty"):
        lists[node.output[0]] = list(node.input)
        return True
    if op == "SplitToSequence":
        return _split(graph, node, lists, contents, values)
    items = lists.get(node.input[0]) if op in OPERATORS and node.input else None
    if items is None:
        return False
    if op in ("SequenceInsert", "SequenceErase"):
        position = _position(node, 2 if op == "SequenceInsert" else 1, contents, len(items))
        if position is None:
            return False
        if op == "SequenceErase":
            position = min(position, len(items) - 1)
            lists[node.output[0]] = [*items[:position], *items[position + 1 :]]
        else:
            lists[node.output[0]] = [*items[:position], node.input[1], *items[position:]]
        return True
    if op == "SequenceAt":
        position = _position(node, 1, contents, len(items))
        if position is None or not 0 <= position < len(items):
            return False
        _emit(graph, "Identity", [items[position]], [node.output[0]])
        return True
    if op == "SequenceLength":
        import onnx

        graph.initializer.append(onnx.helper.make_tensor(node.output[0], 7, [], [len(items)]))
        return True
    return op == "ConcatFromSequence" and _concat(graph, node, items)


def _emit(graph: Any, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
    import onnx

    graph.node.append(onnx.helper.make_node(op, inputs, outputs, name=outputs[0], **attributes))


def _concat(graph: Any, node: Any, items: list[str]) -> bool:
    import onnx

    if not items:
        return False
    numbers = {a.name: int(a.i) for a in node.attribute}
    axis = numbers.get("axis", 0)
    if numbers.get("new_axis", 0):
        where = f"{node.output[0]}::axis"
        graph.initializer.append(onnx.helper.make_tensor(where, 7, [1], [axis]))
        lifted = [f"{node.output[0]}::{i}" for i in range(len(items))]
        for item, name in zip(items, lifted, strict=True):
            _emit(graph, "Unsqueeze", [item, where], [name])
        items = lifted
    _emit(graph, "Concat", items, [node.output[0]], axis=axis)
    return True


def _split(
    graph: Any, node: Any, lists: dict[str, list[str]], contents: Mapping[str, Any], values: Mapping[str, Value]
) -> bool:
    import onnx

    numbers = {a.name: int(a.i) for a in node.attribute}
    axis, given = numbers.get("axis", 0), len(node.input) > 1 and bool(node.input[1])
    value = values.get(node.input[0])
    sizes = _ints(contents.get(node.input[1])) if given else (1,)
    if value is None or not value.shape or sizes is None or not sizes or min(sizes) < 1:
        return False
    length = value.shape[axis]
    if len(sizes) == 1 and length // sizes[0] > MAX_ITEMS:
        return False
    if len(sizes) == 1 and (not given or sizes[0] < length):
        sizes = (*(sizes[0],) * (length // sizes[0]), *((length % sizes[0],) if length % sizes[0] else ()))
    if len(sizes) > MAX_ITEMS:
        return False
    names = [f"{node.output[0]}::{i}" for i in range(len(sizes))]
    lengths = f"{node.output[0]}::sizes"
    graph.initializer.append(onnx.helper.make_tensor(lengths, 7, [len(sizes)], list(sizes)))
    drops = not given and not numbers.get("keepdims", 1)
    parts = [f"{name}::kept" for name in names] if drops else names
    _emit(graph, "Split", [node.input[0], lengths], parts, axis=axis)
    if drops:
        where = f"{node.output[0]}::axis"
        graph.initializer.append(onnx.helper.make_tensor(where, 7, [1], [axis]))
        for part, name in zip(parts, names, strict=True):
            _emit(graph, "Squeeze", [part, where], [name])
    lists[node.output[0]] = names
    return True
