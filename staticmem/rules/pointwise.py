"""Arithmetic and comparisons: TensorIterator kernels with one new output, or none in place.

Source of what is saved and of each formula: tools/autograd/derivatives.yaml. A formula's temporaries are listed as the
kernels that it calls; they coexist until the formula ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem import dtypes
from staticmem.dtypes import DType
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, result_type
from staticmem.eager.tensor import Tensor
from staticmem.rules.registry import rule

Scalar = int | float | bool


def inplace(e: Eager, self: Tensor, kernel: str) -> Tensor:
    """The result of an in-place op: the same storage under a new autograd history."""
    e.kernel(kernel)
    result = e.alias(self, self.shape, self.strides)
    result.requires_grad, result.grad_fn, result.output_nr = self.requires_grad, self.grad_fn, self.output_nr
    return result


def clone_for_backward(e: Eager, self: Tensor, *inputs: Tensor | None) -> Tensor | None:
    """An in-place op whose derivative needs its input saves a clone that is made first (gen_variable_type.py)."""
    return e.empty_like(self, kernel="aten.clone.default") if e.needs_grad(*inputs) else None


def scalar_dtype(self: Tensor, other: Any) -> DType:
    """The result dtype of a tensor and a Python number."""
    if isinstance(other, bool):
        return self.dtype
    if isinstance(other, float) and not self.dtype.is_differentiable:
        return dtypes.float32
    if isinstance(other, int) and self.dtype is dtypes.bool_:
        return dtypes.int64
    return self.dtype


def grad_of(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad


def chain(e: Eager, kernels: Sequence[str], *operands: Tensor, free: bool = False) -> Tensor:
    """Allocates one pointwise result for each kernel name and returns the last."""
    result = operands[0]
    for name in kernels:
        result = e.pointwise(f"aten.{name}", *operands)
    return result


def same(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    """The incoming gradient itself."""
    return grad_of(grads)


def _binary_inputs(self: Any, other: Any) -> tuple[Tensor | None, Tensor | None]:
    return (self if isinstance(self, Tensor) else None, other if isinstance(other, Tensor) else None)


@rule("aten::add", "aten::sub")
def add(
    e: Eager, self: Tensor, other: Tensor | Scalar, alpha: Scalar = 1, *, kernel: str = "aten.add.Tensor"
) -> Tensor:
    """Saves nothing; both gradients are the incoming tensor itself (`other` scaled by alpha when it is not 1)."""
    a, b = _binary_inputs(self, other)
    assert a is not None
    out = e.pointwise(kernel, a, dtype=scalar_dtype(a, other)) if b is None else e.pointwise(kernel, a, b)
    e.record("AddBackward0", out, [a, b], _add_formulas(alpha))
    return out


def _add_formulas(alpha: Scalar) -> list[Formula]:
    def scaled(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.mul.Tensor", grad_of(grads))

    return [Formula((1,), same if alpha == 1 else scaled), Formula((0,), same)]


@rule("aten::sub.Tensor", "aten::sub.Scalar")
def sub(e: Eager, self: Tensor, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """Saves nothing; the gradient of `other` is a negated copy."""
    a, b = _binary_inputs(self, other)
    assert a is not None
    name = "aten.sub.Tensor"
    out = e.pointwise(name, a, dtype=scalar_dtype(a, other)) if b is None else e.pointwise(name, a, b)
    e.record("SubBackward0", out, [a, b], [Formula((1,), negate), Formula((0,), same)])
    return out


def negate(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    return e.pointwise("aten.neg.default", grad_of(grads))


@rule("aten::rsub")
def rsub(e: Eager, self: Tensor, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """other - self: saves nothing; the gradient of `self` is a negated copy."""
    operands = [t for t in (self, other) if isinstance(t, Tensor)]
    out = e.pointwise("aten.rsub.Scalar", *operands)
    e.record("RsubBackward0", out, [self], [Formula((0,), negate)])
    return out


@rule("aten::add_", "aten::sub_")
def add_(e: Eager, self: Tensor, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """In place: saves nothing; both gradients are the incoming tensor."""
    out = inplace(e, self, "aten.add_.Tensor")
    b = other if isinstance(other, Tensor) else None
    e.record("AddBackward0", out, [self, b], _add_formulas(alpha))
    return out


def _times(saved: Tensor | None, scale: Tensor) -> Any:
    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.mul.Tensor", grad_of(grads), scale)

    return formula


def scale_grad(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    """grad times a number."""
    return e.pointwise("aten.mul.Tensor", grad_of(grads))


@rule("aten::mul")
def mul(e: Eager, self: Tensor, other: Tensor | Scalar) -> Tensor:
    """Each operand is saved only if the other one needs a gradient; each gradient is one product."""
    a, b = _binary_inputs(self, other)
    assert a is not None
    if b is None:
        out = e.pointwise("aten.mul.Tensor", a, dtype=scalar_dtype(a, other))
        e.record("MulBackward0", out, [a], [Formula((0,), scale_grad)])
        return out
    out = e.pointwise("aten.mul.Tensor", a, b)
    record_mul(e, out, a, b, a, b)
    return out


def record_mul(e: Eager, out: Tensor, a: Tensor, b: Tensor, saved_a: Tensor | None, saved_b: Tensor | None) -> None:
    saves = [saved_a if e.needs_grad(b) else None, saved_b if e.needs_grad(a) else None]
    formulas = [Formula((1,), _times(saved_a, a)), Formula((0,), _times(saved_b, b))]
    e.record("MulBackward0", out, [a, b], formulas, saves)


@rule("aten::mul_")
def mul_(e: Eager, self: Tensor, other: Tensor | Scalar) -> Tensor:
    """In place: `other` is saved; `self` is cloned first if `other` needs a gradient."""
    b = other if isinstance(other, Tensor) else None
    original = clone_for_backward(e, self, b)
    out = inplace(e, self, "aten.mul_.Tensor")
    if b is None:
        e.record("MulBackward0", out, [self], [Formula((0,), scale_grad)])
    else:
        record_mul(e, out, self, b, original, b)
    return out


def _div_other(self: Tensor, other: Tensor) -> Any:
    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        # -grad * ((self / other) / other): FunctionsManual.cpp, div_tensor_other_grad
        grad = grad_of(grads)
        e.pointwise("aten.div.Tensor", self, other)
        e.pointwise("aten.div.Tensor", self, other)
        e.pointwise("aten.neg.default", grad)
        return e.pointwise("aten.mul.Tensor", grad, self, other)

    return formula


def _div_self(other: Tensor) -> Any:
    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.div.Tensor", grad_of(grads), other)

    return formula


def _div_scalar(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    return e.pointwise("aten.div.Tensor", grad_of(grads))


@rule("aten::div", "aten::true_divide")
def div(e: Eager, self: Tensor, other: Tensor | Scalar, rounding_mode: str | None = None) -> Tensor:
    """Saves `other`, and `self` if `other` needs a gradient; that gradient takes div, div, neg and mul at once."""
    a, b = _binary_inputs(self, other)
    assert a is not None
    dtype = result_type([a] if b is None else [a, b])
    if rounding_mode is None and not dtype.is_differentiable:
        dtype = dtypes.float32
    out = e.pointwise("aten.div.Tensor", a, *([] if b is None else [b]), dtype=dtype)
    if rounding_mode is None:
        _record_div(e, out, a, b, a)
    return out


def _record_div(e: Eager, out: Tensor, a: Tensor, b: Tensor | None, saved_a: Tensor | None) -> None:
    if b is None:
        e.record("DivBackward0", out, [a], [Formula((0,), _div_scalar)])
        return
    formulas = [Formula((1,), _div_other(a, b)), Formula((0,), _div_self(b))]
    e.record("DivBackward0", out, [a, b], formulas, [saved_a if e.needs_grad(b) else None, b])


@rule("aten::div_")
def div_(e: Eager, self: Tensor, other: Tensor | Scalar) -> Tensor:
    """In place: saves `other`, and a clone of `self` if `other` needs a gradient."""
    b = other if isinstance(other, Tensor) else None
    original = clone_for_backward(e, self, b)
    out = inplace(e, self, "aten.div_.Tensor")
    _record_div(e, out, self, b, original)
    return out


@rule("aten::addcmul")
def addcmul(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """Saves tensor1 and tensor2 where the other needs a gradient; `self` receives the incoming gradient."""
    out = e.pointwise("aten.addcmul.default", self, tensor1, tensor2)

    def times(other: Tensor) -> Any:
        def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            return e.pointwise("aten.mul.Tensor", grad_of(grads), other)

        return formula

    saves = [tensor1 if e.needs_grad(tensor2) else None, tensor2 if e.needs_grad(tensor1) else None]
    formulas = [Formula((0,), same), Formula((1,), times(tensor2)), Formula((2,), times(tensor1))]
    e.record("AddcmulBackward0", out, [self, tensor1, tensor2], formulas, saves)
    return out


@rule("aten::pow", autocast="float32")
def pow(e: Eager, self: Tensor | Scalar, exponent: Tensor | Scalar) -> Tensor:
    """Saves the base (and exponent and result where they need gradients); backward holds pow, scaled pow, product."""
    if not isinstance(self, Tensor):
        assert isinstance(exponent, Tensor)
        out = e.pointwise("aten.pow.Scalar", exponent)

        def by_exponent(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            return chain(e, ["mul.Tensor", "mul.Tensor"], grad_of(grads), out)

        e.record("PowBackward2", out, [exponent], [Formula((0,), by_exponent)], [out])
        return out
    if isinstance(exponent, Tensor):
        return _pow_tensor(e, self, exponent)
    out = e.pointwise("aten.pow.Tensor_Scalar", self, dtype=scalar_dtype(self, exponent))

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        if exponent == 0:
            return e.empty_like(self, kernel="aten.zeros_like.default")
        e.pointwise("aten.pow.Tensor_Scalar", self)
        e.pointwise("aten.mul.Scalar", self)
        return e.pointwise("aten.mul.Tensor", grad_of(grads), self)

    e.record("PowBackward0", out, [self], [Formula((0,), by_self)], [self])
    return out


def _pow_tensor(e: Eager, self: Tensor, exponent: Tensor) -> Tensor:
    out = e.pointwise("aten.pow.Tensor_Tensor", self, exponent)

    def by_exponent(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return chain(e, ["log.default", "mul.Tensor", "where.self", "mul.Tensor"], grad, self, exponent)

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return chain(e, ["sub.Tensor", "pow.Tensor_Tensor", "mul.Tensor", "where.self"], grad, self, exponent)

    saves = [self, exponent, out if e.needs_grad(exponent) else None]
    e.record("PowBackward1", out, [self, exponent], [Formula((1,), by_exponent), Formula((0,), by_self)], saves)
    return out


@rule(
    "aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge", "aten::logical_and", "aten::logical_or",
    "aten::logical_xor", "aten::isclose",
)  # fmt: skip
def compare(e: Eager, self: Tensor, other: Tensor | Scalar, **_: Any) -> Tensor:
    """A bool result without gradient."""
    operands = [self, other] if isinstance(other, Tensor) else [self]
    return e.pointwise("aten.eq.Tensor", *operands, dtype=dtypes.bool_)


@rule("aten::logical_not", "aten::isnan", "aten::isinf", "aten::isfinite", "aten::isposinf", "aten::isneginf")
def predicate(e: Eager, self: Tensor) -> Tensor:
    """A bool result without gradient."""
    return e.pointwise("aten.logical_not.default", self, dtype=dtypes.bool_)


@rule(
    "aten::bitwise_and", "aten::bitwise_or", "aten::bitwise_xor", "aten::__and__", "aten::__or__", "aten::__xor__",
    "aten::floor_divide", "aten::remainder", "aten::fmod", "aten::__lshift__", "aten::__rshift__",
)  # fmt: skip
def integer_binary(e: Eager, self: Tensor, other: Tensor | Scalar, **_: Any) -> Tensor:
    """One new result; the gradient of `self` (where one exists: remainder, fmod) is the incoming tensor."""
    operands = [self, other] if isinstance(other, Tensor) else [self]
    out = e.pointwise("aten.bitwise_and.Tensor", *operands)
    if out.dtype.is_differentiable:
        e.record("RemainderBackward0", out, [self], [Formula((0,), same)])
    return out


@rule("aten::bitwise_not")
def bitwise_not(e: Eager, self: Tensor) -> Tensor:
    """One new result without gradient."""
    return e.pointwise("aten.bitwise_not.default", self)


@rule("aten::maximum", "aten::minimum", "aten::fmax", "aten::fmin", "aten::min.other", "aten::max.other")
def maximum(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both operands; each gradient takes a mask, a halved gradient, a choice and a fill mask."""
    out = e.pointwise("aten.maximum.default", self, other)

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        e.pointwise("aten.eq.Tensor", self, other, dtype=dtypes.bool_)
        e.pointwise("aten.div.Tensor", grad)
        result = e.pointwise("aten.where.self", grad)
        e.pointwise("aten.lt.Tensor", self, other, dtype=dtypes.bool_)
        return result

    e.record("MaximumBackward0", out, [self, other], [Formula((1,), formula), Formula((0,), formula)], [self, other])
    return out
