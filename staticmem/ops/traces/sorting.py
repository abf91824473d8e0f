"""Extremes and sorted values: extern kernels or reductions, whose gradients go to the positions.

Sources: tools/autograd/derivatives.yaml and FunctionsManual.cpp (`value_selecting_reduction_backward`,
`cummaxmin_backward`, `evenly_distribute_backward`, `scale_grad_by_count`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.comparison import boolean, chosen
from staticmem.ops.traces.reduction import Dims, reduced_axes
from staticmem.ops.traces.registry import trace_of, traced
from staticmem.ops.traces.unary import isnan
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form, gradient_of, reduced


def _selected(
    t: Tracer, self: Node, values: Node, positions: Node, dim: int, keepdim: bool, sums: bool = False
) -> None:
    """The gradient of values that were picked out of `self` along a dimension."""

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad, index = grads[0], positions
        assert grad is not None
        if not keepdim and self.ndim:
            grad, index = t.unsqueeze(grad, dim), t.unsqueeze(positions, dim)
        zeros = t.full(self.shape, 0, grad.dtype)
        target = "aten::scatter_add" if sums else "aten::scatter.src"
        return [t.new(target, (zeros, dim, index, grad), self.shape, grad.dtype)]

    t.record([values], [self], gradient)


def _along(name: str, default: int | None = None) -> None:
    def function(t: Tracer, self: Node, *args: Any, dim: Any = None, keepdim: bool = False) -> list[Node]:
        """`kthvalue` has its k first."""
        rest = list(args)
        ahead = [rest.pop(0)] if name == "kthvalue" else []
        if dim is None:
            dim = rest.pop(0) if rest else default
        keepdim = rest.pop(0) if rest else keepdim
        shape = reduced(self.shape, [self.dim(dim)], keepdim)
        target = f"aten::{name}" if name in ("kthvalue", "mode") else f"aten::{name}.dim"
        forms = [form(shape, self.dtype), form(shape, dtypes.int64)]
        values, positions = t.several(target, (self, *ahead, dim, keepdim), forms)
        _selected(t, self, values, positions, dim, keepdim)
        return [values, positions]

    traced(name if name in ("kthvalue", "mode") else f"{name}.dim")(function)


for _name, _default in (("max", None), ("min", None), ("median", None), ("kthvalue", -1), ("mode", -1)):
    _along(_name, _default)


@traced("topk")
def topk(t: Tracer, self: Node, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Node]:
    axis = self.dim(dim)
    shape = (*self.shape[:axis], k, *self.shape[axis + 1 :])
    more = () if largest and sorted else (largest, sorted)
    head: tuple[Any, ...] = (self, k) if dim == -1 and not more else (self, k, dim, *more)
    values, positions = t.several("aten::topk", head, [form(shape, self.dtype), form(shape, dtypes.int64)])
    _selected(t, self, values, positions, dim, True)
    return [values, positions]


@traced("sort")
def sort(t: Tracer, self: Node, dim: int = -1, descending: bool = False) -> list[Node]:
    return _sorted(t, self, "aten::sort", (self, dim, descending), dim, {})


@traced("sort.stable")
def sort_stable(t: Tracer, self: Node, *, stable: bool | None = None, dim: int = -1, descending: bool = False,
                ) -> list[Node]:  # fmt: skip
    how = {"stable": stable, "dim": dim, "descending": descending}
    return _sorted(t, self, "aten::sort.stable", (self,), dim, how)


@traced("argsort")
def argsort(t: Tracer, self: Node, dim: int = -1, descending: bool = False) -> Node:
    return sort(t, self, dim, descending)[1]


def _sorted(t: Tracer, self: Node, target: str, args: tuple[Any, ...], dim: int, how: dict[str, Any]) -> list[Node]:
    strides = layout.dense_like(self.shape, self.strides)
    forms = [form(self.shape, self.dtype, strides), form(self.shape, dtypes.int64, strides)]
    values, positions = t.several(target, args, forms, **how)
    _selected(t, self, values, positions, dim, True)
    return [values, positions]


def _running(name: str) -> None:
    def function(t: Tracer, self: Node, dim: int) -> list[Node]:
        forms = [form(self.shape, self.dtype), form(self.shape, dtypes.int64)]
        values, positions = t.several(f"aten::{name}", (self, dim), forms)
        _selected(t, self, values, positions, dim, True, sums=True)
        return [values, positions]

    traced(name)(function)


_running("cummax")

_running("cummin")


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

        return t.derive_each(
            out, [self, other], (1, lambda grad: share(grad, hides_other)), (0, lambda grad: share(grad, hides_self))
        )

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
            return boolean(t, "aten::logical_or", t.compare(hides_self, self, other), isnan(t, other))

        def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
            grad = gradient_of(grads)
            by_other = by_self = None
            if need[1]:
                by_other = _zeroed(t, kept(), grad)
            if need[0]:
                by_self = _zeroed(t, boolean(t, "aten::logical_not", kept()), grad)
            return [by_self, by_other]

        return t.record(out, [self, other], gradient)

    traced(name)(function)


_larger_number("fmax", "lt", "ge")

_larger_number("fmin", "gt", "le")


# -- extremes ----------------------------------------------------------------------------------------------------------


def _extreme(name: str) -> None:
    def over_dims(t: Tracer, self: Node, dim: Dims = (), keepdim: bool = False) -> Node:
        """Equal elements share the gradient (`scale_grad_by_count`)."""
        dims = layout.listed(dim)
        shape = reduced(self.shape, reduced_axes(self, dims), keepdim)
        out = t.node(f"aten::{name}", (self, dims, keepdim), form(shape, self.dtype))

        def gradient(grad: Node) -> Node:
            result = out
            if not keepdim:
                kept = reduced(self.shape, reduced_axes(self, dims), True) if dims else ()
                result = t.view(out, kept)
            mask = t.compare("eq", result, self)
            grad = grad if keepdim else t.view(grad, result.shape)
            count = t.reduce("aten::sum.dim_IntList", mask, dims, True, dtypes.int64)
            return t.mul(t.pointwise("aten::div.Tensor", grad, count, dtype=grad.dtype), mask)

        return t.derive(out, self, gradient)

    traced(name)(over_dims)

    def of_all(t: Tracer, self: Node, *args: Any, **kwargs: Any) -> Any:
        """`evenly_distribute_backward`. Recordings and exports name overloads, hand-made graphs need not."""
        if args or kwargs:
            other = args[0] if args else kwargs.get("other")
            overload = "other" if isinstance(other, Node) else "dim"
            return trace_of(f"aten::{name[1:]}.{overload}")(t, self, *args, **kwargs)
        out = t.node(f"aten::{name[1:]}", (self,), form((), self.dtype))

        def gradient(grad: Node) -> Node:
            missing = t.pointwise("aten::isnan", self, dtype=dtypes.bool_)
            none = t.pointwise("aten::isnan", out, dtype=dtypes.bool_)
            both = t.pointwise("aten::logical_and", missing, none, dtype=dtypes.bool_)
            equal = t.compare("eq", self, out)
            mask = t.pointwise("aten::logical_or", equal, both, dtype=dtypes.bool_)
            count = t.node("aten::sum", (mask,), form((), dtypes.int64))
            return t.mul(mask, t.pointwise("aten::div.Tensor", grad, count, dtype=grad.dtype))

        return t.derive(out, self, gradient)

    traced(name[1:])(of_all)


_extreme("amax")

_extreme("amin")


def _position(name: str) -> None:
    def function(t: Tracer, self: Node, dim: int | None = None, keepdim: bool = False) -> Node:
        shape = reduced(self.shape, reduced_axes(self, layout.listed(dim)), keepdim)
        args = (self,) if dim is None and not keepdim else (self, dim, keepdim)
        return t.node(f"aten::{name}", args, form(shape, dtypes.int64))

    traced(name)(function)


_position("argmax")

_position("argmin")
