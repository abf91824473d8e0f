"""Windows as columns, products of vectors, and in-place forms that keep another op's formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.strides import broadcast_shapes
from staticmem.eager.tensor import Tensor
from staticmem.ops.pointwise import Scalar, clone_for_backward, div, grad_of, inplace, mul
from staticmem.ops.reduction import sum as sum_
from staticmem.ops.reduction import vector_norm
from staticmem.ops.registry import rule
from staticmem.ops.ternary import record_addcdiv, record_addcmul, record_pow
from staticmem.ops.views import clone, expand


def _windows(size: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _moved(e: Eager, self: Tensor, shape: tuple[int, ...], name: str, reverse: str) -> Tensor:
    out = e.empty(shape, self.dtype, kernel=f"aten.{name}.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, grad_of(grads).dtype, kernel=f"aten.{reverse}.default")

    e.record(f"{name.title()}Backward0", out, [self], [Formula((0,), gradient)])
    return out


@rule("aten::im2col")
def im2col(e: Eager, self: Tensor, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    """Saves nothing; backward makes one tensor of the input's size."""
    rows, columns = map(_windows, self.shape[-2:], kernel_size, dilation, padding, stride)
    channels = self.shape[-3] * kernel_size[0] * kernel_size[1]
    return _moved(e, self, (*self.shape[:-3], channels, rows * columns), "im2col", "col2im")


@rule("aten::col2im")
def col2im(
    e: Eager, self: Tensor, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> Tensor:
    """Saves nothing; backward makes one tensor of the input's size."""
    channels = self.shape[-2] // (kernel_size[0] * kernel_size[1])
    return _moved(e, self, (*self.shape[:-2], channels, *output_size), "col2im", "im2col")


@rule("aten::linalg_cross", "aten::cross")
def cross(e: Eager, self: Tensor, other: Tensor, dim: int = -1) -> Tensor:
    """Each factor is saved only if the other one needs a gradient; each gradient is one product."""
    out = e.pointwise("aten.linalg_cross.default", self, other)

    def by(factor: Tensor) -> Any:
        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            return e.pointwise("aten.linalg_cross.default", factor, grad_of(grads))

        return gradient

    saves = [self if e.needs_grad(other) else None, other if e.needs_grad(self) else None]
    e.record("LinalgCrossBackward0", out, [self, other], [Formula((1,), by(self)), Formula((0,), by(other))], saves)
    return out


@rule("aten::cosine_similarity", autocast="promote")
@scoped
def cosine_similarity(e: Eager, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Two norms, cloned to clamp them without history, two quotients, their product and its sum (Distance.cpp)."""
    shape = broadcast_shapes(x1.shape, x2.shape)
    x1, x2 = (x if x.shape == shape else expand(e, x, shape) for x in (x1, x2))
    norms = []
    for x in (x1, x2):
        norm = vector_norm(e, x, 2, dim, True)
        norms.append(clone(e, norm))
        e.free(norm)  # unless its backward saved it
    e.empty((), x1.dtype, kernel="aten.scalar_tensor.default")
    second = div(e, x2, norms[1])  # C++ evaluates the second factor first
    return sum_(e, mul(e, div(e, x1, norms[0]), second), dim)


@rule("aten::pow_")
def pow_(e: Eager, self: Tensor, exponent: Tensor | Scalar) -> Tensor:
    """In place: clones its input first and saves the clone (a tensor exponent and the result too)."""
    other = exponent if isinstance(exponent, Tensor) else None
    original = clone_for_backward(e, self, self, other)
    out = inplace(e, self, "aten.pow_.Scalar")
    record_pow(e, out, self, original or self, exponent)
    return out


@rule("aten::addcmul_")
def addcmul_(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """In place, else as `addcmul`."""
    out = inplace(e, self, "aten.addcmul_.default")
    record_addcmul(e, out, self, tensor1, tensor2)
    return out


@rule("aten::addcdiv_")
def addcdiv_(e: Eager, self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Scalar = 1) -> Tensor:
    """In place, else as `addcdiv`."""
    out = inplace(e, self, "aten.addcdiv_.default")
    record_addcdiv(e, out, self, tensor1, tensor2)
    return out


@rule("aten::tril_", "aten::triu_")
def tril_(e: Eager, self: Tensor, diagonal: int = 0) -> Tensor:
    """In place; the gradient is a new contiguous tensor."""
    out = inplace(e, self, "aten.tril_.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, grad_of(grads).dtype, kernel="aten.tril.default")

    e.record("TrilBackward0", out, [self], [Formula((0,), gradient)])
    return out
