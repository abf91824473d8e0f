"""Functions of one number: exponentials, logarithms, angles, roundings and special functions.

Each row says what backward needs (`self`, `result`) and which kernels its formula runs, the last one being the gradient
(tools/autograd/derivatives.yaml; FunctionsManual.cpp for the composed ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.onnx import one_input
from staticmem.ops.pointwise import Unary, define_unary, grad_of
from staticmem.ops.registry import declare, rule

TABLE = (
    Unary("exp", "ExpBackward0", "result", ("mul.Tensor",), "float32"),
    Unary("exp2", "Exp2Backward0", "result", ("mul.Tensor", "mul.Tensor"), also="special_exp2"),
    Unary("expm1", "Expm1Backward0", "result", ("add.Tensor", "mul.Tensor"), "float32", also="special_expm1"),
    Unary("log", "LogBackward0", "self", ("div.Tensor",), "float32"),
    Unary("log2", "Log2Backward0", "self", ("mul.Tensor", "div.Tensor"), "float32"),
    Unary("log10", "Log10Backward0", "self", ("mul.Tensor", "div.Tensor"), "float32"),
    Unary("log1p", "Log1PBackward0", "self", ("add.Tensor", "div.Tensor"), "float32", also="special_log1p"),
    Unary("sqrt", "SqrtBackward0", "result", ("mul.Tensor", "div.Tensor")),
    Unary("rsqrt", "RsqrtBackward0", "result", ("mul.Tensor", "pow.Tensor_Scalar", "mul.Tensor"), "float32"),
    Unary("reciprocal", "ReciprocalBackward0", "result", ("neg.default", "mul.Tensor", "mul.Tensor"), "float32"),
    Unary("square", "PowBackward0", "self", ("pow.Tensor_Scalar", "mul.Scalar", "mul.Tensor"), "float32"),
    Unary("abs", "AbsBackward0", "self", ("sgn.default", "mul.Tensor"), also="absolute absolute_"),
    Unary("neg", "NegBackward0", "", ("neg.default",), also="negative negative_"),
    Unary("sin", "SinBackward0", "self", ("cos.default", "mul.Tensor")),
    Unary("cos", "CosBackward0", "self", ("sin.default", "neg.default", "mul.Tensor")),
    Unary("tan", "TanBackward0", "result", ("pow.Tensor_Scalar", "add.Tensor", "mul.Tensor"), "float32"),
    Unary("sinh", "SinhBackward0", "self", ("cosh.default", "mul.Tensor"), "float32"),
    Unary("cosh", "CoshBackward0", "self", ("sinh.default", "mul.Tensor"), "float32"),
    Unary("asin", "AsinBackward0", "self", ("mul.Tensor", "neg.default", "add.Tensor", "rsqrt.default", "mul.Tensor"),
          "float32", also="arcsin arcsin_"),
    Unary("acos", "AcosBackward0", "self",
          ("neg.default", "mul.Tensor", "neg.default", "add.Tensor", "rsqrt.default", "mul.Tensor"), "float32",
          also="arccos arccos_"),
    Unary("atan", "AtanBackward0", "self", ("mul.Tensor", "add.Tensor", "div.Tensor"), also="arctan arctan_"),
    Unary("asinh", "AsinhBackward0", "self", ("pow.Tensor_Scalar", "add.Tensor", "rsqrt.default", "mul.Tensor"),
          also="arcsinh"),
    Unary("acosh", "AcoshBackward0", "self", ("pow.Tensor_Scalar", "sub.Tensor", "rsqrt.default", "mul.Tensor"),
          also="arccosh"),
    Unary("atanh", "AtanhBackward0", "self", ("pow.Tensor_Scalar", "rsub.Scalar", "reciprocal.default", "mul.Tensor"),
          also="arctanh"),
    Unary("erf", "ErfBackward0", "self",
          ("pow.Tensor_Scalar", "neg.default", "exp.default", "mul.Tensor", "mul.Tensor"),
          also="special_erf", saved_first=True),
    Unary("erfc", "ErfcBackward0", "self",
          ("pow.Tensor_Scalar", "neg.default", "exp.default", "mul.Tensor", "mul.Tensor"),
          also="special_erfc", saved_first=True),
    Unary("erfinv", "ErfinvBackward0", "self",
          ("erfinv.default", "pow.Tensor_Scalar", "exp.default", "mul.Tensor", "mul.Tensor"), "float32",
          saved_first=True),
    Unary("logit", "LogitBackward0", "self", ("logit_backward.default",), also="special_logit", saved_first=True),
    Unary("lgamma", "LgammaBackward0", "self", ("digamma.default", "mul.Tensor"), also="special_gammaln"),
    Unary("deg2rad", "Deg2RadBackward0", "", ("mul.Tensor",)),
    Unary("rad2deg", "Rad2DegBackward0", "", ("mul.Tensor",)),
    Unary("floor", "FloorBackward0", "", ("zeros_like.default",)),
    Unary("ceil", "CeilBackward0", "", ("zeros_like.default",)),
    Unary("round", "RoundBackward0", "", ("zeros_like.default",), also="special_round"),
    Unary("trunc", "TruncBackward0", "", ("zeros_like.default",), also="fix fix_"),
    Unary("sign", "SignBackward0", "", ("zeros_like.default",)),
    Unary("frac", "FracBackward0", "", ()),
)  # fmt: skip
for _row in TABLE:
    define_unary(_row)
declare("heaviside", ("step",))


@rule("sinc special_sinc")
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
        for done in (sine, cosine, product, difference, ratio):
            e.free(done)
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        mask = e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        return e.pointwise("aten.where.self", mask, result, dtype=grad.dtype)

    e.record("SincBackward0", out, [self], [Formula((0,), gradient)], [self])
    return out


@rule("digamma special_digamma special_psi")
def digamma(e: Eager, self: Tensor) -> Tensor:
    """Saves its input; backward runs polygamma, mul."""
    out = e.pointwise("aten.digamma.default", self)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        slope = e.pointwise("aten.polygamma.default", self)
        return e.pointwise("aten.mul.Tensor", grad_of(grads), slope)

    e.record("DigammaBackward0", out, [self], [Formula((0,), gradient)], [self])
    return out


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

    e.record("NanToNumBackward0", out, [self], [Formula((0,), gradient)], [self])
    return out


@rule("bitwise_not")
def bitwise_not(e: Eager, self: Tensor) -> Tensor:
    """One new result without gradient."""
    return e.pointwise("aten.bitwise_not.default", self)


_SAME_NAMES = (
    "Erf Exp Log Sqrt Abs Neg Floor Ceil Round Sign Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Reciprocal "
    "IsNaN IsInf"
).split()
one_input({**{name: name.lower() for name in _SAME_NAMES}, "Not": "logical_not", "BitwiseNot": "bitwise_not"})
