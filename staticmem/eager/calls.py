"""Calls as they were recorded: what a rule, or a backward node, does for operands of given looks, to be done again.

A rule is a function of what its operands look like, and so is a formula. Large graphs repeat few such calls many times,
so each is run once in a `Recorder` (`eager.recording`), and from then on its effects alone are repeated: kernels,
births and deaths at known distances, who holds what. The results are those of the rule, to the tick; docs/adr/0015.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from staticmem.eager.context import Eager
from staticmem.eager.strides import Form
from staticmem.eager.tensor import Formula, Meta, Node, Storage, Tensor, gradient_edge
from staticmem.eager.trace import OPEN, Read


class Birth(NamedTuple):
    """A buffer that a call allocates. `kernel` and `tick` count from the call's first ones."""

    form: Form
    kernel: int
    tick: int


# A storage that a call knows: operand k has that of its number, ~k is the call's own k-th birth
Source: TypeAlias = int


HIDDEN = 1 << 16  # more operands than an op has


class Made(NamedTuple):
    """A tensor that a call makes. `node` is the call's own node that made it, -1 for none.

    `base` is as in `Tensor`: an operand's number, that of an operand whose base it is (~k), HIDDEN + k for the k-th of
    `Call.hidden`, None for no view. `view` is the tensor's own, of gradients.
    """

    source: Source
    form: Form
    node: int = -1
    output_nr: int = 0
    requires_grad: bool = False
    base: int | None = None
    view: bool = False


class Effects(NamedTuple):
    """What the allocator and the trace see of a call. `deaths` are (birth, tick); `ticks` is how long it takes."""

    kernels: tuple[str, ...]
    births: tuple[Birth, ...]
    deaths: tuple[tuple[int, int], ...]
    ticks: int
    reads: tuple[tuple[int, tuple[Read, ...]], ...]

    def repeat(self, e: Eager) -> list[Storage]:
        """Does it again at the present tick; the storages of its births. `e.trace.ticks` moves on."""
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
        made = []
        for form, kernel, tick in self.births:
            nbytes = form.nbytes
            buffers.nbytes.append(nbytes)
            forms.append(form)
            buffers.categories.append(category)
            buffers.names.append("")
            buffers.kernels.append(first + kernel)
            buffers.born.append(now + tick)
            buffers.died.append(OPEN)
            made.append(Storage(id, nbytes))
            id += 1
        trace.ticks = now + self.ticks
        if self.deaths:
            for birth, tick in self.deaths:
                storage = made[birth]
                buffers.died[storage.id] = now + tick
                storage.refs = -1
        for kernel, reads in self.reads:
            trace.reads[first + kernel] = reads
        return made


class Recorded:
    """A backward node of a call.

    `edges` are operands' numbers, or (node, output) of nodes of the call's own, each with what the node expects it to
    be. `moved` are operands whose history moves on to this node (in place), each with the number of its output.
    `backward` has what the node does, by the forms of its gradients: None where that is not known to repeat.
    """

    __slots__ = (
        "backward", "edges", "formulas", "kinds", "metadata", "moved", "name", "saves", "tick", "whos",
    )  # fmt: skip

    def __init__(self, name: str, formulas: Sequence[Formula], metadata: list[Meta]) -> None:
        self.name, self.formulas, self.metadata = name, formulas, metadata
        self.edges: tuple[tuple[int | tuple[int, int] | None, Meta | None], ...] = ()
        self.saves: tuple[Source, ...] = ()
        self.kinds: tuple[str, ...] = ()  # of the holds on them
        self.whos: tuple[str, ...] = ()
        self.tick = 0
        self.moved: tuple[tuple[int, int], ...] = ()
        self.backward: dict[Form | tuple[Form | None, ...] | None, BackwardCall | None] = {}


class RepeatedNode(Node):
    """A backward node that was made from a record; `recorded` is None where its backward is not known to repeat."""

    __slots__ = ("recorded",)
    recorded: Recorded | None


class Call(NamedTuple):
    """What a rule does. `results` are tensors that it makes, or operands' numbers.

    `effects` are its kernels, births and deaths, `nodes` what it records for the backward. `hidden` are tensors that
    results are views of and that are no operands, `choices` what it says of kernels that it chose, `unowned` births
    that nobody holds at its end; `loose`: some of them are no results.
    """

    effects: Effects
    nodes: tuple[Recorded, ...]
    results: tuple[Made | int | None, ...]
    hidden: tuple[Made, ...]
    choices: tuple[tuple[str, str], ...]
    unowned: tuple[int, ...]
    loose: bool


class BackwardCall(NamedTuple):
    """What a backward node does with gradients of known forms, up to where it hands on its own.

    `holds` are (storage, start, end) in ticks from its first, None for one that lasts; `made` the tensors that it hands
    on, or numbers of those that came in, each with how many holds last on it; `outputs`, for each edge, which of them
    by which hold (indices), or None.
    """

    effects: Effects
    holds: tuple[tuple[Source, int, int | None], ...]
    made: tuple[tuple[Made | int, int], ...]
    outputs: tuple[tuple[int, int] | None, ...]


def call_again(e: Eager, call: Call, operands: Sequence[Tensor], leave: bool) -> list[Tensor | None]:
    """Does what a rule does; what it returns. `leave`: births without an owner are the present scope's."""
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
                    edges.append(gradient_edge(operand))
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
    for made in call.hidden:
        hidden.append(_make(made, operands, born, nodes, hidden))
    for result in call.results:
        if type(result) is Made:
            results.append(_make(result, operands, born, nodes, hidden))
        else:
            results.append(None if result is None else operands[result])  # type: ignore[index]
    if leave:
        e.leave([born[birth] for birth in call.unowned])
    return results


def _make(
    made: Made, operands: Sequence[Tensor], born: Sequence[Storage], nodes: Sequence[Node], hidden: Sequence[Tensor]
) -> Tensor:
    source, form, index, output_nr, requires_grad, base, _ = made
    storage = operands[source].storage if source >= 0 else born[~source]
    tensor = Tensor(storage, form.shape, form.strides, form.dtype)
    tensor.known_form = form
    if requires_grad:
        tensor.requires_grad = True
        if index >= 0:
            tensor.grad_fn, tensor.output_nr = nodes[index], output_nr
    if base is not None:
        tensor.base = operands[~base].base if base < 0 else operands[base] if base < HIDDEN else hidden[base - HIDDEN]
    return tensor


def backward_again(
    e: Eager, node: Node, call: BackwardCall, slots: Sequence[Tensor | None]
) -> list[tuple[Tensor, int] | None]:
    """Does what a backward node does; for each edge the gradient and the hold that keeps it."""
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
        holds.kinds.append("gradient")
        holds.whos.append(name)
        if end is None:
            storage.refs += 1
    tensors: list[Tensor] = []
    for made, count in call.made:
        if type(made) is Made:
            source, form = made.source, made.form
            storage = slots[source].storage if source >= 0 else born[~source]  # type: ignore[union-attr]
            tensor = Tensor(storage, form.shape, form.strides, form.dtype)
            tensor.known_form, tensor.view = form, made.view
        else:
            tensor = slots[made]  # type: ignore[index, assignment]
        tensor.refs += count
        tensors.append(tensor)
    return [None if output is None else (tensors[output[0]], first + output[1]) for output in call.outputs]
