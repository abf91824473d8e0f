"""Reading elements by index or mask.

Where the data decides how many there are, results get the size that the file or the user gives, else the largest
possible one. `size` is no argument of PyTorch's: frontends add it where the export or `--dim u0=N` says it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.eager.trace import Indices
from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.arithmetic import sub
from staticmem.ops.joining import cat
from staticmem.ops.onnx import Context, integer, like_first, translation
from staticmem.ops.pointwise import grad_of, gradient_like, inplace
from staticmem.ops.registry import KernelCall, Temporary, rule, workspace
from staticmem.ops.views import contiguous, expand, narrow, reshape
from staticmem.units import Band


@rule("embedding", kinds=("lookup",))
def embedding(
    e: Eager, weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Saves indices; the gradient is dense, of the table's size."""
    out = e.empty((*indices.shape, *weight.shape[1:]), weight.dtype, kernel="aten.embedding.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        weight_grad = e.empty(weight.shape, grad_of(grads).dtype, kernel="aten.embedding_dense_backward.default")
        e.reads(Indices(indices.numel))
        return weight_grad

    return e.record("EmbeddingBackward0", out, [weight], [Formula((0,), gradient)], [indices])


_SORTS_ABOVE = 3072  # indices; aten/src/ATen/native/cuda/Embedding.cu: up to here one kernel without a sort
_ROWS_PER_THREAD = 10  # aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, NROWS_PER_THREAD
_FLOAT = 4  # bytes; partial gradients are float32


@workspace("aten.embedding_dense_backward.default")
def embedding_backward(call: KernelCall) -> list[Temporary]:
    """Many indices are sorted: sorted indices and where they were, and cub's double buffers while they are sorted
    (Embedding.cu, cub.cuh). Then partial gradients of segments of equal indices (EmbeddingBackwardKernel.cu): of 10
    indices each, and one more for each index that occurs, at most min(indices, rows)."""
    count, table = call.indices, call.results[0].shape
    if count <= _SORTS_ABOVE or len(table) != 2:
        return []
    kept = 2 * dtypes.int64.itemsize * count
    full, row = count // _ROWS_PER_THREAD, table[1] * _FLOAT
    most = (full + min(count, table[0])) * row
    return [
        Temporary(Band(kept, 2 * kept, 2 * kept + (1 << 20)), "embedding backward: sort", first=True),
        Temporary(Band(full * row, most, most), "embedding backward: segments"),
    ]


@rule("embedding_bag _embedding_bag")
def embedding_bag(
    e: Eager, weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Saves contiguous indices, offsets and int64 helpers (one an index, one a bag); a dense gradient of the table's
    size."""
    indices, offsets = contiguous(e, indices), contiguous(e, offsets)
    bags = offsets.shape[0] - (1 if include_last_offset else 0)
    out = e.empty((bags, weight.shape[1]), weight.dtype, kernel="aten._embedding_bag.default")
    offset2bag = e.empty(indices.shape, indices.dtype)
    bag_size = e.empty(offsets.shape, indices.dtype)
    max_indices = e.empty((bags, weight.shape[1]) if mode == 2 else (0,), indices.dtype)
    gradient = gradient_like(weight, "aten._embedding_bag_dense_backward.default")
    saves = [indices, offsets, offset2bag, bag_size, max_indices, per_sample_weights]
    e.record("EmbeddingBagBackward0", [out], [weight], [Formula((0,), gradient)], saves)
    return out, offset2bag, bag_size, max_indices


@rule("index", kinds=("lookup",))
def index(e: Eager, self: Tensor, indices: Sequence[Tensor | None], *, size: int | None = None) -> Tensor:
    """Saves indices; backward makes zeros of the input's size and accumulates into them. A mask is turned into
    positions first, at most all of them."""
    indices = masked_index(e, self, indices, size)
    given = [(i, t) for i, t in enumerate(indices) if t is not None]
    picked = layout.broadcast_shapes(*(t.shape for _, t in given))
    used = [i for i, _ in given]
    adjacent = used == list(range(used[0], used[0] + len(used)))
    rest = [s for i, s in enumerate(self.shape) if i not in used]
    at = used[0] if adjacent else 0
    out = e.empty((*rest[:at], *picked, *rest[at:]), self.dtype, kernel="aten.index.Tensor")
    return e.record(
        "IndexBackward0",
        out,
        [self],
        [Formula((0,), gradient_like(self, "aten.new_zeros.default"))],
        [t for _, t in given],
    )


@rule("_unsafe_index", kinds=("lookup",))
def unsafe_index(e: Eager, self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """As `index` without checks; backward makes zeros of the input's size and a copy with the gradient put in."""
    out = index(e, self, indices)
    node = out.grad_fn
    if node is not None:

        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            e.empty(self.shape, grad_of(grads).dtype, kernel="aten.new_zeros.default")
            return e.empty(self.shape, grad_of(grads).dtype, kernel="aten._unsafe_index_put.default")

        node.name, node.formulas = "UnsafeIndexBackward0", [Formula((0,), gradient)]
    return out


@rule("index_select", kinds=("lookup",))
def index_select(e: Eager, self: Tensor, dim: int, index: Tensor) -> Tensor:
    """Saves the index; backward makes zeros of the input's size and adds into them."""
    axis = self.dim(dim)
    shape = tuple(index.numel if i == axis else s for i, s in enumerate(self.shape))
    out = e.empty(shape, self.dtype, kernel="aten.index_select.default")
    e.record("IndexSelectBackward0", out, [self], [Formula((0,), gradient_like(self, "aten.zeros.default"))], [index])
    return out


@rule("gather", kinds=("lookup",))
def gather(e: Eager, self: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    """Saves its input and the index; backward scatters into zeros of the input's size."""
    out = e.empty(index.shape, self.dtype, kernel="aten.gather.default")
    formula = Formula((0,), gradient_like(self, "aten.new_zeros.default"))
    return e.record("GatherBackward0", out, [self], [formula], [self, index])


@rule("take", kinds=("lookup",))
def take(e: Eager, self: Tensor, index: Tensor) -> Tensor:
    """Saves its input and the index; backward puts into zeros like the input."""
    out = e.empty(index.shape, self.dtype, kernel="aten.take.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty_like(self, kernel="aten.zeros_like.default")

    return e.record("TakeBackward0", out, [self], [Formula((0,), gradient)], [self, index])


@rule("take_along_dim", kinds=("lookup",))
def take_along_dim(e: Eager, self: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """As `gather`, after both are broadcast over the other dimensions and indices are wrapped, which is a copy."""
    if dim is None:
        return gather(e, reshape(e, self, (self.numel,)), 0, reshape(e, indices, (indices.numel,)))
    axis = self.dim(dim)

    def target(tensor: Tensor) -> layout.Shape:
        other = layout.broadcast_shapes(*((*t.shape[:axis], 1, *t.shape[axis + 1 :]) for t in (self, indices)))
        return (*other[:axis], tensor.shape[axis], *other[axis + 1 :])

    wide, index = expand(e, self, target(self)), expand(e, indices, target(indices))
    return gather(e, wide, axis, e.pointwise("aten.remainder.Scalar", index))


@rule("tril triu")
def tril(e: Eager, self: Tensor, diagonal: int = 0) -> Tensor:
    """A new contiguous tensor; so is its gradient."""
    out = e.empty(self.shape, self.dtype, kernel="aten.tril.default")
    gradient = gradient_like(self, "aten.tril.default")
    return e.record("TrilBackward0", out, [self], [Formula((0,), gradient)])


@rule("tril_ triu_")
def tril_(e: Eager, self: Tensor, diagonal: int = 0) -> Tensor:
    """In place; the gradient is a new contiguous tensor."""
    out = inplace(e, self, "aten.tril_.default")
    gradient = gradient_like(self, "aten.tril.default")
    return e.record("TrilBackward0", out, [self], [Formula((0,), gradient)])


@rule("diff")
def diff(
    e: Eager, self: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """A difference of two narrowed views, after a cat with what is prepended or appended."""
    parts = [t for t in (prepend, self, append) if t is not None]
    source = cat(e, parts, dim) if len(parts) > 1 else self
    axis = source.dim(dim)
    for _ in range(n):
        length = source.shape[axis] - 1
        before = narrow(e, source, axis, 0, length)  # C++ evaluates the second operand first
        source = sub(e, narrow(e, source, axis, 1, length), before)
    return source


@rule("one_hot")
def one_hot(e: Eager, self: Tensor, num_classes: int = -1) -> Tensor:
    """int64 of one more dimension, without gradient."""
    return e.empty((*self.shape, num_classes), dtypes.int64, kernel="aten.zeros.default")


@rule("nonzero nonzero_static", kinds=("data_sized",), aliases="argwhere")
def nonzero(e: Eager, self: Tensor, *, size: int | None = None, fill_value: int = -1) -> Tensor:
    """int64 positions, a row an element that is not zero (at most all of them), without gradient."""
    rows = self.numel if size is None else size
    strides = (1, rows)  # cuda/Nonzero.cu writes dimension after dimension
    return e.empty((rows, self.ndim), dtypes.int64, strides, "aten.nonzero.default")


@rule("nonzero_numpy", kinds=("data_sized",))
def nonzero_numpy(e: Eager, self: Tensor, *, size: int | None = None) -> list[Tensor]:
    """Views of `nonzero`, one a dimension."""
    positions = nonzero(e, self, size=size)
    return [e.alias(positions, positions.shape[:1], positions.strides[:1]) for _ in range(self.ndim)]


@rule("masked_select", kinds=("data_sized",))
def masked_select(e: Eager, self: Tensor, mask: Tensor, *, size: int | None = None) -> Tensor:
    """At most all elements. Saves input and mask; backward makes zeros of the common shape and scatters into a copy."""
    shape = layout.broadcast_shapes(self.shape, mask.shape)
    out = e.empty((layout.numel(shape) if size is None else size,), self.dtype, kernel="aten.masked_select.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        zeros = e.empty(shape, grad_of(grads).dtype, kernel="aten.zeros_like.default")
        e.kernel("aten.masked_scatter_.default")
        return zeros

    return e.record("MaskedSelectBackward0", out, [self], [Formula((0,), gradient)], [self, mask])


def masked_index(e: Eager, self: Tensor, indices: Sequence[Tensor | None], size: int | None) -> list[Tensor | None]:
    """Masks among the indices of `x[mask]` as the positions that `nonzero` makes of them (`expandTensors`)."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (dtypes.bool_, dtypes.uint8):
            expanded.append(index)
            continue
        positions = nonzero(e, index, size=size)
        expanded += [e.alias(positions, positions.shape[:1], positions.strides[:1]) for _ in range(index.ndim)]
    return expanded


@translation("Gather")
def onnx_gather(ctx: Context, node: Node) -> list[Op] | None:
    axis, rank = integer(node, "axis", 0), ctx.rank(node.inputs[0])
    index = ctx.net.const(node.inputs[1])
    x = ctx.ref(node.inputs[0])
    if index is not None and index.ndim == 0:
        return [ctx.op(node, "aten::select.int", x, axis, int(index))]
    weight = node.inputs[0] in ctx.net.weights and rank == 2 and axis == 0
    leaf = node.inputs[0].rpartition(".")[2]
    if weight and (leaf == "weight" or not ctx.net.producer.startswith("pytorch") or "." not in node.inputs[0]):
        return [ctx.op(node, "aten::embedding", x, ctx.ref(node.inputs[1]))]
    if ctx.rank(node.inputs[1]) == 1:
        if axis == 0 and weight:
            return [ctx.op(node, "aten::index.Tensor", x, (ctx.ref(node.inputs[1]),))]
        return [ctx.op(node, "aten::index_select", x, axis, ctx.ref(node.inputs[1]))]
    indices: tuple[Arg, ...] = (*(None,) * (axis % max(rank, 1)), ctx.ref(node.inputs[1]))
    return [ctx.op(node, "aten::index.Tensor", x, indices)]


@translation("GatherElements")
def onnx_gather_elements(ctx: Context, node: Node) -> list[Op]:
    x, index = ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1])
    return [ctx.op(node, "aten::gather", x, integer(node, "axis", 0), index)]


@translation("Trilu", sizes=like_first)
def onnx_trilu(ctx: Context, node: Node) -> list[Op]:
    k = ctx.number(node, 1)
    target = "aten::triu" if integer(node, "upper", 1) else "aten::tril"
    return [ctx.op(node, target, ctx.ref(node.inputs[0]), int(k or 0))]


@translation("OneHot")
def onnx_one_hot(ctx: Context, node: Node) -> list[Op] | None:
    depth = ctx.number(node, 1)
    return None if depth is None else [ctx.op(node, "aten::one_hot", ctx.ref(node.inputs[0]), int(depth))]


@translation("NonZero")
def onnx_non_zero(ctx: Context, node: Node) -> list[Op] | None:
    """[rank, n] positions: the transposed view of PyTorch's; n is at most the number of elements."""
    shape, result = ctx.net.shape(node.inputs[0]), ctx.net.shape(node.outputs[0])
    if shape is None:
        return None
    count = result[1] if result is not None else math.prod(shape)
    name = ctx.fresh(node)
    ctx.define(name, node.outputs[0], (count, len(shape)))
    kwargs: dict[str, Arg] = {"size": count}
    return [
        ctx.op(node, "aten::nonzero", ctx.ref(node.inputs[0]), outputs=(name,), kwargs=kwargs),
        ctx.op(node, "aten::t", Ref(name)),
    ]
