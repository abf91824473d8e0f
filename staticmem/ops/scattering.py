"""Writing into a tensor by indices or slices, out of place and in place.

Each row says which inputs an op has, what it saves and its formulas (tools/autograd/derivatives.yaml).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.eager.trace import Indices
from staticmem.ir import dtypes
from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context, integer, text, translation
from staticmem.ops.pointwise import clone_for_backward, end_statement, grad_of, gradient_like, inplace, same
from staticmem.ops.registry import KernelCall, Temporary, rule, workspace
from staticmem.units import exactly


class Row(NamedTuple):
    """`self`: what the gradient of the old value is: "same" as the incoming one, or a "masked" copy of it."""

    name: str
    self: str
    saves_source: bool = False  # where the source needs a gradient


TABLE = (
    Row("scatter", "masked"),
    Row("scatter_add", "same"),
    Row("index_add", "same", True),
    Row("index_copy", "masked", True),
    Row("index_fill", "masked"),
)


def _masked(self: Tensor, kernel: str) -> Any:
    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty_like(grad_of(grads), kernel=kernel)

    return formula


def _define(row: Row) -> None:
    def record(e: Eager, out: Tensor, self: Tensor, index: Tensor, source: Any) -> None:
        by_self = same if row.self == "same" else _masked(self, f"aten.{row.name}.value")
        formulas = [Formula((0,), by_self)]
        inputs = [self]
        read = row.self != "same" or (isinstance(source, Tensor) and e.needs_grad(source))
        saves: list[Tensor | None] = [index if read else None]
        if isinstance(source, Tensor):
            pick = "aten.gather.default" if row.name.startswith("scatter") else "aten.index_select.default"
            formulas.append(Formula((1,), gradient_like(source, pick)))
            inputs.append(source)
            saves.append(source if row.saves_source and e.needs_grad(source) else None)
        name = row.name.title().replace("_", "")
        e.record(f"{name}Backward0", out, inputs, formulas, saves)

    def out_of_place(e: Eager, self: Tensor, dim: int, index: Tensor, source: Any = None, **_: Any) -> Tensor:
        out = e.empty_like(self, kernel=f"aten.{row.name}.default")
        record(e, out, self, index, source)
        return out

    def in_place(e: Eager, self: Tensor, dim: int, index: Tensor, source: Any = None, **_: Any) -> Tensor:
        out = inplace(e, self, f"aten.{row.name}_.default")
        record(e, out, self, index, source)
        return out

    old = "the incoming tensor" if row.self == "same" else "a copy of it with the written elements zeroed"
    kept = ", and the source where it needs a gradient" if row.saves_source else ""
    guard = " where the source needs a gradient" if row.self == "same" else ""
    facts = f"Saves the index{guard}{kept}; the gradient of the old value is {old}, that of the source its elements."
    out_of_place.__doc__, in_place.__doc__ = facts, f"In place. {facts}"
    rule(row.name, ("scatter",))(out_of_place)
    rule(f"{row.name}_", ("scatter",))(in_place)


for _row in TABLE:
    _define(_row)


def _record_put(
    e: Eager, out: Tensor, self: Tensor, indices: Sequence[Tensor | None], values: Tensor, add: bool
) -> Tensor:
    count = Indices(max([t.numel for t in indices if t is not None], default=0))

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        e.empty_like(values, kernel="aten.zeros_like.default")
        self_grad = e.empty_like(grad_of(grads), kernel="aten.index_put.default")
        e.reads(count)
        return self_grad

    def by_values(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        given = [t for t in indices if t is not None]
        picked = layout.broadcast_shapes(*(t.shape for t in given))
        rest = [s for i, s in enumerate(self.shape) if i >= len(indices) or indices[i] is None]
        return e.empty((*picked, *rest), grad_of(grads).dtype, kernel="aten.index.Tensor")

    formulas = [Formula((0,), same if add else by_self), Formula((1,), by_values)]
    return e.record("IndexPutBackward0", out, [self, values], formulas, indices)


@rule("index_put")
def index_put(
    e: Eager, self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Saves the indices; the old value's gradient is a copy with zeros put in, that of the values an index of it."""
    out = e.empty_like(self, kernel="aten.index_put.default")
    return _record_put(e, out, self, indices, values, accumulate)


@rule("index_put_", kinds=("assignment",))
def index_put_(
    e: Eager, self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """In place, else as `index_put`."""
    out = inplace(e, self, "aten.index_put_.default")
    return _record_put(e, out, self, indices, values, accumulate)


@workspace("aten.index_put.default aten.index_put_.default", results=0)
def index_put_sort(call: KernelCall) -> list[Temporary]:
    """Linear index, its order, and both sorted (aten/src/ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel).
    Only in backward: there indices accumulate."""
    if call.phase != "backward":
        return []
    return [Temporary(exactly(4 * dtypes.int64.itemsize * call.indices), "index_put: sort", held=False)]


def _record_masked_scatter(e: Eager, out: Tensor, self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    by_self = gradient_like(out, "aten.masked_fill.Scalar")
    by_source = gradient_like(source, "aten.masked_scatter_backward.default")
    return e.record(
        "MaskedScatterBackward0", out, [self, source], [Formula((0,), by_self), Formula((1,), by_source)], [mask]
    )


@rule("masked_scatter")
def masked_scatter(e: Eager, self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Saves the mask; one masked copy for the old value; the selected gradient, padded to the source's size."""
    out = e.empty(layout.broadcast_shapes(self.shape, mask.shape), self.dtype, kernel="aten.masked_scatter.default")
    return _record_masked_scatter(e, out, self, mask, source)


@rule("masked_scatter_")
def masked_scatter_(e: Eager, self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """In place, else as `masked_scatter`."""
    out = inplace(e, self, "aten.masked_scatter_.default")
    return _record_masked_scatter(e, out, self, mask, source)


def _record_window(e: Eager, out: Tensor, self: Tensor, src: Tensor, window: Any) -> Tensor:
    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        e.empty(src.shape, grad.dtype, kernel="aten.zeros.default")
        return e.empty_like(grad, kernel="aten.slice_scatter.default")

    def by_src(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return e.alias(grad, src.shape, window(grad.strides))

    return e.record("SliceScatterBackward0", out, [self, src], [Formula((0,), by_self), Formula((1,), by_src)])


@rule("slice_scatter")
def slice_scatter(
    e: Eager, self: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A copy; backward makes zeros and a copy for the old value, a view of the gradient for the slice."""
    axis = self.dim(dim)
    out = e.empty_like(self, kernel="aten.slice_scatter.default")
    return _record_window(
        e, out, self, src, lambda strides: tuple(s * step if i == axis else s for i, s in enumerate(strides))
    )


@rule("select_scatter")
def select_scatter(e: Eager, self: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """A copy; backward makes zeros and a copy for the old value, a view of the gradient for the slice."""
    axis = self.dim(dim)
    out = e.empty_like(self, kernel="aten.select_scatter.default")
    return _record_window(e, out, self, src, lambda strides: strides[:axis] + strides[axis + 1 :])


@rule("diagonal_scatter")
def diagonal_scatter(e: Eager, self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """A copy; backward makes zeros and a copy for the old value, a view of the gradient for the diagonal."""
    first, second = self.dim(dim1), self.dim(dim2)
    out = e.empty_like(self, kernel="aten.diagonal_scatter.default")

    def window(strides: layout.Strides) -> layout.Strides:
        rest = [s for i, s in enumerate(strides) if i not in (first, second)]
        return (*rest, strides[first] + strides[second])

    return _record_window(e, out, self, src, window)


def _record_flat_put(e: Eager, out: Tensor, self: Tensor, index: Tensor, source: Tensor, add: bool) -> Tensor:
    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        e.empty_like(source, kernel="aten.zeros_like.default")
        return e.empty_like(grad_of(grads), kernel="aten.put.default")

    formulas = [Formula((0,), same if add else by_self), Formula((1,), gradient_like(index, "aten.take.default"))]
    return e.record("PutBackward0", out, [self, source], formulas, [index, source if e.needs_grad(source) else None])


@rule("put")
def put(e: Eager, self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Saves the index, and the source where it needs a gradient; the old value's gradient is a copy with zeros put in,
    that of the source its elements."""
    out = e.empty_like(self, kernel="aten.put.default")
    return _record_flat_put(e, out, self, index, source, accumulate)


@rule("put_")
def put_(e: Eager, self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """In place, else as `put`."""
    out = inplace(e, self, "aten.put_.default")
    return _record_flat_put(e, out, self, index, source, accumulate)


@rule("scatter_reduce")
def scatter_reduce(
    e: Eager, self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Saves input, index, source and result; of a sum the old value gets the whole gradient, the source its elements.
    A mean counts the elements, a maximum or minimum finds them again: up to seven tensors of their sizes. A product is
    reduced twice again, without the zeros of the input and of the source: up to twelve tensors."""
    out = e.empty_like(self, kernel="aten.scatter_reduce.two")
    return _record_scatter(e, out, self, self, index, src, (reduce, include_self))


@rule("scatter_reduce_")
def scatter_reduce_(
    e: Eager, self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """In place, on a clone that is saved where a gradient is needed; else as `scatter_reduce`."""
    original = clone_for_backward(e, self, self, src) or self
    out = inplace(e, self, "aten.scatter_reduce_.two")
    return _record_scatter(e, out, self, original, index, src, (reduce, include_self))


def _record_scatter(
    e: Eager, out: Tensor, self: Tensor, original: Tensor, index: Tensor, src: Tensor, how: tuple[str, bool]
) -> Tensor:
    """The node of a reduction of elements; `original` has what was in `self` before."""
    kernels = _Kernels("gather", "scatter_add", "scatter", "aten.scatter_reduce.two", True)
    formula = Formula((0, 1), _gradients_of_reduction(original, src, out, *how, kernels))
    return e.record("ScatterReduceBackward0", out, [self, src], [formula], [index, original, src, out])


@rule("index_reduce")
def index_reduce(
    e: Eager, self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """As `scatter_reduce`, of whole rows; it has no sum."""
    out = e.empty_like(self, kernel="aten.index_reduce.default")
    kernels = _Kernels("index_select", "index_add", "index_fill", "aten.index_reduce.default", False)
    formula = Formula((0, 1), _gradients_of_reduction(self, source, out, reduce, include_self, kernels))
    return e.record("IndexReduceBackward0", out, [self, source], [formula], [index, self, source, out])


class _Kernels(NamedTuple):
    """What the backward of a reduction by indices reads, adds up and masks with, and how it reduces again."""

    pick: str
    add: str
    mask: str
    again: str
    asks_again: bool  # which elements are the largest


def _gradients_of_reduction(
    self: Tensor, src: Tensor, out: Tensor, reduce: str, include_self: bool, kernels: _Kernels
) -> Any:
    """torch/csrc/autograd/FunctionsManual.cpp, `scatter_reduce_backward` and `index_reduce_backward`: variables live
    until their block ends, temporaries until their statement does."""

    masked_fill = "aten.masked_fill.Scalar"

    def picked_of(e: Eager, tensor: Tensor) -> Tensor:
        return e.empty(src.shape, tensor.dtype, kernel=f"aten.{kernels.pick}.default")

    def of_product(e: Eager, grad: Tensor) -> tuple[Tensor, Tensor]:
        zeros = e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        masked_self = e.empty_like(self, kernel=masked_fill)
        end_statement(e, zeros)
        of_others = e.empty_like(masked_self, kernel=kernels.again)
        product = e.pointwise("aten.mul.Tensor", grad, of_others)
        by_self = e.pointwise("aten.div.Tensor", product, masked_self)
        end_statement(e, product)
        src_zero = e.pointwise("aten.eq.Scalar", src, dtype=dtypes.bool_)
        counts = e.empty_like(self, kernel="aten.zeros_like.default")
        ones = e.empty_like(src, self.dtype, "aten._to_copy.default")
        added = e.empty_like(self, kernel=f"aten.{kernels.add}.default")
        number_of_zeros = picked_of(e, self)
        end_statement(e, counts, ones, added)
        is_one = e.pointwise("aten.eq.Scalar", number_of_zeros, dtype=dtypes.bool_)
        single = e.pointwise("aten.bitwise_and.Tensor", src_zero, is_one)
        end_statement(e, is_one)
        masked_src = e.empty_like(src, kernel=masked_fill)
        of_rest = e.empty_like(self, kernel=kernels.again)
        divisor, product = e.empty_like(src, kernel=masked_fill), e.pointwise("aten.mul.Tensor", grad, out)
        picked = picked_of(e, grad)
        quotient = e.pointwise("aten.div.Tensor", picked, divisor)
        product_of_rest = e.pointwise("aten.mul.Tensor", grad, of_rest)
        picked_of_rest = picked_of(e, grad)
        by_src = e.pointwise("aten.where.self", single, picked_of_rest, quotient, dtype=grad.dtype)
        end_statement(e, divisor, product, picked, quotient, product_of_rest, picked_of_rest)
        end_statement(e, masked_self, of_others, src_zero, number_of_zeros, single, masked_src, of_rest)
        return by_self, by_src

    def of_mean(e: Eager, grad: Tensor) -> tuple[Tensor, Tensor]:
        counts = e.empty_like(grad, kernel="aten.ones_like.default")
        ones = e.empty_like(src, kernel="aten.ones_like.default")
        added = e.empty_like(counts, kernel=f"aten.{kernels.add}.default")
        end_statement(e, counts, ones)
        end_statement(e, e.pointwise("aten.eq.Scalar", grad, dtype=dtypes.bool_))
        by_self = e.pointwise("aten.div.Tensor", grad)
        picked_counts = e.empty_like(src, kernel=f"aten.{kernels.pick}.default")
        picked = e.empty_like(src, kernel=f"aten.{kernels.pick}.default")
        by_src = e.pointwise("aten.div.Tensor", picked)
        end_statement(e, picked, added, picked_counts)
        return by_self, by_src

    def of_extreme(e: Eager, grad: Tensor) -> tuple[Tensor, Tensor]:
        value = picked_of(e, out)
        variables = [value]
        for one, other in ((self, out), (src, value)):
            equal = e.pointwise("aten.eq.Tensor", one, other, dtype=dtypes.bool_)
            variables.append(e.empty_like(one, kernel="aten._to_copy.default"))
            end_statement(e, equal)
        variables.append(e.empty_like(self, kernel=f"aten.{kernels.add}.default"))
        variables.append(e.pointwise("aten.div.Tensor", grad))
        asks = [e.pointwise("aten.eq.Tensor", self, out, dtype=dtypes.bool_)] if kernels.asks_again else []
        by_self = e.pointwise("aten.mul.Tensor", grad)
        end_statement(e, *asks)
        picked = e.empty_like(src, kernel=f"aten.{kernels.pick}.default")
        asks = [e.pointwise("aten.eq.Tensor", src, value, dtype=dtypes.bool_)] if kernels.asks_again else []
        by_src = e.pointwise("aten.mul.Tensor", picked)
        end_statement(e, *asks, picked, *variables)
        return by_self, by_src

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)
        if reduce == "sum":
            by_self, by_src = grad, picked_of(e, grad)
        else:
            by_self, by_src = {"mean": of_mean, "prod": of_product}.get(reduce, of_extreme)(e, grad)
        if not include_self:
            by_self = e.empty_like(grad, kernel=f"aten.{kernels.mask}.value")
        return by_self, by_src

    return formula


@translation("ScatterElements")
def onnx_scatter_elements(ctx: Context, node: Node) -> list[Op]:
    x, index, source = (ctx.ref(n) for n in node.inputs[:3])
    target = "aten::scatter_add" if text(node, "reduction", "none") == "add" else "aten::scatter.src"
    return [ctx.op(node, target, x, integer(node, "axis", 0), index, source)]
