"""Scaled scores under a softmax: scale(x) - amax(scale(x)) becomes scale(x - amax(x)).

Source: torch/_inductor/fx_passes/joint_graph.py (`mul_softmax_pattern`, `div_softmax_pattern`), which keep the plain
form beside it for rows that are not finite (`_preserve_scaled_softmax_nonfinite_semantics`).
"""

from __future__ import annotations

import math
from typing import Any

from staticmem.compiler.edit import GraphEditor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Tracer

_CAST = "prims::convert_element_type"
_SCALES = ("aten::mul.Tensor", "aten::div.Tensor")


def stable_scaled_softmax(graph: GraphEditor, node: Node) -> None:
    """Rewrites `sub(scaled, amax(scaled))`."""
    if node.target != "aten::sub.Tensor" or len(node.args) != 2 or node.kwargs:
        return
    scaled, largest = node.args
    if not isinstance(scaled, Node) or not isinstance(largest, Node) or largest.target != "aten::amax":
        return
    if largest.args[0] is not scaled or len(largest.args) != 3 or graph.user_count(largest) != 1:
        return
    inner, dtype = scaled, None
    if scaled.target == _CAST:
        inner, dtype = scaled.args[0], scaled.dtype
    if inner.target not in _SCALES or len(inner.args) != 2:
        return
    dims, keepdim = tuple(largest.args[1]), largest.args[2]
    operands = _operands(inner, dims)
    if operands is None:
        return
    tracer = Tracer(training=False)
    tracer.op, tracer.region = node.op, node.must_recompute
    result = _stable(tracer, inner.target, *operands, dims, keepdim, dtype)
    graph.insert(tracer.nodes, before=node)
    graph.replace(node, result)
    for dead in (node, largest, scaled, inner):
        if graph.alive(dead) and not graph.user_count(dead):
            graph.erase(dead)


def _operands(call: Node, dims: tuple[int, ...]) -> tuple[Node, Any] | None:
    """What is scaled and by what, which is the same along the dimensions of the maximum."""
    first, second = call.args
    orders = [(first, second), (second, first)] if call.target == "aten::mul.Tensor" else [(first, second)]
    for scaled, factor in orders:
        if isinstance(factor, (int, float)) and isinstance(scaled, Node):
            return scaled, factor
        if not isinstance(scaled, Node) or not isinstance(factor, Node) or scaled.ndim < factor.ndim:
            continue
        shape = (1,) * (scaled.ndim - factor.ndim) + factor.shape
        if all(shape[d] == 1 for d in dims):
            return scaled, factor
    return None


def _stable(
    t: Tracer, scale: str, x: Node, factor: Any, dims: tuple[int, ...], keepdim: bool, dtype: DType | None
) -> Node:
    scaled = t.pointwise(scale, x, factor)
    if dtype is not None:
        scaled, x = t.cast(scaled, dtype), t.cast(x, dtype)
    sign: Any
    if isinstance(factor, Node):
        one = t.full((), 1, x.dtype)
        positive = t.pointwise("aten::ge.Scalar", factor, 0, dtype=dtypes.bool_)
        negative_one = t.pointwise("aten::neg", one)
        sign = t.pointwise("aten::where.self", positive, one, negative_one, dtype=x.dtype)
    else:
        sign = 1 if factor >= 0 else -1
    x = t.pointwise("aten::mul.Tensor", x, sign)
    centred = t.pointwise("aten::sub.Tensor", x, t.reduce("aten::amax", x, dims, keepdim))
    signed = t.pointwise("aten::mul.Tensor", sign, factor) if isinstance(factor, Node) else sign * factor
    stable = t.pointwise(scale, centred, signed)
    plain = t.pointwise("aten::sub.Tensor", scaled, t.reduce("aten::amax", scaled, dims, keepdim))
    size = t.pointwise("aten::abs", scaled)
    bounded = t.pointwise("aten::ne.Scalar", size, math.inf, dtype=dtypes.bool_)
    is_number = t.pointwise("aten::eq.Tensor", scaled, scaled, dtype=dtypes.bool_)
    finite = t.pointwise("aten::mul.Tensor", is_number, bounded)
    wrong = t.reduce("aten::any.dims", t.pointwise("aten::logical_not", finite), dims, True)
    return t.where(t.pointwise("aten::logical_not", wrong), stable, plain)
