"""What the partitioner does to a joint graph first: dead code goes, equal nodes become one.

Sources: `fx_graph_cse` (torch/_functorch/compile_utils.py), `Graph.eliminate_dead_code` (torch/fx/graph.py), and
`partition_key` in `min_cut_rematerialization_partition` (torch/_functorch/partitioners.py).

What the partitioner knows of an op: whether it may be computed again, whether it fuses, whether it is a view.

The lists are those of `get_default_op_list` (torch/_functorch/partitioners.py), which stand in `ops.tags`.
`tests/compiler/partition/test_partition_op_types.py` compares them with an installed PyTorch.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from staticmem.compiler.graphs import JointGraph
from staticmem.ops import tags
from staticmem.ops.tags import PARTITIONER_ALIASES
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, Argument, Node

VIEWS = tags.PARTITIONER_VIEWS
RECOMPUTABLE = tags.partitioner_pointwise() | VIEWS | tags.PARTITIONER_OTHERS | {GETITEM}
RANDOM = tags.PARTITIONER_RANDOM
FUSIBLE = RECOMPUTABLE | RANDOM
COMPUTE_INTENSIVE = tags.PARTITIONER_COMPUTE_INTENSIVE
LIFTED = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})

NEVER_MERGED = tags.never_merged()
WRITES = "aten::copy_"
CAT = "aten::cat"


class OpTypes(NamedTuple):
    """Answers of the lists for one target."""

    recomputable: bool
    fusible: bool
    view: bool
    random: bool
    compute_intensive: bool
    lifted: bool
    cat: bool


@lru_cache(4096)
def types_of(target: str) -> OpTypes:
    """The types of a target, whatever its overload: `get_aten_target` (torch/_functorch/compile_utils.py)."""
    base = target.split(".", 1)[0]
    return OpTypes(
        base in RECOMPUTABLE,
        base in FUSIBLE,
        base in VIEWS,
        base in RANDOM,
        base in COMPUTE_INTENSIVE,
        target in LIFTED,
        base == CAT,
    )


# `fx_graph_cse` finds nodes by a hash of their arguments and keeps the first node of each hash. Python's hash of -1 is
# that of -2: behind `unsqueeze(x, -2)` no two `unsqueeze(x, -1)` become one
_COLLIDING: dict[object, object] = {
    (int, -1): (int, -2),
    (float, struct.pack("<d", -1.0)): (float, struct.pack("<d", -2.0)),
}


def ancestors(roots: Iterable[Node | None], until: Container[Node] = ()) -> set[Node]:
    """The nodes that these depend on, themselves included; nothing behind a node of `until`."""
    nodes: set[Node] = set()
    stack = [root for root in roots if root is not None]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            if node not in until:
                stack.extend(node.inputs)
    return nodes


def live_nodes(nodes: Iterable[Node], outputs: Iterable[Node | None]) -> list[Node]:
    """Those that an output depends on, those that write, and placeholders; in order."""
    nodes = list(nodes)
    writers = [node for node in nodes if node.target == WRITES]
    live = ancestors([*outputs, *writers])
    return [node for node in nodes if node in live or node.target == PLACEHOLDER]


def merged(joint: JointGraph) -> JointGraph:
    """The joint graph without dead code, and with one node for those that have the same target and arguments.

    A node that the gradients depend on is never merged with one that they do not: the partitioner of 2.15 keeps them
    apart (`partition_key`), that of 2.13 merges them too.
    """
    nodes = live_nodes(joint.nodes, joint.outputs)
    backward_dependencies = ancestors(joint.outputs[joint.forward_outputs :])
    kept_apart = _aliases_of_outputs(nodes, joint.outputs)
    region = 0  # `compute_mutation_region_ids` (torch/_inductor/pattern_matcher.py): nothing is merged across a write
    replaced: dict[Node, Node] = {}
    first_of: dict[object, tuple[Node, object, int]] = {}
    result: list[Node] = []
    for node in nodes:
        new = _replace_inputs(node, replaced)
        if node.target == WRITES:
            region += 1
        if node.target == PLACEHOLDER or node.base in NEVER_MERGED or node in kept_apart:
            result.append(new)
            continue
        leaves: list[object] = []
        nested = (_flatten(new.args, leaves), tuple((key, _flatten(new.kwargs[key], leaves)) for key in new.kwargs))
        structure = (nested, leaves)
        key = (node.target, node in backward_dependencies, tuple([_COLLIDING.get(leaf, leaf) for leaf in leaves]))
        first = first_of.get(key)
        if first is not None and first[1] == structure and first[2] == region:
            replaced[node] = first[0]
            continue
        if first is None or first[1] == structure:
            first_of[key] = (new, structure, region)
        result.append(new)
    outputs = tuple([None if output is None else replaced.get(output, output) for output in joint.outputs])
    return replace(joint, nodes=tuple(result), outputs=outputs)


def copied(node: Node, replaced: dict[Node, Node]) -> Node:
    """The node with other nodes as its arguments."""
    new = Node.__new__(Node)  # its inputs are known: they need not be collected again
    new.target, new.form, new.op, new.name = node.target, node.form, node.op, node.name
    new.must_recompute, new.recomputed, new.kwargs = node.must_recompute, node.recomputed, node.kwargs
    new.on_ctx = node.on_ctx
    new.args = tuple([substituted(arg, replaced) for arg in node.args])
    if node.kwargs:
        new.kwargs = {key: substituted(arg, replaced) for key, arg in node.kwargs.items()}
    new.inputs = tuple(dict.fromkeys([replaced.get(read, read) for read in node.inputs]))
    return new


def substituted(arg: Argument, replaced: dict[Node, Node]) -> Argument:
    """An argument with other nodes in place of those that are replaced."""
    if type(arg) is Node:
        return replaced.get(arg, arg)
    return tuple([substituted(item, replaced) for item in arg]) if type(arg) is tuple else arg


def _replace_inputs(node: Node, replaced: dict[Node, Node]) -> Node:
    """The node itself where none of its inputs was replaced."""
    if replaced and any(read in replaced for read in node.inputs):
        new = copied(node, replaced)
        replaced[node] = new
        return new
    return node


def _flatten(arg: Argument, leaves: list[object]) -> object:
    """Adds the leaves with their types, floats by their bits: 1, 1.0 and True differ, as do 0.0 and -0.0. Gives how
    they are nested."""
    if type(arg) is tuple:
        return tuple([_flatten(item, leaves) for item in arg])
    leaves.append((float, struct.pack("<d", arg)) if type(arg) is float else (type(arg), arg))
    return None


def storages(nodes: Iterable[Node]) -> dict[Node, Node]:
    """The first node with the same storage, for each node."""
    storage: dict[Node, Node] = {}
    for node in nodes:
        base = node.base
        shared = base in PARTITIONER_ALIASES or (base == GETITEM and node.inputs[0].base in PARTITIONER_ALIASES)
        storage[node] = storage[node.inputs[0]] if shared and node.inputs else node
    return storage


def _aliases_of_outputs(nodes: list[Node], outputs: Iterable[Node | None]) -> set[Node]:
    """Nodes that share their storage with an output: these stay separate tensors, as in eager mode."""
    storage = storages(nodes)
    returned = {storage[output] for output in outputs if output is not None}
    return {node for node in nodes if storage[node] in returned and not isinstance(node.form, tuple)}
