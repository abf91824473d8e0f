"""Ops whose result's size is in the data: they get the size that the file or the user gives, else the largest possible.

`size` is no argument of PyTorch's: frontends add it where the export or `--dim u0=N` says how many elements there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import rule


@rule("aten::nonzero", "aten::argwhere", "aten::nonzero_static", kinds=("data_sized",))
def nonzero(e: Eager, self: Tensor, *, size: int | None = None, fill_value: int = -1) -> Tensor:
    """int64 positions, a row an element that is not zero (at most all of them), without gradient."""
    rows = self.numel if size is None else size
    strides = (1, rows)  # cuda/Nonzero.cu writes dimension after dimension
    return e.empty((rows, self.ndim), dtypes.int64, strides, "aten.nonzero.default")


@rule("aten::nonzero_numpy", kinds=("data_sized",))
def nonzero_numpy(e: Eager, self: Tensor, *, size: int | None = None) -> list[Tensor]:
    """Views of `nonzero`, one a dimension."""
    found = nonzero(e, self, size=size)
    return [e.alias(found, found.shape[:1], found.strides[:1]) for _ in range(self.ndim)]


@rule("aten::masked_select", kinds=("data_sized",))
def masked_select(e: Eager, self: Tensor, mask: Tensor, *, size: int | None = None) -> Tensor:
    """At most all elements. Saves input and mask; backward makes zeros of the common shape and scatters into a copy."""
    shape = layout.broadcast_shapes(self.shape, mask.shape)
    out = e.empty((layout.numel(shape) if size is None else size,), self.dtype, kernel="aten.masked_select.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        zeros = e.empty(shape, grad_of(grads).dtype, kernel="aten.zeros_like.default")
        e.kernel("aten.masked_scatter_.default")
        return zeros

    e.record("MaskedSelectBackward0", out, [self], [Formula((0,), gradient)], [self, mask])
    return out


def masked_index(e: Eager, self: Tensor, indices: Sequence[Tensor | None], size: int | None) -> list[Tensor | None]:
    """Masks among the indices of `x[mask]` as the positions that `nonzero` makes of them (`expandTensors`)."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (dtypes.bool_, dtypes.uint8):
            expanded.append(index)
            continue
        found = nonzero(e, index, size=size)
        expanded += [e.alias(found, found.shape[:1], found.strides[:1]) for _ in range(index.ndim)]
    return expanded


def _unique(
    e: Eager, shape: tuple[int, ...], self: Tensor, inverse: tuple[int, ...], counts: int, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = f"aten.{name}.default"
    values = e.empty(shape, self.dtype, kernel=kernel)
    return values, e.empty(inverse, dtypes.int64), e.empty((counts,), dtypes.int64)


@rule("aten::_unique2", "aten::_unique", kinds=("data_sized",))
def unique(
    e: Eager, self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, *,
    size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """At most all elements, with int64 positions and counts; without gradient."""
    count = self.numel if size is None else size
    inverse = self.shape if return_inverse else (0,)
    return _unique(e, (count,), self, inverse, count if return_counts else 0, "_unique2")


@rule("aten::unique_consecutive", kinds=("data_sized",))
def unique_consecutive(
    e: Eager, self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None, *,
    size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `_unique2`, or along a dimension as `unique_dim`."""
    if dim is not None:
        return unique_dim(e, self, dim, True, return_inverse, return_counts, size=size)
    return unique(e, self, True, return_inverse, return_counts, size=size)


@rule("aten::unique_dim", kinds=("data_sized",))
def unique_dim(
    e: Eager, self: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, *,
    size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """At most all slices along a dimension, with int64 positions and counts; without gradient."""
    axis = self.dim(dim)
    count = self.shape[axis] if size is None else size
    shape = tuple(count if d == axis else s for d, s in enumerate(self.shape))
    inverse = (self.shape[axis],) if return_inverse else (0,)
    return _unique(e, shape, self, inverse, count if return_counts else 0, "unique_dim")


@rule("aten::bincount", kinds=("data_sized",))
def bincount(
    e: Eager, self: Tensor, weights: Tensor | None = None, minlength: int = 0, *, size: int | None = None
) -> Tensor:
    """Counts of each integer up to the largest one, which only the data tells: as many as there are elements, or
    `minlength`, unless the file says."""
    count = max(minlength, self.numel) if size is None else size
    dtype = dtypes.int64 if weights is None else dtypes.float64
    return e.empty((count,), dtype, kernel="aten.bincount.default")
