"""Floating-point operations of an op's forward: 2 for each multiply-add of matrix products, convolutions and attention.

Element-wise ops, norms and pooling count as nothing, as in `torch.utils.flop_counter`, whose formulas these are
(torch/utils/flop_counter.py: mm_flop, bmm_flop, conv_flop_count, sdpa_flop_count). Backward takes twice the forward's,
where both factors of a product need a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from staticmem.ir.graph import Arg, Op, Ref

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
_Formula = Callable[[Op, Sequence[Arg], Shapes], int]


def flops(op: Op, shapes: Shapes) -> int:
    """Operations of one op. `shapes`: sizes of its inputs and results by name; what is not in it counts as nothing."""
    formula = _FORMULAS.get(op.base.removeprefix("aten::"))
    if formula is None or not op.outputs:
        return 0
    try:
        return formula(op, (*op.args, *op.kwargs.values()), shapes)
    except (KeyError, IndexError, TypeError, AttributeError):  # a shape that is not known, an argument of another kind
        return 0


def _shape(arg: Arg, shapes: Shapes) -> Shape:
    assert isinstance(arg, Ref)
    return shapes[arg.name]


def _product(first: int) -> _Formula:
    """result x shared dimension; `first` is the position of the left factor, whose last dimension is shared."""

    def count(op: Op, args: Sequence[Arg], shapes: Shapes) -> int:
        return 2 * prod(shapes[op.outputs[0]]) * _shape(args[first], shapes)[-1]

    return count


def _convolution(op: Op, args: Sequence[Arg], shapes: Shapes) -> int:
    """result x (input channels of a group x kernel); of a transposed one, input x the same of the output."""
    x, w = _shape(args[0], shapes), _shape(args[1], shapes)
    transposed = "transpose" in op.base or (op.base == "aten::convolution" and len(args) > 6 and args[6] is True)
    return 2 * prod(w[1:]) * prod(x if transposed else shapes[op.outputs[0]])


def _attention(op: Op, args: Sequence[Arg], shapes: Shapes) -> int:
    """q k^T and p v: batch x heads x queries x keys x (head + value head)."""
    q, k, v = (_shape(arg, shapes) for arg in args[:3])
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _recurrent(op: Op, args: Sequence[Arg], shapes: Shapes) -> int:
    """Every weight matrix once for each step of the sequence: the last list of tensors has the weights."""
    steps = prod(_shape(args[0], shapes)[:-1])
    weights = [arg for arg in args if isinstance(arg, tuple)][-1]
    return sum(2 * steps * prod(shape) for w in weights if len(shape := _shape(w, shapes)) == 2)


def _einsum(op: Op, args: Sequence[Arg], shapes: Shapes) -> int:
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
        sizes |= zip(term, _shape(operand, shapes), strict=True)
    total, done = 0, set(terms[0])
    for index, term in enumerate(terms[1:], 2):
        total += 2 * prod(sizes[label] for label in done | set(term))
        done = (done | set(term)) & set("".join([*terms[index:], right]))
    return total


def _shared(terms: Sequence[str], right: str, operands: Sequence[Arg], shapes: Shapes) -> int:
    """Sizes of the labels that the result lacks. Labels behind an ellipsis count from the end."""
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        head, _, tail = term.partition("...")
        shape = _shape(operand, shapes)
        sizes |= dict(zip(head, shape, strict=False)) | dict(zip(reversed(tail), reversed(shape), strict=False))
    return prod(n for label, n in sizes.items() if label not in right)


_FORMULAS: dict[str, _Formula] = {
    "mm": _product(0), "addmm": _product(1), "bmm": _product(0), "baddbmm": _product(1), "matmul": _product(0),
    "linear": _product(0), "mv": _product(0), "dot": _product(0), "addmv": _product(1), "addbmm": _product(1),
    "einsum": _einsum, "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "_convolution"), _convolution),
    **dict.fromkeys((f"conv_transpose{n}d" for n in (1, 2, 3)), _convolution),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
}  # fmt: skip
