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
from staticmem.ops.pointwise import (
    Scalar,
    clone_for_backward,
    grad_of,
    inplace,
    same,
    scalar_dtype,
    scale_grad,
    times,
    written_once,
)
from staticmem.ops.registry import rule

# -- gradients for eager code and traces ------------------------------------------------------------------------------


def by_factor(c: Any, g: Any, other: Any, value: float) -> Any:
    """Of a factor of `addcmul`."""
    return c.mul(g, c.scale(other, value))


def by_divisor(c: Any, g: Any, numerator: Any, divisor: Any, value: float) -> Any:
    """Of the divisor of `addcdiv`."""
    square = c.mul(divisor, divisor)
    ratio = c.div(c.scale(numerator, value), square)
    return c.mul(c.call("neg", g), ratio)


def by_start(c: Any, g: Any, weight: Any) -> Any:
    """Of what `lerp` begins with."""
    return c.mul(g, c.one_minus(weight))


def by_weight(c: Any, g: Any, start: Any, end: Any) -> Any:
    """Of the weight of `lerp`."""
    return c.mul(g, c.sub(end, start))


def by_base(c: Any, g: Any, base: Any, exponent: float) -> Any:
    """`pow_backward`: grad * (exponent * self ** (exponent - 1)), where the exponent is a float: so x ** 1.0 stays."""
    if exponent == 0:
        return c.zeros_like(base)
    return c.mul(g, c.call("mul.Scalar", c.power(base, float(exponent) - 1), float(exponent)))


def product_over(c: Any, g: Any, factor: Any, divisor: Any) -> Any:
    """Of a side of `hypot`, and of the logarithm of `xlogy`."""
    return c.div(c.mul(g, factor), divisor)


def softmax_share(c: Any, g: Any, mine: Any, theirs: Any) -> Any:
    """Of an operand of `logaddexp`."""
    return c.div(g, c.plus(c.call("exp", c.sub(theirs, mine)), 1))


def power_share(c: Any, g: Any, mine: Any, theirs: Any) -> Any:
    """Of an operand of `logaddexp2`."""
    return c.div(g, c.plus(c.call("pow.Scalar", 2, c.sub(theirs, mine)), 1))


# -- rules -------------------------------------------------------------------------------------------------------------


@rule("addcmul", autocast="promote")
def addcmul(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """Saves tensor1 and tensor2 where the other needs a gradient; `self` receives the incoming gradient."""
    out = e.pointwise("aten.addcmul.default", self, tensor1, tensor2)
    return record_addcmul(e, out, self, tensor1, tensor2)


def record_addcmul(e: Eager, out: Tensor, self: Tensor, tensor1: Tensor, tensor2: Tensor) -> Tensor:
    saves = [tensor1 if e.needs_grad(tensor2) else None, tensor2 if e.needs_grad(tensor1) else None]
    factors = written_once(by_factor, tensor2, 1), written_once(by_factor, tensor1, 1)
    formulas = [Formula((0,), same), Formula((1,), factors[0]), Formula((2,), factors[1])]
    return e.record("AddcmulBackward0", out, [self, tensor1, tensor2], formulas, saves)


@rule("addcdiv", autocast="promote")
def addcdiv(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """Saves tensor2 always, and tensor1 if tensor2 needs a gradient; `self` receives the incoming gradient."""
    out = e.pointwise("aten.addcdiv.default", self, tensor1, tensor2)
    return record_addcdiv(e, out, self, tensor1, tensor2)


def record_addcdiv(e: Eager, out: Tensor, self: Tensor, tensor1: Tensor, tensor2: Tensor) -> Tensor:
    def by_numerator(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        inverse = e.pointwise("aten.reciprocal.default", tensor2)  # value / tensor2, scaled in place
        return e.pointwise("aten.mul.Tensor", grad_of(grads), inverse)

    by_denominator = written_once(by_divisor, tensor1, tensor2, 1)
    formulas = [Formula((0,), same), Formula((1,), by_numerator), Formula((2,), by_denominator)]
    saves = [tensor1 if e.needs_grad(tensor2) else None, tensor2]
    return e.record("AddcdivBackward0", out, [self, tensor1, tensor2], formulas, saves)


@rule("lerp")
def lerp(e: Eager, self: Tensor, end: Tensor, weight: Tensor | Scalar) -> Tensor:
    """A number as weight: saves nothing. A tensor: it is saved, self and end too where it needs a gradient."""
    if isinstance(weight, Tensor):
        out = e.pointwise("aten.lerp.Tensor", self, end, weight)
    else:
        out = e.pointwise("aten.lerp.Scalar", self, end)
    return record_lerp(e, out, self, self, end, weight)


def record_lerp(e: Eager, out: Tensor, self: Tensor, original: Tensor, end: Tensor, weight: Tensor | Scalar) -> Tensor:
    """Autograd's part of `lerp`; `original` is what self was before an op in place."""
    if not isinstance(weight, Tensor):
        return e.record("LerpBackward0", out, [self, end], [Formula((1,), scale_grad), Formula((0,), scale_grad)])

    wants = e.needs_grad(weight)
    saves = [end if wants else None, original if wants else None, weight]
    by_ends = Formula((1,), times(weight)), Formula((0,), written_once(by_start, weight))
    formulas = [*by_ends, Formula((2,), written_once(by_weight, original, end))]
    return e.record("LerpBackward1", out, [self, end, weight], formulas, saves)


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
    return record_pow(e, out, self, self, exponent)


def record_pow(e: Eager, out: Tensor, self: Tensor, saved: Tensor, exponent: Tensor | Scalar) -> Tensor:
    """`saved` is the base as it was before an in-place op."""
    if isinstance(exponent, Tensor):
        return _record_pow_tensor(e, out, self, saved, exponent)
    return e.record("PowBackward0", out, [self], [Formula((0,), written_once(by_base, saved, exponent))], [saved])


def _pow_scalar(e: Eager, exponent: Tensor) -> Tensor:
    out = e.pointwise("aten.pow.Scalar", exponent)
    return e.record("PowBackward2", out, [exponent], [Formula((0,), written_once(by_factor, out, 1))], [exponent, out])


def _record_pow_tensor(e: Eager, out: Tensor, self: Tensor, saved: Tensor, exponent: Tensor) -> Tensor:
    def by_exponent(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        # grad * where(self == 0 and exponent >= 0, 0, result * log(self))
        grad = grad_of(grads)
        positive = e.pointwise("aten.ge.Scalar", exponent, dtype=dtypes.bool_)
        zero = e.pointwise("aten.eq.Scalar", saved, dtype=dtypes.bool_)
        condition = e.pointwise("aten.logical_and.default", zero, positive, dtype=dtypes.bool_)
        e.free(positive, zero)
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
    return e.record("PowBackward1", out, [self, exponent], formulas, [exponent, saved, out])


@rule("pow_")
def pow_(e: Eager, self: Tensor, exponent: Tensor | Scalar) -> Tensor:
    """In place: clones its input first and saves the clone (a tensor exponent and the result too)."""
    other = exponent if isinstance(exponent, Tensor) else None
    original = clone_for_backward(e, self, self, other)
    out = inplace(e, self, "aten.pow_.Scalar")
    return record_pow(e, out, self, original or self, exponent)


@rule("lerp_")
def lerp_(e: Eager, self: Tensor, end: Tensor, weight: Tensor | Scalar) -> Tensor:
    """In place, else as `lerp`: what a weight that needs a gradient reads of the input is cloned first."""
    by_tensor = weight if isinstance(weight, Tensor) else None
    original = clone_for_backward(e, self, by_tensor) if by_tensor is not None else None
    out = inplace(e, self, "aten.lerp_.Scalar")
    return record_lerp(e, out, self, original or self, end, weight)


@rule("addcmul_")
def addcmul_(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """In place, else as `addcmul`."""
    out = inplace(e, self, "aten.addcmul_.default")
    return record_addcmul(e, out, self, tensor1, tensor2)


@rule("addcdiv_")
def addcdiv_(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """In place, else as `addcdiv`."""
    out = inplace(e, self, "aten.addcdiv_.default")
    return record_addcdiv(e, out, self, tensor1, tensor2)


def _atan2_gradients(self: Tensor, other: Tensor) -> Any:
    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)  # FunctionsManual.cpp, atan2_backward
        square = e.pointwise("aten.mul.Tensor", other)
        first = e.pointwise("aten.mul.Tensor", self)
        total = e.pointwise("aten.add.Tensor", first, square)
        e.free(first, square)
        inverse = e.pointwise("aten.reciprocal.default", total)
        zero = e.pointwise("aten.eq.Scalar", total, dtype=dtypes.bool_)
        filled = e.pointwise("aten.masked_fill.Scalar", inverse)
        e.free(inverse, zero)
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


@rule("atan2", aliases="arctan2")
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
    formulas = [Formula((k,), written_once(product_over, side, out)) for k, side in ((1, other), (0, self))]
    saves = [other if e.needs_grad(other) else None, self if e.needs_grad(self) else None, out]
    return e.record("HypotBackward0", out, [self, other], formulas, saves)


@rule("xlogy", aliases="special_xlogy")
def xlogy(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both; the gradient of `self` takes a logarithm, three masks and a choice, that of `other` a quotient."""
    out = e.pointwise("aten.xlogy.Tensor", self, other, dtype=_floating(self, other))

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        product = e.pointwise("aten.xlogy.Tensor", grad, other)
        negative = e.pointwise("aten.le.Scalar", other, dtype=dtypes.bool_)
        zero = e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        e.pointwise("aten.bitwise_and.Tensor", zero, negative, dtype=dtypes.bool_)
        return e.pointwise("aten.masked_fill.Scalar", product)

    formulas = [Formula((1,), written_once(product_over, self, other)), Formula((0,), by_self)]
    return e.record("XlogyBackward0", out, [self, other], formulas, [other, self])


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
    return e.record("CopysignBackward0", out, [self, b], [Formula((1,), by_other), Formula((0,), by_self)], saves)


@rule("logaddexp")
def logaddexp(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both operands; each gradient takes a difference, its exponential, one more and a quotient."""
    out = e.pointwise("aten.logaddexp.default", self, other)
    shares = ((1, other, self), (0, self, other))
    formulas = [Formula((k,), written_once(softmax_share, mine, theirs)) for k, mine, theirs in shares]
    return e.record("LogaddexpBackward0", out, [self, other], formulas, [self, other])


@rule("logaddexp2")
def logaddexp2(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Saves both operands; each gradient takes a difference, its power of two, one more and a quotient."""
    out = e.pointwise("aten.logaddexp2.default", self, other)
    shares = ((1, other, self), (0, self, other))
    formulas = [Formula((k,), written_once(power_share, mine, theirs)) for k, mine, theirs in shares]
    return e.record("Logaddexp2Backward0", out, [self, other], formulas, [self, other])


@translation("Pow")
def onnx_power(ctx: Context, node: Node) -> list[Op]:
    exponent = ctx.arg(node.inputs[1])
    if isinstance(exponent, Ref):
        base = ctx.arg(node.inputs[0])
        target = "aten::pow.Tensor_Tensor" if isinstance(base, Ref) else "aten::pow.Scalar"
        return [ctx.op(node, target, base, exponent)]
    return [ctx.op(node, "aten::pow.Tensor_Scalar", ctx.ref(node.inputs[0]), exponent)]
