"""What recovery reads of an ONNX graph: nodes with plain Python attributes, known sizes and known small contents.

Plain data instead of protobuf messages: a pattern is then a few comparisons, and tests need no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from staticmem.graph.ir import Frame, Note, Op, Value

if TYPE_CHECKING:
    import numpy as np

Attr = Union[int, float, str, tuple[Any, ...], "np.ndarray", "Subgraph", None]


@dataclass(frozen=True, slots=True)
class Subgraph:
    """The body of If, Loop or Scan."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
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

    @property
    def source(self) -> str:
        return f"{self.op} {self.name}".rstrip()


@dataclass(slots=True)
class Net:
    """A bound ONNX graph. `values` has the sizes that inference found, `consts` the contents of small tensors."""

    nodes: Sequence[Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: dict[str, Value]
    consts: dict[str, np.ndarray]
    weights: frozenset[str]  # names of parameters and buffers
    aliases: Mapping[str, str] = field(default_factory=dict)  # names in exporter metadata -> names in the file
    opset: int = 0
    producer: str = ""

    def shape(self, name: str) -> tuple[int, ...] | None:
        value = self.values.get(name)
        return value.shape if value is not None else None

    def ints(self, name: str) -> tuple[int, ...] | None:
        """The integers of a small tensor with known contents."""
        array = self.consts.get(name)
        if array is None or array.dtype.kind not in "iub":
            return None
        return tuple(int(i) for i in array.reshape(-1))


@dataclass(slots=True)
class Recovered:
    """ATen ops in execution order. `renamed` says under which name a dropped result lives on."""

    ops: list[Op]
    notes: list[Note]
    outputs: tuple[str, ...]
    module_tree_known: bool


def frames(node: Node) -> tuple[Frame, ...]:
    """The module calls around a node of a dynamo export. The last element of the lists is the operator itself."""
    if not node.scopes or node.scopes[0].startswith("_empty_nn_module_stack"):
        return ()
    classes = (*node.classes, *[""] * len(node.scopes))
    return tuple(Frame(path, cls) for path, cls in zip(node.scopes[:-1], classes, strict=False))
