"""If nodes out of the way: a branch takes the place of its node before sizes are inferred again.

A condition that is known at the bound sizes decides. Otherwise the branch with more nodes does: memory is then that of
the more expensive one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_ROUNDS = 8
MAX_NODES = 1_000_000


def has_branches(graph: Any) -> bool:
    """Whether a GraphProto has If nodes at its top level."""
    return any(node.op_type == "If" and node.domain in ("", "ai.onnx") for node in graph.node)


def inline(graph: Any, contents: Mapping[str, Any]) -> tuple[int, int]:
    """Replaces the If nodes of a GraphProto by a branch; gives how many were decided and how many were guessed."""
    nodes = list(graph.node)
    del graph.node[:]
    decided = guessed = 0
    for node in nodes:
        branch = None
        if node.op_type == "If" and node.domain in ("", "ai.onnx"):
            condition = contents.get(node.input[0])
            branch, known = _choose(node, condition)
            decided += branch is not None and known
            guessed += branch is not None and not known
        if branch is None:
            graph.node.append(node)
            continue
        _insert(graph, node, branch)
    return decided, guessed


def _choose(node: Any, condition: Any) -> tuple[Any, bool]:
    branches = {a.name: a.g for a in node.attribute if a.type == 5}
    yes, no = branches.get("then_branch"), branches.get("else_branch")
    if yes is None or no is None:
        return None, False
    if condition is not None and condition.size == 1:
        return (yes if bool(condition.reshape(-1)[0]) else no), True
    return (yes if len(yes.node) >= len(no.node) else no), False


def _insert(graph: Any, node: Any, branch: Any) -> None:
    """The branch's nodes, with its results under the names of the If node's."""
    names = {inner.name: outer for inner, outer in zip(branch.output, node.output, strict=False) if outer}
    made = {name for inner in branch.node for name in inner.output}
    taken = {name for other in graph.node for name in other.output} | {t.name for t in graph.initializer}
    clash = {name: f"{node.name or node.output[0]}::{name}" for name in made & taken}
    renamed = {**clash, **{inner: outer for inner, outer in names.items() if inner in made}}
    for tensor in branch.initializer:
        if tensor.name not in taken:
            graph.initializer.add().CopyFrom(tensor)
    for inner in branch.node:
        copy = graph.node.add()
        copy.CopyFrom(inner)
        for field in (copy.input, copy.output):
            for index, name in enumerate(field):
                if name in renamed:
                    field[index] = renamed[name]
    for inner_name, outer in names.items():
        if inner_name not in made:  # the branch hands on a value of the outer graph
            copy = graph.node.add()
            copy.op_type, copy.name = "Identity", f"{node.name}/Identity"
            copy.input.append(inner_name)
            copy.output.append(outer)
