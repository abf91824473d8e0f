"""Normalisations and dropout."""

from __future__ import annotations

from staticmem.ir.graph import Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx.context import Context, Rule, integer, real


def batch_norm(ctx: Context, node: Node) -> list[Op]:
    """Statistics that the graph computes are what the TorchScript exporter writes where PyTorch has none; so are
    weights of ones and biases of zeros in constant nodes (symbolic_helper.py, `_batchnorm_helper`)."""
    x, mean, var = (ctx.ref(node.inputs[i]) for i in (0, 3, 4))
    computed = all(
        name not in ctx.net.weights and (made := ctx.producer(name)) is not None and made.op != "Constant"
        for name in node.inputs[3:5]
    )
    weight = _unless(ctx, node.inputs[1], 1.0, computed)
    bias = _unless(ctx, node.inputs[2], 0.0, computed)
    training = bool(integer(node, "training_mode", 0)) or integer(node, "is_test", 1) == 0
    if computed:
        args = (x, weight, bias, None, None, True, 0.0, _eps(node), True)
        return [ctx.op(node, "aten::batch_norm", *args)]
    momentum = round(1.0 - real(node, "momentum", 0.9), 6)  # ONNX weighs the old value, PyTorch the new one
    return [ctx.op(node, "aten::batch_norm", x, weight, bias, mean, var, training, momentum, _eps(node), True)]


def _constant(ctx: Context, name: str) -> bool:
    node = ctx.producer(name)
    return node is not None and node.op == "Constant" and not node.domain


def _unless(ctx: Context, name: str, number: float, written: bool) -> Ref | None:
    """A tensor, but none where it is a constant of one number, or one that the exporter wrote."""
    if name in ctx.net.weights:
        return ctx.ref(name)
    array = ctx.net.const(name)
    filled = array is not None and array.size > 0 and bool((array == number).all())
    return None if filled or (written and _constant(ctx, name)) else ctx.ref(name)


def _eps(node: Node) -> float:
    return float(f"{real(node, 'epsilon', 1e-5):.6g}")


def layer_norm(ctx: Context, node: Node) -> list[Op] | None:
    shape = ctx.net.shape(node.inputs[0])
    if shape is None:
        return None
    axis = integer(node, "axis", -1) % max(len(shape), 1)
    weight, bias = ctx.optional(node, 1), ctx.optional(node, 2)
    return [ctx.op(node, "aten::layer_norm", ctx.ref(node.inputs[0]), shape[axis:], weight, bias, _eps(node))]


def rms_norm(ctx: Context, node: Node) -> list[Op] | None:
    shape = ctx.net.shape(node.inputs[0])
    if shape is None:
        return None
    axis = integer(node, "axis", -1) % max(len(shape), 1)
    weight = ctx.optional(node, 1)
    return [ctx.op(node, "aten::rms_norm", ctx.ref(node.inputs[0]), shape[axis:], weight, _eps(node))]


def group_norm(ctx: Context, node: Node) -> list[Op]:
    groups = integer(node, "num_groups", 1)
    weight, bias = ctx.optional(node, 1), ctx.optional(node, 2)
    return [ctx.op(node, "aten::group_norm", ctx.ref(node.inputs[0]), groups, weight, bias, _eps(node))]


def instance_norm(ctx: Context, node: Node) -> list[Op]:
    x, weight, bias = ctx.ref(node.inputs[0]), ctx.optional(node, 1), ctx.optional(node, 2)
    return [ctx.op(node, "aten::instance_norm", x, weight, bias, None, None, True, 0.1, _eps(node), True)]


def dropout(ctx: Context, node: Node) -> list[Op]:
    ratio = ctx.number(node, 1)
    p = real(node, "ratio", 0.5) if ratio is None else float(ratio)
    training = ctx.number(node, 2)
    p = float(f"{p:.6g}")
    return [ctx.op(node, "aten::dropout", ctx.ref(node.inputs[0]), p, bool(training))]


def skip_layer_norm(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft: (input + skip + bias), then a layer norm; the fourth output is the sum."""
    shape = ctx.net.shape(node.inputs[0])
    total = node.outputs[3] if len(node.outputs) > 3 and node.outputs[3] else ctx.fresh(node)
    simplified = node.op.startswith("SkipSimplified")
    bias_at = 3 if simplified else 4
    ops = [ctx.op(node, "aten::add.Tensor", ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1]), outputs=(total,))]
    if ctx.optional(node, bias_at) is not None:
        before = ctx.fresh(node)
        ops = [
            ctx.op(node, "aten::add.Tensor", ctx.ref(node.inputs[0]), ctx.optional(node, bias_at), outputs=(before,)),
            ctx.op(node, "aten::add.Tensor", ctx.ref(before), ctx.ref(node.inputs[1]), outputs=(total,)),
        ]
    if shape is None:
        return None
    ctx.define(total, node.inputs[0], shape)
    weight = ctx.ref(node.inputs[2])
    if simplified:
        return [*ops, ctx.op(node, "aten::rms_norm", ctx.ref(total), shape[-1:], weight, _eps(node))]
    bias = ctx.optional(node, 3)
    return [*ops, ctx.op(node, "aten::layer_norm", ctx.ref(total), shape[-1:], weight, bias, _eps(node))]


RULES: dict[str, Rule] = {
    "BatchNormalization": batch_norm,
    "LayerNormalization": layer_norm,
    "RMSNormalization": rms_norm,
    "SimplifiedLayerNormalization": rms_norm,
    "GroupNormalization": group_norm,
    "InstanceNormalization": instance_norm,
    "Dropout": dropout,
    "SkipLayerNormalization": skip_layer_norm,
    "SkipSimplifiedLayerNormalization": skip_layer_norm,
}
