"""All translations by operator name, and the fallback for the rest."""

from __future__ import annotations

from collections.abc import Mapping

from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import attention, conv, loss, matmul, norm, pointwise, quantized, recurrent, reduction, shape
from staticmem.ops.onnx.context import Context, Rule

RULES: Mapping[str, Rule] = {
    **attention.RULES,
    **conv.RULES,
    **loss.RULES,
    **matmul.RULES,
    **norm.RULES,
    **pointwise.RULES,
    **quantized.RULES,
    **recurrent.RULES,
    **reduction.RULES,
    **shape.RULES,
}
# operators of other domains that the rules know; an equal name elsewhere may mean something else
_DOMAINS = ("", "com.microsoft")


def translate(ctx: Context, node: Node) -> tuple[list[Op], bool]:
    """The ops of a node, and whether it has a meaning in ATen."""
    rule = RULES.get(node.op) if node.domain in _DOMAINS else None
    if rule is not None:
        try:
            ops = rule(ctx, node)
        except (IndexError, KeyError, ValueError, TypeError, ZeroDivisionError):
            ops = None  # a node that breaks its operator's definition
        if ops is not None:
            return ops, True
    return [fallback(ctx, node)], False


def fallback(ctx: Context, node: Node) -> Op:
    """The node under its own name: the engine assumes that its results are new and its inputs are kept."""
    args = tuple(ctx.arg(name) for name in node.inputs)
    outputs = tuple(name for name in node.outputs if name)
    return ctx.op(node, f"{node.domain or 'onnx'}::{node.op}", *args, outputs=outputs)
