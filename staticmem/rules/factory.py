"""Factories, random numbers and dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem import dtypes
from staticmem.dtypes import DType
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.rules.pointwise import grad_of, inplace, record_mul
from staticmem.rules.registry import rule


@rule("aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::rand", "aten::randn")
def empty(e: Eager, size: Any, *args: Any, dtype: DType | None = None, **_: Any) -> Tensor:
    """A new tensor without gradient."""
    fill = next((a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)), None)
    if dtype is None:
        dtype = dtypes.int64 if isinstance(fill, int) else dtypes.float32
    return e.empty((size,) if isinstance(size, int) else tuple(size), dtype, kernel="aten.empty.memory_format")


@rule("aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like",
      "aten::randn_like")  # fmt: skip
def empty_like(e: Eager, self: Tensor, *args: Any, dtype: DType | None = None, **_: Any) -> Tensor:
    """A new tensor of the same layout without gradient."""
    return e.empty_like(self, dtype, "aten.empty_like.default")


@rule("aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full")
def new_empty(e: Eager, self: Tensor, size: Any, *args: Any, dtype: DType | None = None, **_: Any) -> Tensor:
    """A new tensor of the input's dtype without gradient."""
    return e.empty(tuple(size), dtype or self.dtype, kernel="aten.new_empty.default")


@rule("aten::scalar_tensor")
def scalar_tensor(e: Eager, s: Any, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """A 0-dim tensor."""
    return e.empty((), dtype or dtypes.float32, kernel="aten.scalar_tensor.default")


@rule("aten::arange")
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


@rule("aten::linspace")
def linspace(e: Eager, start: Any, end: Any, steps: int, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """A 1-D tensor."""
    return e.empty((steps,), dtype or dtypes.float32, kernel="aten.linspace.default")


@rule("aten::eye")
def eye(e: Eager, n: int, m: int | None = None, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """An identity matrix."""
    return e.empty((n, n if m is None else m), dtype or dtypes.float32, kernel="aten.eye.default")


@rule("aten::randint")
def randint(e: Eager, *args: Any, dtype: DType | None = None, **_: Any) -> Tensor:
    """Random int64 numbers."""
    size = next(a for a in args if isinstance(a, tuple))
    return e.empty(size, dtype or dtypes.int64, kernel="aten.randint.low")


@rule("aten::randperm")
def randperm(e: Eager, n: int, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """A random permutation."""
    return e.empty((n,), dtype or dtypes.int64, kernel="aten.randperm.default")


@rule("aten::bernoulli_", "aten::uniform_", "aten::normal_", "aten::fill_", "aten::zero_", "aten::exponential_",
      "aten::random_")  # fmt: skip
def fill_(e: Eager, self: Tensor, *args: Any, **_: Any) -> Tensor:
    """In place; no gradient reaches the old value."""
    out = inplace(e, self, "aten.fill_.Scalar")
    if out.requires_grad:

        def zeros(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            return e.empty_like(grad_of(grads), kernel="aten.zeros_like.default")

        e.record("FillBackward0", out, [self], [Formula((0,), zeros)])
    return out


@rule("aten::bernoulli", "aten::multinomial", "aten::fill", "aten::normal")
def bernoulli(e: Eager, self: Tensor, *args: Any, **_: Any) -> Tensor:
    """A new tensor; its gradient is zeros, which the engine drops where nothing needs it."""
    return e.empty_like(self, kernel="aten.bernoulli.p")


@rule("aten::dropout", "aten::native_dropout", "aten::feature_dropout_impl")
def dropout(e: Eager, input: Tensor, p: float, train: bool = True) -> Tensor:
    """Fused on CUDA: saves a bool mask, one byte an element; p = 0 or eval is the tensor itself."""
    if not train or not e.training or p == 0:
        return input
    if p == 1:
        return e.pointwise("aten.mul.Tensor", input)
    out = e.empty_like(input, kernel="aten.native_dropout.default")
    mask = e.empty_like(input, dtypes.bool_)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.native_dropout_backward.default", grad_of(grads), mask)

    e.record("NativeDropoutBackward0", out, [input], [Formula((0,), gradient)], [mask])
    return out


@rule("aten::dropout_")
def dropout_(e: Eager, input: Tensor, p: float, train: bool = True) -> Tensor:
    """Not fused: saves a noise tensor of the input's dtype and size (Dropout.cpp, `_dropout_impl`)."""
    if not train or not e.training or p == 0:
        return input
    noise = e.empty_like(input, kernel="aten.empty_like.default")
    out = inplace(e, input, "aten.mul_.Tensor")
    record_mul(e, out, input, noise, None, noise)
    return out


@rule("aten::feature_dropout", "aten::feature_dropout_", "aten::alpha_dropout")
def feature_dropout(e: Eager, input: Tensor, p: float, train: bool = True) -> Tensor:
    """Saves a noise tensor of shape (N, C, 1...): `_dropout_impl` with feature noise."""
    if not train or not e.training or p == 0:
        return input
    noise = e.empty((*input.shape[:2], *(1,) * (input.ndim - 2)), input.dtype, kernel="aten.empty.memory_format")
    out = e.pointwise("aten.mul.Tensor", input, noise)
    record_mul(e, out, input, noise, input, noise)
    return out
