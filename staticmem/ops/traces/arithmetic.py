"""Sums, products, quotients and remainders of tensors and numbers.

Gradients are those of tools/autograd/derivatives.yaml; autograd's code computes them in the order of the arguments'
names (other before self). Numbers stay numbers: the graph has `mul.Tensor(x, 2)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.ir import dtypes
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, gradient_of


def tensor(value: Any) -> Node | None:
    """The operand, None where it is a number."""
    return value if type(value) is Node else None


def _real(t: Tracer, out: Node) -> Node:
    if out.dtype.kind == "complex" and t.grad_enabled:
        raise ValueError("gradients of complex numbers are not traced")
    return out


def clamped(t: Tracer, x: Node, low: float, high: float) -> Node:
    return t.pointwise("aten::clamp_max", t.pointwise("aten::clamp_min", x, low), high)


def scaled(t: Tracer, node: Node, factor: float) -> Node:
    """`maybe_multiply`."""
    return node if factor == 1 else t.pointwise("aten::mul.Scalar", node, factor)


def _sum(t: Tracer, target: str, self: Any, other: Any, alpha: float, sign: int) -> Node:
    more: dict[str, Any] = {} if alpha == 1 else {"alpha": alpha}
    out = t.pointwise(target, self, other, **more)
    if any(type(value) is Node and value.dtype.kind != out.dtype.kind for value in (self, other)):
        _real(t, out)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        by_other = None
        if need[1]:
            by_other = scaled(t, grad if sign > 0 else t.pointwise("aten::neg", grad), alpha)
        return [grad, by_other]

    return t.record(out, [tensor(self), tensor(other)], gradient)


@traced("add")
def add(t: Tracer, self: Any, other: Any, *, alpha: float = 1) -> Node:
    return _sum(t, "aten::add.Tensor", self, other, alpha, 1)


@traced("add.Scalar")
def add_scalar(t: Tracer, self: Any, other: Any, alpha: float = 1) -> Node:
    return _sum(t, "aten::add.Scalar", self, other, alpha, 1)


@traced("sub")
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
    return t.derive_each(
        out,
        [tensor(self), tensor(other)],
        (1, lambda grad: t.mul(grad, self)),
        (0, lambda grad: t.pointwise(target, grad, other)),
    )


@traced("mul")
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
        grad = gradient_of(grads)
        by_other = None
        if need[1]:
            square = t.div(t.div(self, other), other)
            by_other = t.mul(t.pointwise("aten::neg", grad), square)
        by_self = t.pointwise(target, grad, other) if need[0] else None
        return [by_self, by_other]

    return t.record(out, [tensor(self), tensor(other)], gradient)


@traced("div")
def div(t: Tracer, self: Any, other: Any) -> Node:
    return _quotient(t, "aten::div.Tensor", self, other)


@traced("div.Scalar")
def div_scalar(t: Tracer, self: Node, other: Any) -> Node:
    return _quotient(t, "aten::div.Scalar", self, other)


@traced("div.Tensor_mode div.Scalar_mode")
def div_mode(t: Tracer, self: Any, other: Any, *, rounding_mode: str | None = None) -> Node:
    """A rounded quotient has the gradient zero."""
    if rounding_mode is None:
        return div(t, self, other)
    out = t.pointwise("aten::div.Tensor_mode", self, other, rounding_mode=rounding_mode)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [t.zeros_like(grads[0]) if wanted else None for wanted in reversed(need)][::-1]

    return t.record(out, [tensor(self), tensor(other)], gradient)


def _remainder(name: str, rounding: str) -> None:
    def function(t: Tracer, self: Any, other: Any) -> Node:
        if not isinstance(self, Node):
            return t.pointwise(f"aten::{name}.Scalar_Tensor", self, other)
        if not isinstance(other, Node):
            return t.derive(t.pointwise(f"aten::{name}.Scalar", self, other), self, lambda g: g)
        out = t.pointwise(f"aten::{name}.Tensor", self, other)

        def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
            grad = gradient_of(grads)
            by_other = None
            if need[1]:
                quotient = t.pointwise("aten::div.Tensor_mode", self, other, rounding_mode=rounding)
                by_other = t.mul(t.call("neg", grad), quotient)
            return [grad, by_other]

        return t.record(out, [self, other], gradient)

    traced(name)(function)


_remainder("remainder", "floor")

_remainder("fmod", "trunc")
