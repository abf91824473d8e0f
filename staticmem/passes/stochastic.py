"""Noise: `empty` + `bernoulli` + `div` + `mul` is stochastic depth with in-place steps, or in-place dropout.

torchvision/ops/stochastic_depth.py: `noise = torch.empty(...).bernoulli_(survival_rate); noise.div_(survival_rate)`.
ATen/native/Dropout.cpp, `_dropout_impl<inplace=true>`: `noise = empty_like(input).bernoulli_(1 - p).div_(1 - p)`.
"""

from __future__ import annotations

from dataclasses import replace

from staticmem.ir.graph import Op, Ref
from staticmem.ir.onnx_graph import Net
from staticmem.passes.edit import Ops


def rewrite(ops: Ops, net: Net) -> None:
    """Puts the in-place noise ops and `dropout_` back."""
    for op in list(ops.ops):
        if op is None or op.base != "aten::bernoulli" or len(op.args) < 2:
            continue
        noise = ops.made_by(op.args[0])
        if noise is None or not noise.base.startswith("aten::empty") or ops.only_reader(noise.outputs[0]) is None:
            continue
        scaled = ops.only_reader(op.outputs[0])
        if scaled is not None and (scaled.base != "aten::div" or isinstance(scaled.args[1], Ref)):
            scaled = None
        if noise.base == "aten::empty_like" and scaled is not None and _dropout(ops, net, noise, op, scaled):
            continue
        ops.put(op, replace(op, target="aten::bernoulli_.float"))
        if scaled is not None:
            ops.put(scaled, replace(scaled, target="aten::div_.Tensor"))


def _dropout(ops: Ops, net: Net, noise: Op, draw: Op, scaled: Op) -> bool:
    """`dropout_(x, p)` from its noise, where the product of x and the noise is the only use of it."""
    product = ops.only_reader(scaled.outputs[0])
    keep = draw.args[1]
    if product is None or product.base != "aten::mul" or not isinstance(keep, float):
        return False
    x = noise.args[0]
    if x not in product.args or not isinstance(x, Ref):
        return False
    for op in (noise, draw, scaled):
        ops.drop(op)
    p = round(1.0 - keep, 12)
    ops.put(product, replace(product, target="aten::dropout_", args=(x, p, True), kwargs={}))
    _collapse(ops, net, product.outputs[0])
    return True


def _collapse(ops: Ops, net: Net, name: str) -> None:
    """Functionalisation writes a changed view back to its base and takes the view again: both are the same tensor."""
    back = ops.only_reader(name)
    if back is None or back.base not in ("aten::view", "aten::_unsafe_view", "aten::reshape"):
        return
    again = ops.only_reader(back.outputs[0])
    if again is None or again.base != back.base:
        return
    if net.shape(again.outputs[0]) == net.shape(name) and net.shape(name) is not None:
        ops.drop(back)
        ops.alias(again, name)
