"""`einsum` as ATen composes it (`einsum`, `sumproduct_pair` of aten/src/ATen/native/Linear.cpp), and other products.

Operands are contracted from left to right: what `ops.einsum` says of the path holds here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from staticmem.eager.strides import numel
from staticmem.ops.einsum import Calls
from staticmem.ops.traces.arithmetic import mul
from staticmem.ops.traces.linear import bmm, mm
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.views import movedim, permute, unsqueeze, view
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Tracer


def _sum(t: Tracer, self: Node, dims: Sequence[int], keepdim: bool) -> Node:
    """`sum.dim_IntList` and its gradient (`sum_backward`)."""

    def back(grad: Node) -> Node:
        if not keepdim:
            for dim in sorted(dims):
                grad = t.unsqueeze(grad, dim)
        return t.expand(grad, self.shape)

    return t.derive(t.sum(self, dims, keepdim), self, back)


def _diagonal(node: Node, dim1: int, dim2: int) -> Node:
    raise ValueError("einsum of a diagonal is not traced")


@traced("einsum")
def einsum(t: Tracer, equation: str, tensors: Sequence[Node], path: Any = None) -> Node:
    calls = Calls[Node](
        permute=partial(permute, t),
        reshape=partial(view, t),
        unsqueeze=partial(unsqueeze, t),
        diagonal=_diagonal,
        movedim=partial(movedim, t),
        sum=partial(_sum, t),
        mul=partial(mul, t),
        bmm=partial(bmm, t),
    )
    return calls.einsum(equation, tensors)


@traced("tensordot")
def tensordot(t: Tracer, self: Node, other: Node, dims_self: Sequence[int], dims_other: Sequence[int]) -> Node:
    left, right = [self.dim(d) for d in dims_self], [other.dim(d) for d in dims_other]
    rows = [d for d in range(self.ndim) if d not in left]
    columns = [d for d in range(other.ndim) if d not in right]
    inner, outer = numel([self.shape[d] for d in left]), numel([self.shape[d] for d in rows])
    a = view(t, permute(t, self, (*rows, *dims_self)), (outer, inner))
    b = view(t, permute(t, other, (*dims_other, *columns)), (inner, numel([other.shape[d] for d in columns])))
    shape = (*[self.shape[d] for d in rows], *[other.shape[d] for d in columns])
    return view(t, mm(t, a, b), shape)


@traced("inner")
def inner(t: Tracer, self: Node, other: Node) -> Node:
    """As `tensordot` over the last dimensions, or a product with a tensor of one value."""
    if not self.ndim or not other.ndim:
        return mul(t, self, other)
    return tensordot(t, self, other, (-1,), (-1,))
