"""Views and the copies that `reshape` makes where strides do not allow one; gradients are views of the gradient."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.compiler.aot.registry import traced
from staticmem.compiler.aot.tracer import Gradients, Tracer
from staticmem.compiler.nodes import Node


@traced("view reshape _unsafe_view")
def view(t: Tracer, self: Node, shape: Sequence[int]) -> Node:
    out = t.view(self, shape)
    if out is self:
        return self

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [t.view(grads[0], self.shape)]

    t.record(out, [self], gradient)
    return out


@traced("t")
def t_(t: Tracer, self: Node) -> Node:
    out = t.permute(self, (1, 0))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [t.permute(grads[0], (1, 0))]

    t.record(out, [self], gradient)
    return out


@traced("flatten")
def flatten(t: Tracer, self: Node, start_dim: int = 0, end_dim: int = -1) -> Node:
    start, end = self.dim(start_dim), self.dim(end_dim)
    return view(t, self, (*self.shape[:start], -1, *self.shape[end + 1 :]))
