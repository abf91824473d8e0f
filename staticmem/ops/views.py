"""Views and reshapes: no storage of their own unless the layout forces a copy.

Backward of a view is a view of the gradient where strides allow it; slice and select fill zeros of the input's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context, integer, integers, translation
from staticmem.ops.pointwise import grad_of, same
from staticmem.ops.registry import rule


def infer_size(size: Any, numel: int) -> layout.Shape:
    """Replaces a -1 (`infer_size` of ATen).

    Raises:
        ValueError: the sizes do not hold `numel` elements.
    """
    sizes = list((size,) if isinstance(size, int) else size)
    if -1 in sizes:
        rest = layout.numel([s for s in sizes if s != -1])
        if sizes.count(-1) > 1 or rest == 0 or numel % rest:
            raise ValueError(f"cannot view {numel} elements as {sizes}")
        sizes[sizes.index(-1)] = numel // rest
    if layout.numel(sizes) != numel:
        raise ValueError(f"cannot view {numel} elements as {sizes}")
    return tuple(sizes)


def make_view(e: Eager, self: Tensor, shape: layout.Shape, strides: layout.Strides, node: str, formula: Any) -> Tensor:
    """A view that autograd knows."""
    out = e.alias(self, shape, strides)
    out.base = self.base if self.base is not None else self
    if not e.training:  # under no_grad, too, a view of a parameter says that it requires a gradient: matmul asks
        out.requires_grad = self.requires_grad
    return e.record(node, out, [self], [Formula((0,), formula)])


def reshape_raw(e: Eager, tensor: Tensor, shape: layout.Shape) -> Tensor:
    """`reshape` without autograd: an alias, or a contiguous clone."""
    strides = layout.view_strides(tensor.shape, tensor.strides, shape)
    if strides is not None:
        return e.alias(tensor, shape, strides)
    copy = e.empty(tensor.shape, tensor.dtype, kernel="aten.clone.default")
    return e.alias(copy, shape, layout.contiguous_strides(shape))


def _reshape_back(self: Tensor) -> Any:
    shape = self.shape

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return grad if grad.shape == shape else reshape_raw(e, grad, shape)

    return gradient


@rule("view _unsafe_view reshape", kinds=("reshaped", "view"))
def reshape(e: Eager, self: Tensor, size: Any = None, *, shape: Any = None) -> Tensor:
    """A view where the strides allow it, else a contiguous clone; backward reshapes the gradient."""
    target = infer_size(size if size is not None else shape, self.numel)
    strides = layout.view_strides(self.shape, self.strides, target)
    if strides is not None:
        return make_view(e, self, target, strides, "ViewBackward0", _reshape_back(self))
    copy = clone(e, self, contiguous=True)
    return unsafe_view(e, copy, target)


def unsafe_view(e: Eager, self: Tensor, size: Any) -> Tensor:
    """`_unsafe_view` of a temporary: shares its storage, but autograd does not take it for a view."""
    target = infer_size(size, self.numel)
    out = e.alias(self, target, layout.contiguous_strides(target))
    return e.record("UnsafeViewBackward0", out, [self], [Formula((0,), _reshape_back(self))])


@rule("flatten", kinds=("reshaped", "view"))
def flatten(e: Eager, self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """As `reshape`; a dimension range of one is the tensor itself."""
    if self.ndim == 0:
        return reshape(e, self, (1,))
    start, end = self.dim(start_dim), self.dim(end_dim)
    if start == end:
        return self
    return reshape(e, self, (*self.shape[:start], layout.numel(self.shape[start : end + 1]), *self.shape[end + 1 :]))


@rule("unflatten", kinds=("reshaped", "view"))
def unflatten(e: Eager, self: Tensor, dim: int, sizes: Any) -> Tensor:
    """A view."""
    axis = self.dim(dim)
    return reshape(e, self, (*self.shape[:axis], *infer_size(sizes, self.shape[axis]), *self.shape[axis + 1 :]))


@rule("view_as reshape_as", kinds=("reshaped", "view"))
def view_as(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """As `reshape`."""
    return reshape(e, self, other.shape)


def clone(e: Eager, self: Tensor, contiguous: bool = False, strides: layout.Strides | None = None) -> Tensor:
    if strides is None:
        strides = layout.contiguous_strides(self.shape) if contiguous else layout.dense_like(self.shape, self.strides)
    out = e.empty(self.shape, self.dtype, strides, "aten.clone.default")
    return e.record("CloneBackward0", out, [self], [Formula((0,), same)])


@rule("clone lift_fresh_copy alias_copy", kinds=("copy",))
def aten_clone(e: Eager, self: Tensor, memory_format: Any = None) -> Tensor:
    """A copy; the gradient passes through."""
    return clone(e, self, strides=layout.in_memory_format(self.shape, self.strides, memory_format))


@rule("contiguous", kinds=("copy",))
def contiguous(e: Eager, self: Tensor, memory_format: Any = None) -> Tensor:
    """The tensor itself where it is contiguous already, else a copy."""
    if memory_format in ("channels_last", "channels_last_3d"):
        if layout.is_channels_last_contiguous(self.shape, self.strides):
            return self
        return clone(e, self, strides=layout.channels_last_strides(self.shape))
    return self if self.is_contiguous else clone(e, self, contiguous=True)


@rule("permute", kinds=("permuted", "view"))
def permute(e: Eager, self: Tensor, dims: Any) -> Tensor:
    """A view; the gradient is permuted back."""
    order = [self.dim(d) for d in dims]
    inverse = [order.index(i) for i in range(len(order))]

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return e.alias(grad, tuple(grad.shape[i] for i in inverse), tuple(grad.strides[i] for i in inverse))

    shape, strides = tuple(self.shape[i] for i in order), tuple(self.strides[i] for i in order)
    return make_view(e, self, shape, strides, "PermuteBackward0", gradient)


@rule("transpose", kinds=("permuted", "view"), aliases="swapaxes swapdims")
@rule("transpose_", kinds=("permuted", "view"), aliases="swapaxes_ swapdims_")
def transpose(e: Eager, self: Tensor, dim0: int, dim1: int) -> Tensor:
    """A view; the gradient is transposed back."""
    if self.ndim == 0:
        return self
    order = list(range(self.ndim))
    a, b = self.dim(dim0), self.dim(dim1)
    order[a], order[b] = order[b], order[a]
    return permute(e, self, order)


@rule("t t_ mT", kinds=("permuted", "view"))
def t(e: Eager, self: Tensor) -> Tensor:
    """A view; the gradient is transposed back."""
    return self if self.ndim < 2 else transpose(e, self, -2, -1)


@rule("numpy_T", kinds=("permuted", "view"))
def numpy_t(e: Eager, self: Tensor) -> Tensor:
    """A view with all dimensions reversed; the gradient is permuted back."""
    return permute(e, self, tuple(range(self.ndim - 1, -1, -1)))


@rule("movedim", kinds=("permuted", "view"), aliases="moveaxis")
def movedim(e: Eager, self: Tensor, source: Any, destination: Any) -> Tensor:
    """A view; the gradient is permuted back."""
    sources = [self.dim(d) for d in ((source,) if isinstance(source, int) else source)]
    targets = [self.dim(d) for d in ((destination,) if isinstance(destination, int) else destination)]
    order = [i for i in range(self.ndim) if i not in sources]
    for target, origin in sorted(zip(targets, sources, strict=True)):
        order.insert(target, origin)
    return permute(e, self, order)


@rule("unsqueeze unsqueeze_", kinds=("reshaped", "view"))
def unsqueeze(e: Eager, self: Tensor, dim: int) -> Tensor:
    """A view; the gradient is squeezed."""
    axis = dim + self.ndim + 1 if dim < 0 else dim
    stride = self.shape[axis] * self.strides[axis] if axis < self.ndim else 1

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return e.alias(grad, _without(grad.shape, axis), _without(grad.strides, axis))

    shape, strides = (*self.shape[:axis], 1, *self.shape[axis:]), (*self.strides[:axis], stride, *self.strides[axis:])
    return make_view(e, self, shape, strides, "UnsqueezeBackward0", gradient)


def _without(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return values[:axis] + values[axis + 1 :]


@rule("squeeze squeeze_", kinds=("reshaped", "view"))
def squeeze(e: Eager, self: Tensor, dim: Any = None) -> Tensor:
    """A view; the gradient is unsqueezed."""
    given = range(self.ndim) if dim is None else [self.dim(d) for d in ((dim,) if isinstance(dim, int) else dim)]
    dropped = {d for d in given if self.shape[d] == 1}
    shape = tuple(s for i, s in enumerate(self.shape) if i not in dropped)
    strides = tuple(s for i, s in enumerate(self.strides) if i not in dropped)
    return make_view(e, self, shape, strides, "SqueezeBackward1", _reshape_back(self))


@rule("expand broadcast_to", kinds=("expanded", "view"))
def expand(e: Eager, self: Tensor, size: Any, implicit: bool = False) -> Tensor:
    """A view with stride 0; the gradient is summed to the input's shape."""
    offset = len(size) - self.ndim
    target = tuple(self.shape[i - offset] if s == -1 else s for i, s in enumerate(size))
    for i, s in enumerate(self.shape):
        if s != 1 and target[offset + i] != s:
            raise ValueError(f"cannot expand {list(self.shape)} to {list(target)}")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return grad if grad.shape == self.shape else e.sum_to(grad, self.shape)

    strides = layout.expand_strides(self.shape, self.strides, target)
    return make_view(e, self, target, strides, "ExpandBackward0", gradient)


@rule("expand_as", kinds=("expanded", "view"))
def expand_as(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """A view with stride 0; the gradient is summed to the input's shape."""
    return expand(e, self, other.shape)


def full_size_zeros(self: Tensor, kernel: str) -> Any:
    """Backward of slice and select: zeros of the input's size, into which the gradient is copied."""
    shape, dtype = self.shape, self.dtype

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(shape, grad_of(grads).dtype if dtype.is_differentiable else dtype, kernel=kernel)

    return gradient


@rule("slice", kinds=("part", "view"))
def slice_(
    e: Eager, self: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A view; backward makes zeros of the input's size. A slice over everything is dropped by exporters' clean-up."""
    axis = self.dim(dim)
    size = self.shape[axis]
    begin = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    stop = size if end is None else min(max(end + size if end < 0 else end, begin), size)
    length = max(0, -(-(stop - begin) // step))
    shape = tuple(length if i == axis else s for i, s in enumerate(self.shape))
    strides = tuple(s * step if i == axis else s for i, s in enumerate(self.strides))
    return make_view(e, self, shape, strides, "SliceBackward0", full_size_zeros(self, "aten.slice_backward.default"))


@rule("slice_backward")
def slice_backward(
    e: Eager, grad_output: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    """Zeros of the whole size, with the gradient in a part of them; its backward is that part as a view."""
    return _part_of_zeros(e, "slice_backward", grad_output, sizes, lambda grad: slice_(e, grad, dim, start, end, step))


@rule("select_backward")
def select_backward(e: Eager, grad_output: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """As `slice_backward`."""
    return _part_of_zeros(e, "select_backward", grad_output, sizes, lambda grad: select(e, grad, dim, index))


def _part_of_zeros(
    e: Eager, name: str, grad_output: Tensor, sizes: Sequence[int], part: Callable[[Tensor], Tensor]
) -> Tensor:
    out = e.empty(tuple(sizes), grad_output.dtype, kernel=f"aten.{name}.default")
    formula = Formula((0,), lambda e, grads, need: part(grad_of(grads)))
    e.record(f"{name} backward", out, [grad_output], [formula])
    return out


@rule("narrow", kinds=("part", "view"))
def narrow(e: Eager, self: Tensor, dim: int, start: int, length: int) -> Tensor:
    """As `slice`."""
    return slice_(e, self, dim, start, start + length)


@rule("select", kinds=("part", "view"))
def select(e: Eager, self: Tensor, dim: int, index: int) -> Tensor:
    """A view; backward makes zeros of the input's size."""
    axis = self.dim(dim)
    shape, strides = _without(self.shape, axis), _without(self.strides, axis)
    return make_view(e, self, shape, strides, "SelectBackward0", full_size_zeros(self, "aten.select_backward.default"))


def _overlaps(shape: layout.Shape, strides: layout.Strides) -> bool:
    """`_maybe_overlapping_memory` of FunctionsManual.cpp."""
    reach = 1
    for stride, size in sorted((st, n) for st, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


@rule("_reshape_alias", kinds=("reshaped", "view"))
def reshape_alias(e: Eager, self: Tensor, size: Any, stride: Any) -> Tensor:
    """A view; backward reshapes the gradient."""
    return make_view(e, self, tuple(size), tuple(stride), "ReshapeAliasBackward0", _reshape_back(self))


@rule("as_strided", kinds=("view",))
def as_strided(e: Eager, self: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """A view; backward makes a buffer of the storage's size, and int64 indices where the view overlaps itself."""
    shape, strides = tuple(size), tuple(stride)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        extents = [(self.shape, self.strides, 0), (shape, strides, storage_offset or 0)]
        count = max(1 + o + sum((n - 1) * st for n, st in zip(s, t, strict=True)) for s, t, o in extents)
        storage = e.empty((count,), grad.dtype, kernel="aten.zeros.default")
        if _overlaps(shape, strides):
            e.empty((count,), dtypes.int64, kernel="aten.arange.default")
            e.empty((layout.numel(shape),), dtypes.int64, kernel="aten.clone.default")
            reshape_raw(e, grad, (grad.numel,))
        return e.alias(storage, self.shape, self.strides)

    return make_view(e, self, shape, strides, "AsStridedBackward0", gradient)


@rule("diagonal", kinds=("part", "view"))
def diagonal(e: Eager, self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """A view; backward makes zeros of the input's size."""
    a, b = self.dim(dim1), self.dim(dim2)
    length = max(0, min(self.shape[a], self.shape[b]) - abs(offset))
    keep = [i for i in range(self.ndim) if i not in (a, b)]
    shape = (*(self.shape[i] for i in keep), length)
    strides = (*(self.strides[i] for i in keep), self.strides[a] + self.strides[b])
    return make_view(
        e, self, shape, strides, "DiagonalBackward0", full_size_zeros(self, "aten.diagonal_backward.default")
    )


@rule("unfold", kinds=("part", "view"))
def unfold(e: Eager, self: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """A view with overlapping windows; backward makes a tensor of the input's size."""
    axis = self.dim(dimension)
    count = (self.shape[axis] - size) // step + 1
    shape = (*(count if i == axis else s for i, s in enumerate(self.shape)), size)
    strides = (*(s * step if i == axis else s for i, s in enumerate(self.strides)), self.strides[axis])
    return make_view(e, self, shape, strides, "UnfoldBackward0", full_size_zeros(self, "aten.unfold_backward.default"))


@rule("alias", kinds=("reshaped", "view"))
def alias(e: Eager, self: Tensor) -> Tensor:
    """A view; the gradient passes through."""
    return make_view(e, self, self.shape, self.strides, "AliasBackward0", same)


@rule("detach detach_ lift_fresh", kinds=("reshaped", "view"))
def detach(e: Eager, self: Tensor) -> Tensor:
    """A view without gradient."""
    return e.alias(self, self.shape, self.strides)


def at_least(e: Eager, self: Tensor, dims: int) -> Tensor:
    if self.ndim >= dims:
        return self
    if self.ndim == 0:
        return reshape(e, self, (1,) * dims)
    if dims == 3:
        return unsqueeze(e, self if self.ndim == 2 else unsqueeze(e, self, 0), -1)
    return unsqueeze(e, self, 0)


def _with_dims(dims: int) -> Callable[..., Any]:
    def run(e: Eager, self: Any) -> Any:
        """A view with dimensions of size 1; the tensor itself where it has enough."""
        return at_least(e, self, dims) if isinstance(self, Tensor) else [at_least(e, t, dims) for t in self]

    return run


for _dims in (1, 2, 3):
    rule(f"atleast_{_dims}d")(_with_dims(_dims))


@rule("ravel", kinds=("reshaped", "view"))
def ravel(e: Eager, self: Tensor) -> Tensor:
    """As `reshape` to one dimension."""
    return reshape(e, self, (-1,))


@rule("adjoint mH matrix_H", kinds=("permuted", "view"))
def adjoint(e: Eager, self: Tensor) -> Tensor:
    """A transposed view (complex conjugation is a flag of the view)."""
    return transpose(e, self, -2, -1)


@translation("Reshape")
def onnx_reshape(ctx: Context, node: Node) -> list[Op] | None:
    sizes = ctx.net.shape(node.outputs[0])
    if sizes is None:
        constant_shape = ctx.ints(node, 1, "shape")
        if constant_shape is None or constant_shape.count(-1) > 1 or 0 in constant_shape:
            return None
        sizes = constant_shape
    return [ctx.op(node, "aten::reshape", ctx.ref(node.inputs[0]), sizes)]


@translation("Flatten")
def onnx_flatten(ctx: Context, node: Node) -> list[Op] | None:
    rank, axis = ctx.rank(node.inputs[0]), integer(node, "axis", 1)
    axis = axis + rank if axis < 0 else axis
    if axis == 1 and rank > 1:
        return [ctx.op(node, "aten::flatten.using_ints", ctx.ref(node.inputs[0]), 1)]
    return onnx_reshape(ctx, node) if ctx.net.shape(node.outputs[0]) is not None else None


@translation("Transpose")
def onnx_transpose(ctx: Context, node: Node) -> list[Op]:
    rank = ctx.rank(node.inputs[0])
    perm = integers(node, "perm", tuple(reversed(range(rank))))
    moved = [axis for axis, source in enumerate(perm) if axis != source]
    x = ctx.ref(node.inputs[0])
    if len(moved) == 2:
        if len(perm) == 2:
            return [ctx.op(node, "aten::t", x)]
        return [ctx.op(node, "aten::transpose.int", x, moved[0], moved[1])]
    return [ctx.op(node, "aten::permute", x, perm)]


def _onnx_steps(ctx: Context, node: Node, target: str, axes: tuple[int, ...], sizes: list[tuple[int, ...]]) -> list[Op]:
    """One op an axis, as PyTorch has no call for several."""
    if not axes:
        ctx.alias(node.outputs[0], node.inputs[0])
    ops: list[Op] = []
    x = ctx.ref(node.inputs[0])
    for position, axis in enumerate(axes):
        last = position == len(axes) - 1
        name = node.outputs[0] if last else ctx.fresh(node)
        if not last:
            ctx.define(name, node.inputs[0], sizes[position])
        ops.append(ctx.op(node, target, x, axis, outputs=(name,)))
        x = Ref(name)
    return ops


@translation("Unsqueeze")
def onnx_unsqueeze(ctx: Context, node: Node) -> list[Op] | None:
    axes = ctx.ints(node, 1, "axes")
    shape = ctx.net.shape(node.inputs[0])
    if axes is None or shape is None:
        return None
    rank = len(shape) + len(axes)
    ordered = tuple(sorted(a % rank for a in axes))
    sizes: list[tuple[int, ...]] = []
    current = shape
    for axis in ordered:
        current = (*current[:axis], 1, *current[axis:])
        sizes.append(current)
    return _onnx_steps(ctx, node, "aten::unsqueeze", ordered, sizes)


@translation("Squeeze")
def onnx_squeeze(ctx: Context, node: Node) -> list[Op] | None:
    axes = ctx.ints(node, 1, "axes")
    shape = ctx.net.shape(node.inputs[0])
    if shape is None:
        return None
    if axes is None:
        return [ctx.op(node, "aten::squeeze", ctx.ref(node.inputs[0]))]
    ordered = tuple(sorted((a % len(shape) for a in axes), reverse=True))
    sizes: list[tuple[int, ...]] = []
    current = shape
    for axis in ordered:
        current = (*current[:axis], *current[axis + 1 :])
        sizes.append(current)
    return _onnx_steps(ctx, node, "aten::squeeze.dim", ordered, sizes)


@translation("Slice")
def onnx_slices(ctx: Context, node: Node) -> list[Op] | None:
    starts, ends = ctx.ints(node, 1, "starts"), ctx.ints(node, 2, "ends")
    shape = ctx.net.shape(node.inputs[0])
    if starts is None or ends is None or shape is None:
        return None
    axes = ctx.ints(node, 3, "axes") or tuple(range(len(starts)))
    steps = ctx.ints(node, 4) or (1,) * len(starts)
    if not starts:
        ctx.alias(node.outputs[0], node.inputs[0])
    ops: list[Op] = []
    bounds: tuple[Arg, ...]
    x, current = ctx.ref(node.inputs[0]), list(shape)
    for position, (start, end, axis, step) in enumerate(zip(starts, ends, axes, steps, strict=False)):
        last = position == len(starts) - 1
        name = node.outputs[0] if last else ctx.fresh(node)
        axis %= len(shape)
        places = range(*slice(start, end, step).indices(current[axis])) if step else range(0)
        part = 0 < len(places) < current[axis]
        current[axis] = len(places)
        if not last:
            ctx.define(name, node.inputs[0], tuple(current))
        if step < 0:  # PyTorch has no negative steps: flip copies
            if part:
                taken = ctx.fresh(node)
                ctx.define(taken, node.inputs[0], tuple(current))
                bounds = (axis, places[-1], places[0] + 1, -step)
                ops.append(ctx.op(node, "aten::slice.Tensor", x, *bounds, outputs=(taken,)))
                x = Ref(taken)
            ops.append(ctx.op(node, "aten::flip", x, (axis,), outputs=(name,)))
        else:
            bounds = (axis, start, end) if step == 1 else (axis, start, end, step)
            ops.append(ctx.op(node, "aten::slice.Tensor", x, *bounds, outputs=(name,)))
        x = Ref(name)
    return ops


@translation("Expand")
def onnx_expand(ctx: Context, node: Node) -> list[Op] | None:
    sizes = ctx.net.shape(node.outputs[0]) or ctx.ints(node, 1)
    return None if sizes is None else [ctx.op(node, "aten::expand", ctx.ref(node.inputs[0]), sizes)]


@translation("Identity")
def onnx_identity(ctx: Context, node: Node) -> list[Op]:
    ctx.alias(node.outputs[0], node.inputs[0])
    return []
