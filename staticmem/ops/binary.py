"""Functions of two and three numbers: powers, angles, blends, with the composed formulas of FunctionsManual.cpp.

C++ evaluates the arguments of a call from the last to the first, which shows in the order of temporaries. `e.free` ends
a C++ temporary where its last reader consumes it (an rvalue); the others live until their formula ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, result_type
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.graph import Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context, translation
from staticmem.ops.pointwise import Scalar, clone_for_backward, grad_of, inplace, same, scalar_dtype, scale_grad, times
from staticmem.ops.registry import rule


@rule("addcmul", autocast="promote")
def addcmul(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """Saves tensor1 and tensor2 where the other needs a gradient; `self` receives the incoming gradient."""
    out = e.pointwise("aten.addcmul.default", self, tensor1, tensor2)
    record_addcmul(e, out, self, tensor1, tensor2)
    return out


def record_addcmul(e: Eager, out: Tensor, self: Tensor, tensor1: Tensor, tensor2: Tensor) -> None:
    def by(other: Tensor) -> Any:
        def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            scaled = e.pointwise("aten.mul.Tensor", other)
            return e.pointwise("aten.mul.Tensor", grad_of(grads), scaled)

        return formula

    saves = [tensor1 if e.needs_grad(tensor2) else None, tensor2 if e.needs_grad(tensor1) else None]
    formulas = [Formula((0,), same), Formula((1,), by(tensor2)), Formula((2,), by(tensor1))]
    e.record("AddcmulBackward0", out, [self, tensor1, tensor2], formulas, saves)


@rule("addcdiv", autocast="promote")
def addcdiv(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """Saves tensor2 always, and tensor1 if tensor2 needs a gradient; `self` receives the incoming gradient."""
    out = e.pointwise("aten.addcdiv.default", self, tensor1, tensor2)
    record_addcdiv(e, out, self, tensor1, tensor2)
    return out


def record_addcdiv(e: Eager, out: Tensor, self: Tensor, tensor1: Tensor, tensor2: Tensor) -> None:
    def by_numerator(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        inverse = e.pointwise("aten.reciprocal.default", tensor2)  # value / tensor2, scaled in place
        return e.pointwise("aten.mul.Tensor", grad_of(grads), inverse)

    def by_denominator(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        square = e.pointwise("aten.mul.Tensor", tensor2, tensor2)
        scaled = e.pointwise("aten.mul.Tensor", tensor1)
        ratio = e.pointwise("aten.div.Tensor", scaled, square)
        negative = e.pointwise("aten.neg.default", grad_of(grads))
        return e.pointwise("aten.mul.Tensor", negative, ratio)

    formulas = [Formula((0,), same), Formula((1,), by_numerator), Formula((2,), by_denominator)]
    saves = [tensor1 if e.needs_grad(tensor2) else None, tensor2]
    e.record("AddcdivBackward0", out, [self, tensor1, tensor2], formulas, saves)


@rule("lerp")
def lerp(e: Eager, self: Tensor, end: Tensor, weight: Tensor | Scalar) -> Tensor:
    """A number as weight: saves nothing. A tensor: it is saved, self and end too where it needs a gradient."""
    if isinstance(weight, Tensor):
        out = e.pointwise("aten.lerp.Tensor", self, end, weight)
    else:
        out = e.pointwise("aten.lerp.Scalar", self, end)
    record_lerp(e, out, self, self, end, weight)
    return out


def record_lerp(e: Eager, out: Tensor, self: Tensor, original: Tensor, end: Tensor, weight: Tensor | Scalar) -> None:
    """Autograd's part of `lerp`; `original` is what self was before an op in place."""
    if not isinstance(weight, Tensor):
        e.record("LerpBackward0", out, [self, end], [Formula((1,), scale_grad), Formula((0,), scale_grad)])
        return

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        rest = e.pointwise("aten.rsub.Scalar", weight)
        return e.pointwise("aten.mul.Tensor", grad_of(grads), rest)

    def by_weight(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        difference = e.pointwise("aten.sub.Tensor", end, original)
        return e.pointwise("aten.mul.Tensor", grad_of(grads), difference)

    wants = e.needs_grad(weight)
    saves = [end if wants else None, original if wants else None, weight]
    formulas = [Formula((1,), times(weight)), Formula((0,), by_self), Formula((2,), by_weight)]
    e.record("LerpBackward1", out, [self, end, weight], formulas, saves)


@rule("pow", autocast="float32")
def pow(e: Eager, self: Tensor | Scalar, exponent: Tensor | Scalar) -> Tensor:
    """Saves the base (a tensor exponent and the result too); backward holds pow, scaled pow, product."""
    if not isinstance(self, Tensor):
        if not isinstance(exponent, Tensor):
            raise TypeError("neither base nor exponent is a tensor")
        return _pow_scalar(e, exponent)
    operands = [self, exponent] if isinstance(exponent, Tensor) else [self]
    dtype = None if isinstance(exponent, Tensor) else scalar_dtype(self, exponent)
    out = e.pointwise("aten.pow.Tensor_Scalar", *operands, dtype=dtype)
    record_pow(e, out, self, self, exponent)
    return out


def record_pow(e: Eager, out: Tensor, self: Tensor, saved: Tensor, exponent: Tensor | Scalar) -> None:
    """`saved` is the base as it was before an in-place op."""
    if isinstance(exponent, Tensor):
        _record_pow_tensor(e, out, self, saved, exponent)
        return

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        if exponent == 0:
            return e.empty_like(saved, kernel="aten.zeros_like.default")
        power = e.pointwise("aten.pow.Tensor_Scalar", saved)
        scaled = e.pointwise("aten.mul.Scalar", power)
        return e.pointwise("aten.mul.Tensor", grad_of(grads), scaled)

    e.record("PowBackward0", out, [self], [Formula((0,), by_self)], [saved])


def _pow_scalar(e: Eager, exponent: Tensor) -> Tensor:
    out = e.pointwise("aten.pow.Scalar", exponent)

    def by_exponent(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        scaled = e.pointwise("aten.mul.Tensor", out)
        return e.pointwise("aten.mul.Tensor", grad_of(grads), scaled)

    e.record("PowBackward2", out, [exponent], [Formula((0,), by_exponent)], [exponent, out])
    return out


def _record_pow_tensor(e: Eager, out: Tensor, self: Tensor, saved: Tensor, exponent: Tensor) -> None:
    def by_exponent(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        # grad * where(self == 0 and exponent >= 0, 0, result * log(self))
        grad = grad_of(grads)
        positive = e.pointwise("aten.ge.Scalar", exponent, dtype=dtypes.bool_)
        zero = e.pointwise("aten.eq.Scalar", saved, dtype=dtypes.bool_)
        condition = e.pointwise("aten.logical_and.default", zero, positive, dtype=dtypes.bool_)
        e.free(positive)
        e.free(zero)
        log = e.pointwise("aten.log.default", saved)
        product = e.pointwise("aten.mul.Tensor", out, log)
        e.empty((), grad.dtype, kernel="aten.zeros.default")
        chosen = e.pointwise("aten.where.self", condition, product, dtype=product.dtype)
        return e.pointwise("aten.mul.Tensor", grad, chosen)

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        # where(exponent == 0, 0, grad * (exponent * self.pow(exponent - 1)))
        grad = grad_of(grads)
        less = e.pointwise("aten.sub.Tensor", exponent)
        power = e.pointwise("aten.pow.Tensor_Tensor", saved, less)
        product = e.pointwise("aten.mul.Tensor", exponent, power)
        scaled = e.pointwise("aten.mul.Tensor", grad, product)
        e.empty((), grad.dtype, kernel="aten.zeros.default")
        condition = e.pointwise("aten.eq.Scalar", exponent, dtype=dtypes.bool_)
        return e.pointwise("aten.where.self", condition, scaled, dtype=scaled.dtype)

    formulas = [Formula((1,), by_exponent), Formula((0,), by_self)]
    e.record("PowBackward1", out, [self, exponent], formulas, [exponent, saved, out])


@rule("pow_")
def pow_(e: Eager, self: Tensor, exponent: Tensor | Scalar) -> Tensor:
    """In place: clones its input first and saves the clone (a tensor exponent and the result too)."""
    other = exponent if isinstance(exponent, Tensor) else None
    original = clone_for_backward(e, self, self, other)
    out = inplace(e, self, "aten.pow_.Scalar")
    record_pow(e, out, self, original or self, exponent)
    return out


@rule("lerp_")
def lerp_(e: Eager, self: Tensor, end: Tensor, weight: Tensor | Scalar) -> Tensor:
    """In place, else as `lerp`: what a weight that needs a gradient reads of the input is cloned first."""
    by_tensor = weight if isinstance(weight, Tensor) else None
    original = clone_for_backward(e, self, by_tensor) if by_tensor is not None else None
    out = inplace(e, self, "aten.lerp_.Scalar")
    record_lerp(e, out, self, original or self, end, weight)
    return out


@rule("addcmul_")
def addcmul_(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """In place, else as `addcmul`."""
    out = inplace(e, self, "aten.addcmul_.default")
    record_addcmul(e, out, self, tensor1, tensor2)
    return out


@rule("addcdiv_")
def addcdiv_(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """In place, else as `addcdiv`."""
    out = inplace(e, self, "aten.addcdiv_.default")
    record_addcdiv(e, out, self, tensor1, tensor2)
    return out


def _atan2_gradients(self: Tensor, other: Tensor) -> Any:
    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)  # FunctionsManual.cpp, atan2_backward
        square = e.pointwise("aten.mul.Tensor", other)
        first = e.pointwise("aten.mul.Tensor", self)
        total = e.pointwise("aten.add.Tensor", first, square)
        e.free(first)
        e.free(square)
        inverse = e.pointwise("aten.reciprocal.default", total)
        zero = e.pointwise("aten.eq.Scalar", total, dtype=dtypes.bool_)
        filled = e.pointwise("aten.masked_fill.Scalar", inverse)
        for done in (inverse, zero):
            e.free(done)
        by_self = by_other = None
        if need[0]:
            scaled = e.pointwise("aten.mul.Tensor", grad, other)
            by_self = e.pointwise("aten.mul.Tensor", scaled, filled)
        if need[1]:
            negative = e.pointwise("aten.neg.default", self)
            product = e.pointwise("aten.mul.Tensor", grad, negative)
            by_other = e.pointwise("aten.mul.Tensor", product, filled)
        return by_self, by_other

    return gradients


@rule("atan2 arctan2")
def atan2(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both; backward takes the reciprocal of the sum of squares, masked at zero, and two products a gradient."""
    out = e.pointwise("aten.atan2.default", self, other, dtype=_floating(self, other))
    e.record("Atan2Backward0", out, [self, other], [Formula((0, 1), _atan2_gradients(self, other))], [other, self])
    return out


def _floating(*operands: Tensor) -> Any:
    dtype = result_type(operands)
    return dtype if dtype.is_differentiable else dtypes.float32


@rule("hypot")
def hypot(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves the result, and each operand that needs a gradient: a product and a quotient."""
    out = e.pointwise("aten.hypot.default", self, other)

    def by(side: Tensor) -> Any:
        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            ratio = e.pointwise("aten.mul.Tensor", grad_of(grads), side)
            return e.pointwise("aten.div.Tensor", ratio, out)

        return gradient

    formulas = [Formula((1,), by(other)), Formula((0,), by(self))]
    saves = [other if e.needs_grad(other) else None, self if e.needs_grad(self) else None, out]
    e.record("HypotBackward0", out, [self, other], formulas, saves)
    return out


@rule("xlogy special_xlogy")
def xlogy(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both; the gradient of `self` takes a logarithm, three masks and a choice, that of `other` a quotient."""
    out = e.pointwise("aten.xlogy.Tensor", self, other, dtype=_floating(self, other))

    def by_other(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        scaled = e.pointwise("aten.mul.Tensor", grad_of(grads), self)
        return e.pointwise("aten.div.Tensor", scaled, other)

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        product = e.pointwise("aten.xlogy.Tensor", grad, other)
        negative = e.pointwise("aten.le.Scalar", other, dtype=dtypes.bool_)
        zero = e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        e.pointwise("aten.bitwise_and.Tensor", zero, negative, dtype=dtypes.bool_)
        return e.pointwise("aten.masked_fill.Scalar", product)

    formulas = [Formula((1,), by_other), Formula((0,), by_self)]
    e.record("XlogyBackward0", out, [self, other], formulas, [other, self])
    return out


@rule("copysign")
def copysign(e: Eager, self: Tensor, other: Tensor | float) -> Tensor:
    """Saves `self` and the result; its gradient takes a quotient, a mask and a product, that of `other` is zeros."""
    b = other if isinstance(other, Tensor) else None
    out = e.pointwise("aten.copysign.Tensor", self, *([] if b is None else [b]))

    def by_other(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        assert b is not None
        return e.empty(b.shape, b.dtype, kernel="aten.zeros.default")

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        ratio = e.pointwise("aten.div.Tensor", out, self)
        e.free(e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_))
        return e.pointwise("aten.mul.Tensor", grad_of(grads), ratio)

    saves = [self if e.needs_grad(self) else None, out]
    e.record("CopysignBackward0", out, [self, b], [Formula((1,), by_other), Formula((0,), by_self)], saves)
    return out


@rule("logaddexp")
def logaddexp(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both operands; each gradient takes a difference, its exponential, one more and a quotient."""
    out = e.pointwise("aten.logaddexp.default", self, other)

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        difference = e.pointwise("aten.sub.Tensor", other, self)
        exponential = e.pointwise("aten.exp.default", difference)
        one_more = e.pointwise("aten.add.Tensor", exponential)
        return e.pointwise("aten.div.Tensor", grad_of(grads), one_more)

    e.record("LogaddexpBackward0", out, [self, other], [Formula((1,), formula), Formula((0,), formula)], [self, other])
    return out


@rule("logaddexp2")
def logaddexp2(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both operands; each gradient takes a difference, its power of two, one more and a quotient."""
    out = e.pointwise("aten.logaddexp2.default", self, other)

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        difference = e.pointwise("aten.sub.Tensor", other, self)
        power = e.pointwise("aten.pow.Scalar", difference)
        one_more = e.pointwise("aten.add.Tensor", power)
        return e.pointwise("aten.div.Tensor", grad_of(grads), one_more)

    e.record("Logaddexp2Backward0", out, [self, other], [Formula((1,), formula), Formula((0,), formula)], [self, other])
    return out


@translation("Pow")
def onnx_power(ctx: Context, node: Node) -> list[Op]:
    exponent = ctx.arg(node.inputs[1])
    if isinstance(exponent, Ref):
        base = ctx.arg(node.inputs[0])
        target = "aten::pow.Tensor_Tensor" if isinstance(base, Ref) else "aten::pow.Scalar"
        return [ctx.op(node, target, base, exponent)]
    return [ctx.op(node, "aten::pow.Tensor_Scalar", ctx.ref(node.inputs[0]), exponent)]
