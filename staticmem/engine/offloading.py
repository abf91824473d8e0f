"""Saved tensors that are on the CPU from the forward to the backward.

`torch.autograd.graph.save_on_cpu` copies each tensor that a node saves, parameters too, when the node is recorded. A
new one is made on the GPU when the node runs, and ends with the node's `apply`. What the forward computed ends when
Python lets go of it.

torchtune's `OffloadActivations` leaves parameters and small tensors where they are. With streams copies overlap with
kernels, so that tensors live for longer: the last few that were saved until they are copied, and those that came back
until the next node with such tensors has run.

The context is around the model's forward: the loss of the training loop and the backward are outside of it.

Sources: torch/autograd/graph.py (`save_on_cpu`), torch/csrc/autograd/saved_variable.cpp (which tensors hooks are
given), torch/csrc/autograd/engine.cpp (`call_function`: when hooks of nodes run),
torchtune/training/_activation_offloading.py at bd2a0fc (`OffloadActivations`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from staticmem.eager import strides as layout
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Node, Owner, Tensor
from staticmem.eager.trace import Copies
from staticmem.engine.features import Feature, RunningStep
from staticmem.engine.notes import note_of_offloading
from staticmem.ir.graph import Graph, Note
from staticmem.scenario.step import PINNED, STREAMS, TORCHTUNE

LEAST = 1024  # bytes: `min_offload_size` of `OffloadActivations`
STASHED = 5  # saved tensors: `max_fwd_stash_size` of `OffloadActivations`
HEAD = "output"  # the last layer of torchtune's models, whose tensors stay: `get_act_offloading_ctx_manager`


class _Slot:
    """One saved tensor. `owner` has it on the GPU: always where it `stays`, else while its node runs. `strides` are
    those that it comes back with."""

    __slots__ = ("number", "owner", "present", "stays", "strides", "tensor")

    def __init__(self, tensor: Tensor, number: int, owner: Owner, strides: layout.Strides, stays: bool) -> None:
        self.tensor, self.number, self.owner, self.strides, self.stays = tensor, number, owner, strides, stays
        self.present: Tensor | None = None  # the one that `owner` has


class Offloading:
    """The hooks of one forward. `copied` are the bytes that go to the CPU, and come back in the backward."""

    without_graph = False

    def __init__(self, e: Eager, kind: str, parameters: Iterable[Tensor], left_out: Collection[int] = ()) -> None:
        """`left_out`: ops of the graph whose saved tensors stay."""
        self.e, self.kind, self.left_out = e, kind, left_out
        self.parameters = {id(tensor) for tensor in parameters}
        self.selects, self.streams = kind in (TORCHTUNE, STREAMS), kind == STREAMS
        self.count = self.copied = 0
        self.stashed: dict[int, Owner] = {}  # by number: tensors of the forward whose copies may not be done
        self.returned: dict[int, Owner] = {}  # by number: tensors that came back, which kernels may not have read yet

    def pack(self, e: Eager, node: Node, saves: Sequence[Tensor], results: Sequence[Tensor]) -> Offloaded | None:
        """In the forward: copies the tensors that a node saves to the CPU."""
        return Offloaded(self, [self._slot(node, tensor) for tensor in saves]) if saves else None

    def _slot(self, node: Node, tensor: Tensor) -> _Slot:
        self.count += 1
        slot = _Slot(tensor, self.count, Owner(Reason.SAVED, node.name, node.op), self._strides(tensor), True)
        on_cpu = tensor.storage.nbytes == 0
        small = self.selects and tensor.nbytes < LEAST
        if on_cpu or small or node.op in self.left_out or (self.selects and id(tensor) in self.parameters):
            slot.present = _same(tensor)
            self.e.hold(slot.present, slot.owner)
            return slot
        slot.stays = False
        self.copied += tensor.nbytes
        self._copy(tensor, slot.strides)
        if self.streams:
            self._end(self.stashed, [number for number in self.stashed if number <= slot.number - STASHED])
            owner = self.stashed[slot.number] = Owner(Reason.OFFLOAD, "copy to the CPU", node.op)
            self.e.hold(_same(tensor), owner)
        return slot

    def _strides(self, tensor: Tensor) -> layout.Strides:
        """`Tensor.cpu()` and `empty_like` keep the order of the dimensions; the pinned memory of `save_on_cpu` is
        contiguous."""
        if self.kind == PINNED:
            return layout.contiguous_strides(tensor.shape)
        return layout.dense_like(tensor.shape, tensor.strides)

    def _copy(self, tensor: Tensor, strides: layout.Strides) -> None:
        """A copy to another layout makes a contiguous one on the GPU (aten/src/ATen/native/cuda/Copy.cu,
        `copy_requires_temporaries`)."""
        if any(s != t and n > 1 for s, t, n in zip(tensor.strides, strides, tensor.shape, strict=True)):
            running = self.e.running
            self.e.kernel("aten.copy_.default")
            self.e.reads(Copies((tensor.nbytes,)))
            self.e.running = running

    def bring_back(self, slots: Sequence[_Slot]) -> None:
        """Gives the owners of a node's slots tensors on the GPU."""
        e, before = self.e, [*self.returned]
        for slot in slots:
            tensor = slot.tensor
            if slot.number in self.stashed:
                slot.present = self.stashed[slot.number].held[0][0]
            else:
                slot.present = e.empty(tensor.shape, tensor.dtype, slot.strides, "aten._to_copy.default")
                if self.streams:
                    owner = self.returned[slot.number] = Owner(Reason.OFFLOAD, "copy from the CPU", slot.owner.op)
                    e.hold(slot.present, owner)
            e.hold(slot.present, slot.owner)
        if self.streams and slots:
            e.post_hooks.append(lambda: self._ran(before, [slot.number for slot in slots]))

    def _ran(self, before: Iterable[int], numbers: Iterable[int]) -> None:
        """The hook of a node for which the tensors `numbers` came back. Those that came `before` end, and those that
        somebody else has by now: the allocator waits with them until the stream is done (`record_stream`)."""
        shared = [n for n in numbers if n in self.returned and self.returned[n].held[0][0].storage.refs > 1]
        self._end(self.stashed, [*self.stashed])
        self._end(self.returned, [*before, *shared])

    def _end(self, owners: dict[int, Owner], numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in owners:
                self.e.release(owners.pop(number))

    def ended(self) -> None:
        """The backward is over."""
        self._end(self.stashed, [*self.stashed])
        self._end(self.returned, [*self.returned])


class Offloaded:
    """The saved tensors of one node."""

    def __init__(self, hooks: Offloading, slots: Sequence[_Slot]) -> None:
        self.hooks, self.slots = hooks, slots
        self.saved: Sequence[Tensor] = [slot.tensor for slot in slots]

    def unpack(self, e: Eager, gradients: Sequence[Tensor | None]) -> None:
        self.hooks.bring_back([slot for slot in self.slots if not slot.stays])

    def tensors(self) -> list[tuple[Tensor, Owner]]:
        return [(slot.present, slot.owner) for slot in self.slots if slot.present is not None]

    def owners(self) -> list[Owner]:
        return [slot.owner for slot in self.slots]

    def applied(self, e: Eager) -> None:
        for slot in self.slots:
            if not slot.stays:
                e.leave_all_to_scope(slot.owner)
                slot.present = None

    def release(self, e: Eager) -> None:
        for slot in self.slots:
            e.release(slot.owner)


class OffloadedActivations(Feature):
    """The context around the forwards of a step."""

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        self.kind = step.scenario.offload_activations
        self.left_out = head_of(step.graph, self.kind)
        self.hooks: Offloading | None = None  # of the forward that has run last

    def begin_forward(self) -> None:
        step = self.step
        parameters = [step.interpreter.env[p.value.name] for p in step.graph.parameters]
        self.hooks = Offloading(self.e, self.kind, parameters, self.left_out)
        self.e.saved_hooks.append(self.hooks)

    def end_forward(self, outputs: list[Tensor]) -> list[Tensor]:
        self.e.saved_hooks.pop()
        assert self.hooks is not None
        self.step.moved = 2 * self.hooks.copied
        return outputs

    def end_backward(self) -> None:
        assert self.hooks is not None
        self.hooks.ended()

    def notes(self) -> Sequence[Note]:
        return (note_of_offloading(self.kind, self.hooks.copied if self.hooks is not None else 0),)


def head_of(graph: Graph, kind: str) -> frozenset[int]:
    """The ops of the last layer, whose tensors torchtune's context leaves on the GPU."""
    if kind not in (TORCHTUNE, STREAMS):
        return frozenset()
    return frozenset(k for k, op in enumerate(graph.ops) if any(frame.path == HEAD for frame in op.modules))


def _same(tensor: Tensor) -> Tensor:
    """The tensor without its history, which a saved one does not keep."""
    return Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)
