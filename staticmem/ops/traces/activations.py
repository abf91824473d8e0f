"""Activations and bounds: their decompositions and those of their backward.

Sources: torch/_decomp/decompositions.py, torch/_refs/nn/functional, torch/_inductor/decomposition.py (silu); the
formulas of tools/autograd/derivatives.yaml say what the backward reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.arithmetic import clamped, mul, sub, tensor
from staticmem.ops.traces.comparison import boolean, chosen, where
from staticmem.ops.traces.joining import concatenated
from staticmem.ops.traces.registry import trace_of, traced
from staticmem.ops.traces.views import view
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, gradient_of

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946  # Activation.cpp

_SQRT2, _SQRT1_2, _2_SQRTPI = 1.41421356237309504880, 0.70710678118654752440, 1.12837916709551257390  # `gelu_backward`


def _recorded(t: Tracer, out: Node, self: Node, backward: Callable[[Node], Node]) -> Node:
    return t.derive(out, self, lambda grad: backward(grad))


def _decomposed(t: Tracer, self: Node, forward: Callable[[Node], Node], backward: Callable[[Node, Node], Node]) -> Node:
    """Both run in float32 for halves; the backward reads the input."""
    out = t.cast(forward(t.opmath(self)), self.dtype)
    return _recorded(t, out, self, lambda grad: t.cast(backward(t.opmath(grad), t.opmath(self)), self.dtype))


def _of_result(t: Tracer, self: Node, name: str, backward: Callable[[Node, Node], Node]) -> Node:
    """A call of its own, whose backward reads its result."""
    out = t.pointwise(f"aten::{name}", self, dtype=self.dtype if self.dtype.is_floating_point else dtypes.float32)
    return _recorded(t, out, self, lambda grad: t.cast(backward(t.opmath(grad), t.opmath(out)), grad.dtype))


def _call(t: Tracer, name: str, self: Node) -> Node:
    return t.pointwise(f"aten::{name}", self)


@traced("relu")
def relu(t: Tracer, self: Node) -> Node:
    """`threshold_backward` of the result: le, where."""
    out = t.pointwise("aten::relu", self)
    return _recorded(t, out, self, lambda grad: _threshold_backward(t, grad, out, 0))


def _threshold_backward(t: Tracer, grad: Node, self: Node, threshold: float) -> Node:
    return t.where(t.compare("le", self, threshold), 0, grad)


@traced("threshold")
def threshold(t: Tracer, self: Node, threshold: float, value: float) -> Node:
    computed = t.opmath(self)
    out = t.cast(t.where(t.compare("le", computed, threshold), value, computed), self.dtype)
    return _recorded(t, out, self, lambda grad: _threshold_backward(t, grad, self, threshold))


@traced("sigmoid special_expit")
def sigmoid(t: Tracer, self: Node) -> Node:
    return _of_result(t, self, "sigmoid", lambda grad, out: t.mul(grad, t.mul(out, t.sub(1, out))))


@traced("tanh")
def tanh(t: Tracer, self: Node) -> Node:
    return _of_result(t, self, "tanh", lambda grad, out: t.mul(grad, t.sub(1, t.mul(out, out))))


@traced("hardtanh")
def hardtanh(t: Tracer, self: Node, min_val: float = -1, max_val: float = 1) -> Node:
    def backward(grad: Node, x: Node) -> Node:
        outside = t.pointwise("aten::bitwise_or.Tensor", t.compare("le", x, min_val), t.compare("ge", x, max_val))
        return t.where(outside, 0.0, grad)

    return _decomposed(t, self, lambda x: clamped(t, x, min_val, max_val), backward)


@traced("relu6")
def relu6(t: Tracer, self: Node) -> Node:
    return hardtanh(t, self, 0, 6)


@traced("hardsigmoid")
def hardsigmoid(t: Tracer, self: Node) -> Node:
    def backward(grad: Node, x: Node) -> Node:
        inside = t.pointwise("aten::bitwise_and.Tensor", t.compare("gt", x, -3.0), t.compare("lt", x, 3.0))
        return t.where(inside, t.mul(grad, 1.0 / 6.0), 0.0)

    return _decomposed(t, self, lambda x: t.div(clamped(t, t.add(x, 3), 0, 6), 6), backward)


@traced("hardswish")
def hardswish(t: Tracer, self: Node) -> Node:
    def backward(grad: Node, x: Node) -> Node:
        low, high = t.compare("le", x, -3), t.compare("lt", x, 3)
        return t.where(low, 0.0, t.where(high, t.mul(grad, t.add(t.div(x, 3), 0.5)), grad))

    return _decomposed(t, self, lambda x: t.div(t.mul(x, clamped(t, t.add(x, 3), 0, 6)), 6), backward)


@traced("silu")
def silu(t: Tracer, self: Node) -> Node:
    def backward(grad: Node, x: Node) -> Node:
        gate = _call(t, "sigmoid", x)
        by_gate = t.mul(grad, gate)
        return t.mul(by_gate, t.add(t.mul(x, t.sub(1, gate)), 1))

    return _decomposed(t, self, lambda x: t.div(x, t.add(_call(t, "exp", _call(t, "neg", x)), 1)), backward)


@traced("gelu")
def gelu(t: Tracer, self: Node, *, approximate: str = "none") -> Node:
    if approximate == "tanh":
        return _gelu_tanh(t, self)

    def cdf(x: Node) -> Node:
        return t.add(_call(t, "erf", t.mul(x, _SQRT1_2)), 1)

    def forward(x: Node) -> Node:
        return t.mul(t.mul(x, 0.5), cdf(x))

    def backward(grad: Node, x: Node) -> Node:
        below = t.mul(cdf(x), 0.5)
        density = t.mul(_call(t, "exp", t.mul(t.mul(x, x), -0.5)), _2_SQRTPI * _SQRT1_2 * 0.5)
        return t.mul(grad, t.add(below, t.mul(x, density)))

    return _decomposed(t, self, forward, backward)


def _gelu_tanh(t: Tracer, self: Node) -> Node:
    beta, kappa = _SQRT2 * _2_SQRTPI * 0.5, 0.044715

    def inner(x: Node, square: Node) -> Node:
        return t.mul(t.add(x, t.mul(t.mul(square, x), kappa)), beta)

    def forward(x: Node) -> Node:
        value = inner(x, t.mul(x, x))
        half = t.mul(x, 0.5)
        return t.mul(half, t.add(_call(t, "tanh", value), 1))

    def backward(grad: Node, x: Node) -> Node:
        square = t.mul(x, x)
        value = _call(t, "tanh", inner(x, square))
        left = t.mul(x, 0.5)
        by_left = t.mul(t.add(value, 1), 0.5)
        of_tanh = t.sub(1, t.mul(value, value))
        of_inner = t.mul(t.add(t.mul(square, 3 * kappa), 1), beta)
        return t.mul(grad, t.add(by_left, t.mul(t.mul(left, of_tanh), of_inner)))

    return _decomposed(t, self, forward, backward)


def _softplus(t: Tracer, x: Node, beta: float = 1, threshold: float = 20) -> Node:
    """torch/_refs/nn/functional, `softplus`: a beta of 1 is left out."""
    scaled = x if beta == 1 else t.mul(x, beta)
    value = _call(t, "log1p", _call(t, "exp", scaled))
    value = value if beta == 1 else t.div(value, beta)
    return t.where(t.compare("gt", scaled, threshold), x, value)


@traced("softplus")
def softplus(t: Tracer, self: Node, beta: float = 1, threshold: float = 20) -> Node:
    def backward(grad: Node, x: Node) -> Node:
        z = _call(t, "exp", t.mul(x, beta))
        high = t.compare("gt", t.mul(x, beta), threshold)
        return t.where(high, grad, t.div(t.mul(grad, z), t.add(z, 1.0)))

    return _decomposed(t, self, lambda x: _softplus(t, x, beta, threshold), backward)


@traced("mish")
def mish(t: Tracer, self: Node) -> Node:
    def backward(grad: Node, x: Node) -> Node:
        value = _call(t, "tanh", _softplus(t, x))
        by_gate = t.mul(x, _call(t, "sigmoid", x))
        return t.mul(grad, t.add(value, t.mul(by_gate, t.sub(1, t.mul(value, value)))))

    return _decomposed(t, self, lambda x: t.mul(x, _call(t, "tanh", _softplus(t, x))), backward)


def _elu_backward(t: Tracer, grad: Node, x: Node, alpha: float, scale: float, input_scale: float) -> Node:
    low = t.compare("le", x, 0)
    scaled = t.mul(t.mul(grad, input_scale), alpha * scale)
    below = t.mul(scaled, _call(t, "exp", t.mul(x, input_scale)))
    return t.where(low, below, t.mul(grad, scale))


@traced("elu")
def elu(t: Tracer, self: Node, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Node:
    def forward(x: Node) -> Node:
        high, above = t.compare("gt", x, 0), t.mul(x, scale)
        return t.where(high, above, t.mul(_call(t, "expm1", t.mul(x, input_scale)), alpha * scale))

    return _decomposed(t, self, forward, lambda grad, x: _elu_backward(t, grad, x, alpha, scale, input_scale))


@traced("elu_")
def elu_(t: Tracer, self: Node, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Node:
    """In place, the backward reads the result."""
    x = t.opmath(self)
    high, above = t.compare("gt", x, 0), t.mul(x, scale)
    value = t.where(high, above, t.mul(_call(t, "expm1", t.mul(x, input_scale)), alpha * scale))
    return _elu_of_result(t, t.cast(value, self.dtype), self, alpha, scale, input_scale)


def _elu_of_result(t: Tracer, out: Node, self: Node, alpha: float, scale: float, input_scale: float) -> Node:
    def backward(grad: Node) -> Node:
        grad, y = t.opmath(grad), t.opmath(out)
        low = t.compare("le", y, 0)
        below = t.mul(t.mul(grad, input_scale), t.add(y, alpha * scale))
        return t.cast(t.where(low, below, t.mul(grad, scale)), self.dtype)

    return _recorded(t, out, self, backward)


@traced("selu_")
def selu_(t: Tracer, self: Node) -> Node:
    return elu_(t, self, _SELU_ALPHA, _SELU_SCALE)


@traced("selu")
def selu(t: Tracer, self: Node) -> Node:
    return elu(t, self, _SELU_ALPHA, _SELU_SCALE)


def _celu(t: Tracer, x: Node, alpha: float) -> Node:
    value = _call(t, "expm1", x if alpha == 1 else t.div(x, alpha))
    value = value if alpha == 1 else t.mul(value, alpha)
    return t.where(t.compare("gt", x, 0), x, value)


@traced("celu_")
def celu_(t: Tracer, self: Node, alpha: float = 1.0) -> Node:
    out = t.cast(_celu(t, t.opmath(self), alpha), self.dtype)
    return _elu_of_result(t, out, self, alpha, 1, 1 / alpha)


@traced("celu")
def celu(t: Tracer, self: Node, alpha: float = 1.0) -> Node:
    return _decomposed(
        t, self, lambda x: _celu(t, x, alpha), lambda grad, x: _elu_backward(t, grad, x, alpha, 1, 1 / alpha)
    )


@traced("leaky_relu")
def leaky_relu(t: Tracer, self: Node, negative_slope: float = 0.01) -> Node:
    slope = negative_slope
    return _decomposed(t, self, lambda x: _sloped(t, x, x, slope), lambda grad, x: _sloped(t, x, grad, slope))


@traced("leaky_relu_")
def leaky_relu_(t: Tracer, self: Node, negative_slope: float = 0.01) -> Node:
    """In place, the backward reads the result."""
    x = t.opmath(self)
    out = t.cast(_sloped(t, x, x, negative_slope), self.dtype)

    def backward(grad: Node) -> Node:
        grad = t.opmath(grad)
        return t.cast(_sloped(t, t.opmath(out), grad, negative_slope), self.dtype)

    return _recorded(t, out, self, backward)


def _sloped(t: Tracer, condition_of: Node, value: Node, slope: float) -> Node:
    return t.where(t.compare("gt", condition_of, 0), value, t.mul(value, slope))


@traced("rrelu")
def rrelu(
    t: Tracer, self: Node, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, generator: Any = None
) -> Node:
    """Slopes are drawn in training (`rrelu_with_noise_functional` of torch/_inductor/decomposition.py)."""
    if not training or not t.training:
        return leaky_relu(t, self, (lower + upper) / 2)
    low = t.compare("le", self, 0)
    drawn = t.random((self.numel,), self.dtype)
    slopes = t.add(t.mul(drawn, upper - lower), lower)
    slopes = t.new("aten::as_strided", (slopes, self.shape, self.strides), self.shape, self.dtype, self.strides)
    out = t.where(low, t.mul(self, slopes), self)
    noise = t.where(low, slopes, 1)
    return _recorded(t, out, self, lambda grad: t.cast(t.mul(t.opmath(grad), t.opmath(noise)), self.dtype))


@traced("log_sigmoid")
def log_sigmoid(t: Tracer, self: Node) -> Node:
    def exp_of_minus_abs(x: Node) -> Node:
        return _call(t, "exp", _call(t, "neg", _call(t, "abs", x)))

    def forward(x: Node) -> Node:
        low = t.pointwise("aten::minimum", t.full((), 0, x.dtype), x)
        return t.sub(low, _call(t, "log1p", exp_of_minus_abs(x)))

    def backward(grad: Node, x: Node) -> Node:
        negative = t.compare("lt", x, 0)
        most, sign = t.where(negative, 1, 0), t.where(negative, 1, -1)
        z = exp_of_minus_abs(x)
        return t.mul(grad, t.sub(most, t.mul(sign, t.div(z, t.add(z, 1)))))

    return _decomposed(t, self, forward, backward)


@traced("hardshrink")
def hardshrink(t: Tracer, self: Node, lambd: float = 0.5) -> Node:
    """torch/_refs/nn/functional, `hardshrink`; its backward has the same condition (merged with it)."""
    low = t.compare("le", _call(t, "abs", self), lambd)
    out = t.where(low, 0, self)
    return _recorded(t, out, self, lambda grad: t.where(low, 0, grad))


@traced("prelu")
def prelu(t: Tracer, self: Node, weight: Node) -> Node:
    """ATen's `prelu` brings the weight to the input's rank."""
    if weight.ndim != self.ndim:
        sizes = tuple([weight.numel if k == 1 else 1 for k in range(self.ndim)]) if self.ndim > 1 else (weight.numel,)
        weight = view(t, weight, sizes)
    return prelu_kernel(t, self, weight)


@traced("_prelu_kernel")
def prelu_kernel(t: Tracer, self: Node, weight: Node) -> Node:
    def by_sign(positive: Any, negative: Callable[[], Any]) -> Node:
        condition = t.compare("gt", self, 0)
        return t.where(condition, positive, negative())

    out = by_sign(self, lambda: t.mul(weight, self))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        by_self = by_sign(grad, lambda: t.mul(weight, grad))
        by_weight = by_sign(0.0, lambda: t.mul(self, grad))
        return [by_self, by_weight]

    return t.record(out, [self, weight], gradient)


@traced("glu")
def glu(t: Tracer, self: Node, dim: int = -1) -> Node:
    """One call; its backward slices the input (`glu_backward`)."""
    axis = self.dim(dim)
    half = self.shape[axis] // 2
    shape = (*self.shape[:axis], half, *self.shape[axis + 1 :])
    strides = layout.pointwise_strides(shape, ((shape, self.strides),))
    out = t.new("aten::glu", (self, dim), shape, self.dtype, strides)

    def backward(grad: Node) -> Node:
        grad_, x = t.opmath(grad), t.opmath(self)
        first, second = t.slice(x, axis, 0, half), t.slice(x, axis, half, 2 * half)
        gate = _call(t, "sigmoid", second)
        by_second = t.mul(t.mul(t.mul(t.sub(1, gate), gate), first), grad_)
        return t.cast(concatenated(t, (t.mul(gate, grad_), by_second), axis), self.dtype)

    return _recorded(t, out, self, backward)


def _bound(t: Tracer, name: str, self: Node, bound: Any) -> Node:
    return t.pointwise(f"aten::{name}{'.Tensor' if isinstance(bound, Node) else ''}", self, bound)


def _masked(t: Tracer, grad: Node, mask: Callable[[], Node]) -> Node:
    zero = t.full((), 0, grad.dtype)
    return chosen(t, mask(), grad, zero)


def _only(t: Tracer, self: Node, bound: Any, name: str, beyond: str, within: str) -> Node:
    out = _bound(t, name, self, bound)
    return t.derive_each(
        out,
        [self, tensor(bound)],
        (1, lambda grad: _masked(t, grad, lambda: t.compare(beyond, self, bound))),
        (0, lambda grad: _masked(t, grad, lambda: t.compare(within, self, bound))),
    )


@traced("clamp_min")
def clamp_min(t: Tracer, self: Node, min: Any) -> Node:
    return _only(t, self, min, "clamp_min", "lt", "ge")


@traced("clamp_max")
def clamp_max(t: Tracer, self: Node, max: Any) -> Node:
    return _only(t, self, max, "clamp_max", "gt", "le")


@traced("clamp")
def clamp(t: Tracer, self: Node, min: Any = None, max: Any = None) -> Node:
    """`clamp_backward`, `clamp_backward_min_max` of FunctionsManual.cpp."""
    if max is None:
        return clamp_min(t, self, min)
    if min is None:
        return clamp_max(t, self, max)
    numbers = not isinstance(min, Node) and not isinstance(max, Node)
    x = t.opmath(self) if numbers else self
    out = t.cast(_bound(t, "clamp_max", _bound(t, "clamp_min", x, min), max), self.dtype)

    def both(target: str, a: Node, b: Node) -> Node:
        return boolean(t, f"aten::logical_{target}", a, b)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        by_min = by_max = by_self = None
        if any(need[1:]):
            zero = t.full((), 0, grad.dtype)
            if need[1]:
                below = both("and", t.compare("lt", self, min), t.compare("lt", min, max))
                by_min = chosen(t, below, grad, zero)
            if need[2]:
                above = both("or", t.compare("gt", self, max), t.compare("lt", max, min))
                by_max = chosen(t, above, grad, zero)
        if need[0]:
            by_self = _masked(t, grad, lambda: both("and", t.compare("ge", self, min), t.compare("le", self, max)))
        return [by_self, by_min, by_max]

    return t.record(out, [self, tensor(min), tensor(max)], gradient)


@traced("softshrink")
def softshrink(t: Tracer, self: Node, lambd: float = 0.5) -> Node:
    """torch/_refs/nn/functional: nan stays nan by a product with zero. Autograd sees its parts."""
    outside = t.compare("gt", t.call("abs", self), lambd)
    shrunk = sub(t, self, mul(t, trace_of("aten::sign")(t, self), lambd))
    return where(t, outside, shrunk, mul(t, self, 0))
