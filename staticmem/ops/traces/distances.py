"""Calls that C++ composes of others, whose parts autograd sees.

Sources: aten/src/ATen/native/Distance.cpp, TensorShape.cpp (`meshgrid`, `column_stack`), ReduceOps.cpp (`diff`),
Onehot.cpp, Loss.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.ops.traces.activations import clamp_min
from staticmem.ops.traces.arithmetic import add, add_scalar, div, mul, sub
from staticmem.ops.traces.comparison import where
from staticmem.ops.traces.loss import MEAN, apply_reduction
from staticmem.ops.traces.reduction import linalg_vector_norm, sum_
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.unary import neg
from staticmem.ops.traces.views import expand
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer


@traced("cosine_similarity")
def cosine_similarity(t: Tracer, x1: Node, x2: Node, dim: int = 1, eps: float = 1e-8) -> Node:
    """Norms are at least `eps`, which autograd does not see."""
    if x1.dtype is not x2.dtype:
        raise ValueError("a cosine similarity of two dtypes is not traced")
    shape = layout.broadcast_shapes(x1.shape, x2.shape)
    if x1.shape != x2.shape:
        x2, x1 = expand(t, x2, shape), expand(t, x1, shape)
    norms = [linalg_vector_norm(t, x, 2, (dim,), True) for x in (x1, x2)]
    least = t.full((), eps, x1.dtype)
    bounded = [t.pointwise("aten::clamp_min.Tensor", norm, least) for norm in norms]
    for norm, value in zip(norms, bounded, strict=True):
        t.record(value, [norm], _unchanged)
    second = div(t, x2, bounded[1])
    return sum_(t, mul(t, div(t, x1, bounded[0]), second), (dim,))


def _unchanged(grads: Gradients, need: Sequence[bool]) -> Gradients:
    return grads


@traced("pairwise_distance")
def pairwise_distance(t: Tracer, x1: Node, x2: Node, p: float = 2, eps: float = 1e-6, keepdim: bool = False) -> Node:
    difference = add_scalar(t, sub(t, x1, x2), eps)
    return linalg_vector_norm(t, difference, p, (difference.ndim - 1,), keepdim)


@traced("margin_ranking_loss")
def margin_ranking_loss(
    t: Tracer, input1: Node, input2: Node, target: Node, margin: float = 0.0, reduction: int = MEAN
) -> Node:
    difference = sub(t, input1, input2)
    distance = mul(t, neg(t, target), difference)
    return apply_reduction(t, clamp_min(t, add_scalar(t, distance, margin), 0), reduction)


@traced("hinge_embedding_loss")
def hinge_embedding_loss(t: Tracer, self: Node, target: Node, margin: float = 1.0, reduction: int = MEAN) -> Node:
    zero = t.zeros_like(self)
    bounded = clamp_min(t, sub(t, t.full_like(self, margin), self), 0)
    apart = where(t, t.compare("ne", target, 1), bounded, zero)
    near = where(t, t.compare("ne", target, -1), self, zero)
    return apply_reduction(t, add(t, apart, near), reduction)
