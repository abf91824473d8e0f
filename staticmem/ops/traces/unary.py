"""Functions of one tensor, element by element: rows of `ops.unary` as they stand, and calls composed of others.

Sources: tools/autograd/derivatives.yaml; torch/_decomp and torch/_refs for those that are composed of others.
"""

from __future__ import annotations

import math

from staticmem.ir import dtypes
from staticmem.ops.pointwise import Unary
from staticmem.ops.traces.registry import trace_of, traced
from staticmem.ops.unary import PLAIN
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Tracer


def _trace(row: Unary) -> None:
    def function(t: Tracer, self: Node) -> Node:
        if row.name in ("floor", "ceil", "round", "trunc") and not self.dtype.is_floating_point:
            return t.clone(self)
        out = t.pointwise(f"aten::{row.name}", self, dtype=row.result(self.dtype))
        return t.derive(out, self, lambda g: row.gradient(t, g, self, out))

    traced(" ".join(name for name in (row.name, *row.also.split()) if not name.endswith("_")))(function)


for _row in PLAIN:
    _trace(_row)


def neg(t: Tracer, self: Node) -> Node:
    out: Node = trace_of("aten::neg")(t, self)
    return out


def _turn(t: Tracer, self: Node, factor: float) -> Node:
    out = t.cast(t.mul(t.opmath(self), factor), self.dtype)
    return t.derive(out, self, lambda grad: t.scale(grad, factor))


traced("deg2rad")(lambda t, self: _turn(t, self, math.pi / 180))
traced("rad2deg")(lambda t, self: _turn(t, self, 180 / math.pi))
traced("isinf")(lambda t, self: t.pointwise("aten::isinf", self, dtype=dtypes.bool_))
traced("logical_not")(lambda t, self: t.pointwise("aten::logical_not", self, dtype=dtypes.bool_))
traced("isposinf")(lambda t, self: t.compare("eq", self, math.inf))
traced("isneginf")(lambda t, self: t.compare("eq", self, -math.inf))


@traced("frac")
def frac(t: Tracer, self: Node) -> Node:
    x = t.opmath(self)
    return t.derive(t.cast(t.sub(x, t.call("trunc", x)), self.dtype), self, lambda g: g)


@traced("positive")
def positive(t: Tracer, self: Node) -> Node:
    return self


@traced("resolve_neg resolve_conj")
def resolve(t: Tracer, self: Node) -> Node:
    return self


@traced("isnan")
def isnan(t: Tracer, self: Node) -> Node:
    return t.pointwise("aten::isnan", self, dtype=dtypes.bool_)


@traced("bitwise_not")
def bitwise_not(t: Tracer, self: Node) -> Node:
    return t.call("bitwise_not", self)


@traced("isfinite")
def isfinite(t: Tracer, self: Node) -> Node:
    if not self.dtype.is_floating_point:
        return t.full(self.shape, True, dtypes.bool_)
    bounded = t.compare("ne", t.call("abs", self), math.inf)
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
    return t.derive(out, self, lambda g: t.mul(g, isfinite(t, self)))


@traced("sinc special_sinc")
def sinc(t: Tracer, self: Node) -> Node:
    def backward(g: Node) -> Node:
        scaled = t.scale(self, math.pi)
        square = t.scale(t.mul(self, self), math.pi)
        sine = t.call("sin", scaled)
        slope = t.div(t.sub(t.mul(scaled, t.call("cos", scaled)), sine), square)
        result = t.mul(g, slope)
        zero = t.full((), 0, result.dtype)
        return t.pointwise("aten::where.self", t.compare("eq", square, 0), zero, result, dtype=result.dtype)

    scaled = t.mul(self, math.pi)
    at_zero = t.compare("eq", scaled, 0)
    return t.derive(t.where(at_zero, 1, t.div(t.call("sin", scaled), scaled)), self, backward)


@traced("logit special_logit")
def logit(t: Tracer, self: Node, eps: float | None = None) -> Node:
    """Without `eps` the decomposition's bounds are -1 and 2."""
    low, high = (-1.0, 2.0) if eps is None else (eps, 1 - eps)
    x = t.opmath(self)
    below = t.compare("lt", x, low)
    x = t.where(below, low, t.where(t.compare("gt", x, high), high, x))
    out = t.cast(t.call("log", t.div(x, t.sub(1, x))), self.dtype)

    def backward(g: Node) -> Node:
        g, y = t.opmath(g), t.opmath(self)
        least, most = (0.0, 1.0) if eps is None else (eps, 1 - eps)
        inside = t.pointwise(
            "aten::logical_and", t.compare("ge", y, least), t.compare("le", y, most), dtype=dtypes.bool_
        )
        result = t.div(g, t.mul(y, t.sub(1, y)))
        return t.cast(t.where(inside, result, math.nan if eps is None else 0.0), self.dtype)

    return t.derive(out, self, backward)


@traced("square")
def square(t: Tracer, self: Node) -> Node:
    out: Node = trace_of("aten::pow.Tensor_Scalar")(t, self, 2)
    return out
