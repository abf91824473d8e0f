"""`einsum` as ATen composes it (permute, reshape and bmm, operand by operand), and products over named dimensions.

Source: aten/src/ATen/native/Linear.cpp, `einsum` and `sumproduct_pair`. Without opt_einsum's path (which PyTorch uses
from Python for three operands and more, where that package is installed) operands are contracted from left to right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Generic, Protocol, TypeVar

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.strides import numel
from staticmem.eager.tensor import Tensor
from staticmem.ir.graph import Arg, Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.arithmetic import mul
from staticmem.ops.linear import bmm, mm
from staticmem.ops.onnx import Context, text, translation
from staticmem.ops.pointwise import grad_of
from staticmem.ops.reduction import sum as sum_
from staticmem.ops.registry import Shapes, rule, size_of
from staticmem.ops.views import diagonal, movedim, permute, reshape, unsqueeze

ELLIPSIS = "."


def _labels(term: str) -> list[str]:
    return list(term.replace(" ", "").replace("...", ELLIPSIS))


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Labels of each operand and of the output; the dimensions of an ellipsis are labels "0", "1"..."""
    left, arrow, right = equation.partition("->")
    terms = [_labels(term) for term in left.split(",")]
    width = max((rank - len(term) + 1 for term, rank in zip(terms, ranks, strict=True) if ELLIPSIS in term), default=0)

    def expanded(term: list[str], rank: int | None) -> list[str]:
        count = width if rank is None else rank - len(term) + 1
        names = [str(k) for k in range(width - count, width)]
        return [label for item in term for label in (names if item == ELLIPSIS else [item])]

    operands = [expanded(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    if [len(term) for term in operands] != list(ranks):
        raise ValueError(f"the equation {equation!r} is not of operands with {', '.join(map(str, ranks))} dimensions")
    if arrow:
        return operands, expanded(_labels(right), None)
    flat = [label for term in terms for label in term if label != ELLIPSIS]
    once = sorted(label for label in set(flat) if flat.count(label) == 1)
    return operands, [*(str(k) for k in range(width)), *once]


def _shared(terms: Sequence[str], right: str, operands: Sequence[Arg], shapes: Shapes) -> int:
    """Sizes of the labels that the result lacks. Labels behind an ellipsis count from the end."""
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        head, _, tail = term.partition("...")
        shape = size_of(operand, shapes)
        sizes |= dict(zip(head, shape, strict=False)) | dict(zip(reversed(tail), reversed(shape), strict=False))
    return prod(n for label, n in sizes.items() if label not in right)


def _einsum_flops(op: Op, args: Sequence[Arg], shapes: Shapes) -> int:
    """Operands from left to right: each pair costs the product of all its labels' sizes."""
    equation, operands = args[0], args[1]
    assert isinstance(equation, str)
    assert isinstance(operands, tuple)
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." in equation or len(terms) < 2:
        return 0 if len(terms) < 2 else 2 * prod(shapes[op.outputs[0]]) * _shared(terms, right, operands, shapes)
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        sizes |= zip(term, size_of(operand, shapes), strict=True)
    total, done = 0, set(terms[0])
    for index, term in enumerate(terms[1:], 2):
        total += 2 * prod(sizes[label] for label in done | set(term))
        done = (done | set(term)) & set("".join([*terms[index:], right]))
    return total


class _Operand(Protocol):
    @property
    def ndim(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


T = TypeVar("T", bound=_Operand)


@dataclass(frozen=True)
class Calls(Generic[T]):
    """The ATen calls that `einsum` is composed of, on the tensors of a step or on the nodes of a trace."""

    permute: Callable[[T, Sequence[int]], T]
    reshape: Callable[[T, Sequence[int]], T]
    unsqueeze: Callable[[T, int], T]
    diagonal: Callable[[T, int, int], T]  # with its dimension last
    movedim: Callable[[T, int, int], T]
    sum: Callable[[T, Sequence[int], bool], T]
    mul: Callable[[T, T], T]
    bmm: Callable[[T, T], T]

    def einsum(self, equation: str, tensors: Sequence[T]) -> T:
        terms, output = parse_equation(equation, [t.ndim for t in tensors])
        summed = sorted({label for term in terms for label in term} - set(output))
        order = [*output, *summed]
        operands = [self._aligned(t, term, order) for t, term in zip(tensors, terms, strict=True)]
        first = len(output)
        if len(operands) == 1:
            return self.sum(operands[0], range(first, len(order)), False) if summed else operands[0]
        counts = [sum(t.shape[dim] != 1 for t in operands) for dim in range(len(order))]
        result = operands[0]
        for other in operands[1:]:
            result = self._contract(result, other, counts, first)
        return self.reshape(result, result.shape[:first]) if summed else result

    def _aligned(self, operand: T, term: list[str], order: list[str]) -> T:
        """The operand with one dimension for each label, in the common order."""
        labels: list[str] = []
        for label in term:
            if label in labels:  # repeated: its diagonal
                operand = self.movedim(
                    self.diagonal(operand, labels.index(label), len(labels)), -1, labels.index(label)
                )
            else:
                labels.append(label)
        for label in order:
            if label not in labels:
                operand = self.unsqueeze(operand, operand.ndim)
                labels.append(label)
        return self.permute(operand, [labels.index(label) for label in order])

    def _contract(self, a: T, b: T, counts: list[int], first: int) -> T:
        """The product of two operands, summed over the labels that no later operand has; `counts` is of those left."""
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
        a = self.sum(a, only[0], True) if only[0] else a
        b = self.sum(b, only[1], True) if only[1] else b
        return self._sumproduct_pair(a, b, both) if both else self.mul(a, b)

    def _sumproduct_pair(self, left: T, right: T, summed: list[int]) -> T:
        shared: list[int] = []
        of_left: list[int] = []
        of_right: list[int] = []
        for dim in range(left.ndim):
            if dim not in summed:
                in_left, in_right = left.shape[dim] != 1, right.shape[dim] != 1
                if in_left and in_right:
                    shared.append(dim)
                else:
                    (of_left if in_left else of_right).append(dim)
        if of_left and of_right and of_right[-1] < of_left[0]:  # so that bmm writes the result's memory order
            left, right, of_left, of_right = right, left, of_right, of_left
        batch, rows, inner = (numel([left.shape[d] for d in dims]) for dims in (shared, of_left, summed))
        columns = numel([right.shape[d] for d in of_right])
        sizes = [left.shape[d] for d in (*shared, *of_left)] + [1] * len(summed) + [right.shape[d] for d in of_right]
        order = [*shared, *of_left, *summed, *of_right]
        left = self.reshape(self.permute(left, order), (batch, rows, inner))
        right = self.reshape(self.permute(right, [*shared, *summed, *of_right, *of_left]), (batch, inner, columns))
        result = self.reshape(self.bmm(left, right), sizes)
        return self.permute(result, [order.index(d) for d in range(len(order))])


@rule("einsum", kinds=("product",), autocast="half", flops=_einsum_flops)
def einsum(e: Eager, equation: str, tensors: Sequence[Tensor], path: Any = None) -> Tensor:
    """Views of both factors, clones where their layout needs one, and bmm, which saves them; else product or sum."""
    calls = Calls[Tensor](
        permute=partial(permute, e),
        reshape=partial(reshape, e),
        unsqueeze=partial(unsqueeze, e),
        diagonal=lambda tensor, dim1, dim2: diagonal(e, tensor, 0, dim1, dim2),
        movedim=partial(movedim, e),
        sum=lambda tensor, dims, keepdim: sum_(e, tensor, tuple(dims), keepdim),
        mul=partial(mul, e),
        bmm=partial(bmm, e),
    )
    return calls.einsum(equation, tensors)


@rule("tensordot")
@scoped
def tensordot(e: Eager, self: Tensor, other: Tensor, dims_self: Any, dims_other: Any) -> Tensor:
    """Permuted views, flattened (a copy where strides do not allow a view), and `mm`, which saves them."""
    left, right = [self.dim(d) for d in dims_self], [other.dim(d) for d in dims_other]
    rows = [d for d in range(self.ndim) if d not in left]
    columns = [d for d in range(other.ndim) if d not in right]
    inner = 1
    for d in left:
        inner *= self.shape[d]
    a = reshape(e, permute(e, self, (*rows, *left)), (-1, inner))
    b = reshape(e, permute(e, other, (*right, *columns)), (inner, -1))
    return reshape(e, mm(e, a, b), (*(self.shape[d] for d in rows), *(other.shape[d] for d in columns)))


@rule("inner")
def inner(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """As `tensordot` over the last dimensions, or a product with a 0-dim tensor."""
    if self.ndim == 0 or other.ndim == 0:
        return mul(e, self, other)
    return tensordot(e, self, other, (-1,), (-1,))


@rule("linalg_cross cross")
def cross(e: Eager, self: Tensor, other: Tensor, dim: int = -1) -> Tensor:
    """Each factor is saved only if the other one needs a gradient; each gradient is one product."""
    out = e.pointwise("aten.linalg_cross.default", self, other)

    def by(factor: Tensor) -> Any:
        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            return e.pointwise("aten.linalg_cross.default", factor, grad_of(grads))

        return gradient

    saves = [self if e.needs_grad(other) else None, other if e.needs_grad(self) else None]
    e.record("LinalgCrossBackward0", out, [self, other], [Formula((1,), by(self)), Formula((0,), by(other))], saves)
    return out


@translation("Einsum")
def onnx_einsum(ctx: Context, node: Node) -> list[Op]:
    equation = text(node, "equation", "").replace(" ", "")
    return [ctx.op(node, "aten::einsum", equation, tuple(ctx.ref(n) for n in node.inputs))]
