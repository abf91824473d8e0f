"""RecordedNode calls of rules and backward nodes, and their repetition.

What a rule does depends only on the forms of its operands, their `requires_grad` and whether they are views; a formula
on the forms of its gradients. Large graphs repeat few such calls many times, so each is run once in a `Recorder`
(`eager.recording`), and later calls repeat its effects alone: kernels, births and deaths at the same distances in
ticks, holds. The results are those of the rule, to the tick; docs/adr/0015.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import Form
from staticmem.eager.tensor import Formula, Meta, Node, Storage, Tensor, gradient_edge
from staticmem.eager.trace import OPEN, Read


class Birth(NamedTuple):
    """A buffer that a call allocates. `kernel` and `tick` count from the first ones of the call."""

    form: Form
    kernel: int
    tick: int


# A storage of a call: k is that of operand k, ~k that of the call's own k-th birth
Source: TypeAlias = int


HIDDEN = 1 << 16  # first number of a hidden base; no op has as many operands


class NewTensor(NamedTuple):
    """A tensor that a call makes. `node` is the index of its `grad_fn` among the nodes of the call, -1 for none.

    `base` is `Tensor.base`: k is operand k, ~k the base of operand k, HIDDEN + k the k-th of `Call.hidden`; None: no
    view. `view` is `Tensor.view`, recorded of gradients alone.
    """

    source: Source
    form: Form
    node: int = -1
    output_nr: int = 0
    requires_grad: bool = False
    base: int | None = None
    view: bool = False


class Effects(NamedTuple):
    """What a call adds to the trace. `deaths` are (birth, tick); `ticks` is the number of ticks that it takes."""

    kernels: tuple[str, ...]
    births: tuple[Birth, ...]
    deaths: tuple[tuple[int, int], ...]
    ticks: int
    reads: tuple[tuple[int, tuple[Read, ...]], ...]

    def repeat(self, e: Eager) -> list[Storage]:
        """Adds the effects at the present tick and advances `e.trace.ticks`. Returns the storages of the births."""
        trace, category = e.trace, e.category
        now, kernels, buffers = trace.ticks, trace.kernels, trace.buffers
        names = kernels.names
        first = len(names)
        for name in self.kernels:
            names.append(name)
            kernels.phases.append(trace.phase)
            kernels.ops.append(trace.op)
        if self.kernels:
            e.running = len(names) - 1
        forms = buffers.forms
        id = len(forms)
        storages = []
        for form, kernel, tick in self.births:
            nbytes = form.nbytes
            buffers.nbytes.append(nbytes)
            forms.append(form)
            buffers.categories.append(category)
            buffers.names.append("")
            buffers.kernels.append(first + kernel)
            buffers.born.append(now + tick)
            buffers.died.append(OPEN)
            storages.append(Storage(id, nbytes))
            id += 1
        trace.ticks = now + self.ticks
        if self.deaths:
            for birth, tick in self.deaths:
                storage = storages[birth]
                buffers.died[storage.id] = now + tick
                storage.refs = -1
        for kernel, reads in self.reads:
            trace.reads[first + kernel] = reads
        return storages


class RecordedNode:
    """A backward node of a call.

    `edges` are numbers of operands, or (node, output) of the call's own nodes, each with the metadata that the gradient
    there must have. `moved` are operands that the call changes in place, with the output of this node that becomes
    their `grad_fn`. `backward` has its backward by the forms of the gradients; None: it must run.
    """

    __slots__ = tuple("backward edges formulas kinds metadata moved name saves tick whos".split())

    def __init__(self, name: str, formulas: Sequence[Formula], metadata: list[Meta]) -> None:
        self.name, self.formulas, self.metadata = name, formulas, metadata
        self.edges: tuple[tuple[int | tuple[int, int] | None, Meta | None], ...] = ()
        self.saves: tuple[Source, ...] = ()
        self.kinds: tuple[Reason, ...] = ()  # of the holds on them
        self.whos: tuple[str, ...] = ()
        self.tick = 0
        self.moved: tuple[tuple[int, int], ...] = ()
        self.backward: dict[Form | tuple[Form | None, ...] | None, BackwardCall | None] = {}


class RepeatedNode(Node):
    """A backward node that was made from a record; `recorded` is None where its backward must run."""

    __slots__ = ("recorded",)
    recorded: RecordedNode | None


class Call(NamedTuple):
    """The record of a rule. `results` are tensors that it makes, or numbers of operands.

    `effects` are its kernels, births and deaths, `nodes` its backward nodes. `hidden` are bases of results that are no
    operands, `choices` its additions to `Eager.choices`, `unowned` births that have no owner at its end; `loose`: some
    of them are no results.
    """

    effects: Effects
    nodes: tuple[RecordedNode, ...]
    results: tuple[NewTensor | int | None, ...]
    hidden: tuple[NewTensor, ...]
    choices: tuple[tuple[str, str], ...]
    unowned: tuple[int, ...]
    loose: bool


class BackwardCall(NamedTuple):
    """The record of a backward node for gradients of given forms, until it passes its results to the next nodes.

    `holds` are (storage, start, end) in ticks from its first, end None for one that outlives the call. `gradients` are
    its results, or slots of incoming gradients that it passes on, each with the number of holds that outlive the call.
    `outputs` has for each edge the indices of the gradient and of its hold, or None.
    """

    effects: Effects
    holds: tuple[tuple[Source, int, int | None], ...]
    gradients: tuple[tuple[NewTensor | int, int], ...]
    outputs: tuple[tuple[int, int] | None, ...]


def call_again(e: Eager, call: Call, operands: Sequence[Tensor], keeps_scope: bool) -> list[Tensor | None]:
    """Repeats a rule and returns its results. `keeps_scope`: the present scope frees births that get no owner."""
    trace = e.trace
    now, op = trace.ticks, trace.op
    born = call.effects.repeat(e)
    holds = trace.holds
    nodes: list[Node] = []
    for recorded in call.nodes:
        node = RepeatedNode(recorded.name, e.sequence, op)
        e.sequence += 1
        node.formulas, node.metadata, node.recorded = recorded.formulas, recorded.metadata, recorded
        edges = node.edges
        for edge, meta in recorded.edges:
            if edge is None:
                edges.append(None)
            elif type(edge) is int:
                operand = operands[edge]
                parent = operand.grad_fn
                if parent is None:
                    e.add_edge(node, gradient_edge(operand))
                else:
                    parent.refs += 1
                    number = operand.output_nr
                    edges.append((parent, number))
                    if parent.metadata[number] is not meta and parent.metadata[number] != meta:
                        node.recorded = None
            else:
                own, number = edge  # type: ignore[misc]
                nodes[own].refs += 1
                edges.append((nodes[own], number))
        if recorded.saves:
            node.saved = saved = [operands[s].storage if s >= 0 else born[~s] for s in recorded.saves]
            node.hold = len(holds.kinds)
            start = now + recorded.tick
            holds.kinds.extend(recorded.kinds)
            holds.whos.extend(recorded.whos)
            for storage in saved:
                holds.buffers.append(storage.id)
                holds.starts.append(start)
                holds.ends.append(OPEN)
                holds.ops.append(op)
                storage.refs += 1
        for moved, number in recorded.moved:
            e.set_grad_fn(operands[moved], node, number)
        nodes.append(node)
    for choice in call.choices:
        e.choices[choice] += 1
    results: list[Tensor | None] = []
    hidden: list[Tensor] = []
    for base_result in call.hidden:
        hidden.append(_make(base_result, operands, born, nodes, hidden))
    for result in call.results:
        if type(result) is NewTensor:
            results.append(_make(result, operands, born, nodes, hidden))
        else:
            results.append(None if result is None else operands[result])  # type: ignore[index]
    if keeps_scope:
        e.add_to_scope([born[birth] for birth in call.unowned])
    return results


def _make(
    record: NewTensor,
    operands: Sequence[Tensor],
    born: Sequence[Storage],
    nodes: Sequence[Node],
    hidden: Sequence[Tensor],
) -> Tensor:
    source, form, index, output_nr, requires_grad, base, _ = record
    storage = operands[source].storage if source >= 0 else born[~source]
    tensor = Tensor(storage, form.shape, form.strides, form.dtype)
    tensor.known_form = form
    if requires_grad:
        tensor.requires_grad = True
        if index >= 0:
            tensor.grad_fn, tensor.output_nr = nodes[index], output_nr
    if base is not None:
        if base < 0:
            tensor.base = operands[~base].base
        else:
            tensor.base = operands[base] if base < HIDDEN else hidden[base - HIDDEN]
    return tensor


def backward_again(
    e: Eager, node: Node, call: BackwardCall, slots: Sequence[Tensor | None]
) -> list[tuple[Tensor, int] | None]:
    """Repeats a backward node; returns for each edge the gradient and the hold that keeps it."""
    trace = e.trace
    now, op, name = trace.ticks, trace.op, node.name
    born = call.effects.repeat(e)
    holds = trace.holds
    first = len(holds.kinds)
    for source, start, end in call.holds:
        storage = slots[source].storage if source >= 0 else born[~source]  # type: ignore[union-attr]
        holds.buffers.append(storage.id)
        holds.starts.append(now + start)
        holds.ends.append(OPEN if end is None else now + end)
        holds.ops.append(op)
        holds.kinds.append(Reason.GRADIENT)
        holds.whos.append(name)
        if end is None:
            storage.refs += 1
    tensors: list[Tensor] = []
    for gradient, count in call.gradients:
        if type(gradient) is NewTensor:
            source, form = gradient.source, gradient.form
            storage = slots[source].storage if source >= 0 else born[~source]  # type: ignore[union-attr]
            tensor = Tensor(storage, form.shape, form.strides, form.dtype)
            tensor.known_form, tensor.view = form, gradient.view
        else:
            tensor = slots[gradient]  # type: ignore[index, assignment]
        tensor.refs += count
        tensors.append(tensor)
    return [None if output is None else (tensors[output[0]], first + output[1]) for output in call.outputs]
