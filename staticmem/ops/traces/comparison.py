"""Comparisons, choices and logic, element by element.

Sources: tools/autograd/derivatives.yaml, torch/_decomp/decompositions.py, torch/_inductor/decomposition.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.arithmetic import tensor
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form, gradient_of


def boolean(t: Tracer, target: str, *args: Any) -> Node:
    return t.pointwise(target, *args, dtype=dtypes.bool_)


def _comparison(name: str) -> None:
    def function(t: Tracer, self: Any, other: Any) -> Node:
        return boolean(t, f"aten::{name}.{'Tensor' if isinstance(other, Node) else 'Scalar'}", self, other)

    traced(name)(function)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_name)


def _logical(name: str) -> None:
    traced(name)(lambda t, self, other: boolean(t, f"aten::{name}", self, other))


for _name in ("logical_and", "logical_or", "logical_xor"):
    _logical(_name)


def _bitwise(name: str) -> None:
    def function(t: Tracer, self: Any, other: Any) -> Node:
        if not isinstance(self, Node):
            return t.pointwise(f"aten::{name}.Scalar_Tensor", self, other)
        return t.pointwise(f"aten::{name}.{'Tensor' if isinstance(other, Node) else 'Scalar'}", self, other)

    traced(name)(function)


for _name in "bitwise_and bitwise_or bitwise_xor __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift".split():
    _bitwise(_name)


def chosen(t: Tracer, condition: Node, a: Node, b: Node) -> Node:
    return t.pointwise("aten::where.self", condition, a, b, dtype=a.dtype)


@traced("where")
def where(t: Tracer, condition: Node, self: Any, other: Any) -> Node:
    out = t.where(condition, self, other)
    return t.derive_each(
        out,
        [tensor(self), tensor(other)],
        (1, lambda grad: chosen(t, condition, t.full((), 0, grad.dtype), grad)),
        (0, lambda grad: chosen(t, condition, grad, t.full((), 0, grad.dtype))),
    )


@traced("isin.Tensor_Tensor")
def isin(t: Tracer, elements: Node, test_elements: Node, **_: Any) -> Node:
    """`isin_default` of torch/_refs, for few test elements."""
    expanded = t.view(elements, (*elements.shape, *[1] * test_elements.ndim))
    equal = t.compare("eq", expanded, test_elements)
    dims = tuple(range(-1, -test_elements.ndim - 1, -1))
    return t.reduce("aten::any.dims", equal, dims, False, dtypes.bool_)


@traced("floor_divide")
def floor_divide(t: Tracer, self: Any, other: Any) -> Node:
    return t.pointwise("aten::div.Tensor_mode", self, other, rounding_mode="floor")


@traced("masked_fill")
def masked_fill(t: Tracer, self: Node, mask: Node, value: Node | float) -> Node:
    """where, contiguous. The gradient of the result is filled with zeros, that of a tensor of one value is a sum."""
    filler = t.cast(value, self.dtype) if isinstance(value, Node) else t.full((), value, self.dtype)
    out = _filled(t, mask, filler, self)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        by_self = _filled(t, mask, t.full((), 0, grad.dtype), grad) if need[0] else None
        if not need[1]:
            return [by_self, None]
        kept = t.pointwise("aten::where.self", mask, grad, t.full((), 0, grad.dtype), dtype=grad.dtype)
        return [by_self, t.new("aten::sum", (kept,), (), grad.dtype)]

    return t.record(out, [self, value if isinstance(value, Node) else None], gradient)


def _filled(t: Tracer, mask: Node, value: Node, self: Node) -> Node:
    out = t.pointwise("aten::where.self", mask, value, self, dtype=self.dtype)
    return out if layout.is_contiguous(out.shape, out.strides) else t.clone(out)


for _name in ("_is_all_true", "_is_any_true"):
    traced(_name)(lambda t, self, target=f"aten::{_name}": t.node(target, (self,), form((), dtypes.bool_)))
