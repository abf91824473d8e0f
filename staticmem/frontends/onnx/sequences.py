"""Sequences of tensors out of the way of inference, which keeps no sizes for their elements."""

from __future__ import annotations

from typing import Any

from staticmem.recover.nodes import Node


def slice_splits(graph: Any, nodes: tuple[Node, ...], contents: dict[str, Any]) -> None:
    """Turns `SequenceAt(SplitToSequence(x, sizes), i)` of a GraphProto into the Slice that it is.

    `nodes` are the nodes of the graph in the same order; `contents` are known small tensors.
    """
    import onnx

    splits = {n.outputs[0]: n for n in nodes if n.op == "SplitToSequence"}
    if not splits:
        return
    known = dict(contents)
    for node in nodes:
        if node.op == "Constant" and "value" in node.attrs:
            known[node.outputs[0]] = node.attrs["value"]
        elif node.op == "Constant":
            known[node.outputs[0]] = next(iter(node.attrs.values()), None)
    for node, proto in zip(nodes, graph.node, strict=True):
        if node.op != "SequenceAt" or node.inputs[0] not in splits:
            continue
        split = splits[node.inputs[0]]
        given = len(split.inputs) > 1 and bool(split.inputs[1])
        sizes = _ints(known.get(split.inputs[1])) if given else (1,)
        index = _ints(known.get(node.inputs[1]))
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
