"""Comparisons, choices and bounds, element by element.

Sources: tools/autograd/derivatives.yaml, torch/_decomp/decompositions.py, torch/_inductor/decomposition.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.arithmetic import mul, sub
from staticmem.ops.traces.registry import TRACED, traced
from staticmem.ops.traces.unary import call, isnan, with_gradient
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer


def _node(value: Any) -> Node | None:
    return value if isinstance(value, Node) else None


def _boolean(t: Tracer, target: str, *args: Any) -> Node:
    return t.pointwise(target, *args, dtype=dtypes.bool_)


def _comparison(name: str, names: str) -> None:
    def function(t: Tracer, self: Any, other: Any) -> Node:
        return _boolean(t, f"aten::{name}.{'Tensor' if isinstance(other, Node) else 'Scalar'}", self, other)

    traced(names)(function)


for _name, _alias in (
    ("eq", ""), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal"),
):  # fmt: skip
    _comparison(_name, f"{_name} {_alias}".strip())


def _logical(name: str) -> None:
    traced(name)(lambda t, self, other: _boolean(t, f"aten::{name}", self, other))


for _name in ("logical_and", "logical_or", "logical_xor"):
    _logical(_name)


def _bitwise(name: str, names: str) -> None:
    def function(t: Tracer, self: Any, other: Any) -> Node:
        if not isinstance(self, Node):
            return t.pointwise(f"aten::{name}.Scalar_Tensor", self, other)
        return t.pointwise(f"aten::{name}.{'Tensor' if isinstance(other, Node) else 'Scalar'}", self, other)

    traced(names)(function)


for _name, _names in (
    ("bitwise_and", "bitwise_and __and__"), ("bitwise_or", "bitwise_or __or__"),
    ("bitwise_xor", "bitwise_xor __xor__"), ("__lshift__", "__lshift__"), ("__rshift__", "__rshift__"),
    ("bitwise_left_shift", "bitwise_left_shift"), ("bitwise_right_shift", "bitwise_right_shift"),
):  # fmt: skip
    _bitwise(_name, _names)


def chosen(t: Tracer, condition: Node, a: Node, b: Node) -> Node:
    return t.pointwise("aten::where.self", condition, a, b, dtype=a.dtype)


@traced("where")
def where(t: Tracer, condition: Node, self: Any, other: Any) -> Node:
    out = t.where(condition, self, other)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        by_other = chosen(t, condition, t.full((), 0, grad.dtype), grad) if need[1] else None
        by_self = chosen(t, condition, grad, t.full((), 0, grad.dtype)) if need[0] else None
        return [by_self, by_other]

    t.record(out, [_node(self), _node(other)], gradient)
    return out


def _bound(t: Tracer, name: str, self: Node, bound: Any) -> Node:
    return t.pointwise(f"aten::{name}{'.Tensor' if isinstance(bound, Node) else ''}", self, bound)


def _masked(t: Tracer, grad: Node, mask: Callable[[], Node]) -> Node:
    zero = t.full((), 0, grad.dtype)
    return chosen(t, mask(), grad, zero)


def _only(t: Tracer, self: Node, bound: Any, name: str, beyond: str, within: str) -> Node:
    out = _bound(t, name, self, bound)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        by_bound = _masked(t, grad, lambda: t.compare(beyond, self, bound)) if need[1] else None
        by_self = _masked(t, grad, lambda: t.compare(within, self, bound)) if need[0] else None
        return [by_self, by_bound]

    t.record(out, [self, _node(bound)], gradient)
    return out


@traced("clamp_min")
def clamp_min(t: Tracer, self: Node, min: Any) -> Node:
    return _only(t, self, min, "clamp_min", "lt", "ge")


@traced("clamp_max")
def clamp_max(t: Tracer, self: Node, max: Any) -> Node:
    return _only(t, self, max, "clamp_max", "gt", "le")


@traced("clamp clip")
def clamp(t: Tracer, self: Node, min: Any = None, max: Any = None) -> Node:
    """`clamp_backward`, `clamp_backward_min_max` of FunctionsManual.cpp."""
    if max is None:
        return clamp_min(t, self, min)
    if min is None:
        return clamp_max(t, self, max)
    numbers = not isinstance(min, Node) and not isinstance(max, Node)
    x = t.opmath(self) if numbers else self
    out = t.cast(_bound(t, "clamp_max", _bound(t, "clamp_min", x, min), max), self.dtype)

    def both(target: str, a: Node, b: Node) -> Node:
        return _boolean(t, f"aten::logical_{target}", a, b)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        by_min = by_max = by_self = None
        if any(need[1:]):
            zero = t.full((), 0, grad.dtype)
            if need[1]:
                below = both("and", t.compare("lt", self, min), t.compare("lt", min, max))
                by_min = chosen(t, below, grad, zero)
            if need[2]:
                above = both("or", t.compare("gt", self, max), t.compare("lt", max, min))
                by_max = chosen(t, above, grad, zero)
        if need[0]:
            by_self = _masked(t, grad, lambda: both("and", t.compare("ge", self, min), t.compare("le", self, max)))
        return [by_self, by_min, by_max]

    t.record(out, [self, _node(min), _node(max)], gradient)
    return out


def _zeroed(t: Tracer, condition: Node, grad: Node) -> Node:
    """`masked_fill`"""
    filled = chosen(t, condition, t.full((), 0, grad.dtype), grad)
    return filled if layout.is_contiguous(filled.shape, filled.strides) else t.clone(filled)


def _larger(name: str, names: str, hides_other: str, hides_self: str) -> None:
    """maximum and minimum: equal elements share the gradient (`masked_fill` of its half)."""

    def function(t: Tracer, self: Node, other: Node) -> Node:
        out = t.pointwise(f"aten::{name}", self, other)

        def share(grad: Node, hides: str) -> Node:
            half = t.pointwise("aten::div.Scalar", grad, 2)
            shared = chosen(t, t.compare("eq", self, other), half, grad)
            return _zeroed(t, t.compare(hides, self, other), shared)

        def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
            assert grads[0] is not None
            by_other = share(grads[0], hides_other) if need[1] else None
            by_self = share(grads[0], hides_self) if need[0] else None
            return [by_self, by_other]

        t.record(out, [self, other], gradient)
        return out

    traced(names)(function)


_larger("maximum", "maximum max.other", "gt", "lt")
_larger("minimum", "minimum min.other", "lt", "gt")


def _larger_number(name: str, less: str, hides_self: str) -> None:
    """fmax and fmin: a number rather than NaN (torch/_refs)."""

    def function(t: Tracer, self: Node, other: Node) -> Node:
        missing = isnan(t, other)
        keeps = t.pointwise("aten::bitwise_or.Tensor", missing, t.compare(less, other, self), dtype=dtypes.bool_)
        out = chosen(t, keeps, self, other)

        def kept() -> Node:
            return _boolean(t, "aten::logical_or", t.compare(hides_self, self, other), isnan(t, other))

        def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
            grad = grads[0]
            assert grad is not None
            by_other = by_self = None
            if need[1]:
                by_other = _zeroed(t, kept(), grad)
            if need[0]:
                by_self = _zeroed(t, _boolean(t, "aten::logical_not", kept()), grad)
            return [by_self, by_other]

        t.record(out, [self, other], gradient)
        return out

    traced(name)(function)


@traced("logaddexp")
def logaddexp(t: Tracer, self: Node, other: Node) -> Node:
    """torch/_refs"""
    first = t.compare("ge", self, other)
    large, small = chosen(t, first, self, other), chosen(t, first, other, self)
    finite = t.compare("ne", call(t, "abs", self), math.inf)
    is_number = t.pointwise("aten::eq.Tensor", self, self, dtype=dtypes.bool_)
    regular = _boolean(t, "aten::mul.Tensor", is_number, finite)
    unknown = _boolean(t, "aten::logical_not", regular)
    same = _boolean(t, "aten::logical_and", unknown, t.compare("eq", self, other))
    summed = t.add(large, call(t, "log1p", call(t, "exp", t.sub(small, large))))
    out = chosen(t, same, self, summed)

    def share(grad: Node, mine: Node, theirs: Node) -> Node:
        rest = t.pointwise("aten::add.Scalar", call(t, "exp", t.sub(theirs, mine)), 1)
        return t.div(grad, rest)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        by_other = share(grad, other, self) if need[1] else None
        by_self = share(grad, self, other) if need[0] else None
        return [by_self, by_other]

    t.record(out, [self, other], gradient)
    return out


_larger_number("fmax", "lt", "ge")
_larger_number("fmin", "gt", "le")


@traced("lerp.Tensor")
def lerp(t: Tracer, self: Node, end: Node, weight: Node) -> Node:
    """Nearer to the end the sum starts there (`lerp` of torch/_refs)."""
    between = t.sub(end, self)
    near_end = t.compare("ge", call(t, "abs", weight), 0.5)
    rest = call(t, "neg", t.sub(1, weight))
    factor = chosen(t, near_end, rest, weight)
    base = chosen(t, near_end, end, self)
    out = t.pointwise("aten::addcmul", base, factor, between)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        by_end = t.mul(grad, weight) if need[1] else None
        by_self = t.mul(grad, t.sub(t.full_like(weight, 1), weight)) if need[0] else None
        by_weight = t.mul(grad, t.sub(end, self)) if need[2] else None
        return [by_self, by_end, by_weight]

    t.record(out, [self, end, weight], gradient)
    return out


def _remainder(name: str, rounding: str) -> None:
    def function(t: Tracer, self: Any, other: Any) -> Node:
        if not isinstance(self, Node):
            return t.pointwise(f"aten::{name}.Scalar_Tensor", self, other)
        if not isinstance(other, Node):
            return with_gradient(t, t.pointwise(f"aten::{name}.Scalar", self, other), self, lambda g: g)
        out = t.pointwise(f"aten::{name}.Tensor", self, other)

        def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
            grad = grads[0]
            assert grad is not None
            by_other = None
            if need[1]:
                quotient = t.pointwise("aten::div.Tensor_mode", self, other, rounding_mode=rounding)
                by_other = t.mul(call(t, "neg", grad), quotient)
            return [grad, by_other]

        t.record(out, [self, other], gradient)
        return out

    traced(name)(function)


_remainder("remainder", "floor")
_remainder("fmod", "trunc")


@traced("atan2 arctan2")
def atan2(t: Tracer, self: Node, other: Node) -> Node:
    out = t.pointwise("aten::atan2", self, other)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        other_square = t.mul(other, other)
        total = t.add(t.mul(self, self), other_square)
        inverse = call(t, "reciprocal", total)
        at_zero = t.compare("eq", total, 0)
        inverse = chosen(t, at_zero, t.full((), 0, total.dtype), inverse)
        by_self = t.mul(t.mul(grad, other), inverse) if need[0] else None
        by_other = t.mul(t.mul(grad, call(t, "neg", self)), inverse) if need[1] else None
        return [by_self, by_other]

    t.record(out, [self, other], gradient)
    return out


@traced("hypot")
def hypot(t: Tracer, self: Node, other: Node) -> Node:
    out = t.pointwise("aten::hypot", self, other)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        by_other = t.div(t.mul(grads[0], other), out) if need[1] else None
        by_self = t.div(t.mul(grads[0], self), out) if need[0] else None
        return [by_self, by_other]

    t.record(out, [self, other], gradient)
    return out


def xlogy_value(t: Tracer, self: Any, other: Node) -> Node:
    """`xlogy` of torch/_refs."""
    at_zero = t.compare("eq", self, 0)
    product = t.mul(self, call(t, "log", other))
    result = t.where(at_zero, 0, product)
    return t.where(isnan(t, other), math.nan, result)


@traced("xlogy.Tensor special_xlogy")
def xlogy(t: Tracer, self: Node, other: Node) -> Node:
    out = xlogy_value(t, self, other)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        by_other = t.div(t.mul(grad, self), other) if need[1] else None
        by_self = None
        if need[0]:
            value = xlogy_value(t, grad, other)
            low = t.compare("le", other, 0)
            both = t.pointwise("aten::bitwise_and.Tensor", t.compare("eq", self, 0), low)
            by_self = t.where(both, 0, value)
        return [by_self, by_other]

    t.record(out, [self, other], gradient)
    return out


@traced("isin.Tensor_Tensor")
def isin(t: Tracer, elements: Node, test_elements: Node, **_: Any) -> Node:
    """`isin_default` of torch/_refs, for few test elements."""
    expanded = t.view(elements, (*elements.shape, *[1] * test_elements.ndim))
    equal = t.compare("eq", expanded, test_elements)
    dims = tuple(range(-1, -test_elements.ndim - 1, -1))
    return t.reduce("aten::any.dims", equal, dims, False, dtypes.bool_)


@traced("softshrink")
def softshrink(t: Tracer, self: Node, lambd: float = 0.5) -> Node:
    """torch/_refs/nn/functional: nan stays nan by a product with zero. Autograd sees its parts."""
    outside = t.compare("gt", call(t, "abs", self), lambd)
    shrunk = sub(t, self, mul(t, TRACED["aten::sign"](t, self), lambd))
    return where(t, outside, shrunk, mul(t, self, 0))
