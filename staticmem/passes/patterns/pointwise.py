"""Pointwise calls that the TorchScript exporter takes apart."""

from __future__ import annotations

from staticmem.ir.onnx_graph import Node
from staticmem.passes.patterns.matcher import Matcher, close


def addcmul(m: Matcher, node: Node) -> bool:
    """`a + (b * c) * 1.0`: the exporter multiplies by `value` even where it is 1 (symbolic_opset9.py, `addcmul`), which
    code that multiplies and adds does not. With another number it may be either, and is left."""
    if node.op != "Add":
        return False
    scaled = m.inner(node.inputs[1], "Mul")
    product = m.inner(scaled.inputs[0], "Mul") if scaled is not None else None
    if scaled is None or product is None or not close(m.number(scaled.inputs[1]), 1.0):
        return False
    if any(m.number(name) is not None for name in product.inputs):
        return False
    args = [m.ctx.ref(name) for name in (node.inputs[0], *product.inputs)]
    return m.take(node, [m.op(node, "aten::addcmul", *args)], scaled, product)
