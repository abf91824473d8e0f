"""Matrix products."""

from __future__ import annotations

from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx.context import Context, Rule, integer, real, text


def named_weight(ctx: Context, name: str) -> bool:
    """Whether PyTorch stores this tensor as it is in the file: folding by the exporter makes new, numbered names."""
    return ctx.net.producer.startswith("pytorch") and "." in name and "::" not in name


def matmul(ctx: Context, node: Node) -> list[Op]:
    a, b = node.inputs[:2]
    if b in ctx.net.weights and ctx.rank(b) == 2 and ctx.rank(a) >= 2 and not named_weight(ctx, b):
        ctx.transposed.add(b)
        return [ctx.op(node, "aten::linear", ctx.ref(a), ctx.ref(b))]
    return [ctx.op(node, "aten::matmul", ctx.ref(a), ctx.ref(b))]


def gemm(ctx: Context, node: Node) -> list[Op]:
    alpha, beta = real(node, "alpha", 1.0), real(node, "beta", 1.0)
    a, b = node.inputs[:2]
    bias = ctx.optional(node, 2)
    ops: list[Op] = []
    x = ctx.ref(a)
    if integer(node, "transA", 0):
        name = ctx.fresh(node)
        shape = ctx.net.shape(a)
        ctx.define(name, a, tuple(reversed(shape)) if shape is not None else None)
        ops.append(ctx.op(node, "aten::t", x, outputs=(name,)))
        x = Ref(name)
    plain = alpha == 1.0 and beta == 1.0
    shape = ctx.net.shape(node.inputs[2]) if bias is not None else None
    if plain and (bias is None or shape is None or len(shape) == 1):
        if integer(node, "transB", 0):
            return [*ops, ctx.op(node, "aten::linear", x, ctx.ref(b), bias)]
        if b in ctx.net.weights and not named_weight(ctx, b):
            ctx.transposed.add(b)
            return [*ops, ctx.op(node, "aten::linear", x, ctx.ref(b), bias)]
    weight = ctx.ref(b)
    if integer(node, "transB", 0):
        name = ctx.fresh(node)
        sizes = ctx.net.shape(b)
        ctx.define(name, b, tuple(reversed(sizes)) if sizes is not None else None)
        ops.append(ctx.op(node, "aten::t", weight, outputs=(name,)))
        weight = Ref(name)
    if bias is None:
        return [*ops, ctx.op(node, "aten::mm", x, weight)]
    kwargs: dict[str, Arg] = {} if plain else {"beta": beta, "alpha": alpha}
    return [*ops, ctx.op(node, "aten::addmm", bias, x, weight, kwargs=kwargs)]


def einsum(ctx: Context, node: Node) -> list[Op]:
    equation = text(node, "equation", "").replace(" ", "")
    return [ctx.op(node, "aten::einsum", equation, tuple(ctx.ref(n) for n in node.inputs))]


def fused_matmul(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft FusedMatMul: matmul with transposes and a factor."""
    if integer(node, "transBatchA", 0) or integer(node, "transBatchB", 0):
        return None
    ops: list[Op] = []
    args: list[Arg] = []
    for name, flag in zip(node.inputs[:2], ("transA", "transB"), strict=True):
        if integer(node, flag, 0):
            fresh, shape = ctx.fresh(node), ctx.net.shape(name)
            ctx.define(fresh, name, (*shape[:-2], shape[-1], shape[-2]) if shape is not None else None)
            ops.append(ctx.op(node, "aten::transpose.int", ctx.ref(name), -2, -1, outputs=(fresh,)))
            args.append(Ref(fresh))
        else:
            args.append(ctx.ref(name))
    alpha = real(node, "alpha", 1.0)
    if alpha == 1.0:
        return [*ops, ctx.op(node, "aten::matmul", *args)]
    product = ctx.fresh(node)
    ctx.define(product, node.outputs[0], ctx.net.shape(node.outputs[0]))
    ops.append(ctx.op(node, "aten::matmul", *args, outputs=(product,)))
    return [*ops, ctx.op(node, "aten::mul.Tensor", Ref(product), alpha)]


RULES: dict[str, Rule] = {"MatMul": matmul, "Gemm": gemm, "Einsum": einsum, "FusedMatMul": fused_matmul}
