"""Changes of dtype, copies, and writes to all of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.compiler.aot.registry import traced
from staticmem.compiler.aot.tracer import Gradients, Tracer
from staticmem.compiler.nodes import Node
from staticmem.eager import strides as layout
from staticmem.eager.strides import Strides
from staticmem.ir import dtypes
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
    """A write to all of a tensor as a value: what was there is gone.

    Exporters write `x[...] = number` as a copy of an expanded scalar; Dynamo calls `fill_`.
    """
    number = src
    while number.base in ("aten::expand", "aten::view", "aten::alias"):
        number = number.inputs[0]
    if number.target == "aten::full" and not number.shape:
        return fill(t, self, number.args[1])
    out = t.new("aten::copy", (self, src), self.shape, self.dtype, self.strides)

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
    out = t.full_like(self, value)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [t.zeros_like(grads[0])]

    t.record(out, [self], gradient)
    return out


@traced("_to_copy to_copy")
def to_dtype(t: Tracer, self: Node, *, dtype: DType | None = None, memory_format: str | None = None, **_: Any) -> Node:
    """`_to_copy`: a copy even where the dtype is that of its input."""
    if dtype is None or dtype is self.dtype:
        return clone(t, self, memory_format)
    out = to_copy(t, self, dtype)
    strides = strides_in(self, memory_format)
    return out if strides == out.strides else clone(t, out, memory_format)


@traced("to.dtype")
def to(
    t: Tracer, self: Node, dtype: DType, non_blocking: bool = False, copy: bool = False,
    memory_format: str | None = None,
) -> Node:  # fmt: skip
    if dtype is self.dtype and not copy and memory_format in (None, "preserve_format"):
        return self
    return to_dtype(t, self, dtype=dtype, memory_format=memory_format)


@traced("float")
def to_float(t: Tracer, self: Node) -> Node:
    """A name that exporters write."""
    return to(t, self, dtypes.float32)


@traced("to.dtype_layout to.device")
def to_keywords(t: Tracer, self: Node, device: Any = None, dtype: DType | None = None, **more: Any) -> Node:
    """Devices are all one."""
    more = {name: value for name, value in more.items() if name in ("copy", "memory_format")}
    return to(t, self, dtype or self.dtype, **more)


@traced("type_as to.other")
def type_as(t: Tracer, self: Node, other: Node, *_: Any) -> Node:
    return to(t, self, other.dtype)


@traced("prims::convert_element_type")
def convert_element_type(t: Tracer, self: Node, dtype: DType) -> Node:
    return to_copy(t, self, dtype)
