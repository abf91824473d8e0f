"""PyTorch's own partitions of joint graphs, and ours of the same graphs, both by the names of PyTorch's nodes.

PyTorch 2.13 merges nodes that the gradients depend on with nodes that they do not depend on; 2.15, which we follow,
does not (`partition_key`). So both run without merging here, and `test_merged_nodes.py` compares the merging by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.lowering  # a decomposition of max_pool2d asks it
from fx import nodes_of
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import CheckpointPolicy

from staticmem.compiler.graphs import JointGraph
from staticmem.compiler.partition import Partitioner
from staticmem.compiler.partition.classify import classify
from staticmem.compiler.partition.cse import live_nodes
from staticmem.compiler.partition.extract import halves, partition_of

RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass
class Sides:
    """Names of the nodes of the forward and of the backward, placeholders included, in order, and what is saved."""

    forward: list[str]
    backward: list[str]
    saved: list[str]


def joint_of(module: Any, forward_outputs: int, static: Sequence[int] = ()) -> tuple[JointGraph, dict[Any, str]]:
    """A joint graph of PyTorch as ours, and the name of each node."""
    nodes, outputs = nodes_of(module.graph)
    fx_nodes = [node for node in module.graph.nodes if node.op != "output"]
    for node, fx_node in zip(nodes, fx_nodes, strict=True):
        if fx_node.meta.get("recompute") in RECOMPUTED:
            node.must_recompute = fx_node.meta.get("ac_graph_id", 0) + 1
    placeholders = [node for node, fx_node in zip(nodes, fx_nodes, strict=True) if fx_node.op == "placeholder"]
    primals = tuple(node for node in placeholders if "tangents" not in node.name)
    tangents = tuple(node for node in placeholders if "tangents" in node.name)
    joint = JointGraph(tuple(nodes), outputs, forward_outputs, primals, tangents, tuple(primals[i] for i in static))
    return joint, {node: fx_node.name for node, fx_node in zip(nodes, fx_nodes, strict=True)}


def alive(joint: JointGraph) -> JointGraph:
    return JointGraph(
        tuple(live_nodes(joint.nodes, joint.outputs)),
        joint.outputs, joint.forward_outputs, joint.primals, joint.tangents, joint.static_primals,
    )  # fmt: skip


def partitioner_of(joint: JointGraph) -> Partitioner:
    """One that merges nothing."""
    partitioner = Partitioner.__new__(Partitioner)
    partitioner.facts = classify(alive(joint))
    return partitioner


def ours(joint: JointGraph, names: dict[Any, str], budget: float = 1.0) -> Sides:
    partitioner = partitioner_of(joint)
    facts = partitioner.facts
    parts = halves(facts.joint, [facts.nodes[i] for i in partitioner.saved_values(budget)])
    made = partition_of(facts.joint, parts)
    assert len(made.backward.nodes) == len(parts.saved) + len(joint.tangents) + len(parts.backward)
    return Sides(
        [names[node] for node in (*joint.primals, *parts.forward)],
        [names[node] for node in (*parts.saved, *joint.tangents, *parts.backward)],
        [names[node] for node in parts.saved],
    )


def real(
    module: Any, forward_outputs: int, static: Sequence[int] = (), budget: float = 1.0
) -> tuple[Sides, tuple[Any, Any]]:
    """PyTorch's, and its two modules. It writes to the module."""
    with config.patch(cse=False, activation_memory_budget=budget):
        halves = min_cut_rematerialization_partition(
            module, None, num_fwd_outputs=forward_outputs, static_lifetime_input_indices=list(static)
        )
    forward, backward = ([node.name for node in half.graph.nodes if node.op != "output"] for half in halves)
    saved = [node.name for node in halves[1].graph.nodes if node.op == "placeholder" and "tangents" not in node.name]
    return Sides(forward, backward, saved), halves


def of_model(model: Any, inputs: Sequence[Any], budget: float = 1.0) -> list[tuple[Sides, Sides]]:
    """Ours and PyTorch's for each graph of a model that `torch.compile` compiles for training, on the CPU."""
    found: list[tuple[Sides, Sides]] = []

    def partition(module: Any, _: Any, *, num_fwd_outputs: int, static_lifetime_input_indices: Any, **__: Any) -> Any:
        joint, names = joint_of(module, num_fwd_outputs, static_lifetime_input_indices or ())
        mine = ours(joint, names, budget)
        theirs, both = real(module, num_fwd_outputs, static_lifetime_input_indices or (), budget)
        found.append((mine, theirs))
        return both

    def nothing(module: Any, _: Any) -> Callable[..., Any]:
        run: Callable[..., Any] = make_boxed_func(module.forward)
        return run

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=nothing, bw_compiler=nothing, partition_fn=partition, decompositions=select_decomp_table()
    )
    torch.compile(model, backend=backend)(*inputs)
    return found
