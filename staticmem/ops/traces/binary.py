"""Functions of two or three tensors, element by element.

Sources: tools/autograd/derivatives.yaml, torch/_refs, torch/_decomp/decompositions.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.ir import dtypes
from staticmem.ops import binary
from staticmem.ops.traces.comparison import boolean, chosen
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.unary import isnan
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, gradient_of


@traced("pow.Tensor_Scalar pow pow_.Scalar")
def pow_(t: Tracer, self: Any, exponent: Any) -> Node:
    if type(exponent) is Node:
        return pow_tensor(t, self, exponent) if type(self) is Node else pow_of_number(t, self, exponent)
    out = t.pointwise("aten::pow.Tensor_Scalar", self, exponent)
    return t.derive(out, self, lambda grad: binary.by_base(t, grad, self, exponent))


@traced("pow.Tensor_Tensor")
def pow_tensor(t: Tracer, self: Node, exponent: Node) -> Node:
    """`pow_backward_exponent`, `pow_backward_self`."""
    out = t.pointwise("aten::pow.Tensor_Tensor", self, exponent)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad, by_exponent, by_self = grads[0], None, None
        if need[1]:
            positive = t.compare("ge", exponent, 0)
            zero = t.pointwise("aten::logical_and", t.compare("eq", self, 0), positive, dtype=dtypes.bool_)
            product = t.mul(out, t.pointwise("aten::log", self))
            by_exponent = t.mul(grad, t.where(zero, 0.0, product))
        if need[0]:
            power = t.pointwise("aten::pow.Tensor_Tensor", self, t.pointwise("aten::sub.Scalar", exponent, 1))
            product = t.mul(grad, t.mul(exponent, power))
            nothing = t.full((), 0.0, product.dtype)
            by_self = t.where(t.compare("eq", exponent, 0.0), nothing, product)
        return [by_self, by_exponent]

    return t.record(out, [self, exponent], gradient)


@traced("pow.Scalar")
def pow_of_number(t: Tracer, self: float, exponent: Node) -> Node:
    out = t.pointwise("aten::pow.Scalar", self, exponent)
    return t.derive(out, exponent, lambda grad: binary.by_factor(t, grad, out, math.log(self)))


@traced("addcmul")
def addcmul(t: Tracer, self: Node, tensor1: Node, tensor2: Node, *, value: float = 1) -> Node:
    more: dict[str, Any] = {} if value == 1 else {"value": value}
    out = t.pointwise("aten::addcmul", self, tensor1, tensor2, **more)
    return t.derive_each(
        out,
        [self, tensor1, tensor2],
        (0, lambda grad: grad),
        (1, lambda grad: binary.by_factor(t, grad, tensor2, value)),
        (2, lambda grad: binary.by_factor(t, grad, tensor1, value)),
    )


@traced("addcdiv")
def addcdiv(t: Tracer, self: Node, tensor1: Node, tensor2: Node, *, value: float = 1) -> Node:
    more: dict[str, Any] = {} if value == 1 else {"value": value}
    out = t.pointwise("aten::addcdiv", self, tensor1, tensor2, **more)
    return t.derive_each(
        out,
        [self, tensor1, tensor2],
        (0, lambda grad: grad),
        (1, lambda grad: t.mul(grad, t.div(t.full(tensor2.shape, value, tensor2.dtype), tensor2))),
        (2, lambda grad: binary.by_divisor(t, grad, tensor1, tensor2, value)),
    )


@traced("lerp.Scalar")
def lerp_by_number(t: Tracer, self: Node, end: Node, weight: float) -> Node:
    """torch/_inductor/decomposition.py, `_lerp_scalar`: from the end that is nearer."""
    difference = t.sub(end, self)
    near = -0.5 < weight < 0.5
    start, alpha = (self, weight) if near else (end, -(1.0 - weight))
    out = t.pointwise("aten::add.Tensor", start, difference, alpha=alpha)
    return t.derive_each(
        out, [self, end], (1, lambda grad: t.scale(grad, weight)), (0, lambda grad: t.scale(grad, 1 - weight))
    )


@traced("logaddexp")
def logaddexp(t: Tracer, self: Node, other: Node) -> Node:
    """torch/_refs"""
    first = t.compare("ge", self, other)
    large, small = chosen(t, first, self, other), chosen(t, first, other, self)
    finite = t.compare("ne", t.call("abs", self), math.inf)
    is_number = t.pointwise("aten::eq.Tensor", self, self, dtype=dtypes.bool_)
    regular = boolean(t, "aten::mul.Tensor", is_number, finite)
    unknown = boolean(t, "aten::logical_not", regular)
    same = boolean(t, "aten::logical_and", unknown, t.compare("eq", self, other))
    summed = t.add(large, t.call("log1p", t.call("exp", t.sub(small, large))))
    out = chosen(t, same, self, summed)
    return t.derive_each(
        out,
        [self, other],
        (1, lambda grad: binary.softmax_share(t, grad, other, self)),
        (0, lambda grad: binary.softmax_share(t, grad, self, other)),
    )


@traced("logaddexp2")
def logaddexp2(t: Tracer, self: Node, other: Node) -> Node:
    """torch/_refs"""
    first = t.compare("ge", self, other)
    large, small = chosen(t, first, self, other), chosen(t, first, other, self)
    infinite = boolean(t, "aten::isinf", self)
    same = boolean(t, "aten::logical_and", infinite, t.compare("eq", self, other))
    logarithm = t.mul(t.call("log1p", t.call("exp2", t.sub(small, large))), 1 / math.log(2))
    return t.derive_each(
        chosen(t, same, self, t.add(large, logarithm)),
        [self, other],
        (1, lambda grad: binary.power_share(t, grad, other, self)),
        (0, lambda grad: binary.power_share(t, grad, self, other)),
    )


@traced("lerp.Tensor")
def lerp(t: Tracer, self: Node, end: Node, weight: Node) -> Node:
    """Nearer to the end the sum starts there (`lerp` of torch/_refs)."""
    between = t.sub(end, self)
    near_end = t.compare("ge", t.call("abs", weight), 0.5)
    rest = t.call("neg", t.sub(1, weight))
    factor = chosen(t, near_end, rest, weight)
    base = chosen(t, near_end, end, self)
    out = t.pointwise("aten::addcmul", base, factor, between)
    return t.derive_each(
        out,
        [self, end, weight],
        (1, lambda grad: t.mul(grad, weight)),
        (0, lambda grad: binary.by_start(t, grad, weight)),
        (2, lambda grad: binary.by_weight(t, grad, self, end)),
    )


@traced("atan2")
def atan2(t: Tracer, self: Node, other: Node) -> Node:
    out = t.pointwise("aten::atan2", self, other)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        other_square = t.mul(other, other)
        total = t.add(t.mul(self, self), other_square)
        inverse = t.call("reciprocal", total)
        at_zero = t.compare("eq", total, 0)
        inverse = chosen(t, at_zero, t.full((), 0, total.dtype), inverse)
        by_self = t.mul(t.mul(grad, other), inverse) if need[0] else None
        by_other = t.mul(t.mul(grad, t.call("neg", self)), inverse) if need[1] else None
        return [by_self, by_other]

    return t.record(out, [self, other], gradient)


@traced("hypot")
def hypot(t: Tracer, self: Node, other: Node) -> Node:
    out = t.pointwise("aten::hypot", self, other)
    return t.derive_each(
        out,
        [self, other],
        (1, lambda grad: binary.product_over(t, grad, other, out)),
        (0, lambda grad: binary.product_over(t, grad, self, out)),
    )


def xlogy_value(t: Tracer, self: Any, other: Node) -> Node:
    """`xlogy` of torch/_refs."""
    at_zero = t.compare("eq", self, 0)
    product = t.mul(self, t.call("log", other))
    result = t.where(at_zero, 0, product)
    return t.where(isnan(t, other), math.nan, result)


@traced("xlogy.Tensor special_xlogy")
def xlogy(t: Tracer, self: Node, other: Node) -> Node:
    out = xlogy_value(t, self, other)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        by_other = binary.product_over(t, grad, self, other) if need[1] else None
        by_self = None
        if need[0]:
            value = xlogy_value(t, grad, other)
            low = t.compare("le", other, 0)
            both = t.pointwise("aten::bitwise_and.Tensor", t.compare("eq", self, 0), low)
            by_self = t.where(both, 0, value)
        return [by_self, by_other]

    return t.record(out, [self, other], gradient)
