"""Changes of dtype, copies, and writes to all of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.traces.registry import trace_of, traced
from staticmem.ops.traces.views import clone
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer


def to_copy(t: Tracer, self: Node, dtype: DType) -> Node:
    """A conversion; its gradient is cast back (when it is brought to its input's form)."""
    out = t.cast(self, dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        return grads

    if out is not self and dtype.is_differentiable:
        t.record(out, [self], gradient)
    return out


def _converted(t: Tracer, self: Node) -> Node:
    """A conversion to the dtype that the tensor has: a copy."""
    strides = layout.dense_like(self.shape, self.strides)
    out = t.new("prims::convert_element_type", (self, self.dtype), self.shape, self.dtype, strides)
    return t.record(out, [self], lambda grads, need: grads)


@traced("copy copy_")
def copy(t: Tracer, self: Node, src: Node, non_blocking: bool = False) -> Node:
    """A write to all of a tensor as a value: what was there is gone.

    Exporters write `x[...] = number` as a copy of an expanded scalar; Dynamo calls `fill_`.
    """
    number = src
    while number.base in ("aten::expand", "aten::view", "aten::alias"):
        number = number.inputs[0]
    if number.target == "aten::full" and not number.shape:
        filled: Node = trace_of("aten::fill.Scalar")(t, self, number.args[1])
        return filled
    out = t.new("aten::copy", (self, src), self.shape, self.dtype, self.strides)
    return t.derive_each(
        out, [self, src], (0, lambda grad: t.zeros_like(grad)), (1, lambda grad: t.cast(grad, src.dtype))
    )


@traced("_to_copy to_copy")
def to_dtype(t: Tracer, self: Node, *, dtype: DType | None = None, memory_format: str | None = None, **_: Any) -> Node:
    """`_to_copy`: a copy even where the dtype is that of its input (torch/_decomp/decompositions.py, `_to_copy`)."""
    if dtype is None:
        return clone(t, self, memory_format)
    out = to_copy(t, self, dtype) if dtype is not self.dtype else _converted(t, self)
    strides = layout.in_memory_format(self.shape, self.strides, memory_format)
    return out if strides == out.strides else clone(t, out, memory_format)


@traced("to.dtype")
def to(
    t: Tracer, self: Node, dtype: DType, non_blocking: bool = False, copy: bool = False,
    memory_format: str | None = None,
) -> Node:  # fmt: skip
    kept = (None, "preserve_format", layout.suggested_memory_format(self.shape, self.strides))
    if dtype is self.dtype and not copy and memory_format in kept:
        return self
    return to_dtype(t, self, dtype=dtype, memory_format=memory_format)


@traced("float")
def to_float(t: Tracer, self: Node) -> Node:
    """A name that exporters write."""
    return to(t, self, dtypes.float32)


@traced("to.dtype_layout to.device")
def to_keywords(
    t: Tracer, self: Node, device: Any = None, dtype: DType | None = None, non_blocking: bool = False,
    copy: bool = False, memory_format: str | None = None, **_: Any,
) -> Node:  # fmt: skip
    """Devices are all one."""
    if dtype is None and copy:
        return clone(t, self, memory_format)
    return to(t, self, dtype or self.dtype, non_blocking, copy, memory_format)


@traced("type_as to.other")
def type_as(t: Tracer, self: Node, other: Node, *args: Any, **more: Any) -> Node:
    return to(t, self, other.dtype, *args, **more)


@traced("prims::convert_element_type")
def convert_element_type(t: Tracer, self: Node, dtype: DType) -> Node:
    return to_copy(t, self, dtype)
