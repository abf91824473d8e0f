"""Matrix products: `linear` and its parts as they are composed in C++ (aten/src/ATen/native/Linear.cpp), formulas of
tools/autograd/derivatives.yaml (`mm_mat1_grad`, `mm_mat2_grad` of FunctionsManual.cpp for contiguous operands)."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.compiler.aot.registry import traced
from staticmem.compiler.aot.tracer import Gradients, Tracer
from staticmem.compiler.aot.views import t_, view
from staticmem.compiler.nodes import Node


def _products(t: Tracer, a: Node, b: Node, gradient: Node, need: Sequence[bool]) -> list[Node | None]:
    by_a = t.mm(gradient, t.permute(b, (1, 0))) if need[0] else None
    by_b = t.mm(t.permute(a, (1, 0)), gradient) if need[1] else None
    return [by_a, by_b]


@traced("mm")
def mm(t: Tracer, self: Node, mat2: Node) -> Node:
    out = t.mm(self, mat2)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return _products(t, self, mat2, grads[0], need)

    t.record(out, [self, mat2], gradient)
    return out


@traced("linear")
def linear(t: Tracer, input: Node, weight: Node, bias: Node | None = None) -> Node:
    """With a bias one addmm over all leading dimensions (`_flatten_nd_linear`), else a product."""
    flat = input if input.ndim == 2 else view(t, input, (-1, input.shape[-1]))
    transposed = t_(t, weight)
    product = mm(t, flat, transposed) if bias is None else addmm(t, bias, flat, transposed)
    return product if input.ndim == 2 else view(t, product, (*input.shape[:-1], weight.shape[0]))


@traced("addmm")
def addmm(t: Tracer, self: Node, mat1: Node, mat2: Node, beta: float = 1, alpha: float = 1) -> Node:
    out = t.new("aten::addmm", (self, mat1, mat2), (mat1.shape[0], mat2.shape[1]), mat1.dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [grads[0], *_products(t, mat1, mat2, grads[0], need[1:])]

    t.record(out, [self, mat1, mat2], gradient)
    return out
