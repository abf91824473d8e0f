"""Products of routed experts: each expert multiplies its own rows, whose ends are in `offs`; and rows that go to the
experts of other ranks.

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
from staticmem.ir.dtypes import DType, int64
from staticmem.ops.linear import product_flops
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule
from staticmem.ops.views import contiguous, transpose

_ALIGNMENT = 16  # bytes


def _product(e: Eager, a: Tensor, b: Tensor, groups: int) -> Tensor:
    """The result of `_grouped_mm`. Two matrices are divided along the dimension that they share: one result a group."""
    shape: tuple[int, ...] = (a.shape[0], b.shape[-1]) if a.ndim == 2 else (a.shape[1], b.shape[1])
    if a.ndim == b.ndim:
        shape = (groups if a.ndim == 2 else a.shape[0], a.shape[-2], b.shape[-1])
    return e.empty(shape, a.dtype, padded_strides(shape, a.dtype.itemsize), "aten._grouped_mm.default")


def padded_strides(shape: Sequence[Any], itemsize: int) -> tuple[Any, ...]:
    """The strides of a result whose rows are padded. Sizes may be symbolic, as they are where code is recorded."""
    aligned = _ALIGNMENT // itemsize
    row = (shape[-1] + aligned - 1) // aligned * aligned
    return (shape[-2] * row, row, 1)[-len(shape) :]


@rule("_grouped_mm", kinds=("product",), flops=product_flops(0))
def grouped_mm(
    e: Eager,
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: DType | None = None,
) -> Tensor:
    """Each factor is saved only if the other one needs a gradient, offsets always; a gradient is one product with the
    other factor, column-major where its factor was."""
    if self.shape[-1] != mat2.shape[-2]:
        raise ValueError(f"cannot multiply {list(self.shape)} by {list(mat2.shape)}")
    groups = offs.shape[0] if offs is not None else 0
    out = _product(e, self, mat2, groups)
    row_major, column_major = self.strides[-1] == 1, mat2.strides[-2] == 1  # those of the forward

    def by_first(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        if row_major:
            return _product(e, grad, transpose(e, mat2, -2, -1), groups)
        return transpose(e, _product(e, mat2, transpose(e, grad, -2, -1), groups), -2, -1)

    def by_second(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        if column_major:
            return transpose(e, _product(e, transpose(e, grad, -2, -1), self, groups), -2, -1)
        return _product(e, transpose(e, self, -2, -1), grad, groups)

    saves = [mat2 if e.needs_grad(self) else None, offs, self if e.needs_grad(mat2) else None]
    formulas = [Formula((1,), by_second), Formula((0,), by_first)]
    return e.record("GroupedMmBackward0", out, [self, mat2], formulas, saves)


@rule("transformers::grouped_mm_fallback")
def grouped_mm_fallback(e: Eager, input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """One product an expert, each over its rows: saves rows and weights; backward makes zeros of both sizes at once."""
    shape = (input.shape[0], weight.shape[2])
    out = e.empty(shape, input.dtype, kernel="transformers.grouped_mm_fallback.default")

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("transformers.grouped_mm_fallback_backward.default")
        return [e.empty_like(input), e.empty_like(weight)]

    return e.record("grouped_mm_fallback", out, [input, weight], [Formula((0, 1), gradients)], [input, weight])


@rule("torchtitan::deterministic_scatter_add")
def deterministic_scatter_add(e: Eager, out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """A copy of `out` with rows added: saves the index; the rows' gradient is gathered, that of `out` is the incoming
    one (torchtitan/ops/scatter_add.py)."""
    result = e.empty_like(out, kernel="torchtitan.deterministic_scatter_add.default")

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)
        return [grad, e.empty(index.shape, grad.dtype, kernel="aten.gather.default")]

    return e.record("deterministic_scatter_add", result, [out, src], [Formula((0, 1), gradients)], [index])


# -- rows that go to other ranks (`passes.requested.expert_parallel`) ---------------------------------------------

ALL_TO_ALL = "_c10d_functional.all_to_all_single.default"


@rule("staticmem::all_to_all")
def all_to_all(e: Eager, rows: Tensor, times: int, per: int) -> Tensor:
    """Receives `times / per` as many rows as it sends; the gradient goes the way back, contiguous."""

    shape = (rows.shape[0] * times // per, *rows.shape[1:])
    contiguous(e, rows)
    out = e.empty(shape, rows.dtype, kernel=ALL_TO_ALL)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        contiguous(e, grad_of(grads))
        return e.empty(rows.shape, rows.dtype, kernel=ALL_TO_ALL)

    return e.record("all_to_all_single", out, [rows], [Formula((0,), gradient)])


@rule("staticmem::exchanged_counts")
def exchanged_counts(e: Eager, counts: Tensor, ranks: int) -> Tensor:
    """The counts of the ranks' experts, from all ranks; their sums by rank go to the CPU."""
    arriving = e.empty(counts.shape, counts.dtype, kernel=ALL_TO_ALL)
    for _ in range(2):
        e.empty((ranks,), int64, kernel="aten.sum.dim_IntList")
    return arriving


@rule("staticmem::order_by_expert")
def order_by_expert(e: Eager, arriving: Tensor, rows: Tensor, ranks: int) -> tuple[Tensor, ...]:
    """The positions of rows by expert, how many each has, and what variables hold until the rows are gathered: the
    part of each row, and lengths and starts of the parts."""

    def integers(count: int, kernel: str) -> Tensor:
        return e.empty((count,), int64, kernel=f"aten.{kernel}")

    parts, count = arriving.shape[0], rows.shape[0]
    ends = integers(parts, "cumsum.default")
    first = integers(parts, "sub.Tensor")
    e.free(ends)
    lengths, starts = e.empty((parts,), arriving.dtype, kernel="aten.clone.default"), integers(parts, "clone.default")
    e.free(first)
    numbers = integers(parts, "arange.default")
    repeated = integers(count, "repeat_interleave.Tensor")
    part = integers(count, "index_select.default")
    e.free(repeated, numbers)
    ends = integers(parts, "cumsum.default")
    begins = integers(parts, "sub.Tensor")
    e.free(ends)
    of_part, at = integers(count, "index.Tensor"), integers(count, "arange.default")
    total = integers(count, "add.Tensor")
    e.free(of_part, at)
    begin = integers(count, "index.Tensor")
    order = integers(count, "sub.Tensor")
    e.free(total, begin)
    each = integers(parts // ranks, "sum.dim_IntList")
    return order, each, part, lengths, starts, begins
