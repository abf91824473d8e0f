"""Losses, where the compiled code has them in its graph.

Sources: torch/_decomp/decompositions.py (`mse_loss`, `smooth_l1_loss`, `huber_loss`, `binary_cross_entropy`,
`nll_loss_forward` and their backward), aten/src/ATen/native/Loss.cpp and LossNLL.cpp for those that are composed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.arithmetic import add, add_scalar, div, div_scalar, mul, mul_scalar, sub
from staticmem.ops.traces.binary import xlogy
from staticmem.ops.traces.comparison import masked_fill
from staticmem.ops.traces.reduction import mean, sum_
from staticmem.ops.traces.registry import trace_of, traced
from staticmem.ops.traces.softmax import log_softmax
from staticmem.ops.traces.unary import neg
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, gradient_of

MEAN, SUM = 1, 2  # aten/src/ATen/core/Reduction.h


def _reduced(t: Tracer, loss: Node, reduction: int) -> Node:
    """Without a history."""
    if reduction == MEAN:
        return t.new("aten::mean", (loss,), (), loss.dtype)
    return t.new("aten::sum", (loss,), (), loss.dtype) if reduction == SUM else loss


def apply_reduction(t: Tracer, loss: Node, reduction: int) -> Node:
    """Of a loss that autograd sees in its parts."""
    if reduction == MEAN:
        return mean(t, loss)
    return sum_(t, loss) if reduction == SUM else loss


def _pair(
    t: Tracer, self: Node, target: Node, reduction: int, loss: Callable[[Node, Node], Node],
    slope: Callable[[Node, Node, Node, float], Node],
) -> Node:  # fmt: skip
    """A loss of two tensors that may both need a gradient; `slope` has the gradient and what a mean divides by."""
    out = _reduced(t, loss(t.opmath(self), t.opmath(target)), reduction)
    out = t.cast(out, self.dtype)
    count = layout.numel(layout.broadcast_shapes(self.shape, target.shape)) if reduction == MEAN else 1

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        results: list[Node | None] = [None, None]
        for k, (a, b) in enumerate(((self, target), (target, self))):
            if need[k]:
                grad = t.opmath(grads[0])
                results[k] = t.cast(slope(grad, t.opmath(a), t.opmath(b), 1.0 / max(count, 1)), self.dtype)
        return results

    return t.record(out, [self, target], gradient)


@traced("mse_loss")
def mse_loss(t: Tracer, self: Node, target: Node, reduction: int = MEAN) -> Node:
    def loss(x: Node, y: Node) -> Node:
        return t.pointwise("aten::pow.Tensor_Scalar", t.sub(x, y), 2)

    def slope(grad: Node, x: Node, y: Node, share: float) -> Node:
        return t.mul(t.mul(t.sub(x, y), 2.0 * share), grad)

    return _pair(t, self, target, reduction, loss, slope)


@traced("smooth_l1_loss")
def smooth_l1_loss(t: Tracer, self: Node, target: Node, reduction: int = MEAN, beta: float = 1.0) -> Node:
    def loss(x: Node, y: Node) -> Node:
        size = t.call("abs", t.sub(x, y))
        small = t.compare("lt", size, beta)
        square = t.mul(t.pointwise("aten::pow.Tensor_Scalar", size, 2), 0.5)
        return t.where(small, t.div(square, beta), t.sub(size, 0.5 * beta))

    def slope(grad: Node, x: Node, y: Node, share: float) -> Node:
        difference = t.sub(x, y)
        size = t.call("abs", difference)
        scaled = t.mul(grad, share)
        small = t.compare("lt", size, beta)
        inside = t.div(t.mul(scaled, difference), beta)
        return t.where(small, inside, t.mul(scaled, t.call("sign", difference)))

    return _pair(t, self, target, reduction, loss, slope)


@traced("huber_loss")
def huber_loss(t: Tracer, self: Node, target: Node, reduction: int = MEAN, delta: float = 1.0) -> Node:
    def loss(x: Node, y: Node) -> Node:
        size = t.call("abs", t.sub(x, y))
        small = t.compare("lt", size, delta)
        square = t.mul(t.mul(size, 0.5), size)
        return t.where(small, square, t.mul(t.sub(size, 0.5 * delta), delta))

    def slope(grad: Node, x: Node, y: Node, share: float) -> Node:
        difference = t.sub(x, y)
        low = t.compare("lt", difference, -delta)
        falling = t.mul(t.mul(grad, -share), delta)
        high = t.compare("gt", difference, delta)
        rising = t.mul(t.mul(grad, share), delta)
        inside = t.mul(t.mul(difference, share), grad)
        return t.where(low, falling, t.where(high, rising, inside))

    return _pair(t, self, target, reduction, loss, slope)


@traced("l1_loss")
def l1_loss(t: Tracer, self: Node, target: Node, reduction: int = MEAN) -> Node:
    return apply_reduction(t, trace_of("aten::abs")(t, sub(t, self, target)), reduction)


@traced("binary_cross_entropy")
def binary_cross_entropy(
    t: Tracer, self: Node, target: Node, weight: Node | None = None, reduction: int = MEAN
) -> Node:
    """Logarithms are at least -100."""
    if t.needs_grad(target):
        raise ValueError("a binary cross entropy whose target needs a gradient is not traced")
    x, y = t.opmath(self), t.opmath(target)

    def bounded(logarithm: Node) -> Node:
        return t.pointwise("aten::maximum", logarithm, t.full((), -100, logarithm.dtype))

    miss = t.sub(y, 1)
    left = t.mul(miss, bounded(t.call("log1p", t.call("neg", x))))
    loss = t.sub(left, t.mul(y, bounded(t.call("log", x))))
    if weight is not None:
        loss = t.mul(loss, weight)
    out = t.cast(_reduced(t, loss, reduction), self.dtype)

    def gradient(grad: Node) -> Node:
        grad, p, q = t.opmath(grad), t.opmath(self), t.opmath(target)
        over = t.mul(grad, t.sub(p, q))
        under = t.pointwise("aten::clamp_min", t.mul(p, t.sub(1, p)), 1e-12)
        result = t.div(over, under)
        if weight is not None:
            result = t.mul(result, weight)
        if reduction == MEAN:
            result = t.div(result, self.numel)
        return t.cast(result, self.dtype)

    return t.derive(out, self, gradient)


@traced("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    t: Tracer, self: Node, target: Node, weight: Node | None = None, pos_weight: Node | None = None,
    reduction: int = MEAN,
) -> Node:  # fmt: skip
    if t.needs_grad(target):
        raise ValueError("a binary cross entropy whose target needs a gradient is not traced")
    x = self
    factor = None
    if pos_weight is not None:
        factor = t.add(t.mul(t.sub(pos_weight, 1), target), 1)
    left = t.mul(t.sub(1, target), x)
    low = t.pointwise("aten::minimum", t.full((), 0, x.dtype), x)
    soft = t.sub(low, t.call("log1p", t.call("exp", t.call("neg", t.call("abs", x)))))
    loss = t.sub(left, soft if factor is None else t.mul(factor, soft))
    if weight is not None:
        loss = t.mul(loss, weight)
    out = _reduced(t, loss, reduction)

    def gradient(grad: Node) -> Node:
        if pos_weight is None:
            result = t.mul(t.sub(t.call("sigmoid", self), target), grad)
        else:
            positive = t.mul(pos_weight, target)
            rest = t.sub(t.pointwise("aten::add.Scalar", positive, 1), target)
            result = t.mul(t.sub(t.mul(rest, t.call("sigmoid", self)), positive), grad)
        if weight is not None:
            result = t.mul(result, weight)
        if reduction == MEAN:
            result = t.pointwise("aten::div.Scalar", result, self.numel)
        return result

    return t.derive(out, self, gradient)


@traced("soft_margin_loss")
def soft_margin_loss(t: Tracer, self: Node, target: Node, reduction: int = MEAN) -> Node:
    powers = t.call("exp", t.mul(t.call("neg", self), target))
    out = _reduced(t, t.call("log1p", powers), reduction)

    def gradient(grad: Node) -> Node:
        first = t.mul(target, grad)
        result = t.mul(first, t.sub(t.call("sigmoid", t.mul(target, self)), 1))
        if reduction == MEAN:
            result = t.div(result, self.numel)
        return result

    return t.derive(out, self, gradient)


@traced("kl_div")
def kl_div(t: Tracer, self: Node, target: Node, reduction: int = MEAN, *, log_target: bool = False) -> Node:
    """target * (log(target) - input)."""
    if log_target:
        difference = sub(t, target, self)
        loss = mul(t, trace_of("aten::exp")(t, target), difference)
    else:
        product = mul(t, target, self)
        loss = sub(t, xlogy(t, target, target), product)
    return apply_reduction(t, loss, reduction)


# -- negative log likelihood -------------------------------------------------------------------------------------------


def _taken(t: Tracer, target: Node, ignore: int) -> Node:
    """The target, 0 in place of what is ignored."""
    return t.where(t.compare("ne", target, ignore), target, 0)


def _only_counted(t: Tracer, target: Node, value: Node, ignore: int) -> Node:
    return t.where(t.compare("ne", target, ignore), value, 0)


@traced("nll_loss_forward nll_loss2d_forward")
def nll_loss_forward(
    t: Tracer, self: Node, target: Node, weight: Node | None, reduction: int, ignore_index: int
) -> list[Node]:
    """The loss, and the sum of the weights of the targets."""
    dim = 0 if self.ndim < 2 else 1
    shaped = None
    x = self
    if weight is not None:
        sizes = tuple([self.shape[dim] if d == dim else 1 for d in range(self.ndim)])
        shaped = t.view(weight, sizes) if self.ndim > 1 else weight
        x = t.mul(x, shaped)
    index = t.unsqueeze(_taken(t, target, ignore_index), dim)

    def picked(values: Node) -> Node:
        return t.squeeze_dim(t.new("aten::gather", (values, dim, index), index.shape, values.dtype), dim)

    loss = _only_counted(t, target, t.call("neg", picked(x)), ignore_index)
    if not reduction:
        total, out = t.full((), 0, self.dtype), loss
    else:
        if shaped is None:
            counted = t.compare("ne", target, ignore_index)
            total = t.cast(t.new("aten::sum", (counted,), (), dtypes.int64), self.dtype)
        else:
            weights = picked(t.expand(shaped, self.shape))
            total = _reduced(t, _only_counted(t, target, weights, ignore_index), SUM)
        out = _reduced(t, loss, SUM)
        out = t.div(out, total) if reduction == MEAN else out

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        return [_nll_gradient(t, grad, self, target, weight, reduction, ignore_index, total, dim)]

    t.record([out], [self], gradient)
    return [out, total]


def _nll_gradient(
    t: Tracer, grad: Node, self: Node, target: Node, weight: Node | None, reduction: int, ignore: int, total: Node,
    dim: int,
) -> Node:  # fmt: skip
    """`_nll_loss_backward`"""
    if reduction == MEAN:
        grad = t.div(grad, total)
    column = t.unsqueeze(target, dim)
    index = _taken(t, column, ignore)
    zeros = t.full(self.shape, 0, self.dtype)
    place = t.new("aten::scatter.value", (zeros, dim, index, -1.0), self.shape, self.dtype)
    if grad.ndim and self.ndim > grad.ndim:
        grad = t.unsqueeze(grad, dim)
    if weight is not None:
        sizes = tuple([self.shape[dim] if d == dim else 1 for d in range(self.ndim)])
        grad = t.mul(grad, t.view(weight, sizes))
    return t.mul(place, _only_counted(t, column, grad, ignore))


@traced("nll_loss nll_loss_nd nll_loss2d")
def nll_loss(
    t: Tracer, self: Node, target: Node, weight: Node | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Node:
    if self.ndim > 2 and self.ndim != 4:
        raise ValueError("a negative log likelihood of this many dimensions is not traced")
    return nll_loss_forward(t, self, target, weight, reduction, ignore_index)[0]


@traced("cross_entropy_loss")
def cross_entropy_loss(
    t: Tracer, self: Node, target: Node, weight: Node | None = None, reduction: int = MEAN, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Node:  # fmt: skip
    dim = 0 if self.ndim == 1 else 1
    logs = log_softmax(t, self, dim)
    if target.dtype.is_floating_point:
        return _of_probabilities(t, logs, target, weight, reduction, label_smoothing, dim)
    loss = nll_loss(t, logs, target, weight, reduction, ignore_index)
    if not label_smoothing:
        return loss
    smooth = neg(t, sum_(t, logs if weight is None else mul(t, logs, _of_classes(t, weight, logs, dim)), dim))
    ignored = t.compare("eq", target, ignore_index)
    smooth = masked_fill(t, smooth, ignored, 0.0)
    if reduction:
        total = None
        if reduction == MEAN and weight is None:
            counted = t.call("bitwise_not", ignored)
            total = t.new("aten::sum", (counted,), (), dtypes.int64)
        elif reduction == MEAN and weight is not None:
            total = _weight_of_targets(t, target, weight, ignored)
        smooth = sum_(t, smooth)
        smooth = smooth if total is None else div(t, smooth, total)
    smooth = mul_scalar(t, smooth, label_smoothing / self.shape[dim])
    return add(t, mul_scalar(t, loss, 1 - label_smoothing), smooth)


def _of_classes(t: Tracer, weight: Node, logs: Node, dim: int) -> Node:
    return t.view(weight, tuple([logs.shape[dim] if d == dim else 1 for d in range(logs.ndim)]))


def _weight_of_targets(t: Tracer, target: Node, weight: Node, ignored: Node) -> Node:
    """The sum of the weights of the targets that count."""
    index = masked_fill(t, target, ignored, 0)
    index = index if index.ndim == 1 else t.view(index, (index.numel,))
    weights = t.new("aten::gather", (weight, 0, index), index.shape, weight.dtype)
    mask = ignored if ignored.ndim == 1 else t.view(ignored, (ignored.numel,))
    return _reduced(t, t.where(mask, 0, weights), SUM)


def _of_probabilities(
    t: Tracer, logs: Node, target: Node, weight: Node | None, reduction: int, smoothing: float, dim: int
) -> Node:
    """`cross_entropy_loss_prob_target`"""
    classes = logs.shape[dim]
    if smoothing:
        target = add_scalar(t, mul_scalar(t, target, 1 - smoothing), smoothing / classes)
    shaped = None if weight is None else _of_classes(t, weight, logs, dim)
    loss = mul(t, logs, target)
    if shaped is not None:
        loss = mul(t, loss, shaped)
    if not reduction:
        return neg(t, sum_(t, loss, dim))
    total = neg(t, sum_(t, loss))
    return div_scalar(t, total, logs.numel / classes) if reduction == MEAN else total
