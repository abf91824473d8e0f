"""Records what a rule or a backward node does: runs it once in a `Recorder`, whose execution state is not the step's,
over stand-ins for the operands.

Effects that cannot be recorded raise `UnrepeatableError`, and the rule itself runs each time: in-place changes of views
with a history, saved-tensor hooks, autocast's cache, attributes of `ctx`, holds on storage that belongs to no operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from staticmem.eager import strides as layout
from staticmem.eager.calls import HIDDEN, BackwardCall, Birth, Call, Effects, NewTensor, RecordedNode, RepeatedNode
from staticmem.eager.context import Eager
from staticmem.eager.evaluate import apply, validate
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import Form, form_of
from staticmem.eager.tensor import Meta, Node, Owner, Storage, Tensor, meta_of
from staticmem.eager.trace import OPEN

# what rules and formulas raise where arguments do not fit; the real run then raises it for the user
_FAILURES = (ValueError, TypeError, AttributeError, LookupError, StopIteration, ArithmeticError, AssertionError)
MOST = 256  # records of the backward of one node


class UnrepeatableError(Exception):
    """The call has an effect that cannot be recorded."""


class ForeignStorageError(Exception):
    """A backward formula holds a tensor of its forward, which was a stand-in. `record_call` then keeps no record."""


class Recorder(Eager):
    """An execution state of its own: its first buffers are the operands, later ones belong to the call."""

    def __init__(self, like: Eager) -> None:
        super().__init__(like.training)
        self.grad_enabled, self.sdpa, self.torch = like.grad_enabled, like.sdpa, like.torch
        self.outer_autocast = like.autocast
        self.trace.phase, self.trace.op = "forward", 0
        self.outside = Owner(Reason.OUTSIDE, "")
        self.storages: list[Storage] = []
        self.nodes: list[Node] = []
        self.operands: list[Tensor] = []
        self.first = self.first_hold = 0

    def stand_in(self, shape: layout.Shape, strides: layout.Strides, like: Tensor | Form) -> Tensor:
        tensor = self.empty(shape, like.dtype, strides)
        self.hold(tensor, self.outside)
        self.operands.append(tensor)
        return tensor

    def start(self) -> None:
        """All operands exist: begins to record."""
        self.first, self.first_hold, self.trace.ticks = len(self.storages), len(self.trace.holds), 0
        self._scopes = [[], []]

    # -- effects that cannot be recorded ---------------------------------------------------------------------------

    def empty(self, *args: Any, **kwargs: Any) -> Tensor:
        tensor = super().empty(*args, **kwargs)
        self.storages.append(tensor.storage)
        return tensor

    def own(self, storage: Storage) -> bool:
        """Whether a storage is an operand's or the call's own; formulas may refer to stand-ins of another recorder."""
        return storage.id < len(self.storages) and self.storages[storage.id] is storage

    def take(self, tensor: Tensor, kind: Reason, who: str, op: int = -1) -> int:
        if not self.own(tensor.storage):
            raise ForeignStorageError
        return super().take(tensor, kind, who, op)

    def free(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.storage.id < self.first or not self.own(tensor.storage):
                raise UnrepeatableError
            super().free(tensor)

    def _rebase(self, view: Tensor, node: Node) -> NoReturn:
        raise UnrepeatableError

    def undo(self, kernel: int) -> NoReturn:
        raise UnrepeatableError

    def keep_on_ctx(self, tensor: Tensor) -> NoReturn:
        raise UnrepeatableError

    @property
    def autocast(self) -> Any:
        if self.outer_autocast is not None:
            raise UnrepeatableError
        return None

    @autocast.setter
    def autocast(self, dtype: Any) -> None:
        if dtype is not None:
            raise UnrepeatableError

    def _node(self, name: str) -> Node:
        node = super()._node(name)
        self.nodes.append(node)
        return node

    # -- the record ----------------------------------------------------------------------------------------------

    def source(self, storage: Storage) -> int:
        if not self.own(storage):
            raise UnrepeatableError
        return storage.id if storage.id < self.first else ~(storage.id - self.first)

    def effects(self) -> Effects:
        trace, first = self.trace, self.first
        buffers = trace.buffers
        if any(tick != OPEN for tick in buffers.died[:first]) or any(k < 0 for k in buffers.kernels[first:]):
            raise UnrepeatableError
        births = tuple(map(Birth, buffers.forms[first:], buffers.kernels[first:], buffers.born[first:]))
        deaths = tuple((k, tick) for k, tick in enumerate(buffers.died[first:]) if tick != OPEN)
        return Effects(tuple(trace.kernels.names), births, deaths, trace.ticks, tuple(trace.reads.items()))

    def saves(self, node: Node) -> tuple[tuple[int, ...], int]:
        """The storages that a node saves, and when."""
        if node.packed is not None:
            raise UnrepeatableError
        return tuple(self.source(s) for s in node.saved), self.trace.holds.starts[node.hold] if node.saved else 0


# -- a rule ------------------------------------------------------------------------------------------------------


def record_call(e: Eager, run: Callable[[Eager, Sequence[Tensor]], Any], operands: Sequence[Tensor]) -> Call | None:
    """The record of `run`, which calls a rule with the operands that it is given; None where it is not repeatable."""
    try:
        call = _record_call(Recorder(e), run, operands)
        for recorded in call.nodes:
            _check(e, recorded)
    except (UnrepeatableError, ForeignStorageError, *_FAILURES):
        return None
    return call


def _record_call(r: Recorder, run: Callable[[Eager, Sequence[Tensor]], Any], operands: Sequence[Tensor]) -> Call:
    bases: list[Tensor | None] = []
    parents: dict[Node, int] = {}
    for number, real in enumerate(operands):
        tensor = r.stand_in(real.shape, real.strides, real)
        tensor.requires_grad = real.requires_grad
        bases.append(None)
        if real.base is not None:
            bases[-1] = tensor.base = Tensor(Storage(-1, 0), real.base.shape, real.base.strides, real.base.dtype)
        if real.requires_grad:
            parent = tensor.grad_fn = Node("outside", -1, -1)
            parent.refs = 1
            parents[parent] = number
    r.start()
    result = run(r, r.operands)
    results = [result] if isinstance(result, Tensor) else list(result or ())
    index = {node: k for k, node in enumerate(r.nodes)}
    nodes = tuple(_recorded_node(r, node, index, parents) for node in r.nodes)
    saved = {id(s) for node in r.nodes for s in node.saved}
    for number, (tensor, real) in enumerate(zip(r.operands, operands, strict=True)):
        _moved(tensor, number, real, bases[number], index, nodes)
    hidden: list[Tensor] = []
    recorded_results = tuple(_result(r, t, index, bases, hidden) for t in results)
    recorded_hidden = tuple(_new_tensor(r, t, index, None) for t in hidden)
    kept = {m.source for m in recorded_results if isinstance(m, NewTensor)}
    unowned = [s.id - r.first for s in r._scopes[-1] if s.refs == 0]
    if len(r._scopes) != 2 or r._scopes[0] or len(r.trace.holds) - r.first_hold != sum(len(n.saves) for n in nodes):
        raise UnrepeatableError
    effects = r.effects()
    for storage in r.storages:  # formulas read the layouts of stand-ins: nothing may free them
        storage.refs = max(storage.refs, 1) if id(storage) not in saved else storage.refs
    loose = any(~birth not in kept for birth in unowned)
    return Call(effects, nodes, recorded_results, recorded_hidden, tuple(r.choices.elements()), tuple(unowned), loose)


def _recorded_node(r: Recorder, node: Node, index: dict[Node, int], parents: dict[Node, int]) -> RecordedNode:
    recorded = RecordedNode(node.name, node.formulas, node.metadata)
    edges: list[int | tuple[int, int] | None] = []
    metas: list[Meta | None] = []
    for edge in node.edges:
        if edge is None:
            edges.append(None)
            metas.append(None)
        elif edge[0] in parents:
            operand = r.operands[parents[edge[0]]]
            edges.append(parents[edge[0]])
            metas.append(meta_of(operand.shape, operand.dtype))
        else:
            edges.append((index[edge[0]], edge[1]))
            metas.append(edge[0].metadata[edge[1]])
    recorded.edges = tuple(zip(edges, metas, strict=True))
    recorded.saves, recorded.tick = r.saves(node)
    recorded.kinds = (Reason.SAVED,) * len(recorded.saves)
    recorded.whos = tuple(r.trace.holds.whos[node.hold : node.hold + len(recorded.saves)])  # a rule may rename the node
    return recorded


def _moved(
    tensor: Tensor,
    number: int,
    real: Tensor,
    base: Tensor | None,
    index: dict[Node, int],
    nodes: Sequence[RecordedNode],
) -> None:
    """Notes an operand that was changed in place: a node of the call is its `grad_fn` from then on."""
    if tensor.base is not base or tensor.accumulate is not None or tensor.name or tensor.shape != real.shape:
        raise UnrepeatableError
    if tensor.grad_fn is None or tensor.grad_fn not in index:
        if tensor.requires_grad != real.requires_grad:
            raise UnrepeatableError
        return
    node = nodes[index[tensor.grad_fn]]
    if real.requires_grad and number not in [edge for edge, _ in node.edges]:
        raise UnrepeatableError
    node.moved = (*node.moved, (number, tensor.output_nr))


def _result(
    r: Recorder, tensor: Tensor | None, index: dict[Node, int], bases: Sequence[Tensor | None], hidden: list[Tensor]
) -> NewTensor | int | None:
    """A result; a base of it that is neither an operand nor an operand's base is added to `hidden`."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        raise UnrepeatableError
    for number, operand in enumerate(r.operands):
        if tensor is operand:
            return number
    if tensor.base is None:
        return _new_tensor(r, tensor, index, None)
    candidates = [*r.operands, *bases]
    matches = [k for k, other in enumerate(candidates) if tensor.base is other]
    if matches:
        count = len(r.operands)
        return _new_tensor(r, tensor, index, matches[0] if matches[0] < count else ~(matches[0] - count))
    if tensor.base.base is not None:
        raise UnrepeatableError
    if not any(tensor.base is other for other in hidden):
        hidden.append(tensor.base)
    return _new_tensor(r, tensor, index, HIDDEN + next(k for k, other in enumerate(hidden) if tensor.base is other))


def _new_tensor(r: Recorder, tensor: Tensor, index: dict[Node, int], base: int | None) -> NewTensor:
    if tensor.accumulate is not None or tensor.name:
        raise UnrepeatableError
    node = -1 if tensor.grad_fn is None else index[tensor.grad_fn]
    form = form_of(tensor.shape, tensor.strides, tensor.dtype)
    return NewTensor(r.source(tensor.storage), form, node, tensor.output_nr, tensor.requires_grad, base)


# -- a backward node ---------------------------------------------------------------------------------------------


def recorded_backward(e: Eager, node: RepeatedNode, slots: Sequence[Tensor | None]) -> BackwardCall | None:
    """The record of the node's backward with these gradients, made at their first call; None: the node must run."""
    recorded = node.recorded
    if recorded is None or node.packed is not None or e.grad_enabled or e.autocast is not None:
        return None
    forms = [None if slot is None else slot.form for slot in slots]
    key = forms[0] if len(forms) == 1 else tuple(forms)
    calls = recorded.backward
    if key not in calls and key is not None:
        if len(calls) >= MOST:
            return None
        calls[key] = _record_backward(e, recorded, forms)
    return calls.get(key)


def _record_backward(e: Eager, recorded: RecordedNode, forms: Sequence[Form | None]) -> BackwardCall | None:
    try:
        return record_backward(e, recorded, forms)
    except (UnrepeatableError, *_FAILURES):
        return None


def record_backward(e: Eager, recorded: RecordedNode, forms: Sequence[Form | None]) -> BackwardCall:
    """The record of a node's backward with gradients of these forms.

    Raises:
        UnrepeatableError: it has an effect that cannot be recorded.
        Exception: whatever the formulas raise.
    """
    r = Recorder(e)
    r.outer_autocast, r.grad_enabled, r.trace.phase = None, False, "backward"
    slots = [None if form is None else r.stand_in(form.shape, form.strides, form) for form in forms]
    node = Node(recorded.name, 0, 0)
    node.formulas, node.metadata = recorded.formulas, recorded.metadata
    for _, meta in recorded.edges:
        parent = Node("outside", -1, -1)
        parent.metadata = [] if meta is None else [meta]
        node.edges.append(None if meta is None else (parent, 0))
    r.start()
    outputs = validate(r, node, apply(r, node, slots))
    if len(r._scopes) != 2 or any(s.refs == 0 for scope in r._scopes for s in scope):
        raise UnrepeatableError
    slot_of = [k for k, form in enumerate(forms) if form is not None]
    tensors: list[Tensor] = []
    for output in outputs:
        if output is not None and not any(output[0] is t for t in tensors):
            tensors.append(output[0])
    gradients: list[NewTensor | int] = []
    for tensor in tensors:
        passed_on = [slot_of[k] for k, slot in enumerate(r.operands) if tensor is slot]
        source = r.source(tensor.storage)
        form = form_of(tensor.shape, tensor.strides, tensor.dtype)
        if tensor.requires_grad or tensor.base is not None:
            raise UnrepeatableError
        gradients.append(
            passed_on[0] if passed_on else NewTensor(source if source < 0 else slot_of[source], form, view=tensor.view)
        )
    holds = []
    for hold in r.trace.holds[r.first_hold :]:
        source = hold.buffer if hold.buffer < r.first else ~(hold.buffer - r.first)
        holds.append((source if source < 0 else slot_of[source], hold.start, hold.end))
    edge_outputs = [
        None if o is None else (next(k for k, t in enumerate(tensors) if t is o[0]), o[1] - r.first_hold)
        for o in outputs
    ]
    counts = [sum(o is not None and o[0] is t for o in outputs) for t in tensors]
    return BackwardCall(r.effects(), tuple(holds), tuple(zip(gradients, counts, strict=True)), tuple(edge_outputs))


def _check(e: Eager, recorded: RecordedNode) -> None:
    """Raises where a formula uses tensors of the forward, which a repeated call does not have.

    It is run with contiguous gradients, the likeliest ones, and the record is kept for them.
    """
    forms = [
        form_of(meta.shape, layout.contiguous_strides(meta.shape), meta.dtype) if meta.dtype.is_differentiable else None
        for meta in recorded.metadata
    ]
    if any(forms):
        key = forms[0] if len(forms) == 1 else tuple(forms)
        recorded.backward[key] = record_backward(e, recorded, forms)
