"""Noise: `empty` + `bernoulli` + `div` + `mul` is stochastic depth with in-place steps, or in-place dropout.

torchvision/ops/stochastic_depth.py: `noise = torch.empty(...).bernoulli_(survival_rate); noise.div_(survival_rate)`.
ATen/native/Dropout.cpp, `_dropout_impl<inplace=true>`: `noise = empty_like(input).bernoulli_(1 - p).div_(1 - p)`.

The noise of stochastic depth has the dtype of the tensor that it multiplies. torchvision and timm make
`empty(shape, dtype=x.dtype).bernoulli_(p)` and multiply `x` by it; an export has resolved `x.dtype` to float32, which
is wrong as soon as `x` is in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.ir.graph import Graph, Note, Op, Ref
from staticmem.ir.onnx_graph import Net
from staticmem.passes.edit import Ops


def in_place_noise(ops: Ops, net: Net) -> None:
    """Puts the in-place noise ops and `dropout_` back."""
    for op in ops.of("aten::bernoulli"):
        if len(op.args) < 2:
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


_FILLS = ("aten::bernoulli", "aten::div")


def follow_operand(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """`empty(size)` that only becomes noise for `x` is made `new_empty(x, size)`, which follows x's dtype."""
    readers: dict[str, list[Op]] = {}
    made_at: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        for read in op.refs():
            readers.setdefault(read, []).append(op)
        made_at.update(dict.fromkeys(op.outputs, index))
    ops = list(graph.ops)
    changed = False
    for index, op in enumerate(graph.ops):
        if op.base != "aten::empty" or len(op.outputs) != 1:
            continue
        name: str | None = op.outputs[0]
        other: str | None = None
        for _ in range(4):  # empty, bernoulli_, div_, mul
            followers = [r for r in readers.get(name or "", ()) if r.outputs]
            if not followers:
                break
            step = followers[-1]
            if step.base == "aten::mul":
                other = next((n for n in step.refs() if n != name), None)
                break
            if step.base.rstrip("_") not in _FILLS:
                break
            name = step.outputs[0]
        if other is not None and made_at.get(other, len(ops)) < index:
            kwargs = {k: v for k, v in op.kwargs.items() if k != "dtype"}
            ops[index] = replace(op, target="aten::new_empty", args=(Ref(other), *op.args), kwargs=kwargs)
            changed = True
    return (replace(graph, ops=tuple(ops)) if changed else graph), ()
