"""Arithmetic and comparisons: TensorIterator kernels with one new output, or none in place.

Source of what is saved and of each formula: tools/autograd/derivatives.yaml. A formula's temporaries are listed as the
kernels that it calls; they coexist until the formula ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, result_type
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.registry import rule

Scalar = int | float | bool


def inplace(e: Eager, self: Tensor, kernel: str) -> Tensor:
    """The result of an in-place op: the tensor itself, whose history `Eager.record` moves on."""
    e.kernel(kernel)
    return e.mutate(self)


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


def same(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    """The incoming gradient itself."""
    return grad_of(grads)


def tensors_of(self: Any, other: Any) -> tuple[Tensor | None, Tensor | None]:
    """The operands that are tensors. PyTorch takes a number for either of them, also where the schema of its operator
    has a tensor (python_arg_parser.cpp, should_allow_numbers_as_tensors); it stays on the CPU."""
    a = self if isinstance(self, Tensor) else None
    b = other if isinstance(other, Tensor) else None
    if (a is None and b is None) or (a is None and not isinstance(self, (int, float, complex))):
        raise TypeError("the first operand is neither a tensor nor a number beside one")
    return a, b


def result_of(e: Eager, kernel: str, a: Tensor | None, b: Tensor | None, number: Any) -> Tensor:
    """The new result of two operands, of which `number` takes the place of the one that is missing."""
    if a is not None and b is not None:
        return e.pointwise(kernel, a, b)
    tensor = a if a is not None else b
    assert tensor is not None
    return e.pointwise(kernel, tensor, dtype=scalar_dtype(tensor, number))


@rule("aten::add", kinds=("arithmetic",))
def add(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """Saves nothing; both gradients are the incoming tensor itself (`other` scaled by alpha when it is not 1)."""
    a, b = tensors_of(self, other)
    out = result_of(e, "aten.add.Tensor", a, b, self if a is None else other)
    e.record("AddBackward0", out, [a, b], _add_formulas(alpha))
    return out


def _add_formulas(alpha: Scalar) -> list[Formula]:
    def scaled(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.mul.Tensor", grad_of(grads))

    return [Formula((1,), same if alpha == 1 else scaled), Formula((0,), same)]


@rule("aten::sub", kinds=("arithmetic",))
def sub(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """Saves nothing; the gradient of `other` is a negated copy."""
    a, b = tensors_of(self, other)
    out = result_of(e, "aten.sub.Tensor", a, b, self if a is None else other)
    e.record("SubBackward0", out, [a, b], [Formula((1,), _negated(alpha)), Formula((0,), same)])
    return out


def negate(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    return e.pointwise("aten.neg.default", grad_of(grads))


def _negated(alpha: Scalar) -> Any:
    """`maybe_multiply(-grad, alpha)`."""

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        negative = negate(e, grads, need)
        return negative if alpha == 1 else e.pointwise("aten.mul.Tensor", negative)

    return formula


@rule("aten::rsub", kinds=("arithmetic",))
def rsub(e: Eager, self: Tensor, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """other - self: saves nothing; the gradient of `self` is a negated copy, that of `other` the incoming tensor."""
    operands = [t for t in (self, other) if isinstance(t, Tensor)]
    out = e.pointwise("aten.rsub.Scalar", *operands)
    e.record(
        "RsubBackward0", out, operands, [Formula((0,), _negated(alpha)), *([Formula((1,), same)] * (len(operands) - 1))]
    )
    return out


@rule("aten::sub_", kinds=("arithmetic",))
def sub_(e: Eager, self: Tensor, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """In place: saves nothing; the gradient of `other` is a negated copy."""
    out = inplace(e, self, "aten.sub_.Tensor")
    b = other if isinstance(other, Tensor) else None
    e.record("SubBackward0", out, [self, b], [Formula((1,), _negated(alpha)), Formula((0,), same)])
    return out


@rule("aten::add_", kinds=("arithmetic",))
def add_(e: Eager, self: Tensor, other: Tensor | Scalar, alpha: Scalar = 1) -> Tensor:
    """In place: saves nothing; both gradients are the incoming tensor."""
    out = inplace(e, self, "aten.add_.Tensor")
    b = other if isinstance(other, Tensor) else None
    e.record("AddBackward0", out, [self, b], _add_formulas(alpha))
    return out


def times(scale: Tensor) -> Any:
    """grad times a tensor."""

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        if scale.dtype.kind == "complex":  # a conjugated view: kernels get a copy of it
            conjugate = e.empty_like(scale, kernel="aten.clone.default")
            return e.pointwise("aten.mul.Tensor", grad_of(grads), conjugate)
        return e.pointwise("aten.mul.Tensor", grad_of(grads), scale)

    return formula


def scale_grad(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    """grad times a number."""
    return e.pointwise("aten.mul.Tensor", grad_of(grads))


@rule("aten::mul", kinds=("arithmetic",))
def mul(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """Each operand is saved only if the other one needs a gradient; each gradient is one product."""
    a, b = tensors_of(self, other)
    out = result_of(e, "aten.mul.Tensor", a, b, self if a is None else other)
    if a is None or b is None:
        e.record("MulBackward0", out, [b if a is None else a], [Formula((0,), scale_grad)])
    else:
        record_mul(e, out, a, b, a, b)
    return out


def record_mul(e: Eager, out: Tensor, a: Tensor, b: Tensor, saved_a: Tensor | None, saved_b: Tensor | None) -> None:
    saves = [saved_a if e.needs_grad(b) else None, saved_b if e.needs_grad(a) else None]
    formulas = [Formula((1,), times(a)), Formula((0,), times(b))]
    e.record("MulBackward0", out, [a, b], formulas, saves)


@rule("aten::mul_", kinds=("arithmetic",))
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


def _div_other(self: Tensor | None, other: Tensor) -> Any:
    operands = (other,) if self is None else (self, other)

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        # -grad * ((self / other) / other): FunctionsManual.cpp, div_tensor_other_grad
        grad = grad_of(grads)
        e.pointwise("aten.div.Tensor", *operands)
        e.pointwise("aten.div.Tensor", *operands)
        e.pointwise("aten.neg.default", grad)
        return e.pointwise("aten.mul.Tensor", grad, *operands)

    return formula


def _div_self(other: Tensor) -> Any:
    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.div.Tensor", grad_of(grads), other)

    return formula


def _div_scalar(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    return e.pointwise("aten.div.Tensor", grad_of(grads))


@rule("aten::div", "aten::true_divide", kinds=("arithmetic",))
def div(e: Eager, self: Tensor | Scalar, other: Tensor | Scalar, rounding_mode: str | None = None) -> Tensor:
    """Saves `other`, and `self` if `other` needs a gradient; that gradient takes div, div, neg and mul at once.

    With a rounding mode both gradients are zeros.
    """
    a, b = tensors_of(self, other)
    inputs = [t for t in (a, b) if t is not None]
    dtype = result_type(inputs)
    if rounding_mode is None and not dtype.is_differentiable:
        dtype = dtypes.float32
    out = e.pointwise("aten.div.Tensor", *inputs, dtype=dtype)
    if rounding_mode is None:
        _record_div(e, out, a, b, a)
    else:
        formulas = [Formula((k,), zeros) for k in range(len(inputs) - 1, -1, -1)]
        e.record("DivBackward1", out, inputs, formulas, [a if e.needs_grad(b) else None, b])
    return out


def zeros(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    """`zeros_like` of the incoming gradient."""
    return e.empty_like(grad_of(grads), kernel="aten.zeros_like.default")


def _record_div(e: Eager, out: Tensor, a: Tensor | None, b: Tensor | None, saved_a: Tensor | None) -> None:
    if b is None:
        e.record("DivBackward0", out, [a], [Formula((0,), _div_scalar)])
        return
    formulas = [Formula((1,), _div_other(a, b)), *([] if a is None else [Formula((0,), _div_self(b))])]
    e.record("DivBackward0", out, [a, b], formulas, [saved_a if e.needs_grad(b) else None, b])


@rule("aten::div_", kinds=("arithmetic",))
def div_(e: Eager, self: Tensor, other: Tensor | Scalar) -> Tensor:
    """In place: saves `other`, and a clone of `self` if `other` needs a gradient."""
    b = other if isinstance(other, Tensor) else None
    original = clone_for_backward(e, self, b)
    out = inplace(e, self, "aten.div_.Tensor")
    _record_div(e, out, self, b, original)
    return out
