"""ONNX operators on small known arrays: what size computations are made of.

Each function takes a node and its inputs (None where an optional input is absent) and gives one array or a list.
Definitions: onnx/docs/Operators.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from staticmem.ir.onnx_graph import Node

Array = Any
Inputs = Sequence[Array]

LIMIT = 4096  # elements of a result: sizes and indices are short

# TensorProto.DataType -> numpy, for Cast; bfloat16 and smaller stand as float32, their contents are sizes at most
_CAST = {
    1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_,
    10: np.float16, 11: np.float64, 12: np.uint32, 13: np.uint64, 16: np.float32,
}  # fmt: skip


def _ints(array: Array) -> list[int]:
    return [int(i) for i in np.asarray(array).reshape(-1)]


def _axes(node: Node, inputs: Inputs, position: int = 1) -> list[int] | None:
    if len(inputs) > position and inputs[position] is not None:
        return _ints(inputs[position])
    axes = node.attrs.get("axes")
    return [int(a) for a in axes] if isinstance(axes, tuple) else None


def _int(node: Node, name: str, default: int) -> int:
    value = node.attrs.get(name, default)
    return value if isinstance(value, int) else default


def _unsqueeze(node: Node, inputs: Inputs) -> Array:
    axes = _axes(node, inputs) or []
    rank = inputs[0].ndim + len(axes)
    result = inputs[0]
    for axis in sorted(a % rank for a in axes):
        result = np.expand_dims(result, axis)
    return result


def _squeeze(node: Node, inputs: Inputs) -> Array:
    axes = _axes(node, inputs)
    return np.squeeze(inputs[0], None if axes is None else tuple(axes))


def _reshape(node: Node, inputs: Inputs) -> Array:
    shape = _ints(inputs[1])
    if not _int(node, "allowzero", 0):
        shape = [inputs[0].shape[i] if s == 0 else s for i, s in enumerate(shape)]
    return inputs[0].reshape(shape)


def _slice(node: Node, inputs: Inputs) -> Array:
    steps: list[int] | None = None
    if len(inputs) == 1:  # before opset 10
        starts, ends, axes = (_list(node, name) for name in ("starts", "ends", "axes"))
    else:
        starts, ends = _ints(inputs[1]), _ints(inputs[2])
        axes = _ints(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else []
        steps = _ints(inputs[4]) if len(inputs) > 4 and inputs[4] is not None else None
    index = [slice(None)] * inputs[0].ndim
    for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[position] if axes else position
        step = steps[position] if steps is not None else 1
        stop = None if step < 0 and end < -inputs[0].shape[axis] else end
        index[axis] = slice(start, stop, step)
    return inputs[0][tuple(index)]


def _list(node: Node, name: str) -> list[int]:
    value = node.attrs.get(name)
    return [int(v) for v in value] if isinstance(value, tuple) else []


def _gather(node: Node, inputs: Inputs) -> Array:
    if inputs[0].size * inputs[1].size > LIMIT * max(inputs[0].shape[_int(node, "axis", 0)], 1):
        raise ValueError("too large")
    return np.take(inputs[0], inputs[1].astype(np.int64), axis=_int(node, "axis", 0))


def _concat(node: Node, inputs: Inputs) -> Array:
    return np.concatenate(inputs, axis=_int(node, "axis", 0))


def _cast(node: Node, inputs: Inputs) -> Array:
    return inputs[0].astype(_CAST[_int(node, "to", 1)])


def _div(node: Node, inputs: Inputs) -> Array:
    if inputs[0].dtype.kind in "iu":
        return np.trunc(inputs[0] / inputs[1]).astype(inputs[0].dtype)  # ONNX truncates, numpy floors
    return inputs[0] / inputs[1]


def _mod(node: Node, inputs: Inputs) -> Array:
    return np.fmod(*inputs) if _int(node, "fmod", 0) else np.mod(*inputs)


def _range(node: Node, inputs: Inputs) -> Array:
    start, limit, step = (i.reshape(-1)[0] for i in inputs)
    if step == 0 or (limit - start) / step > LIMIT:
        raise ValueError("too long")
    return np.arange(start, limit, step, dtype=inputs[0].dtype)


def _constant_of_shape(node: Node, inputs: Inputs) -> Array:
    value = node.attrs.get("value")
    fill = value.reshape(-1)[0] if isinstance(value, np.ndarray) else np.float32(0)
    shape = _ints(inputs[0])
    if math.prod(shape) > LIMIT:
        raise ValueError("too large")
    return np.full(shape, fill)


def _expand(node: Node, inputs: Inputs) -> Array:
    shape = np.broadcast_shapes(inputs[0].shape, tuple(_ints(inputs[1])))
    if math.prod(shape) > LIMIT:
        raise ValueError("too large")
    return np.broadcast_to(inputs[0], shape)


def _tile(node: Node, inputs: Inputs) -> Array:
    repeats = _ints(inputs[1])
    if inputs[0].size * math.prod(repeats) > LIMIT:
        raise ValueError("too large")
    return np.tile(inputs[0], repeats)


def _split(node: Node, inputs: Inputs) -> Array:
    axis = _int(node, "axis", 0)
    sizes = _ints(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else node.attrs.get("split")
    if not isinstance(sizes, (list, tuple)):
        count = len(node.outputs)
        size = -(-inputs[0].shape[axis] // count)
        sizes = [size] * count
    return np.split(inputs[0], np.cumsum(sizes)[:-1].tolist(), axis=axis)


def _scatter_nd(node: Node, inputs: Inputs) -> Array:
    result = np.array(inputs[0])
    indices = inputs[1].astype(np.int64)
    result[tuple(np.moveaxis(indices, -1, 0))] = inputs[2]
    return result


def _reduce(function: Callable[..., Array]) -> Callable[[Node, Inputs], Array]:
    def run(node: Node, inputs: Inputs) -> Array:
        axes = _axes(node, inputs)
        if not axes and _int(node, "noop_with_empty_axes", 0):
            return inputs[0]
        keep = bool(_int(node, "keepdims", 1))
        result = function(inputs[0], axis=tuple(axes) if axes else None, keepdims=keep)
        return np.asarray(result).astype(inputs[0].dtype)

    return run


def _cumsum(node: Node, inputs: Inputs) -> Array:
    if _int(node, "exclusive", 0) or _int(node, "reverse", 0):
        raise ValueError("not needed for sizes")
    return np.cumsum(inputs[0], axis=_ints(inputs[1])[0], dtype=inputs[0].dtype)


def _transpose(node: Node, inputs: Inputs) -> Array:
    perm = node.attrs.get("perm")
    return np.transpose(inputs[0], perm if isinstance(perm, tuple) else None)


def _trilu(node: Node, inputs: Inputs) -> Array:
    k = _ints(inputs[1])[0] if len(inputs) > 1 and inputs[1] is not None else 0
    return np.triu(inputs[0], k) if _int(node, "upper", 1) else np.tril(inputs[0], k)


def _variadic(function: Callable[[Array, Array], Array]) -> Callable[[Node, Inputs], Array]:
    def run(node: Node, inputs: Inputs) -> Array:
        result = inputs[0]
        for other in inputs[1:]:
            result = function(result, other)
        return result

    return run


def _plain(function: Callable[..., Array]) -> Callable[[Node, Inputs], Array]:
    def run(node: Node, inputs: Inputs) -> Array:
        result = np.asarray(function(*inputs))
        return result if result.dtype.kind == "b" else result.astype(inputs[0].dtype)

    return run


def _clip(node: Node, inputs: Inputs) -> Array:
    low: Array = inputs[1] if len(inputs) > 1 else node.attrs.get("min")
    high: Array = inputs[2] if len(inputs) > 2 else node.attrs.get("max")
    result = inputs[0]
    result = result if low is None else np.maximum(result, low)
    return result if high is None else np.minimum(result, high)


def _nonzero(node: Node, inputs: Inputs) -> Array:
    return np.stack(np.nonzero(inputs[0])).astype(np.int64)


EVALUATE: dict[str, Callable[[Node, Inputs], Array]] = {
    "Identity": lambda node, inputs: inputs[0],
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Slice": _slice,
    "Gather": _gather,
    "Concat": _concat,
    "Cast": _cast,
    "CastLike": lambda node, inputs: inputs[0].astype(inputs[1].dtype),
    "Add": _plain(np.add),
    "Sub": _plain(np.subtract),
    "Mul": _plain(np.multiply),
    "Div": _div,
    "Mod": _mod,
    "Neg": _plain(np.negative),
    "Abs": _plain(np.abs),
    "Floor": _plain(np.floor),
    "Ceil": _plain(np.ceil),
    "Round": _plain(np.round),
    "Sqrt": _plain(np.sqrt),
    "Pow": _plain(np.power),
    "Sign": _plain(np.sign),
    "Min": _variadic(np.minimum),
    "Max": _variadic(np.maximum),
    "Sum": _variadic(np.add),
    "Equal": _plain(np.equal),
    "Less": _plain(np.less),
    "LessOrEqual": _plain(np.less_equal),
    "Greater": _plain(np.greater),
    "GreaterOrEqual": _plain(np.greater_equal),
    "Not": _plain(np.logical_not),
    "And": _plain(np.logical_and),
    "Or": _plain(np.logical_or),
    "Where": lambda node, inputs: np.where(inputs[0], inputs[1], inputs[2]),
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Tile": _tile,
    "Split": _split,
    "ScatterND": _scatter_nd,
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "CumSum": _cumsum,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Clip": _clip,
    "NonZero": _nonzero,
    "Flatten": lambda node, inputs: inputs[0].reshape(
        int(np.prod(inputs[0].shape[: _int(node, "axis", 1)], dtype=np.int64)), -1
    ),
}


def _bounded(function: Callable[[Node, Inputs], Array]) -> Callable[[Node, Inputs], Array]:
    """The function, but not for inputs that broadcasting makes large."""

    def run(node: Node, inputs: Inputs) -> Array:
        arrays = [array for array in inputs if array is not None]
        most = math.prod(array.size for array in arrays)
        if most > LIMIT and math.prod(np.broadcast_shapes(*(array.shape for array in arrays))) > LIMIT:
            raise ValueError("too large")
        return function(node, inputs)

    return run


for (
    _op
) in "Add Sub Mul Div Mod Pow Min Max Sum Equal Less LessOrEqual Greater GreaterOrEqual And Or Where Clip".split():
    EVALUATE[_op] = _bounded(EVALUATE[_op])


def constant(node: Node) -> Array | None:
    """The array of a Constant node, or None where the file's reader dropped it or it is no number."""
    for name, value in node.attrs.items():
        if name == "value":
            return value if isinstance(value, np.ndarray) else None
        if not isinstance(value, (int, float, tuple)):
            return None
        if name in ("value_int", "value_ints"):
            return np.asarray(value, dtype=np.int64)
        if name in ("value_float", "value_floats"):
            return np.asarray(value, dtype=np.float32)
    return None
