"""Dropout and its relatives; random numbers are the tracer's.

An export in training mode is run for inference as `model.eval()` has it: nothing is dropped.

Sources: torch/_decomp/decompositions.py (`native_dropout`, `bernoulli`), aten/src/ATen/native/Dropout.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.traces.arithmetic import mul
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer


def _drawn(t: Tracer, like: Node, dtype: DType) -> Node:
    """`rand_like`: drawn contiguous in the order of memory, then permuted and copied (torch/_inductor/decomposition.py,
    `_rand_like`)."""
    order = sorted(range(like.ndim), key=lambda d: -like.strides[d])
    drawn = t.random(tuple([like.shape[d] for d in order]), dtype)
    if order == sorted(order):
        return drawn
    view = t.permute(drawn, [order.index(d) for d in range(like.ndim)])
    return t.clone(view, view.strides)


@traced("dropout")
def dropout(t: Tracer, input: Node, p: float, train: bool) -> Node:
    return native_dropout(t, input, p, train)[0]


@traced("dropout_")
def dropout_(t: Tracer, input: Node, p: float, train: bool) -> Node:
    """Not fused: noise, and a product."""
    if not train or not t.training or p == 0:
        return input
    return mul(t, input, t.pointwise("aten::div.Scalar", _noise(t, input, p, False), 1 - p))


@traced("native_dropout")
def native_dropout(t: Tracer, input: Node, p: float, train: bool | None = True) -> list[Node]:
    if not train or not t.training or p == 0:
        return [input]
    if p == 1:
        scale, out = 0.0, t.full(input.shape, 0, input.dtype)
        mask = t.full(input.shape, False, dtypes.bool_)
    else:
        scale = 1.0 / (1.0 - p)
        mask = t.compare("gt", _drawn(t, input, input.dtype), p)
        out = t.mul(t.mul(mask, input), scale)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        """`native_dropout_backward`."""
        grad = grads[0]
        assert grad is not None
        result = t.mul(grad, t.mul(t.cast(mask, grad.dtype), scale))
        last = layout.prefers_channels_last(grad.shape, grad.strides)
        return [t.clone(result, layout.channels_last_strides(grad.shape) if last else None)]

    t.record(out, [input], gradient)
    return [out, mask]


@traced("bernoulli.p")
def bernoulli_p(t: Tracer, self: Node, p: float, *, generator: Any = None) -> Node:
    """Drawn as float32 in the input's sizes; `bernoulli_` casts the result."""
    return _without_gradient(t, t.compare("lt", _drawn(t, self, dtypes.float32), p), self)


def _without_gradient(t: Tracer, out: Node, self: Node) -> Node:
    """derivatives.yaml: zeros."""

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [t.zeros_like(grads[0])]

    t.record(out, [self], gradient)
    return out


@traced("bernoulli")
def bernoulli(t: Tracer, self: Node, p: Any = None, *, generator: Any = None) -> Node:
    out = t.compare("lt", _drawn(t, self, dtypes.float32), self if p is None else p)
    return _without_gradient(t, t.cast(out, self.dtype), self)


def _noise(t: Tracer, input: Node, p: float, features: bool) -> Node:
    """1 where a value stays; one number for each map of features, or for each value."""
    shape = (*input.shape[:2], *[1] * (input.ndim - 2))
    drawn = t.random(shape) if features else _drawn(t, input, dtypes.float32)
    return t.cast(t.compare("lt", drawn, 1 - p), input.dtype)


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
