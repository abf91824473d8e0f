"""What the ONNX frontend decodes: nodes with plain Python attributes, known sizes and known small contents.

Plain data instead of protobuf messages: a pattern is then a few comparisons, and tests need no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Union

from staticmem.ir.graph import Frame, Note, Op, Value
from staticmem.ir.record import record

if TYPE_CHECKING:
    import numpy as np

Attr = Union[int, float, str, tuple[Any, ...], "np.ndarray", "Subgraph", None]


@record(frozen=True, slots=True)
class Subgraph:
    """The body of If, Loop or Scan."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initializers: tuple[str, ...] = ()


@record(frozen=True, slots=True)
class Node:
    """A node of the file. `fx`, `scopes` and `classes` are the exporter's metadata, empty where there is none."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    fx: str = ""
    scopes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    stack: str = ""  # the exporter's stack trace of the model's code


@dataclass(slots=True)
class Net:
    """A bound ONNX graph. `values` has the sizes that inference found, `consts` the contents of small tensors."""

    nodes: Sequence[Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: dict[str, Value]
    consts: dict[str, np.ndarray]
    weights: frozenset[str]  # names of parameters and buffers
    fixed: frozenset[str] = frozenset()  # those of buffers
    aliases: Mapping[str, str] = field(default_factory=dict)  # names in exporter metadata -> names in the file
    opset: int = 0
    producer: str = ""
    rebound: bool = False  # sizes differ from the file's: those in exporter texts are old
    fold: Callable[[], None] | None = None  # fills gaps in values and consts; called at the first gap that is met

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The sizes of a value, None where they depend on data."""
        value = self.values.get(name)
        if (value is None or value.shape is None) and self.filled():
            value = self.values.get(name)
        return value.shape if value is not None else None

    def const(self, name: str) -> np.ndarray | None:
        """The contents of a small tensor."""
        array = self.consts.get(name)
        if array is None and self.filled():
            array = self.consts.get(name)
        return array

    def filled(self) -> bool:
        """Fills gaps once; whether that happened just now."""
        fold, self.fold = self.fold, None
        if fold is not None:
            fold()
        return fold is not None

    def ints(self, name: str) -> tuple[int, ...] | None:
        """The integers of a small tensor with known contents."""
        array = self.const(name)
        if array is None or array.dtype.kind not in "iub":
            return None
        return tuple(int(i) for i in array.reshape(-1))


@dataclass(slots=True)
class Translated:
    """ATen ops in execution order, and what their translation found out about tensors of the file."""

    ops: list[Op]
    outputs: tuple[str, ...]
    notes: Sequence[Note] = ()
    late_notes: Sequence[Note] = ()  # those that come after the notes of passes
    transposed: set[str] = field(default_factory=set)  # 2-D weights that the file stores as [in, out]
    restored: dict[str, str] = field(default_factory=dict)  # tensors that an optimiser made of a parameter, and which
    added: dict[str, Value] = field(default_factory=dict)  # parameters that the file has merged with others


def is_known(node: Node, consts: Mapping[str, Any]) -> bool:
    """Whether the contents of all results are known."""
    names = node.outputs
    if not names or (names[0] and names[0] not in consts):
        return False
    return all(name in consts for name in names if name)


def frames(node: Node) -> tuple[Frame, ...]:
    """The module calls around a node of a dynamo export. The last element of the lists is the operator itself."""
    return _frames(node.scopes, node.classes) if node.scopes else ()


@lru_cache(4096)
def _frames(scopes: tuple[str, ...], classes: tuple[str, ...]) -> tuple[Frame, ...]:
    """The same objects for all nodes of a module: they are compared all the time."""
    if scopes[0].startswith("_empty_nn_module_stack"):
        return ()
    classes = (*classes, *[""] * len(scopes))
    return tuple([_frame(path, cls) for path, cls in zip(scopes[:-1], classes, strict=False)])


_frame = lru_cache(4096)(Frame)
