"""Element-wise functions of one tensor: activations and elementary functions.

Each row says what backward needs (`self`, `result`) and which kernels its formula runs, the last one being the gradient
(tools/autograd/derivatives.yaml; FunctionsManual.cpp for the composed ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.pointwise import clone_for_backward, grad_of, inplace
from staticmem.ops.registry import Autocast, rule


class Unary(NamedTuple):
    """A row of the table."""

    name: str
    node: str
    saves: str  # "self", "result" or ""
    kernels: tuple[str, ...]  # of the backward formula, in order
    autocast: Autocast = ""
    inplace_saves: str = ""  # where the in-place form differs


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
    Unary("leaky_relu", "LeakyReluBackward0", "self", ("leaky_relu_backward.default",), "", "result"),
    Unary("elu", "EluBackward0", "self", ("elu_backward.default",), "", "result"),
    Unary("selu", "EluBackward0", "self", ("elu_backward.default",), "", "result"),
    Unary("celu", "EluBackward0", "self", ("elu_backward.default",), "", "result"),
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
    Unary("acosh", "AcoshBackward0", "self", ("pow.Tensor_Scalar", "sub.Tensor", "rsqrt.default", "mul.Tensor")),
    Unary("atanh", "AtanhBackward0", "self", ("pow.Tensor_Scalar", "rsub.Scalar", "reciprocal.default", "mul.Tensor")),
    Unary("erf", "ErfBackward0", "self",
          ("pow.Tensor_Scalar", "neg.default", "exp.default", "mul.Tensor", "mul.Tensor")),
    Unary("erfc", "ErfcBackward0", "self",
          ("pow.Tensor_Scalar", "neg.default", "exp.default", "mul.Tensor", "mul.Tensor")),
    Unary("erfinv", "ErfinvBackward0", "self",
          ("erfinv.default", "pow.Tensor_Scalar", "exp.default", "mul.Tensor", "mul.Tensor"), "float32"),
    Unary("logit", "LogitBackward0", "self", ("logit_backward.default",)),
    Unary("lgamma", "LgammaBackward0", "self", ("digamma.default", "mul.Tensor")),
    Unary("deg2rad", "Deg2RadBackward0", "", ("mul.Tensor",)),
    Unary("rad2deg", "Rad2DegBackward0", "", ("mul.Tensor",)),
    Unary("floor", "FloorBackward0", "", ("zeros_like.default",)),
    Unary("ceil", "CeilBackward0", "", ("zeros_like.default",)),
    Unary("round", "RoundBackward0", "", ("zeros_like.default",)),
    Unary("trunc", "TruncBackward0", "", ("zeros_like.default",)),
    Unary("sign", "SignBackward0", "", ("zeros_like.default",)),
    Unary("frac", "FracBackward0", "", ()),
)  # fmt: skip
# ATen names, in either form, of ops whose in-place form saves its result where the other one saves its operand
SAVE_LESS_IN_PLACE = frozenset(f"aten::{row.name}{end}" for row in TABLE if row.inplace_saves for end in ("", "_"))


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
    saved_in_place = row.inplace_saves or row.saves

    def out_of_place(e: Eager, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtype = self.dtype if self.dtype.is_differentiable or row.name in _INTEGER else dtypes.float32
        if dtype.kind == "complex" and row.name == "abs":
            dtype = dtypes.real_of(dtype)
        out = e.pointwise(f"aten.{row.name}.default", self, dtype=dtype)
        saves = {"self": self, "result": out, "": None}[row.saves]
        e.record(row.node, out, [self], [_formula(row, self, out)], [saves])
        return out

    def in_place(e: Eager, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        original = clone_for_backward(e, self, self) if saved_in_place == "self" else None
        out = inplace(e, self, f"aten.{row.name}_.default")
        saves = {"self": original, "result": out, "": None}[saved_in_place]
        e.record(row.node, out, [self], [_formula(row, self, out)], [saves])
        return out

    kernels = ", ".join(name.split(".")[0] for name in row.kernels)
    out_of_place.__doc__ = f"Saves {needs}; backward runs {kernels or 'nothing'}."
    in_place.__doc__ = (
        f"In place: saves {'its result' if saved_in_place else 'nothing'}; backward runs {kernels or 'nothing'}."
    )
    if saved_in_place == "self":
        in_place.__doc__ = f"In place: clones its input first and saves the clone; backward runs {kernels}."
    rule(f"aten::{row.name}", autocast=row.autocast)(out_of_place)
    if row.name not in _ONLY_OUT_OF_PLACE:
        rule(f"aten::{row.name}_")(in_place)


_ONLY_OUT_OF_PLACE = {"hardshrink", "softshrink", "softplus", "log_sigmoid"}
_INTEGER = {"abs", "neg", "sign", "floor", "ceil", "round", "trunc", "square", "relu"}
for _row in TABLE:
    _define(_row)


def _bounds(self: Tensor, min: Any, max: Any) -> list[Tensor]:
    return [t for t in (self, min, max) if isinstance(t, Tensor)]


@rule("aten::clamp", "aten::clip")
def clamp(e: Eager, self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Saves its input; backward makes a zero scalar, one bool mask a bound and the chosen gradient."""
    out = e.pointwise("aten.clamp.default", *_bounds(self, min, max))
    _record_clamp(e, out, self, self, min, max)
    return out


@rule("aten::clamp_min")
def clamp_min(e: Eager, self: Tensor, min: Any) -> Tensor:
    """As `clamp` with one bound."""
    return clamp(e, self, min, None)


@rule("aten::clamp_max")
def clamp_max(e: Eager, self: Tensor, max: Any) -> Tensor:
    """As `clamp` with one bound."""
    return clamp(e, self, None, max)


def _record_clamp(e: Eager, out: Tensor, self: Tensor, saved: Tensor | None, min: Any, max: Any) -> None:
    """Tensor bounds are saved, and their gradients (FunctionsManual.cpp, `clamp_backward_min_max`) come first."""
    bounds = [min if isinstance(min, Tensor) else None, max if isinstance(max, Tensor) else None]
    if bounds == [None, None]:
        e.record("ClampBackward1", out, [self], [Formula((0,), _clamp_self(saved, min, max))], [saved])
        return
    both = min is not None and max is not None

    def by_bounds(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        results: list[Tensor | None] = []
        for bound, wanted in zip(bounds, need, strict=True):
            results.append(None)
            if bound is not None and wanted and saved is not None:
                masks = [e.pointwise("aten.lt.Tensor", saved, bound, dtype=dtypes.bool_)]
                if both:
                    masks.append(
                        e.pointwise("aten.lt.Tensor", *[b for b in bounds if b is not None], dtype=dtypes.bool_)
                    )
                results[-1] = e.pointwise("aten.where.self", masks[0], grad, dtype=grad.dtype)
                for mask in masks:
                    e.free(mask)
        return results

    formulas = [Formula((1, 2), by_bounds), Formula((0,), _clamp_self(saved, min, max))]
    e.record("ClampBackward0", out, [self, *bounds], formulas, [saved, *bounds])


def _clamp_self(self: Tensor | None, min: Any, max: Any) -> Any:
    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        assert self is not None
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        for bound in (min, max):
            if bound is not None:
                e.pointwise("aten.ge.Scalar", *_bounds(self, bound, None), dtype=dtypes.bool_)
        return e.pointwise("aten.where.self", grad, *_bounds(self, min, max), dtype=grad.dtype)

    return compute


@rule("aten::clamp_", "aten::clip_")
def clamp_(e: Eager, self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """In place: clones its input first and saves the clone; backward as `clamp`."""
    original = clone_for_backward(e, self, *_bounds(self, min, max))
    out = inplace(e, self, "aten.clamp_.default")
    _record_clamp(e, out, self, original, min, max)
    return out


@rule("aten::clamp_min_")
def clamp_min_(e: Eager, self: Tensor, min: Any) -> Tensor:
    """As `clamp_` with one bound."""
    return clamp_(e, self, min, None)


@rule("aten::clamp_max_")
def clamp_max_(e: Eager, self: Tensor, max: Any) -> Tensor:
    """As `clamp_` with one bound."""
    return clamp_(e, self, None, max)


@rule("aten::prelu", autocast="half")
def prelu(e: Eager, self: Tensor, weight: Tensor) -> Tensor:
    """Saves input and weight; backward makes both gradients at full size always, the weight's is then reduced."""
    from staticmem.ops.views import reshape

    if self.ndim != weight.ndim:
        weight = reshape(e, weight, (weight.numel,) if self.ndim < 2 else (1, weight.numel, *(1,) * (self.ndim - 2)))
    out = e.pointwise("aten._prelu_kernel.default", self, weight)

    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor]:
        grad = grad_of(grads)
        e.kernel("aten._prelu_kernel_backward.default")
        return [e.pointwise("", self, weight, grad) for _ in range(2)]

    e.record("PreluKernelBackward0", out, [self, weight], [Formula((0, 1), compute)], [self, weight])
    return out


@rule("aten::glu")
def glu(e: Eager, self: Tensor, dim: int = -1) -> Tensor:
    """Saves its input; one gradient of the input's size."""
    axis = self.dim(dim)
    half = e.alias(self, tuple(s // 2 if i == axis else s for i, s in enumerate(self.shape)), self.strides)
    out = e.pointwise("aten.glu.default", half)

    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, self.dtype, kernel="aten.glu_backward.default")

    e.record("GluBackward0", out, [self], [Formula((0,), compute)], [self])
    return out
