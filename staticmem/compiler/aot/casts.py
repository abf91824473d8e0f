"""Changes of dtype."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.compiler.aot.registry import traced
from staticmem.compiler.aot.tracer import Gradients, Tracer
from staticmem.compiler.nodes import Node
from staticmem.eager import strides as layout
from staticmem.eager.strides import Strides
from staticmem.ir.dtypes import DType


def to_copy(t: Tracer, self: Node, dtype: DType) -> Node:
    """A conversion; its gradient is cast back (when it is brought to its input's form)."""
    out = t.cast(self, dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        return grads

    if out is not self and dtype.is_differentiable:
        t.record(out, [self], gradient)
    return out


@traced("clone")
def clone(t: Tracer, self: Node, memory_format: str | None = None) -> Node:
    """A copy in the layout that is asked for, that of its input by default."""
    out = t.new("aten::clone", (self,), self.shape, self.dtype, strides_in(self, memory_format))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        return grads

    t.record(out, [self], gradient)
    return out


def strides_in(self: Node, memory_format: str | None) -> Strides:
    """Strides of a new tensor like `self` in a memory format (`empty_like`)."""
    if memory_format in (None, "preserve_format"):
        return layout.dense_like(self.shape, self.strides)
    return (
        layout.contiguous_strides(self.shape)
        if memory_format == "contiguous_format"
        else layout.channels_last_strides(self.shape)
    )
