"""Elementwise operators and activations."""

from __future__ import annotations

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx.context import Context, Rule, integer, real, text

_UNARY = {
    "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Erf": "erf", "Exp": "exp", "Log": "log", "Sqrt": "sqrt",
    "Abs": "abs", "Neg": "neg", "Floor": "floor", "Ceil": "ceil", "Round": "round", "Sign": "sign", "Sin": "sin",
    "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh",
    "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Reciprocal": "reciprocal", "Softplus": "softplus",
    "Mish": "mish", "HardSwish": "hardswish", "Not": "logical_not", "IsNaN": "isnan", "IsInf": "isinf",
    "Selu": "selu", "BitwiseNot": "bitwise_not", "Swish": "silu", "QuickGelu": "silu",
}  # fmt: skip
_BINARY = {
    "Add": "add.Tensor", "Sub": "sub.Tensor", "Mul": "mul.Tensor", "Div": "div.Tensor", "Mod": "remainder.Tensor",
    "Equal": "eq.Tensor", "Less": "lt.Tensor", "LessOrEqual": "le.Tensor", "Greater": "gt.Tensor",
    "GreaterOrEqual": "ge.Tensor", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor",
    "BitwiseAnd": "bitwise_and.Tensor", "BitwiseOr": "bitwise_or.Tensor", "BitwiseXor": "bitwise_xor.Tensor",
}  # fmt: skip
_COMPARE = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
_MIRROR = {"Less": "gt", "LessOrEqual": "ge", "Greater": "lt", "GreaterOrEqual": "le", "Equal": "eq"}


def unary(name: str) -> Rule:
    target = f"aten::{name}"  # one text for all nodes
    return lambda ctx, node: [ctx.op(node, target, ctx.ref(node.inputs[0]))]


def binary(name: str) -> Rule:
    target = f"aten::{name}"

    def rule(ctx: Context, node: Node) -> list[Op]:
        a, b = ctx.arg(node.inputs[0]), ctx.arg(node.inputs[1])
        if not isinstance(a, Ref) and not isinstance(b, Ref):
            a = ctx.ref(node.inputs[0])
        if isinstance(a, Ref):
            if not isinstance(b, Ref) and node.op in _COMPARE:
                return [ctx.op(node, f"aten::{name.removesuffix('.Tensor')}.Scalar", a, b)]
            return [ctx.op(node, target, a, b)]
        # the number stands first: PyTorch's reflected operators
        if node.op in ("Add", "Mul"):
            return [ctx.op(node, f"aten::{name}", b, a)]
        if node.op == "Sub":
            return [ctx.op(node, "aten::rsub.Scalar", b, a)]
        if node.op == "Div":
            return _reciprocal(ctx, node, b, a)
        if node.op in _COMPARE:
            return [ctx.op(node, f"aten::{_MIRROR[node.op]}.Scalar", b, a)]
        return [ctx.op(node, f"aten::{name}", ctx.ref(node.inputs[0]), b)]

    return rule


def _reciprocal(ctx: Context, node: Node, x: Arg, number: Arg) -> list[Op]:
    """`c / x` is `x.reciprocal() * c` (torch/_tensor.py, `__rdiv__`)."""
    if number == 1:
        return [ctx.op(node, "aten::reciprocal", x)]
    name = ctx.fresh(node)
    ctx.define(name, node.outputs[0], ctx.net.shape(node.outputs[0]))
    return [
        ctx.op(node, "aten::reciprocal", x, outputs=(name,)),
        ctx.op(node, "aten::mul.Tensor", Ref(name), number),
    ]


def power(ctx: Context, node: Node) -> list[Op]:
    exponent = ctx.arg(node.inputs[1])
    if isinstance(exponent, Ref):
        base = ctx.arg(node.inputs[0])
        target = "aten::pow.Tensor_Tensor" if isinstance(base, Ref) else "aten::pow.Scalar"
        return [ctx.op(node, target, base, exponent)]
    return [ctx.op(node, "aten::pow.Tensor_Scalar", ctx.ref(node.inputs[0]), exponent)]


def variadic(name: str) -> Rule:
    def rule(ctx: Context, node: Node) -> list[Op]:
        if len(node.inputs) == 1:
            ctx.alias(node.outputs[0], node.inputs[0])
            return []
        ops: list[Op] = []
        result = ctx.ref(node.inputs[0])
        for position, other in enumerate(node.inputs[1:], 2):
            out = node.outputs[0] if position == len(node.inputs) else ctx.fresh(node)
            ctx.define(out, node.outputs[0], ctx.net.shape(node.outputs[0]))
            number = ctx.arg(other)
            if name in ("minimum", "maximum") and not isinstance(number, Ref):
                bounds: tuple[Arg, ...] = (None, number) if name == "minimum" else (number,)
                ops.append(ctx.op(node, "aten::clamp", result, *bounds, outputs=(out,)))
            else:
                ops.append(ctx.op(node, f"aten::{name}", result, number, outputs=(out,)))
            result = Ref(out)
        return ops

    return rule


def mean(ctx: Context, node: Node) -> list[Op]:
    ops = variadic("add.Tensor")(ctx, node) or []
    if not ops:
        return ops
    total = ctx.fresh(node)
    ctx.define(total, node.outputs[0], ctx.net.shape(node.outputs[0]))
    last = ops[-1]
    ops[-1] = ctx.op(node, last.target, *last.args, outputs=(total,))
    return [*ops, ctx.op(node, "aten::div.Tensor", Ref(total), len(node.inputs))]


def clip(ctx: Context, node: Node) -> list[Op]:
    low: Arg = ctx.arg(node.inputs[1]) if len(node.inputs) > 1 else None
    high: Arg = ctx.arg(node.inputs[2]) if len(node.inputs) > 2 else None
    if len(node.inputs) == 1:  # before opset 11
        low = real(node, "min", 0.0) if "min" in node.attrs else None
        high = real(node, "max", 0.0) if "max" in node.attrs else None
    x = ctx.ref(node.inputs[0])
    if low == 0 and high == 6:
        return [ctx.op(node, "aten::hardtanh", x, 0.0, 6.0)]
    if isinstance(low, Ref) or isinstance(high, Ref):
        return [ctx.op(node, "aten::clamp.Tensor", x, low, high)]
    return [ctx.op(node, "aten::clamp", x, low, high)]


def gelu(ctx: Context, node: Node) -> list[Op]:
    approximate = text(node, "approximate", "none")
    kwargs: dict[str, Arg] = {"approximate": approximate} if approximate != "none" else {}
    return [ctx.op(node, "aten::gelu", ctx.ref(node.inputs[0]), kwargs=kwargs)]


def biased_gelu(ctx: Context, node: Node) -> list[Op]:
    """com.microsoft BiasGelu and FastGelu: gelu(x + bias), the fast one with tanh."""
    kwargs: dict[str, Arg] = {"approximate": "tanh"} if node.op == "FastGelu" else {}
    if ctx.optional(node, 1) is None:
        return [ctx.op(node, "aten::gelu", ctx.ref(node.inputs[0]), kwargs=kwargs)]
    name = ctx.fresh(node)
    ctx.define(name, node.inputs[0], ctx.net.shape(node.inputs[0]))
    return [
        ctx.op(node, "aten::add.Tensor", ctx.ref(node.inputs[0]), ctx.optional(node, 1), outputs=(name,)),
        ctx.op(node, "aten::gelu", Ref(name), kwargs=kwargs),
    ]


def softmax(name: str) -> Rule:
    def rule(ctx: Context, node: Node) -> list[Op]:
        axis = integer(node, "axis", -1 if ctx.net.opset >= 13 else 1)
        return [ctx.op(node, f"aten::{name}.int", ctx.ref(node.inputs[0]), axis)]

    return rule


def hard_sigmoid(ctx: Context, node: Node) -> list[Op] | None:
    if abs(real(node, "alpha", 0.2) - 1 / 6) > 1e-4:
        return None
    return [ctx.op(node, "aten::hardsigmoid", ctx.ref(node.inputs[0]))]


def leaky_relu(ctx: Context, node: Node) -> list[Op]:
    return [ctx.op(node, "aten::leaky_relu", ctx.ref(node.inputs[0]), real(node, "alpha", 0.01))]


def elu(ctx: Context, node: Node) -> list[Op]:
    return [ctx.op(node, "aten::elu", ctx.ref(node.inputs[0]), real(node, "alpha", 1.0))]


def celu(ctx: Context, node: Node) -> list[Op]:
    return [ctx.op(node, "aten::celu", ctx.ref(node.inputs[0]), real(node, "alpha", 1.0))]


def prelu(ctx: Context, node: Node) -> list[Op]:
    slope = ctx.sources(node.inputs[1])  # exporters give it the axes of the input
    return [ctx.op(node, "aten::prelu", ctx.ref(node.inputs[0]), ctx.ref(slope[0] if slope else node.inputs[1]))]


def cast(ctx: Context, node: Node) -> list[Op] | None:
    dtype = dtypes.ONNX_CODES.get(integer(node, "to", 1))
    if node.op == "CastLike":
        value = ctx.net.values.get(node.inputs[1])
        dtype = value.dtype if value is not None else None
    return None if dtype is None else [ctx.op(node, "aten::to.dtype", ctx.ref(node.inputs[0]), dtype)]


def where(ctx: Context, node: Node) -> list[Op]:
    condition = ctx.ref(node.inputs[0])
    a, b = ctx.arg(node.inputs[1]), ctx.arg(node.inputs[2])
    kinds = ("Scalar" if not isinstance(a, Ref) else "", "Scalar" if not isinstance(b, Ref) else "")
    overload = {("", ""): "self", ("Scalar", ""): "ScalarSelf", ("", "Scalar"): "ScalarOther"}
    return [ctx.op(node, f"aten::where.{overload.get(kinds, 'Scalar')}", condition, a, b)]


RULES: dict[str, Rule] = {
    **{op: unary(name) for op, name in _UNARY.items()},
    **{op: binary(name) for op, name in _BINARY.items()},
    "Pow": power,
    "Min": variadic("minimum"),
    "Max": variadic("maximum"),
    "Sum": variadic("add.Tensor"),
    "Mean": mean,
    "Clip": clip,
    "Gelu": gelu,
    "FastGelu": biased_gelu,
    "BiasGelu": biased_gelu,
    "Softmax": softmax("softmax"),
    "LogSoftmax": softmax("log_softmax"),
    "HardSigmoid": hard_sigmoid,
    "LeakyRelu": leaky_relu,
    "Elu": elu,
    "Celu": celu,
    "PRelu": prelu,
    "Cast": cast,
    "CastLike": cast,
    "Where": where,
}
