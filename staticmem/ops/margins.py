"""Losses with margins and signs: composites of element-wise ops in C++ order, and `soft_margin_loss`.

Source: aten/src/ATen/native/Loss.cpp. The in-place steps there are taken as they run on plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.ops.composed import pairwise_distance
from staticmem.ops.pointwise import add, div, mul, rsub, sub
from staticmem.ops.reduction import mean
from staticmem.ops.reduction import sum as sum_
from staticmem.ops.registry import RULES, rule


def _op(e: Eager, name: str, *args: Any) -> Tensor:
    result: Tensor = RULES[f"aten::{name}"].function(e, *args)
    return result


def _free(e: Eager, *temporaries: Tensor) -> None:
    """The end of a C++ statement: what its backward has not saved is gone."""
    for temporary in temporaries:
        e.free(temporary)


def _chosen(e: Eager, comparison: str, target: Tensor, number: float, self: Tensor, other: Tensor) -> Tensor:
    mask = _op(e, comparison, target, number)
    result = _op(e, "where", mask, self, other)
    e.free(mask)
    return result


def _reduced(e: Eager, loss: Tensor, reduction: int) -> Tensor:
    return loss if reduction == 0 else mean(e, loss) if reduction == 1 else sum_(e, loss)


@rule("aten::soft_margin_loss", autocast="float32")
def soft_margin_loss(e: Eager, self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """log(1 + exp(-target * self)) in one buffer, which a reduced result keeps whole (`resize_` does not shrink it).

    Saves both; backward has three buffers at once, of which one is the gradient.
    """
    out = e.pointwise("aten.soft_margin_loss.default", self, target)
    if reduction:
        out = e.alias(out, (), ())

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        e.kernel("aten.soft_margin_loss_backward.default")
        parts = [e.empty_like(target), e.pointwise("", target, self)]
        exponential = e.pointwise("", target, self)
        _free(e, *parts)
        result = e.pointwise("", target, exponential)
        e.free(exponential)
        return result

    e.record("SoftMarginLossBackward0", out, [self], [Formula((0,), gradient)], [self, target])
    return out


@rule("aten::margin_ranking_loss", autocast="float32")
@scoped
def margin_ranking_loss(
    e: Eager, input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1
) -> Tensor:
    """-target * (input1 - input2) + margin, clamped in place."""
    difference = sub(e, input1, input2)
    sign = _op(e, "neg", target)
    product = mul(e, sign, difference)
    loss = add(e, product, margin)
    _free(e, sign, difference, product)
    return _reduced(e, _op(e, "clamp_min_", loss, 0), reduction)


@rule("aten::hinge_embedding_loss", autocast="float32")
@scoped
def hinge_embedding_loss(e: Eager, self: Tensor, target: Tensor, margin: float = 1.0, reduction: int = 1) -> Tensor:
    """Zeros, the margin's rest clamped in place, two masks and two selections, whose sum is the loss."""
    zeros = _op(e, "zeros_like", self)
    rest = _op(e, "clamp_min_", rsub(e, self, margin), 0)
    first = _chosen(e, "ne", target, 1, rest, zeros)
    second = _chosen(e, "ne", target, -1, self, zeros)
    return _reduced(e, add(e, first, second), reduction)


@rule("aten::cosine_embedding_loss", autocast="float32")
@scoped
def cosine_embedding_loss(
    e: Eager, input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1
) -> Tensor:
    """Three products over the last dimension, their cosine, and two selections by the sign of the target."""
    dim = (target.ndim,)

    product = mul(e, input1, input2)
    both = sum_(e, product, dim)
    _free(e, product)
    sizes = []
    for x in (input1, input2):
        square = mul(e, x, x)
        total = sum_(e, square, dim)
        sizes.append(add(e, total, 1e-12))
        _free(e, square, total)
    cosine = div(e, both, _op(e, "sqrt_", mul(e, *sizes)))
    zeros = _op(e, "zeros_like", cosine)
    near = rsub(e, cosine, 1)
    far = _op(e, "clamp_min_", sub(e, cosine, margin), 0)
    first = _chosen(e, "eq", target, 1, near, zeros)
    second = _chosen(e, "eq", target, -1, far, zeros)
    return _reduced(e, add(e, first, second), reduction)


@rule("aten::poisson_nll_loss", autocast="float32")
@scoped
def poisson_nll_loss(
    e: Eager, input: Tensor, target: Tensor, log_input: bool, full: bool, eps: float, reduction: int
) -> Tensor:
    """exp(input) - target * input, or input - target * log(input + eps); without Stirling's term."""
    if log_input:
        product, rate = mul(e, target, input), _op(e, "exp", input)
        made = [product, rate]
        loss = sub(e, rate, product)
    else:
        raised = add(e, input, eps)
        log = _op(e, "log", raised)
        made = [raised, log, mul(e, target, log)]
        loss = sub(e, input, made[-1])
    _free(e, *made)
    return _reduced(e, loss, reduction)


@rule("aten::triplet_margin_loss", autocast="float32")
@scoped
def triplet_margin_loss(
    e: Eager, anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, reduction: int = 1,
) -> Tensor:  # fmt: skip
    """Distances to both (with `swap` also between those), and what is above the margin."""
    near = pairwise_distance(e, anchor, positive, p, eps)
    far = pairwise_distance(e, anchor, negative, p, eps)
    if swap:
        between = pairwise_distance(e, positive, negative, p, eps)
        nearest = _op(e, "minimum", far, between)
        _free(e, far, between)
        far = nearest
    raised = add(e, near, margin)
    difference = sub(e, raised, far)
    loss = _op(e, "clamp_min", difference, 0)
    _free(e, raised, difference)
    return _reduced(e, loss, reduction)
