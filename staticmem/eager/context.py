"""`Eager`: the dispatcher, allocator front and autograd recorder that rules talk to.

Allocation happens in `empty`; everything else decides layouts or owners. Tensors that no owner has taken when their
scope closes are freed there: a scope is an op (forward) or a formula (backward), whose C++ temporaries live until the
end of the full expression.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from sys import intern
from typing import Any, NamedTuple, TypeVar, cast

from staticmem.eager import strides as layout
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import Form, form_of
from staticmem.eager.tensor import (
    Formula,
    Grads,
    Node,
    Owner,
    Result,
    SavedTensorsHooks,
    Selecting,
    Storage,
    Tensor,
    attributes_of_ctx,
    gradient_edge,
    meta_of,
)
from staticmem.eager.trace import OPEN, Copies, Read, Reduction, Trace
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.version import REFERENCE_RELEASE

F = TypeVar("F", bound=Callable[..., Tensor])
Outputs = TypeVar("Outputs", bound=Tensor | Sequence[Tensor])

MAX_TENSOR = 2**44  # bytes (16 TiB): no GPU holds a tensor near it; such a size is a mistake in the file or in a rule

_CATEGORY = {
    "setup": "buffer",
    "forward": "activation",
    "decode": "activation",
    "backward": "temporary",
    "optimizer": "temporary",
}


class KeptTensor(NamedTuple):
    """A tensor for `Eager.keep`, and the kernel that makes it."""

    kernel: str
    form: Form


class Eager:
    """One step's execution state. Sizes are elements, buffers are bytes."""

    repeats_calls = True  # calls with like operands repeat a record (`engine.call_records`)

    def __init__(self, training: bool = True) -> None:
        self.trace = Trace()
        self.training = training
        self.grad_enabled = training
        self.autocast: DType | None = None
        self.autocast_cache: dict[int, Tensor] = {}
        self.autocast_owner = Owner(Reason.AUTOCAST, "weight cache")
        self.sdpa = "auto"  # the attention kernel that a user asks for
        self.torch = REFERENCE_RELEASE  # the release that runs
        self.choices: Counter[tuple[str, str]] = Counter()  # (what was chosen, why), for the report
        self.saved_hooks: list[SavedTensorsHooks] = []  # the last one is on top
        self.selection: Selecting | None = None  # of the selective checkpoint that runs
        self.of_graph = attributes_of_ctx()
        self.held_by_node: list[Owner] = []  # what ends when the gradients of the running node have arrived
        self.post_hooks: list[Callable[[], None]] = []  # of the node that runs: `Node.register_hook`
        self.gradient_hooks: dict[Node, list[Callable[[Any], None]]] = {}  # they take what waits for the node
        self.held_by_hooks: dict[str, tuple[Tensor, int]] = {}  # what they have, and let go of in a backward
        self.grads: dict[int, Tensor] = {}  # id(parameter) -> its `.grad`
        self.received: set[int] = set()  # the ids of parameters that a gradient came to
        self.sequence = 0
        self._mutated: Tensor | None = None
        self.running = -1
        self._scopes: list[list[Storage]] = [[]]

    @property
    def category(self) -> str:
        """The category of new buffers in the present phase (`categorise` changes it)."""
        return _CATEGORY[self.trace.phase]

    # -- storages ------------------------------------------------------------------------------------------------

    def kernel(self, name: str) -> None:
        """The call that the next allocations belong to, as the dispatcher names it (`aten.convolution.default`)."""
        if self.selection is not None and not self.selection.begins(self, name):
            return
        self.running = self.trace.kernel(intern(name))

    def empty(
        self, shape: Sequence[int], dtype: DType, strides: layout.Strides | None = None, kernel: str = ""
    ) -> Tensor:
        """A tensor over a new storage; contiguous without `strides`. `kernel` names the call that makes it."""
        shape = tuple(shape)
        if kernel:
            self.kernel(kernel)
        if self.selection is not None and (kept := self.selection.result(self)) is not None:
            return kept
        if strides is None:
            strides = layout.contiguous_strides(shape)
        form = form_of(shape, strides, dtype)
        nbytes, trace = form.nbytes, self.trace
        if nbytes > MAX_TENSOR:
            raise ValueError(f"a tensor of shape {list(shape)} would take {nbytes:,} bytes")
        buffers, ticks = trace.buffers, trace.ticks
        storage = Storage(len(buffers.forms), nbytes)
        buffers.nbytes.append(nbytes)
        buffers.forms.append(form)
        buffers.categories.append(_CATEGORY[trace.phase])
        buffers.names.append("")
        buffers.kernels.append(self.running)
        buffers.born.append(ticks)
        buffers.died.append(OPEN)
        trace.ticks = ticks + 1
        self._scopes[-1].append(storage)
        tensor = Tensor(storage, shape, strides, dtype)
        tensor.known_form = form
        if self.selection is not None:
            self.selection.keep(self, tensor)
        return tensor

    def keep(self, category: str, kind: Reason, tensors: Iterable[tuple[KeptTensor, str, str]]) -> None:
        """Allocates tensors that are held to the end and that no op reads: (tensor, name, owner), with owners of one
        `kind`."""
        trace = self.trace
        kernels, buffers, holds = trace.kernels, trace.buffers, trace.holds
        phase, op, tick, kernel, id = trace.phase, trace.op, trace.ticks, len(kernels.names), len(buffers.forms)
        for (kernel_name, form), name, who in tensors:
            kernels.names.append(kernel_name)
            kernels.phases.append(phase)
            kernels.ops.append(op)
            buffers.nbytes.append(form.nbytes)
            buffers.forms.append(form)
            buffers.categories.append(category)
            buffers.names.append(name)
            buffers.kernels.append(kernel)
            buffers.born.append(tick)
            buffers.died.append(OPEN)
            tick += 1
            holds.take(id, kind, who, tick)
            kernel += 1
            id += 1
        trace.ticks, self.running = tick, kernel - 1

    def empty_like(
        self, tensor: Tensor, dtype: DType | None = None, kernel: str = "", memory_format: str | None = None
    ) -> Tensor:
        """`empty_like`, by default with preserve_format."""
        strides = layout.in_memory_format(tensor.shape, tensor.strides, memory_format)
        return self.empty(tensor.shape, dtype or tensor.dtype, strides, kernel)

    def alias(self, tensor: Tensor, shape: layout.Shape, strides: layout.Strides) -> Tensor:
        """Another view of the same storage. Autograd is not recorded: see `record`."""
        assert tensor.storage.refs >= 0, f"{tensor} was freed"
        view = Tensor(tensor.storage, shape, strides, tensor.dtype)
        view.view = True
        return view

    def categorise(self, tensor: Tensor, category: str, name: str) -> None:
        buffers, id = self.trace.buffers, tensor.storage.id
        buffers.categories[id], buffers.names[id] = category, name

    def _free(self, storage: Storage) -> None:
        trace = self.trace
        trace.buffers.died[storage.id] = trace.ticks
        trace.ticks += 1
        storage.refs = -1

    # -- scopes and owners ---------------------------------------------------------------------------------------

    def open_scope(self) -> None:
        self._scopes.append([])

    def close_scope(self, keep: Iterable[Tensor] = ()) -> None:
        """Frees storages made since `open_scope` that have no owner. Those of `keep` go to the enclosing scope."""
        storages = self._scopes.pop()
        if not storages:
            return
        kept = [t.storage for t in keep] if keep else ()
        for storage in storages:
            if storage.refs == 0:
                if storage in kept:
                    self._scopes[-1].append(storage)
                else:
                    self._free(storage)

    def add_to_scope(self, storages: Iterable[Storage]) -> None:
        """Adds storages to the present scope, which frees them at its end unless they have an owner by then."""
        self._scopes[-1].extend(storages)

    def collect(self, keep: Iterable[Tensor] = ()) -> None:
        """Frees the unowned tensors of the current scope but `keep` (the end of a statement)."""
        if self._scopes[-1]:
            self._scopes.insert(-1, [])
            self.close_scope(keep)

    def free(self, *tensors: Tensor) -> None:
        """Ends temporaries early, those that nothing owns."""
        for tensor in tensors:
            if tensor.storage.refs == 0:
                self._free(tensor.storage)

    def undo(self, kernel: int) -> bool:
        """Undoes the allocations of `kernel` (an early stop); False, and nothing changes, if anything followed them."""
        trace = self.trace
        buffers, last = trace.buffers, len(trace.buffers)
        first = last
        while first and buffers.kernels[first - 1] >= kernel:
            first -= 1
        undone = [storage for storage in self._scopes[-1] if storage.id >= first]
        only_births = first < last and trace.ticks - buffers.born[first] == last - first
        if not only_births or len(undone) != last - first or any(storage.refs for storage in undone):
            return False
        trace.ticks = buffers.born[first]
        buffers.cut(first)
        for index in range(kernel, len(trace.kernels)):
            trace.reads.pop(index, None)
        trace.kernels.cut(kernel)
        self._scopes[-1] = [storage for storage in self._scopes[-1] if storage.id < first]
        return True

    def close_scopes(self, depth: int) -> None:
        """Closes scopes until `depth` are open, after an exception."""
        while len(self._scopes) > depth:
            self.close_scope()

    @property
    def depth(self) -> int:
        """The number of open scopes."""
        return len(self._scopes)

    def hold(self, tensor: Tensor, owner: Owner) -> None:
        owner.held.append((tensor, self.take(tensor, owner.kind, owner.who, owner.op)))

    def take(self, tensor: Tensor, kind: Reason, who: str, op: int = -1) -> int:
        """A hold on a tensor; the caller keeps its index for `end`."""
        storage, trace = tensor.storage, self.trace
        assert storage.refs >= 0, f"{tensor} was freed before {kind.value} {who} took it"
        holds = trace.holds
        kinds = holds.kinds
        hold = len(kinds)
        kinds.append(kind)
        holds.whos.append(who)
        holds.buffers.append(storage.id)
        holds.starts.append(trace.ticks)
        holds.ends.append(OPEN)
        holds.ops.append(op)
        storage.refs += 1
        tensor.refs = refs = tensor.refs + 1
        if refs == 1 and tensor.grad_fn is not None:
            tensor.grad_fn.refs += 1
        return hold

    def drop(self, tensor: Tensor, owner: Owner) -> None:
        """Releases one hold of `owner` on this very tensor."""
        held = owner.held
        for index in range(len(held) - 1, -1, -1):
            if held[index][0] is tensor:
                _, hold = held.pop(index)
                self.end(tensor, hold)
                return
        raise AssertionError(f"{owner} does not hold {tensor}")

    def clear_autocast_cache(self) -> None:
        """`torch.clear_autocast_cache`: copies of weights are let go of."""
        self.release(self.autocast_owner)
        self.autocast_cache = {}

    def release(self, owner: Owner) -> None:
        """Releases all that `owner` holds."""
        held = owner.held
        if held:
            owner.held = []
            for tensor, hold in held:
                self.end(tensor, hold)

    def end(self, tensor: Tensor, hold: int) -> None:
        """Ends a hold on a tensor."""
        trace, storage = self.trace, tensor.storage
        trace.holds.ends[hold] = trace.ticks
        storage.refs = refs = storage.refs - 1
        if refs == 0:
            trace.buffers.died[storage.id] = trace.ticks
            trace.ticks += 1
            storage.refs = -1
        tensor.refs = refs = tensor.refs - 1
        if refs == 0 and tensor.grad_fn is not None:
            self.unref(tensor.grad_fn)

    def leave_to_scope(self, tensor: Tensor, hold: int) -> None:
        """Ends a hold on a tensor that a function returns: the present scope frees it unless somebody takes it."""
        self.trace.holds.ends[hold] = self.trace.ticks
        tensor.refs -= 1
        tensor.storage.refs -= 1
        if tensor.storage.refs == 0:
            self.add_to_scope((tensor.storage,))

    def leave_all_to_scope(self, owner: Owner) -> None:
        """Ends all holds of an owner on what a function may return."""
        held, owner.held = owner.held, []
        for tensor, hold in held:
            self.leave_to_scope(tensor, hold)

    def unref(self, node: Node) -> None:
        """A backward node dies with the last tensor or node that refers to it, and releases what it saved."""
        stack = [node]
        while stack:
            node = stack.pop()
            node.refs -= 1
            if node.refs == 0:
                self.forget(node)
                stack.extend(edge[0] for edge in node.edges if edge is not None)

    def _save(self, node: Node, storages: Sequence[Storage]) -> None:
        """Saves storages: a SavedVariable of a node's own output keeps no reference to the node."""
        trace, name, op = self.trace, node.name, node.op
        holds, ticks = trace.holds, trace.ticks
        node.saved, node.hold = storages, len(holds.kinds)
        for storage in storages:
            assert storage.refs >= 0, f"storage {storage.id} was freed before {node} took it"
            holds.take(storage.id, Reason.SAVED, name, ticks, op)
            storage.refs += 1

    def give_history(self, tensor: Tensor, name: str, saved: Tensor) -> None:
        """Gives a tensor that nobody holds yet a history: a node that has saved `saved`."""
        assert tensor.refs == 0
        tensor.grad_fn = Node(name, -1, -1)
        self._save(tensor.grad_fn, (saved.storage,))

    def forget(self, node: Node) -> None:
        """Releases what a backward node saved: it has run, or died."""
        storages = node.saved
        if storages:
            node.saved = ()
            hold, trace = node.hold, self.trace
            ends = trace.holds.ends
            for storage in storages:
                ends[hold] = trace.ticks
                hold += 1
                storage.refs = refs = storage.refs - 1
                if refs == 0:
                    self._free(storage)
        if node.packed is not None:
            node.packed.release(self)

    def let_go(self, storage: Storage, hold: int) -> None:
        """Ends the hold of a backward node on a storage."""
        self.trace.holds.ends[hold] = self.trace.ticks
        storage.refs -= 1
        if storage.refs == 0:
            self._free(storage)

    def abandon(self, node: Node) -> None:
        """Gives up a node that is being recorded, because an exception ends the op."""
        node.refs += 1
        self.unref(node)

    # -- autograd ------------------------------------------------------------------------------------------------

    def needs_grad(self, *inputs: Tensor | None) -> bool:
        if self.grad_enabled:
            for tensor in inputs:
                if tensor is not None and tensor.requires_grad:
                    return True
        return False

    def record(
        self,
        name: str,
        outputs: Outputs,
        inputs: Sequence[Tensor | None],
        formulas: Sequence[Formula],
        saves: Iterable[Tensor | None] = (),
        node: Node | None = None,
    ) -> Outputs:
        """Adds a backward node to `outputs`, which it gives back, if any of `inputs` needs a gradient. `saves` are held
        until it has run.
        `node`: one of a class of its own, in place of a new `Node`.

        An output that has a history already was changed in place: its history moves on (`rebase_history`), and where
        it is a view, that of its base does.
        """
        mutated, self._mutated = self._mutated, None
        if not self.needs_grad(*inputs):
            return outputs
        results: Sequence[Tensor] = [outputs] if isinstance(outputs, Tensor) else outputs
        if node is None:
            node = self._node(name)
        node.formulas = formulas
        for tensor in inputs:
            self.add_edge(node, gradient_edge(tensor))
        if self.saved_hooks:
            packed = [tensor for tensor in saves if tensor is not None]
            node.packed = self.saved_hooks[-1].pack(self, node, packed, results)
            saves = ()
        if saves:
            self._save(node, [tensor.storage for tensor in saves if tensor is not None])
        for number, tensor in enumerate(results):
            node.metadata.append(meta_of(tensor.shape, tensor.dtype))
            if tensor is mutated and tensor.base is not None:
                self._rebase(tensor, node)
            elif tensor.dtype.is_differentiable:
                self.set_grad_fn(tensor, node, number)
        return outputs

    def keep_on_ctx(self, tensor: Tensor) -> None:
        """`ctx.x = tensor` of a custom function that has a node: no hook of saved tensors sees it, and it lives as long
        as the graph of autograd, which the loss holds."""
        if not any(hooks.without_graph for hooks in self.saved_hooks):
            self.hold(tensor, self.of_graph)

    def _node(self, name: str) -> Node:
        node = Node(name, self.sequence, self.trace.op)
        self.sequence += 1
        return node

    def add_edge(self, node: Node, edge: tuple[Node, int] | None) -> None:
        node.edges.append(edge)
        if edge is not None:
            target = edge[0]
            if target.keeps_leaf and target.refs == 0 and target.leaf is not None:
                self._save(target, (target.leaf.storage,))
            target.refs += 1

    def mutate(self, tensor: Tensor) -> Tensor:
        """Marks the tensor that the op now being recorded writes to."""
        self._mutated = tensor
        return tensor

    def _rebase(self, view: Tensor, node: Node) -> None:
        """An in-place op on a view: CopySlices becomes the base's `grad_fn`, and the view gets a new one from it."""
        base = view.base
        assert base is not None
        chain = view_chain(view, base)
        outer = Node("CopySlices", self.sequence, self.trace.op)
        self.sequence += 1
        self.add_edge(outer, gradient_edge(base))
        for edge in node.edges[1:]:
            self.add_edge(outer, edge)
        outer.saved, outer.hold, outer.packed = node.saved, node.hold, node.packed
        outer.formulas = [copy_slices(base, view, node.formulas, len(outer.edges))]
        outer.metadata = [meta_of(base.shape, base.dtype)]
        self.set_grad_fn(base, outer, 0)
        parent, number = outer, 0
        steps = [(n.name, n.formulas, n.metadata) for n in reversed(chain)]
        if not steps:  # the base had no history: the view's is an as_strided of it
            steps = [("AsStridedBackward0", [zeros_of(base)], [meta_of(view.shape, view.dtype)])]
        for name, formulas, metadata in steps:
            fresh = Node(name, self.sequence, self.trace.op)
            self.sequence += 1
            fresh.formulas, fresh.metadata = formulas, metadata
            self.add_edge(fresh, (parent, number))
            parent, number = fresh, 0
        self.set_grad_fn(view, parent, number)
        for edge in node.edges:  # the node dies: it was made for the view as it was
            if edge is not None:
                self.unref(edge[0])
        node.edges = []

    def set_grad_fn(self, tensor: Tensor, node: Node, number: int) -> None:
        """Makes the tensor output `number` of `node`, and releases its `grad_fn` of before."""
        if tensor.refs:
            node.refs += 1
            if tensor.grad_fn is not None:
                self.unref(tensor.grad_fn)
        tensor.grad_fn, tensor.output_nr, tensor.requires_grad = node, number, True

    # -- the few kernels that the engine itself runs --------------------------------------------------------------

    def pointwise(self, kernel: str, *operands: Tensor, dtype: DType | None = None) -> Tensor:
        """A new TensorIterator output: broadcast shape, ATen's strides. `dtype` defaults to the operands' promotion."""
        first = operands[0]
        if len(operands) == 1:
            shape = first.shape
        else:
            shape = first.shape
            for other in operands[1:]:
                if other.shape != shape:
                    shape = layout.broadcast_shapes(*(t.shape for t in operands))
                    break
        strides = layout.pointwise_strides(shape, tuple([(t.shape, t.strides) for t in operands]))
        return self.empty(shape, dtype or result_type(operands), strides, kernel)

    # Calls of formulas that are written once: these allocate, those of `tracing.tracer.Tracer` make nodes.

    def call(self, name: str, *operands: Tensor | float) -> Tensor:
        """An elementwise call by its name, with its overload where it has one; numbers take no part in the result."""
        kernel = f"aten.{name}" if "." in name else f"aten.{name}.default"
        return self.pointwise(kernel, *[operand for operand in operands if not isinstance(operand, (int, float))])

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.pointwise("aten.mul.Tensor", a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        return self.pointwise("aten.sub.Tensor", a, b)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        return self.pointwise("aten.div.Tensor", a, b)

    def scale(self, a: Tensor, factor: float) -> Tensor:
        return self.pointwise("aten.mul.Tensor", a)

    def plus(self, a: Tensor, number: float) -> Tensor:
        return self.pointwise("aten.add.Tensor", a)

    def minus(self, a: Tensor, number: float) -> Tensor:
        return self.pointwise("aten.sub.Tensor", a)

    def power(self, a: Tensor, exponent: float) -> Tensor:
        return self.pointwise("aten.pow.Tensor_Scalar", a)

    def one_minus(self, a: Tensor) -> Tensor:
        return self.pointwise("aten.rsub.Scalar", a)

    def sgn(self, a: Tensor) -> Tensor:
        return self.pointwise("aten.sgn.default", a)

    def zeros_like(self, a: Tensor) -> Tensor:
        return self.empty_like(a, kernel="aten.zeros_like.default")

    def sum_to(self, tensor: Tensor, shape: layout.Shape) -> Tensor:
        """`at::sum_to`: one sum with keepdim over the broadcast dimensions, then a view."""
        lead = tensor.ndim - len(shape)
        kept = tuple(
            1 if i < lead or (shape[i - lead] == 1 and size != 1) else size for i, size in enumerate(tensor.shape)
        )
        strides = layout.contiguous_strides(kept)
        result = self.empty(kept, tensor.dtype, strides, "aten.sum.dim_IntList")
        self.reduces(tensor, tuple(i for i, size in enumerate(tensor.shape) if kept[i] != size))
        return result if not lead else self.alias(result, shape, strides[lead:])

    def reads(self, read: Read) -> None:
        """Notes an input of the running kernel that its workspace depends on (`devices.kernels`)."""
        if self.selection is not None and self.selection.skips:
            return
        reads = self.trace.reads
        reads[self.running] = (*reads.get(self.running, ()), read)

    def reduces(self, tensor: Tensor, axes: Sequence[int]) -> None:
        """The running kernel sums `tensor` over `axes`."""
        self.reads(Reduction(tensor.shape, tensor.strides, tuple(axes)))

    def copies(self, *tensors: Tensor) -> None:
        """The running kernel makes these contiguous for itself, where they are not."""
        nbytes = tuple([t.dtype.nbytes(t.numel) for t in tensors if not t.is_contiguous])
        if nbytes:
            self.reads(Copies(nbytes))

    def to_dtype(self, tensor: Tensor, dtype: DType) -> Tensor:
        """`to(dtype)`: the tensor itself when it has it already, else a copy that keeps the layout."""
        if tensor.dtype is dtype:
            return tensor
        return self.empty_like(tensor, dtype, "aten._to_copy.default")


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
                gradients = formula(e, [part], needed)
                gradients = [gradients] if isinstance(gradients, Tensor) or gradients is None else gradients
                for index, tensor in zip(indices, gradients, strict=True):
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


def scoped(function: F) -> F:
    """A composite op whose C++ locals end at its return: frees all that it made and nobody owns, except its result."""

    @functools.wraps(function)
    def run(e: Eager, *args: Any, **kwargs: Any) -> Tensor:
        e.open_scope()
        result: Tensor = function(e, *args, **kwargs)
        e.close_scope(keep=[result])
        return result

    return cast(F, run)


def result_type(operands: Sequence[Tensor]) -> DType:
    """Promotion by priority: dimensioned tensors before 0-dim ones, unless those are of a higher kind."""
    dims: DType | None = None
    zero: DType | None = None
    for t in operands:
        if t.ndim:
            dims = t.dtype if dims is None else dtypes.promote(dims, t.dtype)
        else:
            zero = t.dtype if zero is None else dtypes.promote(zero, t.dtype)
    if dims is None:
        if zero is None:
            raise TypeError("there is no tensor among the operands")
        return zero
    if zero is None:
        return dims
    order = ("bool", "int", "float", "complex")
    return zero if order.index(zero.kind) > order.index(dims.kind) else dims
