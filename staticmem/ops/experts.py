"""Products of routed experts: each expert multiplies its own rows, whose ends are in `offs`.

Sources: aten/src/ATen/native/GroupedMMUtils.h (`create_grouped_gemm_output_tensor`: rows are padded to 16 bytes; which
types are taken), cuda/GroupedBlas.cpp (`_grouped_mm_cuda`: float32 runs as one product a group, into the same result),
derivatives.yaml and FunctionsManual.cpp (`_grouped_mm_mat1_backward`, `_grouped_mm_mat2_backward`). It is in no list of
autocast (pytorch issue 174763). transformers/integrations/moe.py (`grouped_mm_fallback`) is for devices without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ops.linear import product_flops
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule
from staticmem.ops.views import transpose

ALIGNMENT = 16  # bytes to which each row of the result is padded


def _product(e: Eager, a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    """The result: a matrix of rows, one of columns, or a matrix for each group."""
    if len(a.shape) == len(b.shape):
        groups = offs.shape[0] if len(a.shape) == 2 and offs is not None else a.shape[0]
        shape: tuple[int, ...] = (groups, a.shape[-2], b.shape[-1])
    else:
        shape = (a.shape[-2], b.shape[-1])
    step = ALIGNMENT // a.dtype.nbytes(1)
    row = -(-shape[-1] // step) * step
    strides = (shape[1] * row, row, 1) if len(shape) == 3 else (row, 1)
    return e.empty(shape, a.dtype, strides, kernel="aten._grouped_mm.default")


def _column_major(tensor: Tensor) -> bool:
    return tensor.strides[-2] == 1 and tensor.strides[-1] == tensor.shape[-2]


def _turned(e: Eager, tensor: Tensor) -> Tensor:
    return transpose(e, tensor, -2, -1)


@rule("_grouped_mm", kinds=("product",), flops=product_flops(0))
def grouped_mm(
    e: Eager, self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Saves each factor if the other needs a gradient, and the ends; each gradient is one grouped product,
    column-major where its factor was."""
    out = _product(e, self, mat2, offs)

    def by_mat2(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        if _column_major(mat2):
            return _turned(e, _product(e, _turned(e, grad), self, offs))
        return _product(e, _turned(e, self), grad, offs)

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        if _column_major(self):
            return _turned(e, _product(e, mat2, _turned(e, grad), offs))
        return _product(e, grad, _turned(e, mat2), offs)

    saves = [self if e.needs_grad(mat2) else None, mat2 if e.needs_grad(self) else None, offs]
    e.record("GroupedMmBackward0", out, [self, mat2], [Formula((1,), by_mat2), Formula((0,), by_self)], saves)
    return out


@rule("transformers::grouped_mm_fallback")
def grouped_mm_fallback(e: Eager, input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """One product an expert, each over its rows: saves rows and weights; backward makes zeros of both sizes at once."""
    shape = (input.shape[0], weight.shape[2])
    out = e.empty(shape, input.dtype, kernel="transformers.grouped_mm_fallback.default")

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("transformers.grouped_mm_fallback_backward.default")
        return [e.empty_like(input), e.empty_like(weight)]

    e.record("grouped_mm_fallback", out, [input, weight], [Formula((0, 1), gradients)], [input, weight])
    return out
