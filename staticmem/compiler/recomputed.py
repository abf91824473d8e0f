"""What a backward computes again of the forward, in place of reading it from memory."""

from __future__ import annotations

from staticmem.compiler.graphs import Partition
from staticmem.eager.strides import Form
from staticmem.ops.tags import PARTITIONER_ALIASES
from staticmem.tracing.nodes import Node


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
