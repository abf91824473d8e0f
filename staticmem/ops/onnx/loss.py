"""Losses that are computed inside of the model."""

from __future__ import annotations

from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx.context import Context, Rule, text

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def classes(target: str) -> Rule:
    """A loss over scores and the numbers of classes; the log-probabilities as a second result are not covered."""

    def rule(ctx: Context, node: Node) -> list[Op] | None:
        if len(node.outputs) > 1 and node.outputs[1]:
            return None
        reduction = _REDUCTIONS[text(node, "reduction", "mean")]
        scores, labels = (ctx.ref(name) for name in node.inputs[:2])
        weight = ctx.ref(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
        return [ctx.op(node, f"aten::{target}", scores, labels, weight, reduction)]

    return rule


RULES: dict[str, Rule] = {
    "SoftmaxCrossEntropyLoss": classes("cross_entropy_loss"),
    "NegativeLogLikelihoodLoss": classes("nll_loss_nd"),
}
