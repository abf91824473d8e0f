"""Random inputs for any signature: types and sizes from the file, ranges of indices from what reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staticmem.ir import dtypes

# what hands indices on without changing their values
_PASS = ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Flatten", "Slice", "Expand", "Transpose", "Concat")


@dataclass(frozen=True, slots=True)
class RandomInput:
    """How to make an input: its dtype, sizes, and for integers the bound of its values (exclusive)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    high: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "high": self.high}


def plan_inputs(graph: Any, shapes: Mapping[str, Sequence[int]]) -> list[RandomInput]:
    """Inputs of a GraphProto whose sizes are bound. Initializers that are listed as inputs are left to the file."""
    owned = {t.name for t in graph.initializer}
    found: list[RandomInput] = []
    for proto in graph.input:
        if proto.name in owned or proto.type.WhichOneof("value") != "tensor_type":
            continue
        dtype = dtypes.ONNX_CODES.get(proto.type.tensor_type.elem_type, dtypes.float32)
        if proto.name not in shapes:
            continue
        shape = tuple(int(s) for s in shapes[proto.name])
        found.append(RandomInput(proto.name, dtype.name, shape, _bound(graph, proto.name)))
    return found


def _bound(graph: Any, name: str) -> int:
    """One above the largest index that every table allows; 2 where no table is in sight (masks, flags, sizes)."""
    sizes = {t.name: tuple(t.dims) for t in graph.initializer}
    carried = {name}
    bounds: list[int] = []
    for node in graph.node:
        if node.op_type in _PASS and carried & set(node.input[:1] if node.op_type != "Concat" else node.input):
            carried.update(node.output)
        elif node.op_type in ("Gather", "GatherElements", "GatherND") and len(node.input) > 1:
            if node.input[1] in carried and node.input[0] in sizes:
                axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
                table = sizes[node.input[0]]
                if table:
                    bounds.append(int(table[axis % len(table)]))
        elif node.op_type == "OneHot" and node.input[0] in carried:
            bounds.append(2)
    return max(min(bounds), 1) if bounds else 2
