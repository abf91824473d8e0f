"""Sums, differences, products, quotients and remainders: TensorIterator kernels with one new output, or none in place.

Source of what is saved and of each formula: tools/autograd/derivatives.yaml. A formula's temporaries are listed as the
kernels that it calls; they coexist until the formula ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, result_type
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context, Translation, declare_sizes, like_first, translation
from staticmem.ops.pointwise import (
    Scalar,
    clone_for_backward,
    grad_of,
    inplace,
    negate,
    result_of,
    same,
    scale_grad,
    tensors_of,
    times,
    zeros,
)
from staticmem.ops.registry import rule


@rule("add", kinds=("arithmetic", "commutative"))
def add(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """Saves nothing; both gradients are the incoming tensor itself (`other` scaled by alpha when it is not 1)."""
    a, b = tensors_of(self, other)
    out = result_of(e, "aten.add.Tensor", a, b, self if a is None else other)
    return e.record("AddBackward0", out, [a, b], _add_formulas(alpha))


def _add_formulas(alpha: Scalar) -> list[Formula]:
    def scaled(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.mul.Tensor", grad_of(grads))

    return [Formula((1,), same if alpha == 1 else scaled), Formula((0,), same)]


@rule("sub", kinds=("arithmetic",), aliases="subtract")
def sub(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """Saves nothing; the gradient of `other` is a negated copy."""
    a, b = tensors_of(self, other)
    out = result_of(e, "aten.sub.Tensor", a, b, self if a is None else other)
    return e.record("SubBackward0", out, [a, b], [Formula((1,), _negated(alpha)), Formula((0,), same)])


def _negated(alpha: Scalar) -> Any:
    """`maybe_multiply(-grad, alpha)`."""

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        negative = negate(e, grads, need)
        return negative if alpha == 1 else e.pointwise("aten.mul.Tensor", negative)

    return formula


@rule("rsub", kinds=("arithmetic",))
def rsub(e: Eager, self: Tensor, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """other - self: saves nothing; the gradient of `self` is a negated copy, that of `other` the incoming tensor."""
    operands = [t for t in (self, other) if isinstance(t, Tensor)]
    out = e.pointwise("aten.rsub.Scalar", *operands)
    return e.record(
        "RsubBackward0", out, operands, [Formula((0,), _negated(alpha)), *([Formula((1,), same)] * (len(operands) - 1))]
    )


@rule("sub_", kinds=("arithmetic",), aliases="subtract_")
def sub_(e: Eager, self: Tensor, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """In place: saves nothing; the gradient of `other` is a negated copy."""
    out = inplace(e, self, "aten.sub_.Tensor")
    b = other if isinstance(other, Tensor) else None
    return e.record("SubBackward0", out, [self, b], [Formula((1,), _negated(alpha)), Formula((0,), same)])


@rule("add_", kinds=("arithmetic",))
def add_(e: Eager, self: Tensor, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """In place: saves nothing; both gradients are the incoming tensor."""
    out = inplace(e, self, "aten.add_.Tensor")
    b = other if isinstance(other, Tensor) else None
    return e.record("AddBackward0", out, [self, b], _add_formulas(alpha))


@rule("mul", kinds=("arithmetic", "commutative"), aliases="multiply")
def mul(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """Each operand is saved only if the other one needs a gradient; each gradient is one product."""
    a, b = tensors_of(self, other)
    out = result_of(e, "aten.mul.Tensor", a, b, self if a is None else other)
    if a is None or b is None:
        e.record("MulBackward0", out, [b if a is None else a], [Formula((0,), scale_grad)])
    else:
        record_mul(e, out, a, b, a, b)
    return out


def record_mul(e: Eager, out: Tensor, a: Tensor, b: Tensor, saved_a: Tensor | None, saved_b: Tensor | None) -> None:
    saves = [saved_b if e.needs_grad(a) else None, saved_a if e.needs_grad(b) else None]
    formulas = [Formula((1,), times(saved_a or a)), Formula((0,), times(saved_b or b))]
    e.record("MulBackward0", out, [a, b], formulas, saves)


@rule("mul_", kinds=("arithmetic",), aliases="multiply_")
def mul_(e: Eager, self: Tensor, other: Tensor | Scalar) -> Tensor:
    """In place: `other` is saved; `self` is cloned first if `other` needs a gradient."""
    b = other if isinstance(other, Tensor) else None
    original = clone_for_backward(e, self, b)
    out = inplace(e, self, "aten.mul_.Tensor")
    if b is None:
        e.record("MulBackward0", out, [self], [Formula((0,), scale_grad)])
    else:
        record_mul(e, out, self, b, original, b)
    return out


def _div_other(self: Tensor | None, other: Tensor) -> Any:
    operands = (other,) if self is None else (self, other)

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        # -grad * ((self / other) / other): FunctionsManual.cpp, div_tensor_other_grad
        grad = grad_of(grads)
        e.pointwise("aten.div.Tensor", *operands)
        e.pointwise("aten.div.Tensor", *operands)
        e.pointwise("aten.neg.default", grad)
        return e.pointwise("aten.mul.Tensor", grad, *operands)

    return formula


def _div_self(other: Tensor) -> Any:
    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.div.Tensor", grad_of(grads), other)

    return formula


def _div_scalar(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    return e.pointwise("aten.div.Tensor", grad_of(grads))


@rule("div", kinds=("arithmetic",), aliases="divide true_divide")
def div(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar, rounding_mode: str | None = None) -> Tensor:
    """Saves `other`, and `self` if `other` needs a gradient; that gradient takes div, div, neg and mul at once.

    With a rounding mode both gradients are zeros.
    """
    a, b = tensors_of(self, other)
    inputs = [t for t in (a, b) if t is not None]
    dtype = result_type(inputs)
    if rounding_mode is None and not dtype.is_differentiable:
        dtype = dtypes.float32
    out = e.pointwise("aten.div.Tensor", *inputs, dtype=dtype)
    if rounding_mode is None:
        _record_div(e, out, a, b, a)
    else:
        formulas = [Formula((k,), zeros) for k in range(len(inputs) - 1, -1, -1)]
        e.record("DivBackward1", out, inputs, formulas, [b, a if e.needs_grad(b) else None])
    return out


def _record_div(e: Eager, out: Tensor, a: Tensor | None, b: Tensor | None, saved_a: Tensor | None) -> Tensor:
    if b is None:
        return e.record("DivBackward0", out, [a], [Formula((0,), _div_scalar)])
    formulas = [Formula((1,), _div_other(saved_a or a, b)), *([] if a is None else [Formula((0,), _div_self(b))])]
    return e.record("DivBackward0", out, [a, b], formulas, [b, saved_a if e.needs_grad(b) else None])


@rule("div_", kinds=("arithmetic",), aliases="divide_ true_divide_")
def div_(e: Eager, self: Tensor, other: Tensor | Scalar) -> Tensor:
    """In place: saves `other`, and a clone of `self` if `other` needs a gradient."""
    b = other if isinstance(other, Tensor) else None
    original = clone_for_backward(e, self, b)
    out = inplace(e, self, "aten.div_.Tensor")
    return _record_div(e, out, self, b, original)


@rule("remainder fmod")
def remainder(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """`self` receives the incoming gradient; a tensor `other` saves both and takes three products of its size.

    A number `self` has no derivative for `other`.
    """
    a, b = tensors_of(self, other)
    out = result_of(e, "aten.remainder.Tensor", a, b, self if a is None else other)
    if a is None:
        return out
    if b is None:
        return e.record("RemainderBackward0", out, [a], [Formula((0,), same)])

    def by_other(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        quotient = e.pointwise("aten.div.Tensor_mode", a, b)
        negative = e.pointwise("aten.neg.default", grad_of(grads))
        return e.pointwise("aten.mul.Tensor", negative, quotient)

    saves = [b, a] if e.needs_grad(b) else []
    return e.record("RemainderBackward1", out, [a, b], [Formula((1,), by_other), Formula((0,), same)], saves)


def onnx_operands(ctx: Context, node: Node) -> tuple[Arg, Arg]:
    """Tensors, or numbers where constants have one; at least one tensor."""
    a, b = ctx.arg(node.inputs[0]), ctx.arg(node.inputs[1])
    return (a, b) if isinstance(a, Ref) or isinstance(b, Ref) else (ctx.ref(node.inputs[0]), b)


def two_inputs(name: str) -> Translation:
    """Operators that are one call; a number that stands first gives way to the tensor."""
    target = f"aten::{name}"  # one text for all nodes

    def translate(ctx: Context, node: Node) -> list[Op]:
        a, b = onnx_operands(ctx, node)
        return [ctx.op(node, target, *((a, b) if isinstance(a, Ref) else (ctx.ref(node.inputs[0]), b)))]

    return translate


def _commutative(name: str) -> Translation:
    target = f"aten::{name}"

    def translate(ctx: Context, node: Node) -> list[Op]:
        a, b = onnx_operands(ctx, node)
        return [ctx.op(node, target, *((a, b) if isinstance(a, Ref) else (b, a)))]

    return translate


translation("Add")(_commutative("add.Tensor"))
declare_sizes("BiasAdd", like_first)
translation("Mul")(_commutative("mul.Tensor"))
translation("Mod")(two_inputs("remainder.Tensor"))


@translation("Sub")
def onnx_sub(ctx: Context, node: Node) -> list[Op]:
    a, b = onnx_operands(ctx, node)
    return [ctx.op(node, "aten::sub.Tensor", a, b) if isinstance(a, Ref) else ctx.op(node, "aten::rsub.Scalar", b, a)]


@translation("Div")
def onnx_div(ctx: Context, node: Node) -> list[Op]:
    """`c / x` is `x.reciprocal() * c` (torch/_tensor.py, `__rdiv__`)."""
    a, b = onnx_operands(ctx, node)
    if isinstance(a, Ref):
        return [ctx.op(node, "aten::div.Tensor", a, b)]
    if a == 1:
        return [ctx.op(node, "aten::reciprocal", b)]
    name = ctx.fresh(node)
    ctx.define(name, node.outputs[0], ctx.net.shape(node.outputs[0]))
    return [ctx.op(node, "aten::reciprocal", b, outputs=(name,)), ctx.op(node, "aten::mul.Tensor", Ref(name), a)]


def any_inputs(name: str) -> Translation:
    """Operators on any number of inputs: a call for each pair, from left to right."""

    def translate(ctx: Context, node: Node) -> list[Op]:
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

    return translate


translation("Sum")(any_inputs("add.Tensor"))


@translation("Mean")
def onnx_mean(ctx: Context, node: Node) -> list[Op]:
    ops = any_inputs("add.Tensor")(ctx, node) or []
    if not ops:
        return ops
    total = ctx.fresh(node)
    ctx.define(total, node.outputs[0], ctx.net.shape(node.outputs[0]))
    last = ops[-1]
    ops[-1] = ctx.op(node, last.target, *last.args, outputs=(total,))
    return [*ops, ctx.op(node, "aten::div.Tensor", Ref(total), len(node.inputs))]
