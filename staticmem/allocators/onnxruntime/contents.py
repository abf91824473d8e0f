"""What the runtime knows of the contents of shape tensors when it plans. It is less than onnx's inference follows.

Source: onnxruntime/core/graph/data_propagation and graph.cc (getInputData). Each rule was tried on onnxruntime 1.31 by
asking a session for the sizes of its results: a vector counts only where all of it is a number; constants of the file
serve the operator that reads them and are followed no further; `Cast`, `Slice`, `Identity`, `Max` and the like are not
followed; `Size` of a shape gives the product of that shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from staticmem.allocators.onnxruntime.graph import PlannedType

_INT64 = 7  # TensorProto.INT64
_LIMIT = 1 << 62  # larger products are no sizes


@dataclass(frozen=True, slots=True)
class Known:
    """Numbers in a scalar or a vector."""

    scalar: bool
    values: tuple[int, ...]


@dataclass(slots=True)
class Contents:
    """Contents of one graph. `constants` are initializers and Constant nodes as TensorProtos; `known` are results."""

    constants: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)

    def data(self, names: list[str]) -> dict[str, Any]:
        """TensorProtos for onnx's inference of a node that reads `names`."""
        found: dict[str, Any] = {}
        for name in names:
            if name in self.constants:
                found[name] = self.constants[name]
            elif name in self.known:
                found[name] = _proto(self.known[name])
        return found

    def follow(self, node: Any, types: Mapping[str, PlannedType]) -> None:
        """Notes what is known of a node's result."""
        rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        found = rule(self, node, types) if rule is not None else None
        if found is not None and all(abs(v) < _LIMIT for v in found.values):
            self.known[node.output[0]] = found

    def index(self, name: str) -> Known | None:
        """A constant of one integer."""
        tensor = self.constants.get(name)
        if tensor is None or len(tensor.dims) > 1 or math.prod(tensor.dims) != 1:
            return None
        import onnx

        try:
            return Known(not tensor.dims, (int(onnx.numpy_helper.to_array(tensor).reshape(-1)[0]),))
        except (ValueError, TypeError):
            return None


def constant_proto(node: Any) -> Any | None:
    """The TensorProto of a Constant node, None for kinds that no shape is made of."""
    import onnx

    for attribute in node.attribute:
        if attribute.name == "value":
            return attribute.t
        if attribute.name == "value_int":
            return onnx.helper.make_tensor(node.output[0], _INT64, [], [attribute.i])
        if attribute.name == "value_ints":
            return onnx.helper.make_tensor(node.output[0], _INT64, [len(attribute.ints)], list(attribute.ints))
    return None


def constants_of(graph: Any) -> dict[str, Any]:
    """Initializers whose contents were read, and Constant nodes."""
    found = {t.name: t for t in graph.initializer if t.data_location == 0 and _has_data(t)}
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            tensor = constant_proto(node)
            if tensor is not None and _has_data(tensor):
                found[node.output[0]] = tensor
    return found


def _has_data(tensor: Any) -> bool:
    return bool(tensor.raw_data or tensor.int64_data or tensor.int32_data or tensor.float_data)


def _proto(known: Known) -> Any:
    import onnx

    dims = [] if known.scalar else [len(known.values)]
    return onnx.helper.make_tensor("", _INT64, dims, list(known.values))


def _attribute(node: Any, name: str, default: int | None) -> int | None:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _shape(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Known | None:
    kind = types.get(node.input[0])
    if kind is None or kind.dims is None or not kind.tensor:
        return None
    taken = kind.dims[slice(_attribute(node, "start", 0), _attribute(node, "end", None))]
    values = tuple(d for d in taken if isinstance(d, int))
    return Known(False, values) if values and len(values) == len(taken) else None


def _size(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Known | None:
    """The runtime multiplies the contents of its input, not its dimensions."""
    known = contents.known.get(node.input[0])
    return Known(True, (math.prod(known.values),)) if known is not None and not known.scalar else None


def _gather(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Known | None:
    known, index = contents.known.get(node.input[0]), contents.index(node.input[1])
    if known is None or known.scalar or index is None:
        return None
    at = index.values[0]
    if not -len(known.values) <= at < len(known.values):
        return None
    return Known(index.scalar, (known.values[at],))


def _unsqueeze(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Known | None:
    known = contents.known.get(node.input[0])
    return Known(False, known.values) if known is not None and known.scalar else None


def _squeeze(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Known | None:
    known = contents.known.get(node.input[0])
    return Known(len(known.values) == 1, known.values) if known is not None and not known.scalar else None


def _concat(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Known | None:
    parts = [contents.known.get(name) for name in node.input]
    values: list[int] = []
    for part in parts:
        if part is None or part.scalar:
            return None
        values.extend(part.values)
    return Known(False, tuple(values))


def _arithmetic(contents: Contents, node: Any, types: Mapping[str, PlannedType]) -> Known | None:
    parts = [contents.known.get(name) for name in node.input]
    if len(parts) != 2 or parts[0] is None or parts[1] is None:
        return None
    first, second = parts[0], parts[1]
    if len(first.values) != 1 or len(second.values) != 1 or (node.op_type == "Div" and second.values[0] == 0):
        return None
    return Known(first.scalar and second.scalar, (_OPERATORS[node.op_type](first.values[0], second.values[0]),))


def _divided(a: int, b: int) -> int:
    """C++ rounds to zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _divided,
}
_RULES: dict[str, Callable[[Contents, Any, Mapping[str, PlannedType]], Known | None]] = {
    "Shape": _shape,
    "Size": _size,
    "Gather": _gather,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
    **dict.fromkeys(_OPERATORS, _arithmetic),
}
