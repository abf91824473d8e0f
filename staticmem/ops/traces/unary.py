"""Functions of one tensor, element by element: calls that stay as they are, and what their gradients read.

Sources: tools/autograd/derivatives.yaml; torch/_decomp and torch/_refs for those that are composed of others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from staticmem.ir import dtypes
from staticmem.ops.traces.registry import trace_of, traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer

# The gradient of an op from (tracer, gradient, input, result)
_Formula = Callable[[Tracer, Node, Node, Node], Node]


def call(t: Tracer, name: str, self: Node) -> Node:
    return t.pointwise(f"aten::{name}", self)


def _scaled(t: Tracer, self: Node, by: float) -> Node:
    return t.pointwise("aten::mul.Scalar", self, by)


def _plus(t: Tracer, self: Node, number: float) -> Node:
    return t.pointwise("aten::add.Scalar", self, number)


def _power(t: Tracer, self: Node, exponent: float) -> Node:
    return t.pointwise("aten::pow.Tensor_Scalar", self, exponent)


def _one_minus_square(t: Tracer, x: Node) -> Node:
    return call(t, "rsqrt", _plus(t, t.mul(call(t, "neg", x), x), 1))


def _gaussian(t: Tracer, g: Node, x: Node, factor: float) -> Node:
    return t.mul(_scaled(t, call(t, "exp", call(t, "neg", _power(t, x, 2))), factor), g)


def _atanh(t: Tracer, g: Node, x: Node, out: Node) -> Node:
    square = _power(t, x, 2)
    rest = t.sub(t.full_like(x, 1), square)
    return t.div(_scaled(t, g, 1), rest)


def sgn(t: Tracer, x: Node) -> Node:
    return t.cast(call(t, "sign", t.opmath(x)), x.dtype)


def _erfinv(t: Tracer, g: Node, x: Node, out: Node) -> Node:
    again = call(t, "erfinv", x)
    return t.mul(_scaled(t, call(t, "exp", _power(t, again, 2)), math.sqrt(math.pi) / 2), g)


def _rsqrt(t: Tracer, g: Node, x: Node, out: Node) -> Node:
    cube = _power(t, out, 3)
    return t.mul(_scaled(t, g, -0.5), cube)


_FORMULAS: dict[str, _Formula] = {
    "exp": lambda t, g, x, out: t.mul(g, out),
    "exp2": lambda t, g, x, out: _scaled(t, t.mul(g, out), math.log(2)),
    "expm1": lambda t, g, x, out: t.mul(g, _plus(t, out, 1)),
    "log": lambda t, g, x, out: t.div(g, x),
    "log2": lambda t, g, x, out: t.div(g, _scaled(t, x, math.log(2))),
    "log10": lambda t, g, x, out: t.div(g, _scaled(t, x, math.log(10))),
    "log1p": lambda t, g, x, out: t.div(g, _plus(t, x, 1)),
    "sqrt": lambda t, g, x, out: t.div(g, _scaled(t, out, 2)),
    "rsqrt": _rsqrt,
    "abs": lambda t, g, x, out: t.mul(g, sgn(t, x)),
    "sin": lambda t, g, x, out: t.mul(g, call(t, "cos", x)),
    "cos": lambda t, g, x, out: t.mul(g, call(t, "neg", call(t, "sin", x))),
    "tan": lambda t, g, x, out: t.mul(g, _plus(t, _power(t, out, 2), 1)),
    "sinh": lambda t, g, x, out: t.mul(g, call(t, "cosh", x)),
    "cosh": lambda t, g, x, out: t.mul(g, call(t, "sinh", x)),
    "asin": lambda t, g, x, out: t.mul(g, _one_minus_square(t, x)),
    "acos": lambda t, g, x, out: t.mul(g, call(t, "neg", _one_minus_square(t, x))),
    "atan": lambda t, g, x, out: t.div(g, _plus(t, t.mul(x, x), 1)),
    "asinh": lambda t, g, x, out: t.mul(g, call(t, "rsqrt", _plus(t, _power(t, x, 2), 1))),
    "acosh": lambda t, g, x, out: t.mul(g, call(t, "rsqrt", t.pointwise("aten::sub.Scalar", t.mul(x, x), 1))),
    "atanh": _atanh,
    "erf": lambda t, g, x, out: _gaussian(t, g, x, 2 / math.sqrt(math.pi)),
    "erfc": lambda t, g, x, out: _gaussian(t, g, x, -2 / math.sqrt(math.pi)),
    "erfinv": _erfinv,
    "lgamma": lambda t, g, x, out: t.mul(g, call(t, "digamma", x)),
    "digamma": lambda t, g, x, out: t.mul(g, t.pointwise("aten::polygamma", 1, x, dtype=x.dtype)),
    "floor": lambda t, g, x, out: t.zeros_like(g),
    "ceil": lambda t, g, x, out: t.zeros_like(g),
    "round": lambda t, g, x, out: t.zeros_like(g),
    "trunc": lambda t, g, x, out: t.zeros_like(g),
    "sign": lambda t, g, x, out: t.zeros_like(g),
}

# Other names of the same ops
_ALIASES = {
    "exp2": "special_exp2", "expm1": "special_expm1", "log1p": "special_log1p", "abs": "absolute", "asin": "arcsin",
    "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
    "erf": "special_erf", "erfc": "special_erfc", "lgamma": "special_gammaln", "trunc": "fix",
    "digamma": "special_digamma special_psi", "round": "special_round",
}  # fmt: skip

_KEEPS_INTEGERS = ("abs", "floor", "ceil", "round", "trunc", "sign")


def _register(name: str, formula: _Formula) -> None:
    def function(t: Tracer, self: Node) -> Node:
        if name in ("floor", "ceil", "round", "trunc") and not self.dtype.is_floating_point:
            return t.clone(self)
        integer = self.dtype.kind in ("int", "bool") and name not in _KEEPS_INTEGERS
        out = t.pointwise(f"aten::{name}", self, dtype=dtypes.float32 if integer else self.dtype)

        def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
            assert grads[0] is not None
            return [formula(t, grads[0], self, out)]

        t.record(out, [self], gradient)
        return out

    traced(" ".join([name, *_ALIASES.get(name, "").split()]))(function)


for _name, _formula in _FORMULAS.items():
    _register(_name, _formula)


def with_gradient(t: Tracer, out: Node, self: Node, formula: Callable[[Node], Node]) -> Node:
    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [formula(grads[0])]

    t.record(out, [self], gradient)
    return out


def _turned(t: Tracer, self: Node, by: float) -> Node:
    out = t.cast(t.mul(t.opmath(self), by), self.dtype)
    return with_gradient(t, out, self, lambda g: _scaled(t, g, by))


@traced("deg2rad")
def deg2rad(t: Tracer, self: Node) -> Node:
    return _turned(t, self, math.pi / 180)


@traced("rad2deg")
def rad2deg(t: Tracer, self: Node) -> Node:
    return _turned(t, self, 180 / math.pi)


@traced("frac")
def frac(t: Tracer, self: Node) -> Node:
    x = t.opmath(self)
    return with_gradient(t, t.cast(t.sub(x, call(t, "trunc", x)), self.dtype), self, lambda g: g)


@traced("positive")
def positive(t: Tracer, self: Node) -> Node:
    return self


@traced("resolve_neg resolve_conj")
def resolve(t: Tracer, self: Node) -> Node:
    return self


@traced("isnan")
def isnan(t: Tracer, self: Node) -> Node:
    return t.pointwise("aten::isnan", self, dtype=dtypes.bool_)


@traced("isinf")
def isinf(t: Tracer, self: Node) -> Node:
    return t.pointwise("aten::isinf", self, dtype=dtypes.bool_)


@traced("logical_not")
def logical_not(t: Tracer, self: Node) -> Node:
    return t.pointwise("aten::logical_not", self, dtype=dtypes.bool_)


@traced("bitwise_not")
def bitwise_not(t: Tracer, self: Node) -> Node:
    return call(t, "bitwise_not", self)


@traced("isposinf")
def isposinf(t: Tracer, self: Node) -> Node:
    return t.compare("eq", self, math.inf)


@traced("isneginf")
def isneginf(t: Tracer, self: Node) -> Node:
    return t.compare("eq", self, -math.inf)


@traced("isfinite")
def isfinite(t: Tracer, self: Node) -> Node:
    if not self.dtype.is_floating_point:
        return t.full(self.shape, True, dtypes.bool_)
    bounded = t.compare("ne", call(t, "abs", self), math.inf)
    return t.mul(t.compare("eq", self, self), bounded)


_LARGEST = {dtypes.float32: 3.4028234663852886e38, dtypes.float16: 65504.0, dtypes.bfloat16: 3.3895313892515355e38}


@traced("nan_to_num")
def nan_to_num(
    t: Tracer, self: Node, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Node:
    largest = _LARGEST.get(self.dtype, 1.7976931348623157e308)
    out = t.where(isnan(t, self), 0.0 if nan is None else nan, self)
    out = t.where(t.compare("eq", self, -math.inf), -largest if neginf is None else neginf, out)
    out = t.where(t.compare("eq", self, math.inf), largest if posinf is None else posinf, out)
    return with_gradient(t, out, self, lambda g: t.mul(g, isfinite(t, self)))


@traced("sinc special_sinc")
def sinc(t: Tracer, self: Node) -> Node:
    def backward(g: Node) -> Node:
        scaled = _scaled(t, self, math.pi)
        square = _scaled(t, t.mul(self, self), math.pi)
        sine = call(t, "sin", scaled)
        slope = t.div(t.sub(t.mul(scaled, call(t, "cos", scaled)), sine), square)
        result = t.mul(g, slope)
        zero = t.full((), 0, result.dtype)
        return t.pointwise("aten::where.self", t.compare("eq", square, 0), zero, result, dtype=result.dtype)

    scaled = t.mul(self, math.pi)
    at_zero = t.compare("eq", scaled, 0)
    return with_gradient(t, t.where(at_zero, 1, t.div(call(t, "sin", scaled), scaled)), self, backward)


@traced("logit special_logit")
def logit(t: Tracer, self: Node, eps: float | None = None) -> Node:
    """Without `eps` the decomposition's bounds are -1 and 2."""
    low, high = (-1.0, 2.0) if eps is None else (eps, 1 - eps)
    x = t.opmath(self)
    below = t.compare("lt", x, low)
    x = t.where(below, low, t.where(t.compare("gt", x, high), high, x))
    out = t.cast(call(t, "log", t.div(x, t.sub(1, x))), self.dtype)

    def backward(g: Node) -> Node:
        g, y = t.opmath(g), t.opmath(self)
        least, most = (0.0, 1.0) if eps is None else (eps, 1 - eps)
        inside = t.pointwise(
            "aten::logical_and", t.compare("ge", y, least), t.compare("le", y, most), dtype=dtypes.bool_
        )
        result = t.div(g, t.mul(y, t.sub(1, y)))
        return t.cast(t.where(inside, result, math.nan if eps is None else 0.0), self.dtype)

    return with_gradient(t, out, self, backward)


@traced("neg negative")
def neg(t: Tracer, self: Node) -> Node:
    out = t.pointwise("aten::neg", self)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        return [t.pointwise("aten::neg", grads[0])]

    t.record(out, [self], gradient)
    return out


@traced("square")
def square(t: Tracer, self: Node) -> Node:
    out: Node = trace_of("aten::pow.Tensor_Scalar")(t, self, 2)
    return out


@traced("reciprocal")
def reciprocal(t: Tracer, self: Node) -> Node:
    out = t.pointwise("aten::reciprocal", self)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        square = t.mul(out, out)
        return [t.mul(t.pointwise("aten::neg", grads[0]), square)]

    t.record(out, [self], gradient)
    return out
