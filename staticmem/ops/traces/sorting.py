"""Extremes with their positions, sorted values: extern kernels or reductions, whose gradients go to those positions.

Source: tools/autograd/derivatives.yaml (`value_selecting_reduction_backward`, `cummaxmin_backward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form, reduced


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
        dim = rest.pop(0) if rest else default if dim is None else dim
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


@traced("cumsum")
def cumsum(t: Tracer, self: Node, dim: int, *, dtype: Any = None) -> Node:
    """Its gradient is the sum from the other end."""
    integer = self.dtype.kind in ("int", "bool")
    result_dtype = dtype or (dtypes.int64 if integer else self.dtype)

    def summed(x: Node, dtype: Any) -> Node:
        more = {} if dtype is x.dtype else {"dtype": dtype}
        return t.node("aten::cumsum", (x, dim), form(x.shape, dtype), more)

    out = summed(self, result_dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        if grad.shape[self.dim(dim)] == 1 if self.ndim else True:
            return [grad]
        return [reversed_(t, summed(reversed_(t, grad, dim), grad.dtype), dim)]

    t.record(out, [self], gradient)
    return out


def reversed_(t: Tracer, x: Node, dim: int) -> Node:
    """`flip`"""
    return t.node("prims::rev", (x, (x.dim(dim),)), form(x.shape, x.dtype))
