"""Views, and the copies that `reshape` makes where strides do not allow one.

Gradients: tools/autograd/derivatives.yaml and FunctionsManual.cpp; those of slices and selects write the gradient into
zeros (`slice_backward`, `select_backward` of torch/_decomp/decompositions.py, whose scatters stay calls of their own:
`decomps_to_exclude` of torch/_inductor/decomposition.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer

_END = (1 << 63) - 1  # how ATen writes the end of a slice that has none


@traced("view reshape _unsafe_view _reshape_alias")
def view(t: Tracer, self: Node, shape: Sequence[int], strides: Sequence[int] = ()) -> Node:
    return t.derive(t.view(self, shape), self, lambda grad: t.view(grad, self.shape))


@traced("view_as reshape_as")
def view_as(t: Tracer, self: Node, other: Node) -> Node:
    return view(t, self, other.shape)


@traced("flatten")
def flatten(t: Tracer, self: Node, start_dim: int = 0, end_dim: int = -1) -> Node:
    if not self.ndim:
        return view(t, self, (1,))
    start, end = self.dim(start_dim), self.dim(end_dim)
    if start == end:
        return self
    return view(t, self, (*self.shape[:start], layout.numel(self.shape[start : end + 1]), *self.shape[end + 1 :]))


@traced("ravel")
def ravel(t: Tracer, self: Node) -> Node:
    return view(t, contiguous(t, self), (-1,))


@traced("unflatten")
def unflatten(t: Tracer, self: Node, dim: int, sizes: Sequence[int]) -> Node:
    dim = self.dim(dim)
    return view(t, self, (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]))


@traced("contiguous")
def contiguous(t: Tracer, self: Node, *, memory_format: str | None = None) -> Node:
    last = memory_format is not None and "channels_last" in memory_format
    if (layout.is_channels_last_contiguous if last else layout.is_contiguous)(self.shape, self.strides):
        return self
    return clone(t, self, memory_format=memory_format or "contiguous_format")


@traced("permute")
def permute(t: Tracer, self: Node, dims: Sequence[int]) -> Node:
    order = [self.dim(d) for d in dims]
    if sorted(order) != list(range(self.ndim)):
        raise ValueError(f"the dimensions {list(dims)} of a tensor with {self.ndim}")
    back = sorted(range(self.ndim), key=order.__getitem__)
    return t.derive(t.permute(self, dims), self, lambda grad: t.permute(grad, back))


@traced("transpose")
def transpose(t: Tracer, self: Node, dim0: int, dim1: int) -> Node:
    return t.derive(t.transpose(self, dim0, dim1), self, lambda grad: t.transpose(grad, dim0, dim1))


@traced("t")
def t_(t: Tracer, self: Node) -> Node:
    return transpose(t, self, 0, 1 if self.ndim == 2 else 0)


@traced("mT adjoint mH matrix_H")
def m_t(t: Tracer, self: Node) -> Node:
    return transpose(t, self, -2, -1)


@traced("numpy_T")
def numpy_t(t: Tracer, self: Node) -> Node:
    return permute(t, self, range(self.ndim)[::-1])


@traced("movedim")
def movedim(t: Tracer, self: Node, source: Sequence[int] | int, destination: Sequence[int] | int) -> Node:
    sources = [self.dim(d) for d in ((source,) if isinstance(source, int) else source)]
    targets = [self.dim(d) for d in ((destination,) if isinstance(destination, int) else destination)]
    taken = dict(zip(targets, sources, strict=True))
    others = iter([d for d in range(self.ndim) if d not in sources])
    return permute(t, self, [taken[d] if d in taken else next(others) for d in range(self.ndim)])


@traced("unsqueeze")
def unsqueeze(t: Tracer, self: Node, dim: int) -> Node:
    if not -self.ndim - 1 <= dim <= self.ndim:
        raise ValueError(f"a new dimension {dim} of a tensor with {self.ndim}")
    return t.derive(t.unsqueeze(self, dim), self, lambda grad: t.squeeze(grad, dim))


@traced("squeeze")
def squeeze(t: Tracer, self: Node, dim: Sequence[int] | int | None = None) -> Node:
    dims = range(self.ndim) if dim is None else layout.listed(dim)
    gone = sorted({self.dim(d) for d in dims if self.shape and self.shape[self.dim(d)] == 1})

    def back(grad: Node) -> Node:
        for d in gone:
            grad = t.unsqueeze(grad, d)
        return grad

    return t.derive(t.squeeze(self, dim), self, back)


@traced("expand broadcast_to")
def expand(t: Tracer, self: Node, size: Sequence[int], *, implicit: bool = False) -> Node:
    return t.derive(t.expand(self, size), self, lambda grad: t.sum_to(grad, self.shape))


@traced("expand_as")
def expand_as(t: Tracer, self: Node, other: Node) -> Node:
    return expand(t, self, other.shape)


@traced("slice")
def slice_(
    t: Tracer, self: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Node:
    if step < 1:
        raise ValueError(f"a slice with the step {step}")
    first, last = 0 if start is None else start, _END if end is None else end
    if first == 0 and last >= self.shape[self.dim(dim)] and step == 1:
        return self  # indexing in Python makes no call (`applySlice`, aten/src/ATen/TensorIndexing.h)

    def back(grad: Node) -> Node:
        zeros = t.full(self.shape, 0, grad.dtype)
        return t.new("aten::slice_scatter", (zeros, grad, dim, first, last, step), self.shape, grad.dtype)

    return t.derive(t.slice(self, dim, first, last, step), self, back)


@traced("narrow")
def narrow(t: Tracer, self: Node, dim: int, start: int, length: int) -> Node:
    start = start + self.shape[self.dim(dim)] if start < 0 else start
    return slice_(t, self, dim, start, start + length)


@traced("select")
def select(t: Tracer, self: Node, dim: int, index: int) -> Node:
    size = self.shape[self.dim(dim)]
    if not -size <= index < size:
        raise ValueError(f"index {index} of a dimension with {size} elements")

    def back(grad: Node) -> Node:
        zeros = t.full(self.shape, 0, grad.dtype)
        return t.new("aten::select_scatter", (zeros, grad, dim, index), self.shape, grad.dtype)

    return t.derive(t.select(self, dim, index), self, back)


@traced("detach lift_fresh")
def detach(t: Tracer, self: Node) -> Node:
    """Another node of the same values, which has no history."""
    return t.alias(self)


@traced("alias")
def alias(t: Tracer, self: Node) -> Node:
    return t.derive(t.alias(self), self, lambda grad: grad)


@traced("as_strided")
def as_strided(
    t: Tracer, self: Node, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Node:
    """Its backward scatters into the memory of the whole tensor (`as_strided_backward`): not traced."""
    if t.grad_enabled and t.needs_grad(self):
        raise ValueError("the backward of as_strided is not traced")
    args = (self, tuple(size), tuple(stride), storage_offset)
    return t.new("aten::as_strided", args, tuple(size), self.dtype, tuple(stride))


@traced("unfold")
def unfold(t: Tracer, self: Node, dimension: int, size: int, step: int) -> Node:
    """The tensor's method: windows along a dimension. Its backward adds them up (`unfold_backward`)."""
    dim = self.dim(dimension)
    if size < 1 or step < 1 or size > self.shape[dim]:
        raise ValueError(f"windows of {size}, {step} apart, in a dimension with {self.shape[dim]}")
    shape, strides = list(self.shape), list(self.strides)
    shape[dim], strides[dim] = (self.shape[dim] - size) // step + 1, strides[dim] * step
    out = t.new("aten::unfold", (self, dim, size, step), (*shape, size), self.dtype, (*strides, self.strides[dim]))
    if t.grad_enabled and t.needs_grad(self):
        raise ValueError("the backward of unfold is not traced")
    return out


@traced("clone")
def clone(t: Tracer, self: Node, memory_format: str | None = None) -> Node:
    """A copy in the layout that is asked for, that of its input by default."""
    strides = layout.in_memory_format(self.shape, self.strides, memory_format)
    out = t.new("aten::clone", (self,), self.shape, self.dtype, strides)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        return grads

    return t.record(out, [self], gradient)
