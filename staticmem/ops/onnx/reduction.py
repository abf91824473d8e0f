"""Reductions, sorting and cumulative operators."""

from __future__ import annotations

from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx.context import Context, Rule, integer

_NAMES = {"ReduceMean": "mean.dim", "ReduceSum": "sum.dim_IntList", "ReduceMax": "amax", "ReduceMin": "amin"}


def reduce(target: str) -> Rule:
    def rule(ctx: Context, node: Node) -> list[Op] | None:
        axes = ctx.ints(node, 1, "axes")
        if len(node.inputs) > 1 and node.inputs[1] and axes is None:
            return None
        if not axes and integer(node, "noop_with_empty_axes", 0):
            ctx.alias(node.outputs[0], node.inputs[0])
            return []
        keep = bool(integer(node, "keepdims", 1))
        dims = axes or tuple(range(ctx.rank(node.inputs[0])))
        return [ctx.op(node, f"aten::{target}", ctx.ref(node.inputs[0]), dims, keep)]

    return rule


def norm(order: int) -> Rule:
    def rule(ctx: Context, node: Node) -> list[Op]:
        axes = ctx.ints(node, 1, "axes") or tuple(range(ctx.rank(node.inputs[0])))
        keep = bool(integer(node, "keepdims", 1))
        return [ctx.op(node, "aten::linalg_vector_norm", ctx.ref(node.inputs[0]), order, axes, keep)]

    return rule


def log_sum_exp(ctx: Context, node: Node) -> list[Op]:
    axes = ctx.ints(node, 1, "axes") or tuple(range(ctx.rank(node.inputs[0])))
    return [ctx.op(node, "aten::logsumexp", ctx.ref(node.inputs[0]), axes, bool(integer(node, "keepdims", 1)))]


def prod(ctx: Context, node: Node) -> list[Op] | None:
    axes = ctx.ints(node, 1, "axes")
    if axes is None or len(axes) != 1:
        return None
    keep = bool(integer(node, "keepdims", 1))
    return [ctx.op(node, "aten::prod.dim_int", ctx.ref(node.inputs[0]), axes[0], keep)]


def arg(name: str) -> Rule:
    def rule(ctx: Context, node: Node) -> list[Op]:
        keep = bool(integer(node, "keepdims", 1))
        return [ctx.op(node, f"aten::{name}", ctx.ref(node.inputs[0]), integer(node, "axis", 0), keep)]

    return rule


def top_k(ctx: Context, node: Node) -> list[Op] | None:
    k = ctx.number(node, 1)
    if k is None:
        return None
    names = tuple(n or ctx.fresh(node) for n in (*node.outputs, "")[:2])
    largest = bool(integer(node, "largest", 1))
    x, axis = ctx.ref(node.inputs[0]), integer(node, "axis", -1)
    return [ctx.op(node, "aten::topk", x, int(k), axis, largest, bool(integer(node, "sorted", 1)), outputs=names)]


def cumsum(ctx: Context, node: Node) -> list[Op] | None:
    axis = ctx.number(node, 1)
    if axis is None or integer(node, "exclusive", 0) or integer(node, "reverse", 0):
        return None
    return [ctx.op(node, "aten::cumsum", ctx.ref(node.inputs[0]), int(axis))]


RULES: dict[str, Rule] = {
    **{op: reduce(target) for op, target in _NAMES.items()},
    "ReduceL1": norm(1),
    "ReduceL2": norm(2),
    "ReduceLogSumExp": log_sum_exp,
    "ReduceProd": prod,
    "ArgMax": arg("argmax"),
    "ArgMin": arg("argmin"),
    "TopK": top_k,
    "CumSum": cumsum,
}
