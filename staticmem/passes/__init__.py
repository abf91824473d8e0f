"""ONNX nodes back to the ATen calls that PyTorch runs: from exporter metadata where it is there, else by patterns."""

from __future__ import annotations

from staticmem.ir.onnx_graph import Net, Recovered

__all__ = ["recover"]


def recover(net: Net) -> Recovered:
    """The ATen ops of a graph."""
    from staticmem.passes import dynamo, evidence, nodewise

    found = dynamo.recover(net) if dynamo.has_metadata(net) else nodewise.recover(net)
    found.notes.extend(evidence.folded_norms(net, found.ops))
    return found
