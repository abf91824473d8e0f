"""Tensors without data: a storage, a layout, a dtype, and autograd's metadata.

Lifetimes are those of intrusive reference counts: a storage lives while any owner holds a tensor over it. Owners are
explicit (`Owner`), because "why is this alive" is the question that users ask.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

from staticmem.eager import strides as layout
from staticmem.ir.dtypes import DType

if TYPE_CHECKING:
    from staticmem.eager.node import Node


class Storage:
    """Bytes on the device. `id` is the index of its Buffer in the trace."""

    __slots__ = ("id", "nbytes", "refs")

    def __init__(self, id: int, nbytes: int) -> None:
        self.id, self.nbytes, self.refs = id, nbytes, 0


class Form:
    """What a tensor looks like. There is one object for each (`form_of`); no other one ever has its `number`.

    Numbers are four apart: `Tensor.look` adds what autograd says of a tensor.
    """

    __slots__ = ("dtype", "number", "shape", "strides")
    _last = count(0, 4)

    def __init__(self, shape: layout.Shape, strides: layout.Strides, dtype: DType) -> None:
        self.shape, self.strides, self.dtype = shape, strides, dtype
        self.number = next(self._last)


form_of = lru_cache(layout.KNOWN)(Form)


class Tensor:
    """A view of a storage: `shape` and `strides` in elements."""

    __slots__ = (
        "accumulate", "base", "dtype", "grad_fn", "known_form", "name", "output_nr", "refs", "requires_grad", "shape",
        "storage", "strides", "view",
    )  # fmt: skip

    def __init__(self, storage: Storage, shape: layout.Shape, strides: layout.Strides, dtype: DType) -> None:
        self.storage, self.shape, self.strides, self.dtype = storage, shape, strides, dtype
        self.known_form: Form | None = None
        self.grad_fn: Node | None = None
        self.accumulate: Node | None = None  # AccumulateGrad of a leaf
        self.base: Tensor | None = None  # of a view that autograd knows: the tensor that is no view
        self.output_nr = 0
        self.requires_grad = False
        self.refs = 0
        self.view = False  # of another tensor, which it keeps: C++ calls its storage shared
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
    def look(self) -> int:
        """All that a rule can see of the tensor, as a number: its form, whether it needs a gradient and is a view."""
        form = self.known_form or self.form
        return form.number + self.requires_grad + (0 if self.base is None else 2)

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
    """Holds tensors for one reason: `kind` is value, frame, saved, gradient, parameter..., `who` its name.

    `op` is the graph's op that it belongs to, -1 for none.
    """

    __slots__ = ("held", "kind", "op", "who")

    def __init__(self, kind: str, who: str, op: int = -1) -> None:
        self.kind, self.who, self.op = kind, who, op
        self.held: list[tuple[Tensor, int]] = []  # with the index of the hold

    def __repr__(self) -> str:
        return f"Owner({self.kind} {self.who}: {len(self.held)})"
