"""ONNX nodes back to the ATen calls that PyTorch runs: from exporter metadata where it is there, else by patterns."""

from __future__ import annotations

from staticmem.graph.ir import Frame, Op, Ref
from staticmem.recover.nodes import Net, Node, Recovered

__all__ = ["recover"]


def recover(net: Net) -> Recovered:
    """The ATen ops of a graph."""
    from staticmem.recover import dynamo

    return dynamo.recover(net, _unknown)


def _unknown(node: Node, modules: tuple[Frame, ...]) -> list[Op]:
    domain = node.domain or "onnx"
    args = tuple(Ref(n) for n in node.inputs)
    return [Op(node.name, f"{domain}::{node.op}", args, {}, node.outputs, modules, (node.source,))]
