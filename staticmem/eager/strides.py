"""Strided layouts as ATen computes them; sizes and strides are in elements.

Sources: `is_contiguous`, `is_non_overlapping_and_dense` and channels-last tests of c10/core/SymbolicShapeMeta.cpp and
c10/core/MemoryFormat.h; `computeStride` of aten/src/ATen/TensorUtils.cpp; `infer_dense_strides` of
aten/src/ATen/ExpandUtils.cpp; `reorder_dimensions` of aten/src/ATen/TensorIterator.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import ParamSpec, TypeVar

from staticmem.ir.dtypes import DType

P = ParamSpec("P")
R = TypeVar("R")
Shape = tuple[int, ...]
Strides = tuple[int, ...]

KNOWN = 1 << 13  # layouts that are remembered: a model has tens to hundreds, however many ops it has


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Layouts are asked for again and again: one answer is kept for each set of arguments, which are tuples."""
    return lru_cache(KNOWN)(function)  # type: ignore[return-value]


def listed(dims: Sequence[int] | int | None) -> tuple[int, ...]:
    """Dimensions as a tuple: one of a number, none of None."""
    if dims is None:
        return ()
    return (dims,) if isinstance(dims, int) else tuple(dims)


def numel(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


@remembered
def contiguous_strides(shape: Shape) -> Strides:
    """Row-major strides; a dimension of size 0 counts as 1, as in `empty`."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@remembered
def channels_last_strides(shape: Shape) -> Strides:
    """NHWC (4-D) or NDHWC (5-D) strides for a tensor of N, C, spatial order."""
    strides = [0] * len(shape)
    step = 1
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


@remembered
def is_contiguous(shape: Shape, strides: Strides) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@remembered
def is_channels_last_contiguous(shape: Shape, strides: Strides) -> bool:
    """`is_contiguous(memory_format=channels_last)` (or channels_last_3d)."""
    if len(shape) not in (4, 5):
        return False
    expected = 1
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] != 1:
            if strides[dim] != expected:
                return False
            expected *= shape[dim]
    return True


@remembered
def prefers_channels_last(shape: Shape, strides: Strides) -> bool:
    """`is_channels_last_strides`: what `suggest_memory_format` looks at."""
    if len(shape) not in (4, 5):
        return False
    low = 0
    if strides[1] == 0:
        return False
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < low:
            return False
        # N11 tensors with identical strides are contiguous unless C is the fastest
        if dim == 0 and low == strides[1]:
            return False
        low = strides[dim]
        if shape[dim] > 1:
            low *= shape[dim]
    return True


@remembered
def is_dense(shape: Shape, strides: Strides) -> bool:
    """`is_non_overlapping_and_dense`: some permutation of the dimensions is contiguous."""
    if len(shape) == 1:
        return shape[0] < 2 or strides[0] == 1
    order = sorted(range(len(shape)), key=lambda d: (shape[d] < 2, strides[d]))
    expected = 1
    for dim in order:
        if shape[dim] < 2:
            return True
        if strides[dim] != expected:
            return False
        expected *= shape[dim]
    return True


@remembered
def view_strides(shape: Shape, strides: Strides, new: Shape) -> Strides | None:
    """Strides of `view(new)`, or None where the layout needs a copy."""
    if numel(shape) == 0:
        return strides if new == shape else contiguous_strides(new)
    if not shape:
        return (1,) * len(new)
    result = [0] * len(new)
    view_dim = len(new) - 1
    chunk_base = strides[-1]
    tensor_numel = view_numel = 1
    for dim in range(len(shape) - 1, -1, -1):
        tensor_numel *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != tensor_numel * chunk_base):
            while view_dim >= 0 and (view_numel < tensor_numel or new[view_dim] == 1):
                result[view_dim] = view_numel * chunk_base
                view_numel *= new[view_dim]
                view_dim -= 1
            if view_numel != tensor_numel:
                return None
            if dim > 0:
                chunk_base = strides[dim - 1]
                tensor_numel = view_numel = 1
    return tuple(result) if view_dim == -1 else None


@remembered
def storage_bytes(shape: Shape, strides: Strides, bits: int) -> int:
    """Bytes from the first to behind the last element of `bits` bits."""
    elements = 1
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return 0
        elements += (size - 1) * stride
    return (int(elements) * bits + 7) // 8


class Form:
    """Shape, strides and dtype of a tensor. Equal ones are one object (`form_of`), and no `number` is used twice.

    `nbytes` is the size of a storage that has this tensor alone. Numbers are four apart: the key of a recorded call
    adds two bits (`engine.call_records.run_call`).
    """

    __slots__ = ("dtype", "nbytes", "number", "shape", "strides")
    _last = count(0, 4)

    def __init__(self, shape: Shape, strides: Strides, dtype: DType) -> None:
        if shape and min(shape) < 0:  # an operator with sizes that nothing can have
            raise ValueError(f"a tensor would have the sizes {list(shape)}")
        self.shape, self.strides, self.dtype = shape, strides, dtype
        self.nbytes = storage_bytes(shape, strides, dtype.bits)
        self.number = next(self._last)

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


form_of = lru_cache(KNOWN)(Form)


def broadcast_shapes(*shapes: Sequence[int]) -> Shape:
    """The broadcast shape.

    Raises:
        ValueError: two sizes differ and neither is 1.
    """
    rank = max(len(s) for s in shapes)
    result = [1] * rank
    for shape in shapes:
        offset = rank - len(shape)
        for i, size in enumerate(shape):
            if size != 1:
                if result[offset + i] not in (1, size):
                    raise ValueError(f"sizes {result[offset + i]} and {size} do not broadcast")
                result[offset + i] = size
    return tuple(result)


@remembered
def expand_strides(shape: Shape, strides: Strides, target: Shape) -> Strides:
    """Strides of `expand(target)`: 0 on broadcast dimensions (`inferExpandGeometry`)."""
    if not shape:
        return (0,) * len(target)
    offset = len(target) - len(shape)
    result = [0] * len(target)
    for dim in range(len(target) - 1, -1, -1):
        source = dim - offset
        if source >= 0:
            result[dim] = 0 if shape[source] == 1 and target[dim] != 1 else strides[source]
        elif target[dim] == 1:  # a new leading dimension, as if it were a size-1 dimension; 0 where it repeats
            result[dim] = target[dim + 1] * result[dim + 1] if dim + 1 < len(target) else 1
    return tuple(result)


def _permuted_dense(shape: Sequence[int], perm: Sequence[int]) -> Strides:
    """Dense strides where `perm` lists dimensions from the fastest to the slowest."""
    strides = [0] * len(shape)
    step = 1
    for dim in perm:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


@remembered
def dense_like(shape: Shape, strides: Strides) -> Strides:
    """Strides of `empty_like(preserve_format)`: the same where dense, else dense in the same order of dimensions."""
    if is_dense(shape, strides):
        return strides
    perm = list(range(len(shape) - 1, -1, -1))
    _insertion_sort(perm, shape, [strides])
    return _permuted_dense(shape, perm)


MEMORY_FORMATS = ("preserve_format", "contiguous_format", "channels_last", "channels_last_3d")


def in_memory_format(shape: Shape, strides: Strides, memory_format: str | None = None) -> Strides:
    """Strides of a new tensor like one of these, in a memory format: by default `preserve_format`."""
    if memory_format in (None, "preserve_format"):
        return dense_like(shape, strides)
    return contiguous_strides(shape) if memory_format == "contiguous_format" else channels_last_strides(shape)


def suggested_memory_format(shape: Shape, strides: Strides) -> str:
    """`suggest_memory_format`: channels last where strides are in that order, else contiguous."""
    if not prefers_channels_last(shape, strides):
        return "contiguous_format"
    return "channels_last" if len(shape) == 4 else "channels_last_3d"


@remembered
def pointwise_strides(shape: Shape, operands: tuple[tuple[Shape, Strides], ...]) -> Strides:
    """Strides of a new TensorIterator output of `shape` for these operands (shape, strides)."""
    rank = len(shape)
    if rank <= 1:
        return (1,) * rank
    first = operands[0]
    if first[0] == shape and all(o[1] == first[1] and o[0] == shape for o in operands) and is_dense(*first):
        # fast set-up: all operands alike; contiguous first, then channels last, then the common dense strides
        if is_contiguous(*first):
            return contiguous_strides(shape)
        if is_channels_last_contiguous(*first):
            return channels_last_strides(shape)
        return first[1]
    if all(o[0] == shape and is_contiguous(*o) for o in operands):
        return contiguous_strides(shape)
    if all(o[0] == shape and is_channels_last_contiguous(*o) for o in operands):
        return channels_last_strides(shape)
    expanded = []
    for sizes, strides in operands:
        offset = rank - len(sizes)
        row = [0] * rank
        for i, size in enumerate(sizes):
            row[offset + i] = 0 if size == 1 and shape[offset + i] != 1 else strides[i]
        expanded.append(row)
    perm = list(range(rank - 1, -1, -1))
    _insertion_sort(perm, shape, expanded)
    return _permuted_dense(shape, perm)


def _insertion_sort(perm: list[int], shape: Sequence[int], operands: Sequence[Sequence[int]]) -> None:
    """The sort of `reorder_dimensions`: by stride over the operands in turn, ambiguous comparisons are skipped."""

    def should_swap(dim0: int, dim1: int) -> int:
        for strides in operands:
            a, b = strides[dim0], strides[dim1]
            if a == 0 or b == 0:
                continue
            if a != b:
                return -1 if a < b else 1
            if shape[dim0] > shape[dim1]:
                return 1
        return 0

    for i in range(1, len(perm)):
        dim1 = i
        for dim0 in range(i - 1, -1, -1):
            order = should_swap(perm[dim0], perm[dim1])
            if order > 0:
                perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
                dim1 = dim0
            elif order < 0:
                break
