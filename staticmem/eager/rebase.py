"""What becomes of the history of views and their bases when one of them is changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from staticmem.eager import strides as layout
from staticmem.eager.node import Formula, Grads, Node, Result
from staticmem.eager.tensor import Tensor

if TYPE_CHECKING:
    from staticmem.eager.context import Eager


def view_chain(view: Tensor, base: Tensor) -> list[Node]:
    """Backward nodes of the views between `view` and its base, the view's own first; () where it needs no gradient."""
    chain: list[Node] = []
    node = view.grad_fn
    while node is not None and node is not base.grad_fn and len(node.edges) == 1:
        chain.append(node)
        edge = node.edges[0]
        node = edge[0] if edge is not None and edge[0].leaf is None else None
    return chain


def copy_slices(base: Tensor, view: Tensor, inner: Sequence[Formula], edges: int) -> Formula:
    """CopySlices (functions/tensor.cpp): the base gradient is copied, its slice cloned for the op's formulas."""

    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Result:
        grad = grads[0]
        assert grad is not None
        whole = e.empty(
            base.shape, grad.dtype, layout.dense_like(base.shape, base.strides), "aten.new_empty_strided.default"
        )
        part = e.empty_like(Tensor(whole.storage, view.shape, view.strides, grad.dtype), kernel="aten.clone.default")
        results: list[Tensor | None] = [None] * edges
        for indices, formula in inner:
            needed = [need[i] for i in indices]
            if any(needed):
                made = formula(e, [part], needed)
                made = [made] if isinstance(made, Tensor) or made is None else made
                for index, tensor in zip(indices, made, strict=True):
                    results[index] = tensor
        results[0] = whole
        return results

    return Formula(tuple(range(edges)), compute)


def zeros_of(base: Tensor) -> Formula:
    """Backward of a view made directly from its base: zeros of the base's size, written to where the view is."""

    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Result:
        grad = grads[0]
        assert grad is not None
        return e.empty(base.shape, grad.dtype, kernel="aten.new_zeros.default")

    return Formula((0,), compute)
