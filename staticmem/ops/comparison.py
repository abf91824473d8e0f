"""Comparisons, logic on bits, masks and choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, result_type
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.graph import Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.arithmetic import onnx_operands, two_inputs
from staticmem.ops.onnx import Context, Translation, translation
from staticmem.ops.pointwise import Scalar, grad_of, gradient_like, inplace, result_of, tensors_of
from staticmem.ops.registry import rule


@rule("eq", kinds=("comparison",))
@rule("ne", kinds=("comparison",), aliases="not_equal")
@rule("lt", kinds=("comparison", "step"), aliases="less")
@rule("le", kinds=("comparison", "step"), aliases="less_equal")
@rule("gt", kinds=("comparison", "step"), aliases="greater")
@rule("ge", kinds=("comparison", "step"), aliases="greater_equal")
@rule("logical_and logical_or logical_xor")
def compare(e: Eager, self: Tensor, other: Tensor | Scalar) -> Tensor:
    """A bool result without gradient."""
    operands = [self, other] if isinstance(other, Tensor) else [self]
    return e.pointwise("aten.eq.Tensor", *operands, dtype=dtypes.bool_)


@rule("bitwise_and", aliases="__and__")
@rule("bitwise_or", aliases="__or__")
@rule("bitwise_xor", aliases="__xor__")
@rule("floor_divide __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift")
def integer_binary(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """One new result without gradient."""
    a, b = tensors_of(self, other)
    return result_of(e, "aten.bitwise_and.Tensor", a, b, self if a is None else other)


@rule("_is_all_true _is_any_true")
def is_all_true(e: Eager, self: Tensor) -> Tensor:
    """One bool without gradient."""
    return e.empty((), dtypes.bool_, kernel="aten._is_all_true.default")


@rule("isin")
def isin(e: Eager, elements: Any, test_elements: Any, **_: Any) -> Tensor:
    """A bool for each element, without gradient."""
    like = elements if isinstance(elements, Tensor) else test_elements
    shape = elements.shape if isinstance(elements, Tensor) else ()
    return e.empty(shape, dtypes.bool_, kernel=f"aten.isin.{'Tensor_Tensor' if like is elements else 'Scalar_Tensor'}")


@rule("where", kinds=("masking",))
def where(e: Eager, condition: Tensor, self: Any = None, other: Any = None) -> Tensor:
    """Saves the condition; each gradient is one tensor of the result's size. A number becomes a 0-dim tensor."""
    operands = []
    dtype = next((value.dtype for value in (self, other) if isinstance(value, Tensor)), dtypes.float32)
    for value in (self, other):
        if isinstance(value, Tensor):
            operands.append(value)
        else:
            operands.append(e.empty((), dtype, kernel="aten.scalar_tensor.default"))
    a, b = operands
    out = e.pointwise("aten.where.self", condition, a, b, dtype=result_type([a, b]))

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        return e.pointwise("aten.where.self", condition, grad, dtype=grad.dtype)

    return e.record("WhereBackward0", out, [a, b], [Formula((1,), gradient), Formula((0,), gradient)], [condition])


@rule("masked_fill", kinds=("masking",))
def masked_fill(e: Eager, self: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Saves the mask; result and gradient are contiguous masked copies."""
    shape = layout.broadcast_shapes(self.shape, mask.shape)
    out = e.empty(shape, self.dtype, kernel="aten.masked_fill.Scalar")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(shape, grad_of(grads).dtype, kernel="aten.masked_fill.Scalar")

    return e.record("MaskedFillBackward0", out, [self], [Formula((0,), gradient)], [mask])


@rule("masked_fill_", kinds=("masking",))
def masked_fill_(e: Eager, self: Tensor, mask: Tensor, value: Any) -> Tensor:
    """In place; saves the mask; the gradient is one masked copy."""
    out = inplace(e, self, "aten.masked_fill_.Scalar")
    gradient = gradient_like(self, "aten.masked_fill.Scalar")
    return e.record("MaskedFillBackward0", out, [self], [Formula((0,), gradient)], [mask])


def _compared(name: str, mirrored: str) -> Translation:
    """`mirrored` is the comparison with its operands changed: of a number that stands first."""

    def translate(ctx: Context, node: Node) -> list[Op]:
        a, b = onnx_operands(ctx, node)
        if not isinstance(a, Ref):
            return [ctx.op(node, f"aten::{mirrored}.Scalar", b, a)]
        return [ctx.op(node, f"aten::{name}.{'Tensor' if isinstance(b, Ref) else 'Scalar'}", a, b)]

    return translate


for _operator, _name, _mirrored in (
    ("Equal", "eq", "eq"), ("Less", "lt", "gt"), ("LessOrEqual", "le", "ge"), ("Greater", "gt", "lt"),
    ("GreaterOrEqual", "ge", "le"),
):  # fmt: skip
    translation(_operator)(_compared(_name, _mirrored))
for _operator in ("And", "Or", "Xor"):
    translation(_operator)(two_inputs(f"logical_{_operator.lower()}"))
    translation(f"Bitwise{_operator}")(two_inputs(f"bitwise_{_operator.lower()}.Tensor"))


@translation("Where")
def onnx_where(ctx: Context, node: Node) -> list[Op]:
    condition = ctx.ref(node.inputs[0])
    a, b = ctx.arg(node.inputs[1]), ctx.arg(node.inputs[2])
    kinds = ("Scalar" if not isinstance(a, Ref) else "", "Scalar" if not isinstance(b, Ref) else "")
    overload = {("", ""): "self", ("Scalar", ""): "ScalarSelf", ("", "Scalar"): "ScalarOther"}
    return [ctx.op(node, f"aten::where.{overload.get(kinds, 'Scalar')}", condition, a, b)]
