"""Autograd's backward nodes: edges to the producers of their inputs, what they save, their formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from staticmem.eager import strides as layout
from staticmem.eager.tensor import Storage, Tensor
from staticmem.ir.dtypes import DType

if TYPE_CHECKING:
    from staticmem.eager.calls import Recorded
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

    __slots__ = (
        "dependencies", "edges", "formulas", "hold", "leaf", "metadata", "name", "op", "packed", "recorded", "refs",
        "saved", "sequence",
    )  # fmt: skip

    def __init__(self, name: str, sequence: int, op: int) -> None:
        self.name, self.sequence, self.op = name, sequence, op
        self.edges: list[tuple[Node, int] | None] = []
        self.metadata: list[Meta] = []  # of the node's outputs in forward: what gradients must look like
        self.formulas: Sequence[Formula] = ()
        self.saved: Sequence[Storage] = ()  # what it holds, by the holds from `hold` on
        self.hold = 0
        self.recorded: Recorded | None = None  # what it was made from, where its backward is known to repeat
        self.packed: Packed | None = None
        self.refs = 0
        self.dependencies = 0  # while a backward runs: gradients that have not come yet
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
