"""Tensors without data, and autograd's nodes: storage, layout, dtype; what a node saves and where its gradients go.

Lifetimes are those of intrusive reference counts: a storage lives while any owner holds a tensor over it. Owners are
explicit (`Owner`), because "why is this alive" is the question that users ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

from staticmem.eager import strides as layout
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import Form, form_of
from staticmem.ir.dtypes import DType


class Storage:
    """Bytes on the device. `id` is the index of its Buffer in the trace."""

    __slots__ = ("id", "nbytes", "refs")

    def __init__(self, id: int, nbytes: int) -> None:
        self.id, self.nbytes, self.refs = id, nbytes, 0


class Tensor:
    """A view of a storage: `shape` and `strides` in elements."""

    __slots__ = tuple(
        "accumulate base dtype grad_fn known_form name output_nr refs requires_grad shape storage strides view".split()
    )

    def __init__(self, storage: Storage, shape: layout.Shape, strides: layout.Strides, dtype: DType) -> None:
        self.storage, self.shape, self.strides, self.dtype = storage, shape, strides, dtype
        self.known_form: Form | None = None
        self.grad_fn: Node | None = None
        self.accumulate: Node | None = None  # AccumulateGrad of a leaf
        self.base: Tensor | None = None  # of a differentiable view: the tensor that it views (`_base`)
        self.output_nr = 0
        self.requires_grad = False
        self.refs = 0
        self.view = False  # shares the storage of another tensor (`Eager.alias`)
        self.name = ""

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}{list(self.shape)} #{self.storage.id})"

    @property
    def form(self) -> Form:
        form = self.known_form
        if form is None:
            form = self.known_form = form_of(self.shape, self.strides, self.dtype)
        return form

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return layout.numel(self.shape)

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.numel)

    @property
    def is_contiguous(self) -> bool:
        return layout.is_contiguous(self.shape, self.strides)

    @property
    def is_dense(self) -> bool:
        return layout.is_dense(self.shape, self.strides)

    @property
    def prefers_channels_last(self) -> bool:
        return layout.prefers_channels_last(self.shape, self.strides)

    def dim(self, index: int) -> int:
        """A dimension index from a possibly negative one."""
        return index + self.ndim if index < 0 else index


class Owner:
    """Holds tensors for one reason: `kind` says which, `who` is its name.

    `op` is the graph's op that it belongs to, -1 for none.
    """

    __slots__ = ("held", "kind", "op", "who")

    def __init__(self, kind: Reason, who: str, op: int = -1) -> None:
        self.kind, self.who, self.op = kind, who, op
        self.held: list[tuple[Tensor, int]] = []  # with the index of the hold

    def __repr__(self) -> str:
        return f"Owner({self.kind.value} {self.who}: {len(self.held)})"


Grads = Sequence[Tensor | None]
Result: TypeAlias = Tensor | Sequence[Tensor | None] | None
Run: TypeAlias = Any  # the `Eager` that runs a formula; `context` defines it with these classes
# A formula of derivatives.yaml: incoming gradients and which of its outputs are needed -> gradients of its inputs
FormulaFn: TypeAlias = Callable[[Run, Grads, Sequence[bool]], Result]
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
    """What a node has instead of its saved tensors where it was recorded under `saved_tensors_hooks`.

    `saved` are those of the forward, in the order of `tensors`.
    """

    saved: Sequence[Tensor]

    def unpack(self, e: Run, gradients: Sequence[Tensor | None]) -> None:
        """The node is about to run on gradients, and needs its tensors."""

    def tensors(self) -> list[tuple[Tensor, Owner]]:
        """The unpacked tensors, each with its owner."""

    def owners(self) -> Iterable[Owner]:
        """Who has what lives as long as the node needs it."""

    def applied(self, e: Run) -> None:
        """The formulas have run, and the unpacked tensors die: they were local variables of `apply`."""

    def release(self, e: Run) -> None:
        """The node has run or died, and releases what it saved."""


class SavedTensorsHooks(Protocol):
    """`torch.autograd.graph.saved_tensors_hooks`, or the forward of a checkpoint with use_reentrant=True, which has no
    graph of autograd (`without_graph`)."""

    without_graph: bool

    def pack(self, e: Run, node: Node, saves: Sequence[Tensor], results: Sequence[Tensor]) -> Packed | None:
        """Takes the tensors that a node saves, maybe none; `results` are the op's."""


class Selecting(Protocol):
    """A selective checkpoint, which keeps results of calls in the forward and gives them to the recomputation."""

    def begins(self, e: Run, kernel: str) -> bool:
        """A kernel is called; False where its results were kept, so that it does not run."""

    @property
    def skips(self) -> bool:
        """The call at hand does not run."""

    def keep(self, e: Run, tensor: Tensor) -> None:
        """Takes a result of the call at hand, if it is one that is kept."""

    def result(self, e: Run) -> Tensor | None:
        """The next result of the call at hand, if it was kept."""


class Node:
    """A backward node: edges to the producers of its inputs, what it saves, its formulas."""

    __slots__ = tuple(
        "dependencies edges formulas hold keeps_leaf leaf metadata name op packed refs saved sequence".split()
    )

    def __init__(self, name: str, sequence: int, op: int) -> None:
        self.name, self.sequence, self.op = name, sequence, op
        self.edges: list[tuple[Node, int] | None] = []
        self.metadata: list[Meta] = []  # of the node's outputs in forward; gradients must have it
        self.formulas: Sequence[Formula] = ()
        self.saved: Sequence[Storage] = ()  # what it holds, by the holds from `hold` on
        self.hold = 0
        self.packed: Packed | None = None
        self.refs = 0
        self.dependencies = 0  # while a backward runs: gradients that have not come yet
        self.leaf: Tensor | None = None  # the parameter of an AccumulateGrad
        self.keeps_leaf = False  # the code made the leaf, which lives as long as other nodes refer to this one

    def __repr__(self) -> str:
        return f"Node({self.name} #{self.sequence})"


def attributes_of_ctx() -> Owner:
    """The owner of what nodes of custom functions hold beside saved tensors: until the graph dies, run or not."""
    return Owner(Reason.AUTOGRAD, "attributes of ctx")


class TakingNode(Node):
    """A node that takes over what comes to it, and lets go of each tensor when it has no further use for it."""

    __slots__ = ()

    def run(self, e: Run, waiting: Owner, slots: Grads, retain_graph: bool) -> list[Tensor | None]:
        """The gradients of its inputs, which belong to the present scope. `waiting` holds the incoming ones, `slots`;
        with `retain_graph` what it has saved stays."""
        raise NotImplementedError


def gradient_edge(tensor: Tensor | None) -> tuple[Node, int] | None:
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
