"""Changes of dtype."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.compiler.aot.tracer import Gradients, Tracer
from staticmem.compiler.nodes import Node
from staticmem.ir.dtypes import DType


def to_copy(t: Tracer, self: Node, dtype: DType) -> Node:
    """A conversion; its gradient is cast back (when it is brought to its input's form)."""
    out = t.cast(self, dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        return grads

    if out is not self and dtype.is_differentiable:
        t.record(out, [self], gradient)
    return out
