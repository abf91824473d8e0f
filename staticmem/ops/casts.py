"""Changes of dtype and device, copies into another tensor, and checks that exports write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads, cast_gradient
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context, integer, translation
from staticmem.ops.pointwise import grad_of, gradient_like, inplace
from staticmem.ops.registry import rule


def to_copy(e: Eager, self: Tensor, dtype: DType, memory_format: str | None = None) -> Tensor:
    """A copy in another dtype; its gradient is cast back."""
    out = e.empty_like(self, dtype, "aten._to_copy.default", memory_format)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return cast_gradient(e, grad_of(grads), self.dtype)

    return e.record("ToCopyBackward0", out, [self], [Formula((0,), gradient)])


def _dtype_in(args: Sequence[Any], kwargs: dict[str, Any]) -> DType | None:
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, DType)), None)


@rule("to _to_copy type_as to_copy prims::convert_element_type", kinds=("cast",))
def to(e: Eager, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The tensor itself where dtype and device are the same and no copy or other memory format is asked for, else a
    copy; the gradient is cast back."""
    other = next((a for a in args if isinstance(a, Tensor)), kwargs.get("other"))
    dtype = (other.dtype if isinstance(other, Tensor) else _dtype_in(args, kwargs)) or self.dtype
    flags = [a for a in args if isinstance(a, bool)]  # non_blocking, copy
    copies = flags[1] if len(flags) > 1 else kwargs.get("copy", False)
    format = next((a for a in args if a in layout.MEMORY_FORMATS), kwargs.get("memory_format"))
    if dtype is self.dtype and not copies:  # ATen/native/TensorConversions.cpp, `to_will_alias`
        kept = (None, "preserve_format", layout.suggested_memory_format(self.shape, self.strides))
        if format in kept:
            return self
    return to_copy(e, self, dtype, format)


@rule("float", kinds=("cast",))
def to_float(e: Eager, self: Tensor) -> Tensor:
    """As `to`."""
    return to(e, self, dtypes.float32)


@rule("copy_", kinds=("assignment",))
def copy_(e: Eager, self: Tensor, src: Tensor | Any, non_blocking: bool = False) -> Tensor:
    """In place: saves nothing; the gradient of `src` is the incoming one, that of the old value is zeros."""
    out = inplace(e, self, "aten.copy_.default")
    old = gradient_like(self, "aten.zeros.default")

    def new(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.to_dtype(grad_of(grads), src.dtype)

    if isinstance(src, Tensor):
        e.record("CopyBackwards", out, [self, src], [Formula((0,), old), Formula((1,), new)])
    return out


@rule(
    "_assert_tensor_metadata _assert_async _assert_scalar sym_constrain_range_for_size sym_constrain_range",
    transparent=True,
    kinds=("check",),
)
def nothing(e: Eager, *args: Any, **kwargs: Any) -> None:
    """A check that eager does not run, or that allocates nothing."""


@rule("item _local_scalar_dense", transparent=True)
def item(e: Eager, self: Tensor) -> None:
    """A number on the host."""


@translation("Cast", "CastLike")
def onnx_cast(ctx: Context, node: Node) -> list[Op] | None:
    dtype = dtypes.ONNX_CODES.get(integer(node, "to", 1))
    if node.op == "CastLike":
        value = ctx.net.values.get(node.inputs[1])
        dtype = value.dtype if value is not None else None
    return None if dtype is None else [ctx.op(node, "aten::to.dtype", ctx.ref(node.inputs[0]), dtype)]
