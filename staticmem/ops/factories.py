"""New tensors, random numbers and dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Arg, Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.arithmetic import add_, mul, mul_
from staticmem.ops.onnx import Context, declare_sizes, like_first, real, translation
from staticmem.ops.pointwise import grad_of, inplace, zeros
from staticmem.ops.registry import rule


@rule("empty zeros ones full rand randn", kinds=("factory",))
def empty(e: Eager, size: Any, *args: Any, dtype: DType | None = None, **_: Any) -> Tensor:
    """A new tensor without gradient."""
    fill = next((a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)), None)
    if dtype is None:
        dtype = dtypes.int64 if isinstance(fill, int) else dtypes.float32
        if any(isinstance(a, bool) for a in args):
            dtype = dtypes.bool_
    return e.empty((size,) if isinstance(size, int) else tuple(size), dtype, kernel="aten.empty.memory_format")


@rule("staticmem::cpu_tensor")
def cpu_tensor(e: Eager, size: Any, *, dtype: DType) -> Tensor:
    """A tensor on the CPU, which an op reads beside tensors on the GPU: it takes none of its memory."""
    storage = e.empty((0,), dtype, kernel="staticmem.cpu_tensor").storage
    return Tensor(storage, tuple(size), layout.contiguous_strides(tuple(size)), dtype)


@rule("empty_like zeros_like ones_like full_like rand_like randn_like", kinds=("factory",))
def empty_like(
    e: Eager, self: Tensor, *args: Any, dtype: DType | None = None, memory_format: str | None = None, **_: Any
) -> Tensor:
    """A new tensor without gradient, of the same layout unless `memory_format` names one."""
    return e.empty_like(self, dtype, "aten.empty_like.default", memory_format)


@rule("new_empty new_zeros new_ones new_full", kinds=("factory",))
def new_empty(e: Eager, self: Tensor, size: Any, *args: Any, dtype: DType | None = None, **_: Any) -> Tensor:
    """A new tensor of the input's dtype without gradient."""
    return e.empty(tuple(size), dtype or self.dtype, kernel="aten.new_empty.default")


@rule("scalar_tensor", kinds=("factory",))
def scalar_tensor(e: Eager, s: Any, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """A 0-dim tensor."""
    return e.empty((), dtype or dtypes.float32, kernel="aten.scalar_tensor.default")


@rule("arange")
def arange(
    e: Eager, *args: Any, dtype: DType | None = None, start: Any = 0, end: Any = None, step: Any = 1, **_: Any
) -> Tensor:
    """A 1-D tensor: int64 for integer bounds."""
    bounds = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    if len(bounds) == 1:
        end = bounds[0]
    elif bounds:
        start, end, *rest = bounds
        step = rest[0] if rest else step
    if dtype is None:
        dtype = dtypes.int64 if all(isinstance(x, int) for x in (start, end, step)) else dtypes.float32
    return e.empty((max(0, math.ceil((end - start) / step)),), dtype, kernel="aten.arange.start_step")


@rule("linspace")
def linspace(e: Eager, start: Any, end: Any, steps: int, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """A 1-D tensor."""
    return e.empty((steps,), dtype or dtypes.float32, kernel="aten.linspace.default")


@rule("eye")
def eye(e: Eager, n: int, m: int | None = None, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """An identity matrix."""
    return e.empty((n, n if m is None else m), dtype or dtypes.float32, kernel="aten.eye.default")


@rule("tril_indices")
def tril_indices(e: Eager, row: int, col: int, offset: int = 0, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """Rows and columns of the elements of a lower triangle."""
    count = sum(tril_sizes(row, col, offset)[:2])
    return e.empty((2, count), dtype or dtypes.int64, kernel="aten.tril_indices.default")


@rule("triu_indices")
def triu_indices(e: Eager, row: int, col: int, offset: int = 0, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """Rows and columns of the elements of an upper triangle."""
    count = sum(triu_sizes(row, col, offset)[:2])
    return e.empty((2, count), dtype or dtypes.int64, kernel="aten.triu_indices.default")


def tril_sizes(row: int, col: int, offset: int) -> tuple[int, int, int]:
    """A lower triangle: elements of its trapezoid and of the rectangle below, and those of the first row
    (torch/_refs, `_get_tril_sizes`)."""
    if row == 0 or col == 0:
        return 0, 0, 0
    first_row = min(col, 1 + offset) if offset > 0 else int(row + offset > 0)
    last_row = max(0, min(col, row + offset))
    height = last_row - first_row + 1
    below = max(0, min(row, row + offset)) - height
    return (first_row + last_row) * height // 2, max(0, below * col), first_row


def triu_sizes(row: int, col: int, offset: int) -> tuple[int, int, int]:
    """An upper triangle: the same of its trapezoid and of the rectangle above (`_get_triu_sizes`)."""
    if row == 0 or col == 0:
        return 0, 0, 0
    first_row = max(0, col - offset) if offset > 0 else col
    above = max(0, min(row, -offset) * col)
    trapezoid, below, _ = tril_sizes(row, col, offset - 1)
    return row * col - (trapezoid + below) - above, above, first_row


@rule("randint")
def randint(e: Eager, *args: Any, dtype: DType | None = None, **_: Any) -> Tensor:
    """Random int64 numbers."""
    size = next(a for a in args if isinstance(a, tuple))
    return e.empty(size, dtype or dtypes.int64, kernel="aten.randint.low")


@rule("randperm")
def randperm(e: Eager, n: int, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """A random permutation."""
    return e.empty((n,), dtype or dtypes.int64, kernel="aten.randperm.default")


@rule("fill_", kinds=("assignment",))
@rule("bernoulli_ uniform_ normal_ zero_ exponential_ random_")
def fill_(e: Eager, self: Tensor, *args: Any, **_: Any) -> Tensor:
    """In place; no gradient reaches the old value."""
    out = inplace(e, self, "aten.fill_.Scalar")
    if out.requires_grad:
        e.record("FillBackward0", out, [self], [Formula((0,), zeros)])
    return out


@rule("bernoulli fill normal")
def bernoulli(e: Eager, self: Tensor, *args: Any, **_: Any) -> Tensor:
    """A new tensor; its gradient is zeros."""
    out = e.empty_like(self, kernel="aten.bernoulli.default")
    return e.record("BernoulliBackward0", out, [self], [Formula((0,), zeros)])


@rule("multinomial")
def multinomial(e: Eager, self: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Tensor:
    """int64 samples without gradient."""
    return e.empty((*self.shape[:-1], num_samples), dtypes.int64, kernel="aten.multinomial.default")


@rule("native_dropout", kinds=("dropout",))
def native_dropout(e: Eager, input: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    """Saves a bool mask, one byte an element, which it also returns."""
    out = e.empty_like(input, kernel="aten.native_dropout.default")
    mask = e.empty_like(input, dtypes.bool_)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        strides = layout.channels_last_strides(grad.shape) if grad.prefers_channels_last else None
        return e.empty(grad.shape, grad.dtype, strides, "aten.native_dropout_backward.default")

    e.record("NativeDropoutBackward0", out, [input], [Formula((0,), gradient)], [mask])
    return out, mask


@rule("dropout", kinds=("dropout",))
def dropout(e: Eager, input: Tensor, p: float, train: bool = True) -> Tensor:
    """Fused on CUDA: saves a bool mask, one byte an element; p = 0 or eval is the tensor itself."""
    if not train or not e.training or p == 0:
        return input
    if p == 1:
        return mul(e, input, e.empty((), input.dtype, kernel="aten.zeros.default"))
    return native_dropout(e, input, p, train)[0]


@rule("dropout_", kinds=("dropout",))
def dropout_(e: Eager, input: Tensor, p: float, train: bool = True) -> Tensor:
    """Not fused: saves a noise tensor of the input's dtype and size (Dropout.cpp, `_dropout_impl`)."""
    if not train or not e.training or p == 0:
        return input
    return mul_(e, input, e.empty_like(input, kernel="aten.empty_like.default"))


def _feature_noise(e: Eager, input: Tensor) -> Tensor:
    shape = (*input.shape[:2], *(1,) * (input.ndim - 2))
    return e.empty(shape, input.dtype, kernel="aten.empty.memory_format")


@rule("feature_dropout", kinds=("dropout",))
def feature_dropout(e: Eager, input: Tensor, p: float, train: bool = True) -> Tensor:
    """Saves a noise tensor of shape (N, C, 1...): `_dropout_impl` with feature noise."""
    if not train or not e.training or p == 0:
        return input
    return mul(e, input, _feature_noise(e, input))


@rule("feature_dropout_", kinds=("dropout",))
def feature_dropout_(e: Eager, input: Tensor, p: float, train: bool = True) -> Tensor:
    """In place, else as `feature_dropout`."""
    if not train or not e.training or p == 0:
        return input
    return mul_(e, input, _feature_noise(e, input))


@rule("alpha_dropout", kinds=("dropout",))
def alpha_dropout(e: Eager, input: Tensor, p: float, train: bool = True) -> Tensor:
    """Saves a noise tensor of the input's size; its offset is a temporary of that size, added in place."""
    if not train or not e.training or p == 0:
        return input
    noise = e.empty_like(input, kernel="aten.empty_like.default")
    offset = e.empty_like(noise, kernel="aten.add.Scalar")
    return add_(e, mul(e, input, noise), offset)


@rule("feature_alpha_dropout", kinds=("dropout",))
def feature_alpha_dropout(e: Eager, input: Tensor, p: float, train: bool = True) -> Tensor:
    """As `alpha_dropout`, with noise and offset of shape (N, C, 1...)."""
    if not train or not e.training or p == 0:
        return input
    noise = _feature_noise(e, input)
    offset = e.empty_like(noise, kernel="aten.add.Scalar")
    return add_(e, mul(e, input, noise), offset)


@translation("ConstantOfShape")
def onnx_filled(ctx: Context, node: Node) -> list[Op] | None:
    sizes = ctx.net.ints(node.inputs[0])
    value = ctx.net.values.get(node.outputs[0])
    if sizes is None:
        return None
    dtype = value.dtype if value is not None else dtypes.float32
    fill = node.attrs.get("value")
    number: Arg = 0
    if fill is not None and not isinstance(fill, (int, float, str, tuple)) and hasattr(fill, "reshape"):
        number = float(fill.reshape(-1)[0])
    return [ctx.op(node, "aten::full", sizes, number, kwargs={"dtype": dtype})]


@translation("Range")
def onnx_arange(ctx: Context, node: Node) -> list[Op] | None:
    start, end, step = (ctx.number(node, i) for i in range(3))
    value = ctx.net.values.get(node.outputs[0])
    if start is None or end is None or step is None or value is None:
        return None
    return [ctx.op(node, "aten::arange.start_step", start, end, step, kwargs={"dtype": value.dtype})]


@translation("Dropout")
def onnx_dropout(ctx: Context, node: Node) -> list[Op]:
    ratio = ctx.number(node, 1)
    p = real(node, "ratio", 0.5) if ratio is None else float(ratio)
    training = ctx.number(node, 2)
    p = float(f"{p:.6g}")
    return [ctx.op(node, "aten::dropout", ctx.ref(node.inputs[0]), p, bool(training))]


declare_sizes("BiasDropout", like_first)
