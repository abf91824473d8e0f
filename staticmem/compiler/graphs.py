"""What stages of the compiler hand on: graphs of nodes, and the two that a joint graph is cut into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from staticmem.eager.strides import Form
from staticmem.ir.record import record
from staticmem.ops.tags import PARTITIONER_ALIASES
from staticmem.tracing.nodes import PLACEHOLDER, Node


@record(frozen=True)
class NodeGraph:
    """Nodes in order, placeholders first; `outputs` has None for a result that is no tensor or a gradient that nobody
    needs.

    Nothing is in place but `aten::copy_` into a placeholder at the end of the forward: a buffer of the module takes a
    new value (running statistics). Nobody reads such a node.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Node | None, ...]

    @property
    def placeholders(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.target == PLACEHOLDER)


@record(frozen=True)
class JointGraph(NodeGraph):
    """Forward and backward in one graph.

    Attributes:
        forward_outputs: how many of `outputs` are of the forward: what the module returns. The rest are gradients, one
            for each of `primals`, None where it needs none.
        primals: placeholders of the forward: parameters, buffers and inputs.
        tangents: placeholders of the backward: gradients of the outputs that need one.
        static_primals: those of `primals` that the module owns, parameters and buffers, which live on whether they are
            saved or not (`static_lifetime_input_nodes` of torch/_functorch/partitioners.py).
        fallbacks: how many calls of an op are one extern call because the op has no trace (`aot.fallback`).
        choices: of kernels, as the tracer has them; passes over the graph add theirs.
    """

    forward_outputs: int = 0
    primals: tuple[Node, ...] = ()
    tangents: tuple[Node, ...] = ()
    static_primals: tuple[Node, ...] = ()
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    choices: list[tuple[str, str]] = field(default_factory=list)


@record(frozen=True)
class Partition:
    """The forward and the backward that a joint graph is cut into.

    Attributes:
        forward: outputs are those of the module, and then `saved`.
        backward: a graph of its own nodes. Its placeholders are one for each of `saved`, with its form, op and name,
            and then one for each tangent; outputs are the gradients.
        saved: nodes of the forward that the backward reads, in the order of the forward, attributes of `ctx` last;
            inputs among them.
        recomputed: nodes of the backward that compute a value of the forward again.
    """

    forward: NodeGraph
    backward: NodeGraph
    saved: tuple[Node, ...]
    recomputed: tuple[Node, ...] = ()


def recomputed_bytes(parts: Partition) -> int:
    """Bytes of the values that gradients are computed from and the backward makes again: they would be saved else."""
    again = set(parts.recomputed)
    read = {_base(i) for node in parts.backward.nodes if node not in again for i in node.inputs if i in again}
    return sum(node.form.nbytes for node in read & again if isinstance(node.form, Form))


def _base(node: Node) -> Node:
    """What a view is of."""
    while node.base in PARTITIONER_ALIASES and node.inputs:
        node = node.inputs[0]
    return node
