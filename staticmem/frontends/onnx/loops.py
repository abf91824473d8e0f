"""Loop and Scan out of the way: their bodies stand in the graph as often as they run.

PyTorch has no loop in a graph either: what exporters write as one was a Python loop, each turn of which made its own
tensors. The number of turns is Loop's trip count or the scanned dimension. Where only the data tells it, one turn is
taken, and the report warns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from staticmem.frontends.onnx.metadata import inherit
from staticmem.frontends.onnx.ordering import names_read
from staticmem.ir.graph import Value

MAX_NODES = 200_000  # nodes that unrolling may make of a graph: a file of a few bytes can ask for any number


@dataclass
class Unrolled:
    """How many loops were unrolled, how many had one turn for want of a count or because there would be too many
    nodes, and how many nodes that made."""

    counted: int = 0
    guessed: int = 0
    long: int = 0
    added: int = 0


def unroll(
    graph: Any, contents: Mapping[str, Any], values: Mapping[str, Value], opset: int, added_before: int = 0
) -> Unrolled:
    """Replaces the Loop and Scan nodes of a GraphProto by their turns. `contents` are known small tensors.

    `made`: nodes that this has made of the graph before, where loops were in loops. Beyond `MAX_NODES` a loop has one
    turn. Scan before opset 9 has a batch dimension of its own: it stays as it is. Loops that lead to no output of the
    graph go: nothing reads what their turns make.
    """
    done = Unrolled()
    nodes = list(graph.node)
    needed = _needed(graph)
    del graph.node[:]
    for node in nodes:
        body = next((a.g for a in node.attribute if a.name == "body" and a.type == 5), None)
        names = ("Loop", "Scan") if opset >= 9 else ("Loop",)
        if node.domain not in ("", "ai.onnx") or node.op_type not in names or body is None:
            graph.node.append(node)
            continue
        if needed.isdisjoint(node.output):
            continue
        turns = _trips(node, contents) if node.op_type == "Loop" else _scanned(node, body, values)
        size = _nodes(body)
        if turns is None:
            turns, done.guessed = 1, done.guessed + 1
        elif turns * size > MAX_NODES - added_before - done.added:
            turns, done.long = 1, done.long + 1
        else:
            done.counted += 1
            done.added += turns * size
        if turns < 1:
            graph.node.append(node)
            continue
        start = len(graph.node)
        (_loop if node.op_type == "Loop" else _scan)(graph, node, body, turns)
        inherit(graph, start, node)
    return done


def _needed(graph: Any) -> set[str]:
    """The names that the outputs of a GraphProto depend on. Its nodes are in order."""
    needed = {output.name for output in graph.output}
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(names_read(node))
    return needed


def _nodes(body: Any) -> int:
    """Nodes of a body and of those in it, which every turn repeats; at least one."""
    total, todo = 0, [body]
    while todo:
        graph = todo.pop()
        total += len(graph.node)
        todo.extend(a.g for node in graph.node for a in node.attribute if a.type == 5)
    return max(total, 1)


def _trips(node: Any, contents: Mapping[str, Any]) -> int | None:
    count = contents.get(node.input[0]) if node.input and node.input[0] else None
    return int(count.reshape(-1)[0]) if count is not None and count.size == 1 else None


def _attribute(node: Any, name: str, default: int = 0) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _listed(node: Any, name: str) -> list[int]:
    return next((list(a.ints) for a in node.attribute if a.name == name), [])


def _scanned(node: Any, body: Any, values: Mapping[str, Value]) -> int | None:
    count = _attribute(node, "num_scan_inputs")
    axes = _listed(node, "scan_input_axes") or [0] * count
    for name, axis in zip(node.input[len(node.input) - count :], axes, strict=False):
        value = values.get(name)
        if value is not None and value.shape:
            return value.shape[axis]
    return None


def _add(graph: Any, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
    import onnx

    graph.node.append(onnx.helper.make_node(op, inputs, [output], name=output, **attributes))
    return output


def _constant(graph: Any, name: str, numbers: list[int] | int) -> str:
    import onnx

    listed = numbers if isinstance(numbers, list) else [numbers]
    dims = [len(listed)] if isinstance(numbers, list) else []
    graph.initializer.append(onnx.helper.make_tensor(name, 7, dims, listed))
    return name


def _turn(graph: Any, body: Any, prefix: str, given: Mapping[str, str]) -> dict[str, str]:
    """One copy of the body. `given` has what its inputs are; the result has what its outputs are."""
    renamed = dict(given)
    for tensor in body.initializer:
        copy = graph.initializer.add()
        copy.CopyFrom(tensor)
        copy.name = renamed[tensor.name] = prefix + tensor.name
    for inner in body.node:
        copy = graph.node.add()
        copy.CopyFrom(inner)
        copy.name = prefix + inner.name
        for index, name in enumerate(copy.input):
            copy.input[index] = renamed.get(name, name)
        for index, name in enumerate(copy.output):
            if name:
                copy.output[index] = renamed[name] = prefix + name
        for attribute in copy.attribute:  # what a nested body reads of this one
            if attribute.type == 5:
                _rename_outer(attribute.g, renamed)
    return {out.name: renamed.get(out.name, out.name) for out in body.output}


def _rename_outer(graph: Any, renamed: Mapping[str, str]) -> None:
    own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    own |= {name for node in graph.node for name in node.output}
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name not in own:
                node.input[index] = renamed.get(name, name)
        for attribute in node.attribute:
            if attribute.type == 5:
                _rename_outer(attribute.g, {k: v for k, v in renamed.items() if k not in own})
    for out in graph.output:
        if out.name not in own and out.name in renamed:
            inner = graph.node.add()
            inner.op_type = "Identity"
            inner.input.append(renamed[out.name])
            inner.output.append(out.name)


def _finish(graph: Any, prefix: str, name: str, parts: list[str], axis: int) -> None:
    """A scan output: its turns, each with a new dimension, joined."""
    if not name:
        return
    where = _constant(graph, f"{prefix}{name}::axis", [axis])
    lifted = [_add(graph, "Unsqueeze", [part, where], f"{prefix}{name}::{i}") for i, part in enumerate(parts)]
    _add(graph, "Concat", lifted, name, axis=axis)


def _loop(graph: Any, node: Any, body: Any, turns: int) -> None:
    prefix = f"{node.name or node.output[0]}::"
    carried = list(node.input[2:])
    scans: list[list[str]] = [[] for _ in body.output[1 + len(carried) :]]
    for turn in range(turns):
        count = _constant(graph, f"{prefix}{turn}::turn", turn)
        inputs = [i.name for i in body.input]
        given = dict(zip(inputs[2:], carried, strict=False))
        if inputs:
            given[inputs[0]] = count
        if len(inputs) > 1:
            given[inputs[1]] = node.input[1] or count
        results = _turn(graph, body, f"{prefix}{turn}::", given)
        ordered = [results[out.name] for out in body.output][1:]
        for scan, name in zip(scans, ordered[len(carried) :], strict=True):
            scan.append(name)
        carried = ordered[: len(carried)]
    for name, last in zip(node.output, carried, strict=False):
        if name:
            _add(graph, "Identity", [last], name)
    for name, parts in zip(node.output[len(carried) :], scans, strict=False):
        _finish(graph, prefix, name, parts, 0)


def _scan(graph: Any, node: Any, body: Any, turns: int) -> None:
    prefix = f"{node.name or node.output[0]}::"
    count = _attribute(node, "num_scan_inputs")
    states = list(node.input[: len(node.input) - count])
    sources = list(node.input[len(node.input) - count :])
    axes = _listed(node, "scan_input_axes") or [0] * count
    directions = _listed(node, "scan_input_directions") or [0] * count
    scans: list[list[str]] = [[] for _ in body.output[len(states) :]]
    for turn in range(turns):
        inputs = [i.name for i in body.input]
        given = dict(zip(inputs, states, strict=False))
        for name, source, axis, back in zip(inputs[len(states) :], sources, axes, directions, strict=False):
            index = _constant(graph, f"{prefix}{turn}::{source}::index", turns - 1 - turn if back else turn)
            given[name] = _add(graph, "Gather", [source, index], f"{prefix}{turn}::{source}", axis=axis)
        results = _turn(graph, body, f"{prefix}{turn}::", given)
        ordered = [results[out.name] for out in body.output]
        for scan, name in zip(scans, ordered[len(states) :], strict=True):
            scan.append(name)
        states = ordered[: len(states)]
    for name, last in zip(node.output, states, strict=False):
        if name:
            _add(graph, "Identity", [last], name)
    out_axes = _listed(node, "scan_output_axes") or [0] * len(scans)
    for name, parts, axis in zip(node.output[len(states) :], scans, out_axes, strict=False):
        _finish(graph, prefix, name, parts, axis)
