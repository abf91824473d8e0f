"""Sizes of windows and products, for operators that onnx's inference does not know."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import integer
from staticmem.ort.memory.graph import Dim, PlannedType

Types = Sequence[PlannedType | None]
Rule = Callable[[Node, Types], Types]  # of the results, from those of the inputs
Dims = tuple[Dim, ...]


def text(node: Node, name: str, default: str = "") -> str:
    """An attribute that is a text."""
    value = node.attrs.get(name, default)
    return value if isinstance(value, str) else default


def integers(node: Node, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """An attribute that is a list of integers."""
    value = node.attrs.get(name)
    return tuple(int(v) for v in value) if isinstance(value, tuple) and value else default


def windows(node: Node, sizes: Dims, kernel: Dims) -> Dims:
    """How often a window of `kernel` fits into each size."""
    rank = len(sizes)
    strides, dilations = integers(node, "strides", (1,) * rank), integers(node, "dilations", (1,) * rank)
    pads = integers(node, "pads", (0,) * (2 * rank))
    auto = node.attrs.get("auto_pad", "NOTSET")
    result: list[Dim] = []
    if len(kernel) != rank or len(strides) != rank or len(dilations) != rank or len(pads) != 2 * rank or 0 in strides:
        return (None,) * rank
    for axis, size in enumerate(sizes):
        window = kernel[axis]
        if not isinstance(size, int) or not isinstance(window, int):
            result.append(None)
            continue
        reach = (window - 1) * dilations[axis] + 1
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            result.append(math.ceil(size / strides[axis]))
            continue
        padded = size + (0 if auto == "VALID" else pads[axis] + pads[axis + rank])
        if integer(node, "ceil_mode", 0):
            count = math.ceil((padded - reach) / strides[axis]) + 1
            if (count - 1) * strides[axis] >= size + pads[axis]:
                count -= 1
            result.append(count)
        else:
            result.append((padded - reach) // strides[axis] + 1)
    return tuple(result)


def matmul(node: Node | None, a: Dims, b: Dims) -> Dims | None:
    """Sizes of a product; `node` has transA and transB where the operator has them."""
    if not a or not b:
        return None
    if node is not None and integer(node, "transA", 0) and len(a) > 1:
        a = (*a[:-2], a[-1], a[-2])
    if node is not None and integer(node, "transB", 0) and len(b) > 1:
        b = (*b[:-2], b[-1], b[-2])
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return (*broadcast(a[:-2], b[:-2]), *rows, *columns)


def broadcast(a: Dims, b: Dims) -> Dims:
    """Sizes of two inputs that are stretched to each other."""
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(_broad(x, y) for x, y in zip(left, right, strict=True))


def _broad(x: Dim, y: Dim) -> Dim:
    if x == 1 or x == y:
        return y
    if y == 1 or isinstance(x, int):
        return x
    return y if isinstance(y, int) and y > 1 else None


def gemm(node: Node, a: Dims, b: Dims) -> Dims:
    """Sizes of a product of two matrices."""
    return (a[1 if integer(node, "transA", 0) else 0], b[0 if integer(node, "transB", 0) else 1])
