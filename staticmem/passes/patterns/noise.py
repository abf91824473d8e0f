"""Noise of stochastic depth: `RandomUniformLike < p` is `empty(...).bernoulli_(p)`.

torchvision/ops/stochastic_depth.py; the exporter writes bernoulli as a comparison (symbolic_opset15.py).
"""

from __future__ import annotations

from staticmem.ir import dtypes
from staticmem.ir.graph import Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.passes.patterns.matcher import Matcher


def match(m: Matcher, node: Node) -> bool:
    """Cast(Less(RandomUniformLike(t), p)), and the division by p after it."""
    if node.op not in ("RandomUniformLike", "RandomUniform"):
        return False
    less = m.reader(node.outputs[0], "Less")
    cast = m.reader(less.outputs[0], "Cast") if less is not None else None
    shape = m.net.shape(node.outputs[0])
    if less is None or cast is None or shape is None or less.inputs[0] != node.outputs[0]:
        return False
    p = m.number(less.inputs[1])
    if p is None:
        return False
    p = float(f"{p:.7g}")
    value = m.net.values.get(cast.outputs[0])
    empty, drawn = m.ctx.fresh(node), cast.outputs[0]
    m.ctx.define(empty, cast.outputs[0], shape)
    dtype = value.dtype if value is not None else dtypes.float32
    ops: list[Op] = [
        m.op(node, "aten::empty.memory_format", shape, outputs=(empty,), kwargs={"dtype": dtype}),
        m.op(node, "aten::bernoulli_.float", Ref(empty), p, outputs=(drawn,)),
    ]
    others = [node, less]
    root = cast
    scaled = m.reader(drawn, "Div")
    if scaled is not None and m.number(scaled.inputs[1]) is not None:
        ops.append(m.op(scaled, "aten::div_.Tensor", Ref(drawn), p, outputs=scaled.outputs[:1]))
        others.append(cast)
        root = scaled
    source = m.inner(node.inputs[0], "ConstantOfShape") if node.inputs else None
    if source is not None:
        others.append(source)
    return m.take(root, ops, *others)
