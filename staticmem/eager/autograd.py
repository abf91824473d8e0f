"""Autograd's nodes and its engine, as PyTorch runs them, over tensors without data.

Sources: torch/csrc/autograd/engine.cpp (`evaluate_function`, `call_function`, `validate_outputs`: order of release and
of accumulation; `ReadyQueue`: highest sequence number first), input_buffer.cpp (`can_accumulate_inplace`),
functions/accumulate_grad.h (when a gradient is stolen).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from staticmem.dtypes import DType
from staticmem.eager import strides as layout
from staticmem.eager.tensor import Owner, Storage, Tensor

if TYPE_CHECKING:
    from staticmem.eager.context import Eager

Grads = Sequence["Tensor | None"]
Result: TypeAlias = "Tensor | Sequence[Tensor | None] | None"
# A formula of derivatives.yaml: incoming gradients and which of its outputs are needed -> gradients of its inputs
FormulaFn: TypeAlias = "Callable[[Eager, Grads, Sequence[bool]], Result]"
TOP_PRIORITY = 2**64 - 1  # sequence number of AccumulateGrad


class Formula(NamedTuple):
    """The gradient of the inputs `indices`, in the order in which the generated code evaluates formulas."""

    indices: tuple[int, ...]
    compute: FormulaFn


class Meta(NamedTuple):
    shape: layout.Shape
    dtype: DType


meta_of = lru_cache(layout.KNOWN)(Meta)


class Packed(Protocol):
    """What a node has instead of its saved tensors where it was recorded under `saved_tensors_hooks`."""

    def unpack(self, e: Eager) -> None:
        """The node is about to run and needs its tensors."""

    def applied(self, e: Eager) -> None:
        """The formulas have run: the unpacked tensors were local variables of `apply`."""

    def release(self, e: Eager) -> None:
        """The node lets go of what it saved: it has run, or died."""


class SavedTensorsHooks(Protocol):
    """`torch.autograd.graph.saved_tensors_hooks`."""

    def pack(self, e: Eager, node: Node, saves: Sequence[Tensor], results: Sequence[Tensor]) -> Packed:
        """Takes the tensors that a node saves; `results` are the op's."""


class Node:
    """A backward node: edges to the producers of its inputs, what it saves, its formulas."""

    __slots__ = ("edges", "formulas", "hold", "leaf", "metadata", "name", "op", "packed", "refs", "saved", "sequence")

    def __init__(self, name: str, sequence: int, op: int) -> None:
        self.name, self.sequence, self.op = name, sequence, op
        self.edges: list[tuple[Node, int] | None] = []
        self.metadata: list[Meta] = []  # of the node's outputs in forward: what gradients must look like
        self.formulas: Sequence[Formula] = ()
        self.saved: Sequence[Storage] = ()  # what it holds, by the holds from `hold` on
        self.hold = 0
        self.packed: Packed | None = None
        self.refs = 0
        self.leaf: Tensor | None = None  # the parameter of an AccumulateGrad

    def __repr__(self) -> str:
        return f"Node({self.name} #{self.sequence})"


def gradient_edge(e: Eager, tensor: Tensor | None) -> tuple[Node, int] | None:
    """Where the gradient of `tensor` goes, or None when it needs none."""
    if tensor is None or not tensor.requires_grad:
        return None
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    if tensor.accumulate is None:
        node = Node("AccumulateGrad", TOP_PRIORITY, -1)
        node.leaf = tensor
        node.metadata = [meta_of(tensor.shape, tensor.dtype)]
        tensor.accumulate = node
    return tensor.accumulate, 0


def cast_gradient(e: Eager, grad: Tensor, dtype: DType) -> Tensor:
    """A gradient as `dtype`: a copy, but the real part of a complex one is a view (`handle_r_to_c`)."""
    if grad.dtype.kind == "complex" and dtype.kind == "float":
        return Tensor(grad.storage, grad.shape, tuple(2 * s for s in grad.strides), dtype)
    return e.to_dtype(grad, dtype)


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


class InputBuffer:
    """Gradients that wait for a node: one slot for each of its forward outputs."""

    __slots__ = ("owner", "slots")

    def __init__(self, node: Node) -> None:
        self.owner = Owner("gradient", node.name, node.op)
        self.slots: list[Tensor | None] = [None] * len(node.metadata)


def run_backward(e: Eager, root: Tensor, gradient: Tensor, grads: dict[int, Tensor]) -> None:
    """Runs the graph below `root`. `grads` maps id(parameter) to its `.grad`; owners are recorded in `e`.

    `gradient` is the root gradient; the caller owns it (Python holds it for the whole of backward).
    """
    assert root.grad_fn is not None
    dependencies = _count_dependencies(root.grad_fn)
    buffers: dict[int, InputBuffer] = {}
    first = InputBuffer(root.grad_fn)
    first.slots[root.output_nr] = gradient
    e.hold(gradient, first.owner)
    order = 0
    ready: list[tuple[int, int, Node, InputBuffer]] = [(-root.grad_fn.sequence, order, root.grad_fn, first)]
    while ready:
        _, _, node, buffer = heapq.heappop(ready)
        e.trace.op = node.op
        if node.leaf is not None:
            _accumulate_grad(e, node.leaf, buffer, grads)
            continue
        e.open_scope()
        outputs = _apply(e, node, buffer)
        outputs = _validate(e, node, outputs)
        e.release(buffer.owner)
        e.forget(node)
        for index, edge in enumerate(node.edges):
            if edge is None:
                continue
            target, slot = edge
            key = id(target)
            dependencies[key] -= 1
            waiting = buffers.get(key)
            if waiting is None:
                waiting = buffers[key] = InputBuffer(target)
            output = outputs[index]
            outputs[index] = None
            if output is not None:
                _add(e, waiting, slot, output)
            if dependencies[key] == 0:
                del buffers[key]
                order += 1
                heapq.heappush(ready, (-target.sequence, order, target, waiting))
        node.edges, node.formulas = [], ()  # it does not run again: large graphs need the memory
        e.close_scope()


def _count_dependencies(root: Node) -> dict[int, int]:
    dependencies: dict[int, int] = {id(root): 0}
    stack = [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is not None:
                node = edge[0]
                key = id(node)
                known = dependencies.get(key)
                if known is None:
                    dependencies[key] = 1
                    stack.append(node)
                else:
                    dependencies[key] = known + 1
    return dependencies


def _apply(e: Eager, node: Node, buffer: InputBuffer) -> list[Tensor | None]:
    """Evaluates the formulas. Temporaries of one formula live until its end; results coexist."""
    edges, slots = node.edges, buffer.slots
    outputs: list[Tensor | None] = [None] * len(edges)
    if node.packed is not None:
        node.packed.unpack(e)
    if slots.count(None) == len(slots):
        return outputs
    for indices, compute in node.formulas:
        needed = [edges[i] is not None for i in indices]
        if True not in needed:
            continue
        e.open_scope()
        result = compute(e, slots, needed)
        results: Sequence[Tensor | None] = [result] if isinstance(result, Tensor) or result is None else result
        e.close_scope(keep=[t for t in results if t is not None])
        for index, need, tensor in zip(indices, needed, results, strict=True):
            if need:
                outputs[index] = tensor
    if node.packed is not None:
        node.packed.applied(e)
    return outputs


def _validate(e: Eager, node: Node, outputs: list[Tensor | None]) -> list[Tensor | None]:
    """Each output is reduced to the shape, then cast to the dtype, of the value that it is a gradient of.

    From here on the list holds its tensors: a reduced one lets go of the full-size one at once.
    """
    owner = Owner("gradient", node.name, node.op)
    edges = node.edges
    for index, output in enumerate(outputs):
        if output is not None:
            if edges[index] is None:
                outputs[index] = None
            else:
                e.hold(output, owner)
    e.collect()
    for index, output in enumerate(outputs):
        edge = edges[index]
        if output is None or edge is None:
            continue
        meta = edge[0].metadata[edge[1]]
        if output.shape != meta.shape:
            reduced = e.sum_to(output, meta.shape)
            e.hold(reduced, owner)
            e.drop(output, owner)
            outputs[index] = output = reduced
        if output.dtype is not meta.dtype and meta.dtype.is_differentiable:
            cast = cast_gradient(e, output, meta.dtype)
            e.hold(cast, owner)
            e.drop(output, owner)
            outputs[index] = cast
    e.pending = owner
    return outputs


def _add(e: Eager, buffer: InputBuffer, slot: int, new: Tensor) -> None:
    """Moves a gradient into a slot; a second one is added in place where the engine owns the first alone."""
    owner = e.pending
    assert owner is not None
    old = buffer.slots[slot]
    if old is None:
        buffer.slots[slot] = new
        e.move(new, owner, buffer.owner)
        return
    if old.is_dense and old.refs == 1 and old.storage.refs == 1:
        e.kernel("aten.add_.Tensor")
        e.drop(new, owner)
        return
    result = e.pointwise("aten.add.Tensor", old, new)
    e.hold(result, buffer.owner)
    buffer.slots[slot] = result
    e.drop(old, buffer.owner)
    e.drop(new, owner)


def _accumulate_grad(e: Eager, leaf: Tensor, buffer: InputBuffer, grads: dict[int, Tensor]) -> None:
    """`.grad` takes the buffer itself where nobody else has it and its strides are the parameter's, else a clone."""
    new = buffer.slots[0]
    if new is None:
        return
    e.open_scope()
    old = grads.get(id(leaf))
    if old is not None:  # gradient accumulation over micro-batches, or a second backward
        e.kernel("aten.add_.Tensor")
        e.release(buffer.owner)
        e.close_scope()
        return
    if new.refs == 1 and (_same_layout(new, leaf) or (not leaf.is_dense and new.is_contiguous)):
        grad = new
    else:
        strides = leaf.strides if leaf.is_dense else layout.contiguous_strides(leaf.shape)
        grad = e.empty(leaf.shape, new.dtype, strides, "aten.new_empty_strided.default")
    grads[id(leaf)] = grad
    grad.name = leaf.name
    owner = Owner("grad", leaf.name)
    e.hold(grad, owner)
    e.release(buffer.owner)
    e.categorise(grad, "gradient", f"{leaf.name}.grad")
    e.close_scope()


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Strides agree wherever a dimension has more than one element (`obeys_layout_contract`)."""
    return all(s == t for s, t, size in zip(a.strides, b.strides, b.shape, strict=True) if size > 1)
