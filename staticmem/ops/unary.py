"""Functions of one number: exponentials, logarithms, angles, roundings and special functions.

Each row has its gradient (tools/autograd/derivatives.yaml; FunctionsManual.cpp for the composed ones), which says what
is saved: the input, the result or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.onnx import one_input
from staticmem.ops.pointwise import Gradient, Unary, define_unary, fused, grad_of
from staticmem.ops.registry import declare, rule


def _rsqrt(c: Any, g: Any, x: Any, out: Any) -> Any:
    cube = c.power(out, 3)
    return c.mul(c.scale(g, -0.5), cube)


def _reciprocal(c: Any, g: Any, x: Any, out: Any) -> Any:
    square = c.mul(out, out)
    return c.mul(c.call("neg", g), square)


def _arcus(c: Any, x: Any) -> Any:
    return c.call("rsqrt", c.plus(c.mul(c.call("neg", x), x), 1))


def _atanh(c: Any, g: Any, x: Any, out: Any) -> Any:
    rest = c.one_minus(c.power(x, 2))
    return c.div(c.scale(g, 1), rest)


def _gaussian(factor: float) -> Gradient:
    return lambda c, g, x, out: c.mul(c.scale(c.call("exp", c.call("neg", c.power(x, 2))), factor), g)


def _erfinv(c: Any, g: Any, x: Any, out: Any) -> Any:
    return c.mul(c.scale(c.call("exp", c.power(c.call("erfinv", x), 2)), math.sqrt(math.pi) / 2), g)


def _nothing(c: Any, g: Any, x: Any, out: Any) -> Any:
    return c.zeros_like(g)


# Calls that `torch.compile` sees as they are
PLAIN = (
    Unary("exp", "ExpBackward0", lambda c, g, x, out: c.mul(g, out), "float32"),
    Unary("exp2", "Exp2Backward0", lambda c, g, x, out: c.scale(c.mul(g, out), math.log(2)), also="special_exp2"),
    Unary("expm1", "Expm1Backward0", lambda c, g, x, out: c.mul(g, c.plus(out, 1)), "float32", "special_expm1"),
    Unary("log", "LogBackward0", lambda c, g, x, out: c.div(g, x), "float32"),
    Unary("log2", "Log2Backward0", lambda c, g, x, out: c.div(g, c.scale(x, math.log(2))), "float32"),
    Unary("log10", "Log10Backward0", lambda c, g, x, out: c.div(g, c.scale(x, math.log(10))), "float32"),
    Unary("log1p", "Log1PBackward0", lambda c, g, x, out: c.div(g, c.plus(x, 1)), "float32", "special_log1p"),
    Unary("sqrt", "SqrtBackward0", lambda c, g, x, out: c.div(g, c.scale(out, 2))),
    Unary("rsqrt", "RsqrtBackward0", _rsqrt, "float32"),
    Unary("reciprocal", "ReciprocalBackward0", _reciprocal, "float32"),
    Unary("abs", "AbsBackward0", lambda c, g, x, out: c.mul(g, c.sgn(x)), also="absolute absolute_"),
    Unary("neg", "NegBackward0", lambda c, g, x, out: c.call("neg", g), also="negative negative_"),
    Unary("sin", "SinBackward0", lambda c, g, x, out: c.mul(g, c.call("cos", x))),
    Unary("cos", "CosBackward0", lambda c, g, x, out: c.mul(g, c.call("neg", c.call("sin", x)))),
    Unary("tan", "TanBackward0", lambda c, g, x, out: c.mul(g, c.plus(c.power(out, 2), 1)), "float32"),
    Unary("sinh", "SinhBackward0", lambda c, g, x, out: c.mul(g, c.call("cosh", x)), "float32"),
    Unary("cosh", "CoshBackward0", lambda c, g, x, out: c.mul(g, c.call("sinh", x)), "float32"),
    Unary("asin", "AsinBackward0", lambda c, g, x, out: c.mul(g, _arcus(c, x)), "float32", "arcsin arcsin_"),
    Unary("acos", "AcosBackward0", lambda c, g, x, out: c.mul(g, c.call("neg", _arcus(c, x))), "float32",
          "arccos arccos_"),
    Unary("atan", "AtanBackward0", lambda c, g, x, out: c.div(g, c.plus(c.mul(x, x), 1)), also="arctan arctan_"),
    Unary("asinh", "AsinhBackward0", lambda c, g, x, out: c.mul(g, c.call("rsqrt", c.plus(c.power(x, 2), 1))),
          also="arcsinh arcsinh_"),
    Unary("acosh", "AcoshBackward0", lambda c, g, x, out: c.mul(g, c.call("rsqrt", c.minus(c.mul(x, x), 1))),
          also="arccosh arccosh_"),
    Unary("atanh", "AtanhBackward0", _atanh, also="arctanh arctanh_"),
    Unary("erf", "ErfBackward0", _gaussian(2 / math.sqrt(math.pi)), also="special_erf"),
    Unary("erfc", "ErfcBackward0", _gaussian(-2 / math.sqrt(math.pi)), also="special_erfc"),
    Unary("erfinv", "ErfinvBackward0", _erfinv, "float32", "special_erfinv"),
    Unary("lgamma", "LgammaBackward0", lambda c, g, x, out: c.mul(g, c.call("digamma", x)), also="special_gammaln"),
    Unary("digamma", "DigammaBackward0", lambda c, g, x, out: c.mul(g, c.call("polygamma", 1, x)),
          also="special_digamma special_psi"),
    Unary("floor", "FloorBackward0", _nothing),
    Unary("ceil", "CeilBackward0", _nothing),
    Unary("round", "RoundBackward0", _nothing, also="special_round"),
    Unary("trunc", "TruncBackward0", _nothing, also="fix fix_"),
    Unary("sign", "SignBackward0", _nothing),
)  # fmt: skip
# Calls that it sees as others
_COMPOSED = (
    Unary("square", "PowBackward0", lambda c, g, x, out: c.mul(g, c.call("mul.Scalar", c.power(x, 1))), "float32"),
    Unary("logit", "LogitBackward0", fused("logit_backward", "self", first=True), also="special_logit"),
    Unary("deg2rad", "Deg2RadBackward0", lambda c, g, x, out: c.scale(g, math.pi / 180)),
    Unary("rad2deg", "Rad2DegBackward0", lambda c, g, x, out: c.scale(g, 180 / math.pi)),
    Unary("frac", "FracBackward0", lambda c, g, x, out: g),
)
TABLE = PLAIN + _COMPOSED
for _row in TABLE:
    define_unary(_row)
declare("heaviside", ("step",))


@rule("sinc", aliases="special_sinc")
def sinc(e: Eager, self: Tensor) -> Tensor:
    """Saves its input; backward runs ten kernels of the input's size, most of which live until its end."""
    out = e.pointwise("aten.sinc.default", self)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)  # FunctionsManual.cpp, sinc_backward
        scaled = e.pointwise("aten.mul.Scalar", self)
        square = e.pointwise("aten.mul.Tensor", self, self)
        denominator = e.pointwise("aten.mul.Scalar", square)
        e.free(square)
        sine = e.pointwise("aten.sin.default", scaled)
        cosine = e.pointwise("aten.cos.default", scaled)
        product = e.pointwise("aten.mul.Tensor", scaled, cosine)
        difference = e.pointwise("aten.sub.Tensor", product, sine)
        ratio = e.pointwise("aten.div.Tensor", difference, denominator)
        result = e.pointwise("aten.mul.Tensor", grad, ratio)
        e.free(sine, cosine, product, difference, ratio)
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        mask = e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        return e.pointwise("aten.where.self", mask, result, dtype=grad.dtype)

    return e.record("SincBackward0", out, [self], [Formula((0,), gradient)], [self])


@rule("positive resolve_neg")
def positive(e: Eager, self: Tensor) -> Tensor:
    """The tensor itself."""
    return self


@rule("logical_not isnan isposinf isneginf isinf")
def predicate(e: Eager, self: Tensor) -> Tensor:
    """A bool result without gradient."""
    return e.pointwise("aten.logical_not.default", self, dtype=dtypes.bool_)


@rule("isfinite")
def isfinite(e: Eager, self: Tensor) -> Tensor:
    """A bool result without gradient: (self == self) * (abs(self) != inf), as in TensorCompare.cpp."""
    if not self.dtype.is_differentiable:
        return e.empty_like(self, dtypes.bool_, "aten.ones_like.default")
    absolute = e.pointwise("aten.abs.default", self)
    e.pointwise("aten.ne.Scalar", absolute, dtype=dtypes.bool_)
    e.pointwise("aten.eq.Tensor", self, self, dtype=dtypes.bool_)
    return e.pointwise("aten.mul.Tensor", self, dtype=dtypes.bool_)


@rule("nan_to_num")
def nan_to_num(e: Eager, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """Saves its input; backward multiplies by a mask of the finite elements."""
    out = e.pointwise("aten.nan_to_num.default", self)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        e.open_scope()
        mask = isfinite(e, self)
        e.close_scope(keep=[mask])
        return e.pointwise("aten.mul.Tensor", grad_of(grads), mask, dtype=self.dtype)

    return e.record("NanToNumBackward0", out, [self], [Formula((0,), gradient)], [self])


@rule("bitwise_not")
def bitwise_not(e: Eager, self: Tensor) -> Tensor:
    """One new result without gradient."""
    return e.pointwise("aten.bitwise_not.default", self)


_SAME_NAMES = (
    "Erf Exp Log Sqrt Abs Neg Floor Ceil Round Sign Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Reciprocal "
    "IsNaN IsInf"
).split()
one_input({**{name: name.lower() for name in _SAME_NAMES}, "Not": "logical_not", "BitwiseNot": "bitwise_not"})
