"""Changes of dtype."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.compiler.aot.registry import traced
from staticmem.compiler.aot.tracer import Gradients, Tracer, form
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


@traced("copy copy_")
def copy(t: Tracer, self: Node, src: Node, non_blocking: bool = False) -> Node:
    """A write to all of a tensor as a value: what was there is gone."""
    out = t.new("aten::copy", (self, src), self.shape, self.dtype, layout.dense_like(self.shape, self.strides))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = grads[0]
        assert grad is not None
        hidden = t.zeros_like(grad) if need[0] else None
        return [hidden, t.cast(grad, src.dtype) if need[1] else None]

    t.record(out, [self, src], gradient)
    return out


@traced("fill.Scalar fill_.Scalar zero zero_")
def fill(t: Tracer, self: Node, value: float = 0) -> Node:
    """One number everywhere; nothing flows back."""
    strides = layout.dense_like(self.shape, self.strides)
    out = t.node("aten::full", (self.shape, value), form(self.shape, self.dtype, strides), {"dtype": self.dtype})

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [t.zeros_like(grads[0])]

    t.record(out, [self], gradient)
    return out
