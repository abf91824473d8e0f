"""Arithmetic on sizes that torch.export records as ops: evaluated, because bound graphs have integer sizes only.

The functions are those that FX graphs hold for SymInt expressions
(torch/fx/experimental/sym_node.py, METHOD_TO_OPERATOR).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from staticmem.ir.graph import Arg, Ref
from staticmem.ir.onnx_graph import Net

LIMIT = 2**62

_BINARY: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "truediv": lambda a, b: a / b,
    "mod": lambda a, b: a % b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "sym_max": max,
    "sym_min": min,
}
_UNARY: dict[str, Callable[[float], float]] = {
    "neg": lambda a: -a,
    "pos": lambda a: a,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "sym_int": math.trunc,
    "sym_float": float,
    "sym_not": lambda a: not a,
    "sym_sqrt": math.sqrt,
    "_sym_sqrt": math.sqrt,
}


def is_symbolic(target: str) -> bool:
    """Whether an FX target computes a number rather than a tensor."""
    if target in ("aten::sym_size.int", "aten::sym_numel", "aten::sym_stride.int"):
        return True
    namespace, _, name = target.partition("::")
    name = name.rpartition(".")[2]
    return namespace in ("operator", "math", "torch", "builtins") and (
        name in _BINARY or name in _UNARY or name == "pow"
    )


def evaluate(target: str, args: Sequence[Arg], net: Net) -> int | float | bool | None:
    """The number, or None where a size is not known."""
    name = target.partition("::")[2].rpartition(".")[2] if not target.startswith("aten") else target
    if target.startswith("aten"):
        return _size(target, args, net)
    numbers = [a for a in args if isinstance(a, (int, float))]
    if len(numbers) != len(args) or any(abs(n) > LIMIT for n in numbers):
        return None
    try:
        if len(numbers) == 2 and name == "pow":
            result = numbers[0] ** numbers[1] if abs(numbers[1]) <= 64 else None
            return result if isinstance(result, (int, float)) else None
        if len(numbers) == 2 and name in _BINARY:
            return _BINARY[name](numbers[0], numbers[1])
        if len(numbers) == 1 and name in _UNARY:
            return _UNARY[name](numbers[0])
    except (ArithmeticError, ValueError):
        return None
    return None


def _size(target: str, args: Sequence[Arg], net: Net) -> int | None:
    if not args or not isinstance(args[0], Ref):
        return None
    shape = net.shape(args[0].name)
    if shape is None:
        return None
    if target == "aten::sym_numel":
        return math.prod(shape)
    if len(args) < 2 or not isinstance(args[1], int) or not -len(shape) <= args[1] < len(shape):
        return None
    if target == "aten::sym_stride.int":
        return math.prod(shape[args[1] % len(shape) + 1 :])
    return shape[args[1]]
