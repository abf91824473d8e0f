"""Element-wise functions of one tensor: activations and elementary functions.

Each row says what backward needs (`self`, `result`) and which kernels its formula runs, the last one being the gradient
(tools/autograd/derivatives.yaml; FunctionsManual.cpp for the composed ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from staticmem import dtypes
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.rules.pointwise import clone_for_backward, grad_of, inplace
from staticmem.rules.registry import Autocast, rule


class Unary(NamedTuple):
    """A row of the table."""

    name: str
    node: str
    saves: str  # "self", "result" or ""
    kernels: tuple[str, ...]  # of the backward formula, in order
    autocast: Autocast = ""


TABLE = (
    Unary("relu", "ReluBackward0", "result", ("threshold_backward.default",)),
    Unary("relu6", "HardtanhBackward0", "self", ("hardtanh_backward.default",)),
    Unary("hardtanh", "HardtanhBackward0", "self", ("hardtanh_backward.default",)),
    Unary("sigmoid", "SigmoidBackward0", "result", ("sigmoid_backward.default",)),
    Unary("tanh", "TanhBackward0", "result", ("tanh_backward.default",)),
    Unary("silu", "SiluBackward0", "self", ("silu_backward.default",)),
    Unary("gelu", "GeluBackward0", "self", ("gelu_backward.default",)),
    Unary("mish", "MishBackward0", "self", ("mish_backward.default",)),
    Unary("hardswish", "HardswishBackward0", "self", ("hardswish_backward.default",)),
    Unary("hardsigmoid", "HardsigmoidBackward0", "self", ("hardsigmoid_backward.default",)),
    Unary("leaky_relu", "LeakyReluBackward0", "self", ("leaky_relu_backward.default",)),
    Unary("elu", "EluBackward0", "self", ("elu_backward.default",)),
    Unary("selu", "EluBackward0", "self", ("elu_backward.default",)),
    Unary("celu", "EluBackward0", "self", ("elu_backward.default",)),
    Unary("softplus", "SoftplusBackward0", "self", ("softplus_backward.default",), "float32"),
    Unary("softshrink", "SoftshrinkBackward0", "self", ("softshrink_backward.default",)),
    Unary("hardshrink", "HardshrinkBackward0", "self", ("hardshrink_backward.default",)),
    Unary("threshold", "ThresholdBackward0", "self", ("threshold_backward.default",)),
    Unary("log_sigmoid", "LogSigmoidBackward0", "self", ("log_sigmoid_backward.default",)),
    Unary("exp", "ExpBackward0", "result", ("mul.Tensor",), "float32"),
    Unary("exp2", "Exp2Backward0", "result", ("mul.Tensor", "mul.Tensor")),
    Unary("expm1", "Expm1Backward0", "result", ("add.Tensor", "mul.Tensor"), "float32"),
    Unary("log", "LogBackward0", "self", ("div.Tensor",), "float32"),
    Unary("log2", "Log2Backward0", "self", ("mul.Tensor", "div.Tensor"), "float32"),
    Unary("log10", "Log10Backward0", "self", ("mul.Tensor", "div.Tensor"), "float32"),
    Unary("log1p", "Log1PBackward0", "self", ("add.Tensor", "div.Tensor"), "float32"),
    Unary("sqrt", "SqrtBackward0", "result", ("mul.Tensor", "div.Tensor")),
    Unary("rsqrt", "RsqrtBackward0", "result", ("mul.Tensor", "pow.Tensor_Scalar", "mul.Tensor"), "float32"),
    Unary("reciprocal", "ReciprocalBackward0", "result", ("neg.default", "mul.Tensor", "mul.Tensor"), "float32"),
    Unary("square", "PowBackward0", "self", ("pow.Tensor_Scalar", "mul.Scalar", "mul.Tensor"), "float32"),
    Unary("abs", "AbsBackward0", "self", ("sgn.default", "mul.Tensor")),
    Unary("neg", "NegBackward0", "", ("neg.default",)),
    Unary("sin", "SinBackward0", "self", ("cos.default", "mul.Tensor")),
    Unary("cos", "CosBackward0", "self", ("sin.default", "neg.default", "mul.Tensor")),
    Unary("tan", "TanBackward0", "result", ("pow.Tensor_Scalar", "add.Tensor", "mul.Tensor"), "float32"),
    Unary("sinh", "SinhBackward0", "self", ("cosh.default", "mul.Tensor"), "float32"),
    Unary("cosh", "CoshBackward0", "self", ("sinh.default", "mul.Tensor"), "float32"),
    Unary("asin", "AsinBackward0", "self", ("mul.Tensor", "neg.default", "add.Tensor", "rsqrt.default", "mul.Tensor"),
          "float32"),
    Unary("acos", "AcosBackward0", "self",
          ("neg.default", "mul.Tensor", "neg.default", "add.Tensor", "rsqrt.default", "mul.Tensor"), "float32"),
    Unary("atan", "AtanBackward0", "self", ("mul.Tensor", "add.Tensor", "div.Tensor")),
    Unary("asinh", "AsinhBackward0", "self", ("pow.Tensor_Scalar", "add.Tensor", "rsqrt.default", "mul.Tensor")),
    Unary("acosh", "AcoshBackward0", "self", ("sub.Tensor", "rsqrt.default", "add.Tensor", "rsqrt.default",
                                              "mul.Tensor", "mul.Tensor")),
    Unary("atanh", "AtanhBackward0", "self", ("pow.Tensor_Scalar", "rsub.Scalar", "reciprocal.default", "mul.Tensor")),
    Unary("erf", "ErfBackward0", "self",
          ("pow.Tensor_Scalar", "neg.default", "exp.default", "mul.Tensor", "mul.Tensor")),
    Unary("floor", "FloorBackward0", "", ("zeros_like.default",)),
    Unary("ceil", "CeilBackward0", "", ("zeros_like.default",)),
    Unary("round", "RoundBackward0", "", ("zeros_like.default",)),
    Unary("trunc", "TruncBackward0", "", ("zeros_like.default",)),
    Unary("sign", "SignBackward0", "", ("zeros_like.default",)),
    Unary("frac", "FracBackward0", "", ()),
)  # fmt: skip


def _formula(row: Unary, self: Tensor, result: Tensor) -> Formula:
    saved = self if row.saves == "self" else result

    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        out = grad
        for name in row.kernels:
            out = e.pointwise(f"aten.{name}", grad, *((saved,) if row.saves else ()))
        return out

    return Formula((0,), compute)


def _define(row: Unary) -> None:
    needs = {"self": "its input", "result": "its result", "": "nothing"}[row.saves]

    def out_of_place(e: Eager, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtype = self.dtype if self.dtype.is_differentiable or row.name in _INTEGER else dtypes.float32
        out = e.pointwise(f"aten.{row.name}.default", self, dtype=dtype)
        saves = {"self": self, "result": out, "": None}[row.saves]
        e.record(row.node, out, [self], [_formula(row, self, out)], [saves])
        return out

    def in_place(e: Eager, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        original = clone_for_backward(e, self, self) if row.saves == "self" else None
        out = inplace(e, self, f"aten.{row.name}_.default")
        saves = {"self": original, "result": out, "": None}[row.saves]
        e.record(row.node, out, [self], [_formula(row, self, out)], [saves])
        return out

    kernels = ", ".join(name.split(".")[0] for name in row.kernels)
    out_of_place.__doc__ = f"Saves {needs}; backward runs {kernels or 'nothing'}."
    in_place.__doc__ = out_of_place.__doc__
    if row.saves == "self":
        in_place.__doc__ = f"In place: clones its input first and saves the clone; backward runs {kernels}."
    rule(f"aten::{row.name}", autocast=row.autocast)(out_of_place)
    rule(f"aten::{row.name}_")(in_place)


_INTEGER = {"abs", "neg", "sign", "floor", "ceil", "round", "trunc", "square", "relu"}
for _row in TABLE:
    _define(_row)


@rule("aten::clamp", "aten::clip")
def clamp(e: Eager, self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Saves its input; backward makes one bool mask a bound, a zero scalar and the chosen gradient."""
    return _clamp(e, self, [min, max])


@rule("aten::clamp_min")
def clamp_min(e: Eager, self: Tensor, min: Any) -> Tensor:
    """Saves its input; backward makes a bool mask, a zero scalar and the chosen gradient."""
    return _clamp(e, self, [min])


@rule("aten::clamp_max")
def clamp_max(e: Eager, self: Tensor, max: Any) -> Tensor:
    """Saves its input; backward makes a bool mask, a zero scalar and the chosen gradient."""
    return _clamp(e, self, [max])


def _clamp(e: Eager, self: Tensor, bounds: Sequence[Any]) -> Tensor:
    out = e.pointwise("aten.clamp.default", self, *(b for b in bounds if isinstance(b, Tensor)))
    e.record("ClampBackward1", out, [self], [_clamp_formula(self, bounds)], [self])
    return out


def _clamp_formula(self: Tensor, bounds: Sequence[Any]) -> Formula:
    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        for bound in bounds:
            if bound is not None:
                e.pointwise("aten.ge.Scalar", self, dtype=dtypes.bool_)
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        return e.pointwise("aten.where.self", grad)

    return Formula((0,), compute)


@rule("aten::clamp_", "aten::clamp_min_", "aten::clamp_max_")
def clamp_(e: Eager, self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """In place: clones its input first and saves the clone; backward as `clamp`."""
    original = clone_for_backward(e, self, self)
    out = inplace(e, self, "aten.clamp_.default")
    e.record("ClampBackward1", out, [self], [_clamp_formula(original or self, [min, max])], [original])
    return out


@rule("aten::prelu", autocast="half")
def prelu(e: Eager, self: Tensor, weight: Tensor) -> Tensor:
    """Saves input and weight; backward makes both gradients at full size, the weight's is then reduced."""
    out = e.pointwise("aten._prelu_kernel.default", self)

    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor]:
        grad = grad_of(grads)
        full = e.pointwise("aten._prelu_kernel_backward.default", self, grad)
        by_weight = e.pointwise("aten._prelu_kernel_backward.default", self, grad)
        channels = tuple(s if i == 1 or self.ndim == 1 else 1 for i, s in enumerate(self.shape))
        summed = e.sum_to(by_weight, channels if weight.numel > 1 else (1,) * self.ndim)
        return full, e.alias(summed, weight.shape, weight.strides)

    e.record("PreluKernelBackward0", out, [self, weight], [Formula((0, 1), compute)], [self, weight])
    return out


@rule("aten::glu")
def glu(e: Eager, self: Tensor, dim: int = -1) -> Tensor:
    """Saves its input; one gradient of the input's size."""
    axis = self.dim(dim)
    shape = tuple(s // 2 if i == axis else s for i, s in enumerate(self.shape))
    out = e.empty(shape, self.dtype, kernel="aten.glu.default")

    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, self.dtype, kernel="aten.glu_backward.default")

    e.record("GluBackward0", out, [self], [Formula((0,), compute)], [self])
    return out
