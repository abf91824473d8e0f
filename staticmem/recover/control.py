"""If, Loop and Scan. A branch that is known, or the larger one, replaces its If; loops stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.recover.nodes import Net, Node, Subgraph

MAX_DEPTH = 16


def inline(net: Net) -> list[Node]:
    """The nodes of a graph with every If replaced by one of its branches."""
    return _inline(net, net.nodes, 0)


def _inline(net: Net, nodes: Sequence[Node], depth: int) -> list[Node]:
    result: list[Node] = []
    for node in nodes:
        branch = _branch(net, node) if depth < MAX_DEPTH else None
        if branch is None:
            result.append(node)
            continue
        result.extend(_inline(net, branch.nodes, depth + 1))
        for inner, outer in zip(branch.outputs, node.outputs, strict=False):
            result.append(Node("Identity", "", f"{node.name}/Identity", (inner,), (outer,)))
            if inner not in net.values and outer in net.values:
                net.values[inner] = replace(net.values[outer], name=inner)
    return result


def _branch(net: Net, node: Node) -> Subgraph | None:
    if node.op != "If" or node.domain:
        return None
    yes, no = node.attrs.get("then_branch"), node.attrs.get("else_branch")
    if not isinstance(yes, Subgraph) or not isinstance(no, Subgraph):
        return None
    condition = net.const(node.inputs[0])
    if condition is not None and condition.size == 1:
        return yes if bool(condition.reshape(-1)[0]) else no
    return yes if len(yes.nodes) >= len(no.nodes) else no
