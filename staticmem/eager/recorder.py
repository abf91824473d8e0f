"""An execution state apart from the step, in which a rule or a formula runs over stand-ins and is watched.

What a record would not show is refused there, and the rule itself runs each time: the history of views that are changed
in place, hooks, what autocast keeps, holds on storage that is no operand's.
"""

from __future__ import annotations

from typing import Any, NoReturn

from staticmem.eager import strides as layout
from staticmem.eager.calls import Birth, Effects
from staticmem.eager.columns import OPEN
from staticmem.eager.context import Eager
from staticmem.eager.node import Node
from staticmem.eager.tensor import Form, Owner, Storage, Tensor


class UnrepeatableError(Exception):
    """The call does something that its record would not show."""


class ForeignStorageError(Exception):
    """A backward formula holds what its forward knew, which is a stand-in: `recording` makes sure that none does."""


class Recorder(Eager):
    """An execution state apart: operands are its first buffers, what follows is the call's."""

    def __init__(self, like: Eager) -> None:
        super().__init__(like.training)
        self.grad_enabled, self.sdpa = like.grad_enabled, like.sdpa
        self.under = like.autocast
        self.trace.phase, self.trace.op = "forward", 0
        self.outside = Owner("outside", "")
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
        """The operands are there: what follows is recorded."""
        self.first, self.first_hold, self.trace.ticks = len(self.storages), len(self.trace.holds), 0
        self._scopes = [[], []]

    # -- what a record does not cover ----------------------------------------------------------------------------

    def empty(self, *args: Any, **kwargs: Any) -> Tensor:
        tensor = super().empty(*args, **kwargs)
        self.storages.append(tensor.storage)
        return tensor

    def own(self, storage: Storage) -> bool:
        """Whether it is the storage of an operand or of the call: formulas know the stand-ins of their forward."""
        return storage.id < len(self.storages) and self.storages[storage.id] is storage

    def take(self, tensor: Tensor, kind: str, who: str, op: int = -1) -> int:
        if not self.own(tensor.storage):
            raise ForeignStorageError
        return super().take(tensor, kind, who, op)

    def free(self, tensor: Tensor) -> None:
        if tensor.storage.id < self.first or not self.own(tensor.storage):
            raise UnrepeatableError
        super().free(tensor)

    def _rebase(self, view: Tensor, node: Node) -> NoReturn:
        raise UnrepeatableError

    def undo(self, kernel: int) -> NoReturn:
        raise UnrepeatableError

    @property
    def autocast(self) -> Any:
        if self.under is not None:
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
        births = tuple(Birth(b.nbytes, b.shape, b.dtype, b.kernel, b.born) for b in buffers[first:])
        deaths = tuple((k, tick) for k, tick in enumerate(buffers.died[first:]) if tick != OPEN)
        return Effects(
            tuple(trace.kernels.names), births, deaths, trace.ticks, tuple(trace.reductions.items()),
            tuple(trace.copies.items()),
        )  # fmt: skip

    def saves(self, node: Node) -> tuple[tuple[int, ...], int]:
        """The storages that a node saves, and when."""
        if node.packed is not None:
            raise UnrepeatableError
        return tuple(self.source(s) for s in node.saved), self.trace.holds.starts[node.hold] if node.saved else 0
