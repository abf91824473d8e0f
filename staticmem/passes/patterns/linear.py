"""`x @ weight.t() + bias` is `linear`.

The TorchScript exporter writes a bias before the product (symbolic_opset9.py, `linear`), which code that adds a vector
to a product does not: so a bias may be computed (that of BEiT and Swin v2 has no part for the key), and the input may
be a tensor that the model owns (a table of positions).
"""

from __future__ import annotations

from staticmem.ir.onnx_graph import Node
from staticmem.ops.linear import named_weight
from staticmem.passes.patterns.matcher import Matcher


def match(m: Matcher, node: Node) -> bool:
    """MatMul with a transposed or a plain 2-D weight, with the Add of a 1-D bias where there is one."""
    if node.op == "Add":
        for position in (0, 1):
            product = m.inner(node.inputs[position], "MatMul")
            bias = node.inputs[1 - position]
            shape = m.net.shape(bias)
            if product is None or shape is None or len(shape) != 1:
                continue
            first = position == 1 and shape == (m.net.shape(node.outputs[0]) or ())[-1:]
            if (first or bias in m.net.weights) and _linear(m, node, product, bias, first):
                return True
        return False
    if node.op == "MatMul":
        follower = m.reader(node.outputs[0], "Add")
        if follower is not None and match(m, follower):
            return True
        return _linear(m, node, node, "", False)
    return False


def _linear(m: Matcher, root: Node, product: Node, bias: str, written: bool) -> bool:
    x, weight = product.inputs[:2]
    others = [] if product is root else [product]
    turned = m.made(weight, "Transpose")
    if turned is not None and turned.inputs[0] in m.net.weights and len(m.net.shape(turned.inputs[0]) or ()) == 2:
        weight = turned.inputs[0]
        if all(r is product for r in m.readers[turned.outputs[0]]):
            others.append(turned)
    elif weight in m.net.weights and len(m.net.shape(weight) or ()) == 2 and not named_weight(m.ctx, weight):
        m.ctx.transposed.add(weight)
    else:
        return False
    owned = x in m.net.weights and m.made(x, "Constant") is None  # not what the code of a trace made
    if weight not in m.net.weights or (x in m.net.weights and turned is None) or (owned and not written):
        return False
    args = (m.ctx.ref(x), m.ctx.ref(weight), *((m.ctx.ref(bias),) if bias else ()))
    return m.take(root, [m.op(product, "aten::linear", *args, outputs=root.outputs[:1])], *others)
