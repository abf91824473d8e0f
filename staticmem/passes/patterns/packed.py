"""The packed projection of `nn.MultiheadAttention`: its `.contiguous()` leaves no trace in an export.

torch/nn/functional.py, `_in_projection_packed`:
`proj.unflatten(-1, (3, E)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()`.
"""

from __future__ import annotations

from staticmem.ir.graph import Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.views import onnx_squeeze, onnx_transpose, onnx_unsqueeze
from staticmem.passes.patterns.matcher import Matcher


def match(m: Matcher, node: Node) -> bool:
    """Squeeze(Transpose(Unsqueeze(x, 0)), -2) where the transpose swaps the first and the last but one axis."""
    if node.op != "Squeeze":
        return False
    turned = m.inner(node.inputs[0], "Transpose")
    added = m.inner(turned.inputs[0], "Unsqueeze") if turned is not None else None
    if turned is None or added is None or m.ctx.ints(added, 1, "axes") != (0,):
        return False
    perm = turned.attrs.get("perm")
    if not isinstance(perm, tuple) or len(perm) < 4 or perm[0] != len(perm) - 2 or perm[-2] != 0:
        return False
    m.ctx.frames = m.frames(node)
    ops: list[Op] = []
    for part in (added, turned, node):
        ops.extend(
            (onnx_unsqueeze if part is added else onnx_transpose if part is turned else onnx_squeeze)(m.ctx, part) or []
        )
    if len(ops) != 3:
        return False
    strided = m.ctx.fresh(node)
    m.ctx.define(strided, node.outputs[0], m.net.shape(node.outputs[0]))
    last = ops[-1]
    ops[-1] = m.op(node, last.target, *last.args, outputs=(strided,))
    ops.append(m.op(node, "aten::contiguous", Ref(strided)))
    return m.take(node, ops, added, turned)
