"""Activations: their decompositions and those of their backward (torch/_decomp/decompositions.py)."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.compiler.aot.registry import traced
from staticmem.compiler.aot.tracer import Gradients, Tracer
from staticmem.compiler.nodes import Node
from staticmem.ir import dtypes


@traced("relu")
def relu(t: Tracer, self: Node) -> Node:
    """`threshold_backward` of the result: le, where."""
    out = t.pointwise("aten::relu", self)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        negative = t.pointwise("aten::le.Scalar", out, 0, dtype=dtypes.bool_)
        return [t.pointwise("aten::where.self", negative, t.full((), 0, self.dtype), grads[0], dtype=self.dtype)]

    t.record(out, [self], gradient)
    return out
