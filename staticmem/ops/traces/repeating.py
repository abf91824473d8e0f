"""Tensors that are repeated, turned round or moved along (torch/_refs; aten/src/ATen/native/Repeat.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.ops.traces.casts import clone
from staticmem.ops.traces.indexing import selected
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.views import derive, expand, flatten, slice_, unsqueeze, view
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Tracer


@traced("tensor_split")
def tensor_split(t: Tracer, self: Node, sections: int | Sequence[int], dim: int = 0) -> list[Node]:
    """Slices (`tensor_split_sections`, TensorShape.cpp)."""
    size = self.shape[self.dim(dim)]
    if isinstance(sections, int):
        if sections < 1:
            raise ValueError(f"{sections} sections")
        small, longer = divmod(size, sections)
        ends = [k * small + min(k, longer) for k in range(1, sections + 1)]
    else:
        ends = [*sections, size]
    return [slice_(t, self, dim, start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@traced("repeat tile")
def repeat(t: Tracer, self: Node, repeats: Sequence[int]) -> Node:
    """`repeat_backward` sums over the repeats in a view that has them as dimensions."""
    repeats = (1,) * (self.ndim - len(repeats)) + tuple(repeats)
    missing = len(repeats) - self.ndim
    sizes = (1,) * missing + self.shape
    shape = tuple([size * times for size, times in zip(sizes, repeats, strict=True)])
    out = t.new("aten::repeat", (self, repeats), shape, self.dtype)

    def back(grad: Node) -> Node:
        if missing:
            grad = t.sum(grad, range(missing))
        apart: list[int] = []
        summed: list[int] = []
        for times, size in zip(repeats[missing:], self.shape, strict=True):
            if times != 1:
                summed.append(len(apart))
                apart.append(times)
            apart.append(size)
        return t.sum(t.view(grad, apart), summed) if summed else grad

    return derive(t, out, self, back)


@traced("repeat_interleave.self_int")
def repeat_interleave(
    t: Tracer, self: Node, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Node:
    """unsqueeze, expand, clone, flatten (`repeat_interleave_symint`, Repeat.cpp)."""
    if dim is None:
        self, dim = flatten(t, self), 0
    dim = self.dim(dim)
    wider = unsqueeze(t, self, dim + 1)
    wider = expand(t, wider, (*wider.shape[: dim + 1], repeats, *wider.shape[dim + 2 :]))
    return flatten(t, clone(t, wider, memory_format="contiguous_format"), dim, dim + 1)


@traced("flip")
def flip(t: Tracer, self: Node, dims: Sequence[int]) -> Node:
    order = tuple([self.dim(d) for d in ((dims,) if isinstance(dims, int) else dims)])
    return derive(t, _reversed(t, self, order), self, lambda grad: _reversed(t, grad, order))


def _reversed(t: Tracer, x: Node, dims: tuple[int, ...]) -> Node:
    return t.new("prims::rev", (x, dims), x.shape, x.dtype, layout.dense_like(x.shape, x.strides))


traced("fliplr")(lambda t, self: flip(t, self, (1,)))
traced("flipud")(lambda t, self: flip(t, self, (0,)))


@traced("rot90")
def rot90(t: Tracer, self: Node, k: int = 1, dims: Sequence[int] = (0, 1)) -> Node:
    """Quarter turns (TensorTransformations.cpp)."""
    first, second = (self.dim(d) for d in dims)

    def turned(x: Node, quarters: int) -> Node:
        if quarters % 4 == 0:
            return t.clone(x)
        if quarters % 4 == 2:
            return _reversed(t, x, (first, second))
        return t.transpose(_reversed(t, x, (second if quarters % 4 == 1 else first,)), first, second)

    return derive(t, turned(self, k), self, lambda grad: turned(grad, -k))


@traced("roll")
def roll(t: Tracer, self: Node, shifts: Sequence[int] | int, dims: Sequence[int] | int = ()) -> Node:
    """`roll` of torch/_refs: each dimension in turn is read at shifted positions; its backward rolls back."""
    by = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    along = (dims,) if isinstance(dims, int) else tuple(dims)
    if not along:
        return view(t, roll(t, flatten(t, self), by, (0,)), self.shape)
    if len(by) != len(along):
        raise ValueError(f"{len(by)} shifts in {len(along)} dimensions")

    def rolled(node: Node, forward: bool) -> Node:
        order = list(zip(by, along, strict=True))
        for shift, dim in order if forward else reversed(order):  # `roll_backward` turns both lists round
            node = _rolled(t, node, shift if forward else -shift, node.dim(dim))
        return node

    return derive(t, rolled(self, True), self, lambda grad: rolled(grad, False))


def _rolled(t: Tracer, self: Node, shift: int, dim: int) -> Node:
    size = self.shape[dim]
    if not self.numel:
        return t.clone(self)
    positions = t.iota(size)
    moved = t.pointwise("aten::add.Tensor", positions, (size - shift) % size)
    wrapped = t.pointwise("aten::fmod.Scalar", moved, size)
    return selected(t, self, dim, wrapped)
