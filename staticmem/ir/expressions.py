"""Integer expressions of exported sizes, evaluated without `eval`: a tokenizer, a recursive parser, an allow-list.

torch.export writes sizes as sympy source, e.g. `Add(FloorDiv(Add(Symbol('s53', positive=True, integer=True),
Integer(-1)), Integer(2)), Integer(1))`. Functions are those of torch/utils/_sympy/functions.py that appear in sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from staticmem.errors import ModelFileError

MAX_LENGTH = 100_000  # characters of one expression
MAX_DEPTH = 200
MAX_VALUE = 2**128  # of anything on the way to a size

_TOKEN = re.compile(r"\s*(?:(-?[0-9]+)|([A-Za-z_][A-Za-z0-9_]*)|'([^']*)'|([(),=]))")

# An expression is an int, a symbol's name, or (function, operands)
Expr = Any
Number = int | Fraction  # a size may pass through a fraction: floor(Mul(Rational(1, 2), s0))


def _floordiv(a: Number, b: Number) -> int:
    return a // b


def _pow(a: Number, b: Number) -> Number:
    if not (-64 <= b <= 64 and -(2**40) <= a <= 2**40) or b != int(b):
        raise OverflowError("power out of range")
    return Fraction(a) ** int(b)


def _float_pow(a: Number, b: Number) -> Fraction:
    """As Python's `a ** b` of floats, which the code of a model calls: `int(patches**0.5)`."""
    if a < 0:
        raise ValueError("a power of a negative number")
    return Fraction(float(a) ** float(b))


# torch/utils/_sympy/functions.py has those that are not sympy's own
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "Add": lambda *xs: sum(xs),
    "Mul": lambda *xs: math.prod(xs),
    "FloorDiv": _floordiv,
    "CleanDiv": _floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda base, divisor, modulus: (base // divisor) % modulus,
    "Max": lambda *xs: max(xs),
    "Min": lambda *xs: min(xs),
    "Pow": _pow,
    "PowByNatural": _pow,
    "Rational": Fraction,
    "IntTrueDiv": Fraction,
    "FloatTrueDiv": Fraction,
    "ToFloat": lambda a: a,
    "Integer": lambda a: a,
    "Abs": lambda a: abs(a),
    "TruncToInt": lambda a: int(a),
    "TruncToFloat": lambda a: int(a),
    "FloorToInt": lambda a: math.floor(a),
    "CeilToInt": lambda a: math.ceil(a),
    "RoundToInt": lambda a: round(a),
    "FloatPow": _float_pow,
    "OpaqueUnaryFn_sqrt": lambda a: _float_pow(a, Fraction(1, 2)),
    "Identity": lambda a: a,
    "Where": lambda condition, a, b: a if condition else b,
    "floor": lambda a: math.floor(a),
    "ceiling": lambda a: math.ceil(a),
    "Eq": lambda a, b: a == b,
    "Ne": lambda a, b: a != b,
    "Lt": lambda a, b: a < b,
    "Le": lambda a, b: a <= b,
    "Gt": lambda a, b: a > b,
    "Ge": lambda a, b: a >= b,
    "And": lambda *xs: all(xs),
    "Or": lambda *xs: any(xs),
    "Not": lambda a: not a,
}


# How people write them: the sign between operands, and how strongly it binds
_SIGNS = {
    "Or": (" or ", 0), "And": (" and ", 1),
    "Eq": (" == ", 2), "Ne": (" != ", 2), "Lt": (" < ", 2), "Le": (" <= ", 2), "Gt": (" > ", 2), "Ge": (" >= ", 2),
    "Add": (" + ", 3),
    "Mul": (" * ", 4), "FloorDiv": (" // ", 4), "CleanDiv": (" // ", 4), "Mod": (" % ", 4), "PythonMod": (" % ", 4),
}  # fmt: skip
_ASSOCIATIVE = ("Or", "And", "Add", "Mul")


class _Parser:
    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise _bad(text, "it is longer than any real size expression")
        self.text, self.at = text, 0
        self.tokens: list[tuple[str, str]] = []
        while self.at < len(text.rstrip()):
            match = _TOKEN.match(text, self.at)
            if match is None:
                raise _bad(text, f"unexpected character at {self.at}")
            kind = ("int", "name", "string", "mark")[match.lastindex - 1] if match.lastindex else "mark"
            self.tokens.append((kind, match.group(match.lastindex or 0)))
            self.at = match.end()
        self.next = 0

    def peek(self) -> str:
        return self.tokens[self.next][1] if self.next < len(self.tokens) else ""

    def take(self) -> tuple[str, str]:
        if self.next >= len(self.tokens):
            raise _bad(self.text, "it ends too early")
        self.next += 1
        return self.tokens[self.next - 1]

    def expression(self, depth: int = 0) -> Expr:
        if depth > MAX_DEPTH:
            raise _bad(self.text, "it is nested too deeply")
        kind, word = self.take()
        if kind == "int":
            if len(word) > 40:
                raise _bad(self.text, f"{word[:20]}... is more than any size")
            return int(word)
        if kind != "name":
            raise _bad(self.text, f"unexpected '{word}'")
        if self.peek() != "(":
            return word
        self.take()
        if word == "Symbol":
            _, name = self.take()
            while self.peek() not in (")", ""):
                self.take()
            self.take()
            return name
        if word not in _FUNCTIONS:
            raise _bad(self.text, f"unknown function '{word}'")
        operands = []
        while self.peek() != ")":
            operands.append(self.expression(depth + 1))
            if self.peek() == ",":
                self.take()
        self.take()
        return (word, tuple(operands))


def _bad(text: str, why: str) -> ModelFileError:
    return ModelFileError(
        f"a size expression cannot be read: {text[:80]!r}",
        f"Reason: {why}.",
        "Export the model again with a current PyTorch; if it persists, report the expression.",
        code="SM121",
    )


@lru_cache(maxsize=4096)
def parse(text: str) -> Expr:
    """The expression of a text, e.g. `('Add', ('s0', 1))`.

    Raises:
        ModelFileError: the text is not an expression of the allowed functions.
    """
    parser = _Parser(text)
    result = parser.expression()
    if parser.next != len(parser.tokens):
        raise _bad(text, f"unexpected '{parser.peek()}' after the end")
    return result


def evaluate(expression: Expr, symbols: Mapping[str, int]) -> int:
    """The value of an expression.

    Raises:
        KeyError: a symbol without a value.
        ModelFileError: it has none (a division by zero), or none that is a whole number.
    """
    value = _value(expression, symbols)
    if value != int(value):
        raise _bad(str(expression), f"its value is {value}, not a whole number")
    return int(value)


def _value(expression: Expr, symbols: Mapping[str, int]) -> Number:
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return symbols[expression]
    function, operands = expression
    values = [_value(o, symbols) for o in operands]
    try:
        result = _FUNCTIONS[function](*values)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _bad(str(expression), f"{function}{tuple(map(str, values))} has no value ({error})") from error
    if not -MAX_VALUE <= result <= MAX_VALUE:
        raise _bad(str(expression), f"{function} gives more than any size")
    return result


def readable(text: str) -> str:
    """An expression as people write it: `batch * (height // 4) != 1` of `Ne(Mul(batch,FloorDiv(height,4)),1)`; a text
    that is no expression stays as it is."""
    try:
        return _infix(parse(text))
    except ModelFileError:
        return text


def _infix(expression: Expr, outer: str = "") -> str:
    """`outer` is the function of which it is an operand."""
    if not isinstance(expression, tuple):
        return str(expression)
    function, operands = expression
    if function not in _SIGNS or len(operands) < 2:
        return f"{function}({', '.join([_infix(operand) for operand in operands])})"
    sign, strength = _SIGNS[function]
    text = sign.join([_infix(operand, function) for operand in operands])
    joins = function == outer and function in _ASSOCIATIVE
    loose = outer in _SIGNS and strength <= _SIGNS[outer][1] and not joins
    return f"({text})" if loose else text


def symbols_of(expression: Expr) -> set[str]:
    """Names of the symbols that an expression uses."""
    if isinstance(expression, str):
        return {expression}
    if isinstance(expression, tuple):
        return set().union(*(symbols_of(o) for o in expression[1])) if expression[1] else set()
    return set()
