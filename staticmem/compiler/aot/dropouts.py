"""Dropout and its relatives; random numbers are the tracer's.

An export in training mode is run for inference as `model.eval()` has it: nothing is dropped.

Sources: torch/_decomp/decompositions.py (`native_dropout`, `bernoulli`), aten/src/ATen/native/Dropout.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.compiler.aot.arithmetic import mul, tensor
from staticmem.compiler.aot.registry import traced
from staticmem.compiler.aot.tracer import Gradients, Tracer
from staticmem.compiler.nodes import Node
from staticmem.eager import strides as layout


def _uniform(t: Tracer, like: Node) -> Node:
    """`rand_like`: drawn contiguous in the order of memory, then permuted and copied (torch/_inductor/decomposition.py,
    `_rand_like`)."""
    if not layout.prefers_channels_last(like.shape, like.strides):
        return t.random(like.shape, like.dtype)
    order = [0, *range(2, like.ndim), 1]
    drawn = t.random(tuple([like.shape[d] for d in order]), like.dtype)
    view = t.permute(drawn, (0, like.ndim - 1, *range(1, like.ndim - 1)))
    return t.clone(view, view.strides)


@traced("dropout")
def dropout(t: Tracer, input: Node, p: float, train: bool) -> Node:
    return native_dropout(t, input, p, train)[0]


@traced("native_dropout")
def native_dropout(t: Tracer, input: Node, p: float, train: bool | None = True) -> list[Node]:
    if not train or not t.training or p == 0:
        return [input]
    if p == 1:
        raise ValueError("a dropout of everything is not traced")
    scale = 1.0 / (1.0 - p)
    mask = t.compare("gt", _uniform(t, input), p)
    out = t.mul(t.mul(mask, input), scale)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        """`native_dropout_backward`; its copy at the end is dropped as one without effect."""
        grad = grads[0]
        assert grad is not None
        return [t.mul(grad, t.mul(t.cast(mask, grad.dtype), scale))]

    t.record(out, [input], gradient)
    return [out, mask]


@traced("bernoulli.p")
def bernoulli_p(t: Tracer, self: Node, p: float, *, generator: Any = None) -> Node:
    """Drawn as float32 in the input's sizes; `bernoulli_` casts the result."""
    return t.compare("lt", t.random(self.shape), p)


@traced("bernoulli")
def bernoulli(t: Tracer, self: Node, p: Any = None, *, generator: Any = None) -> Node:
    if isinstance(p, (int, float)):
        return t.cast(bernoulli_p(t, self, p), self.dtype)
    return t.cast(t.compare("lt", t.random(self.shape), self if tensor(p) is None else p), self.dtype)


def _noise(t: Tracer, input: Node, p: float, features: bool) -> Node:
    """1 where a value stays; one number for each map of features, or for each value."""
    shape = (*input.shape[:2], *[1] * (input.ndim - 2)) if features else input.shape
    return t.cast(t.compare("lt", t.random(shape), 1 - p), input.dtype)


@traced("feature_dropout")
def feature_dropout(t: Tracer, input: Node, p: float, train: bool) -> Node:
    if not train or not t.training or p == 0:
        return input
    return mul(t, input, t.pointwise("aten::div.Scalar", _noise(t, input, p, True), 1 - p))


@traced("alpha_dropout")
def alpha_dropout(t: Tracer, input: Node, p: float, train: bool) -> Node:
    return _alpha(t, input, p, train, False)


@traced("feature_alpha_dropout")
def feature_alpha_dropout(t: Tracer, input: Node, p: float, train: bool) -> Node:
    return _alpha(t, input, p, train, True)


def _alpha(t: Tracer, input: Node, p: float, train: bool, features: bool) -> Node:
    """`_dropout` with `alpha_dropout` of Dropout.cpp: keeps mean and variance of SELU."""
    if not train or not t.training or p == 0:
        return input
    noise = _noise(t, input, p, features)
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    shift = t.pointwise("aten::mul.Scalar", t.pointwise("aten::add.Scalar", noise, -1), alpha * a)
    shift = t.pointwise("aten::add.Scalar", shift, alpha * a * p)
    kept = mul(t, input, t.pointwise("aten::mul.Scalar", noise, a))
    out = t.add(kept, shift)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        return grads

    t.record(out, [kept], gradient)
    return out
