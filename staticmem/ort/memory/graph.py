"""The graph that the ONNX Runtime executes: ONNX nodes with their numbers, and what it knows of sizes when it plans.

This is not the ATen graph of the rest of staticmem: the runtime executes ONNX nodes, so nothing is recovered here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from staticmem.frontends.onnx.convert import sizes_of
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType

MADE_UP = "unk__"  # names that onnx's inference gives to open sizes
Dim = int | str | None  # a size, a symbol, or unknown


@dataclass(frozen=True, slots=True)
class PlannedType:
    """What the runtime knows of a value when it plans. `dims` is None where even the rank is open."""

    dtype: DType
    dims: tuple[Dim, ...] | None
    tensor: bool = True  # False: a sequence, a map or an optional

    @property
    def fixed(self) -> bool:
        """Whether every size is a number of the file."""
        return self.dims is not None and all(isinstance(dim, int) for dim in self.dims)


@dataclass(slots=True)
class ExecNode:
    """A node. `index` is its number in the runtime, which counts no Constant nodes. `implicit` are the outer values
    that its bodies read."""

    index: int
    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    implicit: tuple[str, ...] = ()
    bodies: Mapping[str, ExecGraph] = field(default_factory=dict)
    proto: Any = None

    @property
    def label(self) -> str:
        """How profiles name it: a node without a name is its operator and number."""
        return self.name or f"{self.op}_{self.index}"

    def number(self, name: str, default: int = 0) -> int:
        """An attribute that is an integer."""
        return next((int(a.i) for a in self.proto.attribute if a.name == name), default)

    def numbers(self, name: str, default: Sequence[int]) -> Sequence[int]:
        """An attribute that is a list of integers; an empty one counts as none."""
        return next((tuple(a.ints) for a in self.proto.attribute if a.name == name), ()) or default


@dataclass(slots=True)
class ExecGraph:
    """A graph or the body of If, Loop or Scan.

    `initializers` has those of Constant nodes too; `constants` are those that no caller can replace, with those of the
    graphs around it; `zeros` says of constants of bytes whether all are zero, where their contents were read. `opset`
    is that of the operators of ONNX."""

    nodes: tuple[ExecNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initializers: Mapping[str, PlannedType]
    types: Mapping[str, PlannedType]
    outer: tuple[str, ...] = ()
    constants: Mapping[str, PlannedType] = field(default_factory=dict)
    zeros: Mapping[str, bool] = field(default_factory=dict)
    opset: int = 0

    def planned(self, name: str) -> PlannedType | None:
        """What is known of a value at planning."""
        return self.types.get(name) or self.initializers.get(name)


def constant_type(node: Any) -> PlannedType:
    """What a Constant node gives."""
    for attribute in node.attribute:
        if attribute.name == "value":
            dtype = dtypes.ONNX_CODES.get(attribute.t.data_type, dtypes.float32)
            return PlannedType(dtype, sizes_of(attribute.t))
        if attribute.name == "value_ints":
            return PlannedType(dtypes.int64, (len(attribute.ints),))
        if attribute.name == "value_floats":
            return PlannedType(dtypes.float32, (len(attribute.floats),))
        if attribute.name == "value_int":
            return PlannedType(dtypes.int64, ())
    return PlannedType(dtypes.float32, ())


def planned_type(proto: Any) -> PlannedType | None:
    """A TypeProto as the planner sees it. Names that inference makes up for open sizes say nothing to the runtime."""
    kind = proto.WhichOneof("value")
    if kind is None:
        return None
    if kind != "tensor_type":
        return PlannedType(dtypes.float32, None, tensor=False)
    tensor = proto.tensor_type
    dtype = dtypes.ONNX_CODES.get(tensor.elem_type)
    if dtype is None:
        return None
    if not tensor.HasField("shape"):
        return PlannedType(dtype, None)
    return PlannedType(dtype, tuple(_dim(d) for d in tensor.shape.dim))


def _dim(dim: Any) -> Dim:
    which = dim.WhichOneof("value")
    if which == "dim_value":
        return int(dim.dim_value) if dim.dim_value >= 0 else None  # exporters write -1 for an open size
    name = str(dim.dim_param) if which == "dim_param" else ""
    return name if name and not name.startswith(MADE_UP) else None


def same_size(first: PlannedType | None, second: PlannedType | None) -> bool:
    """Whether the planner takes two tensors to be of one size: equal dimensions and equal element sizes."""
    if first is None or second is None or not (first.tensor and second.tensor):
        return False
    if first.dims is None or second.dims is None or len(first.dims) != len(second.dims):
        return False
    sizes = [max(kind.dtype.bits // 8, 1) for kind in (first, second)]  # of an element; booleans take a byte
    if dtypes.string in (first.dtype, second.dtype) or sizes[0] != sizes[1]:
        return False
    return all(a == b and a is not None for a, b in zip(first.dims, second.dims, strict=True))
