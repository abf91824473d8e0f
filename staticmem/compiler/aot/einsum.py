"""`einsum` as ATen composes it (`einsum`, `sumproduct_pair` of aten/src/ATen/native/Linear.cpp), and other products.

Operands are contracted from left to right: what `ops.einsum` says of the path holds here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.compiler.aot.arithmetic import mul
from staticmem.compiler.aot.linear import bmm, mm
from staticmem.compiler.aot.registry import traced
from staticmem.compiler.aot.tracer import Tracer
from staticmem.compiler.aot.views import derive, permute, unsqueeze, view
from staticmem.compiler.nodes import Node
from staticmem.eager.strides import numel
from staticmem.ops.einsum import parse_equation


def _sum(t: Tracer, self: Node, dims: Sequence[int], keepdim: bool) -> Node:
    """`sum.dim_IntList` and its gradient (`sum_backward`)."""

    def back(grad: Node) -> Node:
        if not keepdim:
            for dim in sorted(dims):
                grad = t.unsqueeze(grad, dim)
        return t.expand(grad, self.shape)

    return derive(t, t.sum(self, dims, keepdim), self, back)


@traced("einsum")
def einsum(t: Tracer, equation: str, tensors: Sequence[Node], path: Any = None) -> Node:
    terms, output = parse_equation(equation, [operand.ndim for operand in tensors])
    if any(len(set(term)) < len(term) for term in terms):
        raise ValueError("einsum of a diagonal is not traced")
    order = [*output, *sorted({label for term in terms for label in term} - set(output))]
    operands = [_aligned(t, operand, term, order) for operand, term in zip(tensors, terms, strict=True)]
    first = len(output)
    if len(operands) == 1:
        return _sum(t, operands[0], range(first, len(order)), False) if first < len(order) else operands[0]
    counts = [sum(operand.shape[dim] != 1 for operand in operands) for dim in range(len(order))]
    result = operands[0]
    for other in operands[1:]:
        result = _contract(t, result, other, counts, first)
    return view(t, result, result.shape[:first]) if first < len(order) else result


def _aligned(t: Tracer, operand: Node, term: list[str], order: list[str]) -> Node:
    """The operand with one dimension for each label, in the common order."""
    labels = list(term)
    for label in order:
        if label not in labels:
            operand = unsqueeze(t, operand, operand.ndim)
            labels.append(label)
    return permute(t, operand, [labels.index(label) for label in order])


def _contract(t: Tracer, a: Node, b: Node, counts: list[int], first: int) -> Node:
    both: list[int] = []
    only: tuple[list[int], list[int]] = ([], [])
    for dim in range(first, len(counts)):
        if a.shape[dim] != 1 and b.shape[dim] != 1:
            counts[dim] -= 1
            if counts[dim] == 1:
                both.append(dim)
                counts[dim] = 0
        elif counts[dim] == 1 and (a.shape[dim] != 1 or b.shape[dim] != 1):
            only[a.shape[dim] == 1].append(dim)
            counts[dim] = 0
    a = _sum(t, a, only[0], True) if only[0] else a
    b = _sum(t, b, only[1], True) if only[1] else b
    return _sumproduct_pair(t, a, b, both) if both else mul(t, a, b)


def _sumproduct_pair(t: Tracer, left: Node, right: Node, summed: list[int]) -> Node:
    shared: list[int] = []
    of_left: list[int] = []
    of_right: list[int] = []
    for dim in range(left.ndim):
        if dim not in summed:
            in_left, in_right = left.shape[dim] != 1, right.shape[dim] != 1
            (shared if in_left and in_right else of_left if in_left else of_right).append(dim)
    if of_left and of_right and of_right[-1] < of_left[0]:  # so that bmm writes the result's memory order
        left, right, of_left, of_right = right, left, of_right, of_left
    batch, rows, inner = (numel([left.shape[d] for d in dims]) for dims in (shared, of_left, summed))
    columns = numel([right.shape[d] for d in of_right])
    shape = (*[left.shape[d] for d in (*shared, *of_left)], *[1] * len(summed), *[right.shape[d] for d in of_right])
    order = [*shared, *of_left, *summed, *of_right]
    left = view(t, permute(t, left, order), (batch, rows, inner))
    right = view(t, permute(t, right, [*shared, *summed, *of_right, *of_left]), (batch, inner, columns))
    result = view(t, bmm(t, left, right), shape)
    return permute(t, result, [order.index(d) for d in range(len(order))])


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


@traced("outer ger")
def outer(t: Tracer, self: Node, vec2: Node) -> Node:
    return mul(t, view(t, self, (self.shape[0], 1)), vec2)
