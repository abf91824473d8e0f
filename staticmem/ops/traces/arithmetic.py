"""Sums, products, quotients and powers of tensors and numbers.

Gradients are those of tools/autograd/derivatives.yaml; autograd's code computes them in the order of the arguments'
names (other before self). Numbers stay numbers: the graph has `mul.Tensor(x, 2)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.ir import dtypes
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer


def tensor(value: Any) -> Node | None:
    """The operand, None where it is a number."""
    return value if type(value) is Node else None


def _real(t: Tracer, out: Node) -> Node:
    if out.dtype.kind == "complex" and t.grad_enabled:
        raise ValueError("gradients of complex numbers are not traced")
    return out


def _scaled(t: Tracer, grad: Node, alpha: float) -> Node:
    return grad if alpha == 1 else t.pointwise("aten::mul.Scalar", grad, alpha)


def _sum(t: Tracer, target: str, self: Any, other: Any, alpha: float, sign: int) -> Node:
    more: dict[str, Any] = {} if alpha == 1 else {"alpha": alpha}
    out = t.pointwise(target, self, other, **more)
    if any(type(value) is Node and value.dtype.kind != out.dtype.kind for value in (self, other)):
        _real(t, out)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        by_other = None
        if need[1]:
            by_other = _scaled(t, grad if sign > 0 else t.pointwise("aten::neg", grad), alpha)
        return [grad, by_other]

    t.record(out, [tensor(self), tensor(other)], gradient)
    return out


@traced("add")
def add(t: Tracer, self: Any, other: Any, *, alpha: float = 1) -> Node:
    return _sum(t, "aten::add.Tensor", self, other, alpha, 1)


@traced("add.Scalar")
def add_scalar(t: Tracer, self: Any, other: Any, alpha: float = 1) -> Node:
    return _sum(t, "aten::add.Scalar", self, other, alpha, 1)


@traced("sub subtract")
def sub(t: Tracer, self: Any, other: Any, *, alpha: float = 1) -> Node:
    return _sum(t, "aten::sub.Tensor", self, other, alpha, -1)


@traced("sub.Scalar")
def sub_scalar(t: Tracer, self: Any, other: Any, alpha: float = 1) -> Node:
    return _sum(t, "aten::sub.Scalar", self, other, alpha, -1)


@traced("rsub")
def rsub(t: Tracer, self: Any, other: Any, alpha: float = 1) -> Node:
    """Decomposes to `other - alpha * self`."""
    return sub(t, other, self, alpha=alpha)


def _product(t: Tracer, target: str, self: Any, other: Any) -> Node:
    out = _real(t, t.pointwise(target, self, other))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        by_other = t.mul(grads[0], self) if need[1] else None
        by_self = t.pointwise(target, grads[0], other) if need[0] else None
        return [by_self, by_other]

    t.record(out, [tensor(self), tensor(other)], gradient)
    return out


@traced("mul multiply")
def mul(t: Tracer, self: Any, other: Any) -> Node:
    return _product(t, "aten::mul.Tensor", self, other)


@traced("mul.Scalar")
def mul_scalar(t: Tracer, self: Node, other: Any) -> Node:
    return _product(t, "aten::mul.Scalar", self, other)


def _quotient(t: Tracer, target: str, self: Any, other: Any) -> Node:
    operands = [value for value in (self, other) if type(value) is Node]
    whole = all(node.dtype.kind in ("int", "bool") for node in operands) and not isinstance(self, float)
    dtype = dtypes.float32 if whole and not isinstance(other, float) else None
    out = _real(t, t.pointwise(target, self, other, dtype=dtype))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        """`div_tensor_self_backward`, `div_tensor_other_backward`."""
        grad = grads[0]
        assert grad is not None
        by_other = None
        if need[1]:
            square = t.div(t.div(self, other), other)
            by_other = t.mul(t.pointwise("aten::neg", grad), square)
        by_self = t.pointwise(target, grad, other) if need[0] else None
        return [by_self, by_other]

    t.record(out, [tensor(self), tensor(other)], gradient)
    return out


@traced("div divide true_divide")
def div(t: Tracer, self: Any, other: Any) -> Node:
    return _quotient(t, "aten::div.Tensor", self, other)


@traced("div.Scalar")
def div_scalar(t: Tracer, self: Node, other: Any) -> Node:
    return _quotient(t, "aten::div.Scalar", self, other)


@traced("div.Tensor_mode div.Scalar_mode divide.Tensor_mode")
def div_mode(t: Tracer, self: Any, other: Any, *, rounding_mode: str | None = None) -> Node:
    """A rounded quotient has the gradient zero."""
    if rounding_mode is None:
        return div(t, self, other)
    out = t.pointwise("aten::div.Tensor_mode", self, other, rounding_mode=rounding_mode)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [t.zeros_like(grads[0]) if wanted else None for wanted in reversed(need)][::-1]

    t.record(out, [tensor(self), tensor(other)], gradient)
    return out


@traced("floor_divide")
def floor_divide(t: Tracer, self: Any, other: Any) -> Node:
    return t.pointwise("aten::div.Tensor_mode", self, other, rounding_mode="floor")


@traced("neg negative")
def neg(t: Tracer, self: Node) -> Node:
    out = t.pointwise("aten::neg", self)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        return [t.pointwise("aten::neg", grads[0])]

    t.record(out, [self], gradient)
    return out


@traced("pow.Tensor_Scalar pow pow_.Scalar")
def pow_(t: Tracer, self: Any, exponent: Any) -> Node:
    """`pow_backward`: grad * (exponent * self ** (exponent - 1)), where the exponent is a float: so x ** 1.0 stays."""
    if type(exponent) is Node:
        return pow_tensor(t, self, exponent) if type(self) is Node else pow_of_number(t, self, exponent)
    out = t.pointwise("aten::pow.Tensor_Scalar", self, exponent)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        if exponent == 0:
            return [t.zeros_like(self)]
        power = t.pointwise("aten::pow.Tensor_Scalar", self, float(exponent) - 1)
        return [t.mul(grads[0], t.pointwise("aten::mul.Scalar", power, float(exponent)))]

    t.record(out, [self], gradient)
    return out


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

    t.record(out, [self, exponent], gradient)
    return out


@traced("pow.Scalar")
def pow_of_number(t: Tracer, self: float, exponent: Node) -> Node:
    out = t.pointwise("aten::pow.Scalar", self, exponent)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        return [t.mul(grads[0], t.pointwise("aten::mul.Scalar", out, math.log(self)))]

    t.record(out, [exponent], gradient)
    return out


@traced("square")
def square(t: Tracer, self: Node) -> Node:
    return pow_(t, self, 2)


@traced("reciprocal")
def reciprocal(t: Tracer, self: Node) -> Node:
    out = t.pointwise("aten::reciprocal", self)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        square = t.mul(out, out)
        return [t.mul(t.pointwise("aten::neg", grads[0]), square)]

    t.record(out, [self], gradient)
    return out


@traced("addcmul")
def addcmul(t: Tracer, self: Node, tensor1: Node, tensor2: Node, *, value: float = 1) -> Node:
    more: dict[str, Any] = {} if value == 1 else {"value": value}
    out = t.pointwise("aten::addcmul", self, tensor1, tensor2, **more)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        def by(other: Node) -> Node:
            return t.mul(grads[0], t.pointwise("aten::mul.Scalar", other, value))

        return [grads[0], by(tensor2) if need[1] else None, by(tensor1) if need[2] else None]

    t.record(out, [self, tensor1, tensor2], gradient)
    return out


@traced("addcdiv")
def addcdiv(t: Tracer, self: Node, tensor1: Node, tensor2: Node, *, value: float = 1) -> Node:
    more: dict[str, Any] = {} if value == 1 else {"value": value}
    out = t.pointwise("aten::addcdiv", self, tensor1, tensor2, **more)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad, by_1, by_2 = grads[0], None, None
        assert grad is not None
        if need[1]:
            by_1 = t.mul(grad, t.div(t.full(tensor2.shape, value, tensor2.dtype), tensor2))
        if need[2]:
            square = t.mul(tensor2, tensor2)
            quotient = t.div(t.pointwise("aten::mul.Scalar", tensor1, value), square)
            by_2 = t.mul(t.pointwise("aten::neg", grad), quotient)
        return [grad, by_1, by_2]

    t.record(out, [self, tensor1, tensor2], gradient)
    return out


@traced("lerp.Scalar")
def lerp(t: Tracer, self: Node, end: Node, weight: float) -> Node:
    """torch/_inductor/decomposition.py, `_lerp_scalar`: from the end that is nearer."""
    difference = t.sub(end, self)
    near = -0.5 < weight < 0.5
    start, alpha = (self, weight) if near else (end, -(1.0 - weight))
    out = t.pointwise("aten::add.Tensor", start, difference, alpha=alpha)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        by_end = t.pointwise("aten::mul.Scalar", grads[0], weight) if need[1] else None
        by_self = t.pointwise("aten::mul.Scalar", grads[0], 1 - weight) if need[0] else None
        return [by_self, by_end]

    t.record(out, [self, end], gradient)
    return out
