"""Inputs for the operators whose inputs have to fit each other, and new tensors for any.

A demand gives the inputs and the attributes of one node, from what there is in a graph or as new tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper

Shape = tuple[int, ...]
CODES = {
    "float": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "string": 8, "bool": 9,
    "float16": 10, "double": 11, "uint32": 12, "uint64": 13, "bfloat16": 16,
}  # fmt: skip
NAMES = {code: name for name, code in CODES.items()}
COMMON = ("float", "float", "float", "float", "float16", "double", "int64", "int32", "bool", "uint8", "int8")


@dataclass(frozen=True)
class Value:
    """A name that nodes can read. `type` as in schemas, `shape` None where it is none (a sequence)."""

    name: str
    type: str
    shape: Shape | None


class NoSuchInputError(Exception):
    """There is nothing of the type or shape that the operator needs."""


class Drawer:
    """Draws the inputs of one node from what there is, or as new tensors."""

    def __init__(self, rng: random.Random, pool: Sequence[Value], prefix: str) -> None:
        self.rng, self.pool, self.prefix = rng, pool, prefix
        self.made = 0
        self.constants: dict[str, Any] = {}
        self.fresh: dict[str, Value] = {}

    def name(self) -> str:
        self.made += 1
        return f"{self.prefix}_{self.made}"

    def constant(self, values: Any, type_: str = "int64") -> str:
        """An initializer with these values."""
        name = self.name()
        array = np.asarray(values)
        flat = [v.item() for v in array.reshape(-1)] if type_ != "string" else [str(v) for v in array.reshape(-1)]
        self.constants[name] = helper.make_tensor(name, CODES[type_], array.shape, flat)
        return name

    def tensor(self, shape: Shape, type_: str = "float", small: int = 3) -> str:
        """A new tensor of this shape: a weight, or an input of the graph."""
        count = int(np.prod(shape, dtype=np.int64))
        if count > 1 << 16 or type_ not in CODES:
            raise NoSuchInputError
        name = self.name()
        if type_ == "string":
            values: list[Any] = [b"ab"] * count
        elif type_ == "bool":
            values = [k % 3 == 0 for k in range(count)]
        elif type_ in ("float", "double", "float16", "bfloat16"):
            values = [0.25 * (k % 5) for k in range(count)]
        else:
            values = [k % small for k in range(count)]
        self.constants[name] = helper.make_tensor(name, CODES[type_], shape, values)
        self.fresh[name] = Value(name, type_, shape)
        return name

    def pick(self, types: Sequence[str] = ("float",), rank: int | None = None, least: int = 0) -> Value:
        """A value that there is, of one of the types."""
        found = [
            v for v in self.pool
            if v.type in types and v.shape is not None and len(v.shape) >= least and rank in (None, len(v.shape))
        ]  # fmt: skip
        if found and self.rng.random() < 0.95:
            return self.rng.choice(found[-6:] if self.rng.random() < 0.7 else found)
        known = [t for t in types if t in CODES]
        if not known:
            raise NoSuchInputError
        type_ = "float" if "float" in known and self.rng.random() < 0.6 else self.rng.choice(known)
        length = rank if rank is not None else self.rng.choice((least, max(least, 2), max(least, 3)))
        shape = tuple(self.rng.choice((1, 2, 3, 4, 8)) for _ in range(length))
        return self.fresh[self.tensor(shape, type_)]

    def like(self, shape: Shape, type_: str) -> str:
        """A tensor that broadcasts with this shape: one that there is, or a new one."""
        same = [v.name for v in self.pool if v.shape == shape and v.type == type_]
        if same and self.rng.random() < 0.6:
            return self.rng.choice(same)
        cut = shape[self.rng.randrange(len(shape) + 1) :] if self.rng.random() < 0.4 else shape
        return self.tensor(tuple(1 if self.rng.random() < 0.2 else d for d in cut), type_)


# -- operators whose inputs have to fit each other ---------------------------------------------------------------------

Demand = Callable[[Drawer, random.Random, tuple[str, ...], int], tuple[list[str], dict[str, Any]]]


def _convolution(d: Drawer, rng: random.Random, floats: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(floats, least=3)
    assert x.shape is not None
    spatial = len(x.shape) - 2
    group = rng.choice([g for g in (1, 1, x.shape[1], 2) if x.shape[1] % g == 0])
    kernel = tuple(rng.choice([k for k in (1, 2, 3, 5) if k <= s] or [1]) for s in x.shape[2:])
    attributes: dict[str, Any] = {"group": group}
    if rng.random() < 0.7:
        attributes["kernel_shape"] = kernel
    _sliding(attributes, rng, spatial, kernel)
    out = group * rng.choice((1, 2, 4))
    inputs = [x.name, d.tensor((out, x.shape[1] // group, *kernel), x.type)]
    return [*inputs, d.tensor((out,), x.type)] if rng.random() < 0.5 else inputs, attributes


def _sliding(attributes: dict[str, Any], rng: random.Random, spatial: int, kernel: Shape) -> None:
    if rng.random() < 0.5:
        attributes["strides"] = [rng.choice((1, 2, 3)) for _ in range(spatial)]
    if rng.random() < 0.2:
        attributes["dilations"] = [rng.choice((1, 2)) for _ in range(spatial)]
    if rng.random() < 0.5:
        attributes["pads"] = [rng.randrange(k) for k in (*kernel, *kernel)]
    elif rng.random() < 0.5:
        attributes["auto_pad"] = rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"))


def _transposed(d: Drawer, rng: random.Random, floats: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(floats, least=3)
    assert x.shape is not None
    kernel = tuple(rng.choice((1, 2, 3, 4)) for _ in x.shape[2:])
    attributes: dict[str, Any] = {"kernel_shape": kernel}
    if rng.random() < 0.6:
        attributes["strides"] = [2] * len(kernel)
        if rng.random() < 0.4:
            attributes["output_padding"] = [1] * len(kernel)
    if rng.random() < 0.4:
        attributes["pads"] = [0] * 2 * len(kernel)
    return [x.name, d.tensor((x.shape[1], rng.choice((1, 2, 4)), *kernel), x.type)], attributes


def _pool(d: Drawer, rng: random.Random, floats: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(floats, least=3)
    assert x.shape is not None
    kernel = tuple(rng.choice([k for k in (1, 2, 3) if k <= s] or [1]) for s in x.shape[2:])
    attributes: dict[str, Any] = {"kernel_shape": kernel}
    _sliding(attributes, rng, len(kernel), kernel)
    attributes.pop("dilations", None)
    if rng.random() < 0.3:
        attributes["ceil_mode"] = 1
    return [x.name], attributes


def _product(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=1)
    assert x.shape is not None
    inner, batch = x.shape[-1], x.shape[:-2]
    other = rng.choice(((inner, 4), (inner, 16), (*batch, inner, 3), (inner,)))
    return [x.name, d.tensor(other, x.type)], {}


def _gemm(d: Drawer, rng: random.Random, types: tuple[str, ...], opset: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, rank=2)
    assert x.shape is not None
    left, right, out = rng.random() < 0.3, rng.random() < 0.5, rng.choice((1, 4, 10))
    inner, rows = x.shape if left else x.shape[::-1]
    inputs = [x.name, d.tensor((out, inner) if right else (inner, out), x.type)]
    if opset < 11 or rng.random() < 0.6:
        inputs.append(d.tensor(rng.choice(((out,), (rows, out), (1, out), (rows, 1), ())), x.type))
    attributes: dict[str, Any] = {"transA": int(left), "transB": int(right)}
    if rng.random() < 0.3:
        attributes |= {"alpha": 0.5, "beta": 2.0}
    return inputs, attributes


def _recurrent(gates: int) -> Demand:
    def draw(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
        x = d.pick(types, rank=3)
        assert x.shape is not None
        length, batch, width = x.shape
        hidden, both = rng.choice((1, 3, 8)), rng.choice((1, 2))
        attributes: dict[str, Any] = {"hidden_size": hidden}
        attributes["direction"] = "bidirectional" if both == 2 else rng.choice(("forward", "reverse"))
        inputs = [
            x.name,
            d.tensor((both, gates * hidden, width), x.type),
            d.tensor((both, gates * hidden, hidden), x.type),
        ]
        if rng.random() < 0.6:
            inputs.append(d.tensor((both, 2 * gates * hidden), x.type))
            if rng.random() < 0.5:
                inputs.append(d.constant([length] * batch, "int32") if rng.random() < 0.5 else "")
                inputs.append(d.tensor((both, batch, hidden), x.type))
        if gates == 3 and rng.random() < 0.4:
            attributes["linear_before_reset"] = 1
        return inputs, attributes

    return draw


def _channels(count: int, after: int = 1) -> Demand:
    """A value and `count` vectors of its channels."""

    def draw(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
        x = d.pick(types, least=2)
        assert x.shape is not None
        return [x.name, *(d.tensor((x.shape[after],), x.type) for _ in range(count))], {}

    return draw


def _layer_norm(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=1)
    assert x.shape is not None
    axis = rng.randrange(len(x.shape))
    inputs = [x.name, d.tensor(x.shape[axis:], x.type)]
    if rng.random() < 0.5:
        inputs.append(d.tensor(x.shape[axis:], x.type))
    return inputs, {"axis": axis - rng.choice((0, len(x.shape)))}


def _rms_norm(d: Drawer, rng: random.Random, types: tuple[str, ...], opset: int) -> tuple[list[str], dict[str, Any]]:
    inputs, attributes = _layer_norm(d, rng, types, opset)
    return inputs[:2], attributes


def _group_norm(d: Drawer, rng: random.Random, types: tuple[str, ...], opset: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=3)
    assert x.shape is not None
    groups = rng.choice([g for g in (1, 2, x.shape[1]) if x.shape[1] % g == 0])
    width = x.shape[1] if opset >= 21 else groups
    return [x.name, d.tensor((width,), x.type), d.tensor((width,), x.type)], {"num_groups": groups}


def _reshape(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types)
    assert x.shape is not None
    total = int(np.prod(x.shape, dtype=np.int64))
    half = next((k for k in (2, 3, 4) if total % k == 0), 1)
    wanted = rng.choice(
        ([-1], [total], [half, -1], [x.shape[0], -1] if x.shape else [1], [0] * len(x.shape), [1, *x.shape])
    )
    return [x.name, d.constant(np.asarray(wanted, dtype=np.int64))], {}


def _axes(d: Drawer, rng: random.Random, types: tuple[str, ...], opset: int) -> tuple[list[str], dict[str, Any]]:
    """Squeeze of axes of length 1, which Unsqueeze has made."""
    x = d.pick(types)
    assert x.shape is not None
    ones = [k for k, size in enumerate(x.shape) if size == 1]
    if not ones:
        raise NoSuchInputError
    axes = [rng.choice(ones) - rng.choice((0, len(x.shape)))]
    return ([x.name, d.constant(axes)], {}) if opset >= 13 else ([x.name], {"axes": axes})


def _unsqueeze(d: Drawer, rng: random.Random, types: tuple[str, ...], opset: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types)
    assert x.shape is not None
    axes = sorted(rng.sample(range(len(x.shape) + 2), rng.choice((1, 2))))
    axes = [a for a in axes if a < len(x.shape) + len(axes)]
    return ([x.name, d.constant(axes)], {}) if opset >= 13 else ([x.name], {"axes": axes})


def _reduce(d: Drawer, rng: random.Random, types: tuple[str, ...], opset: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types)
    assert x.shape is not None
    rank = len(x.shape)
    axes = [a - rng.choice((0, rank)) for a in rng.sample(range(rank), rng.randint(0, rank))]
    attributes: dict[str, Any] = {"keepdims": rng.randrange(2)} if rng.random() < 0.6 else {}
    if not axes:
        return [x.name], attributes
    return ([x.name, d.constant(axes)], attributes) if opset else ([x.name], attributes | {"axes": axes})


def _slice(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=1)
    assert x.shape is not None
    axes = rng.sample(range(len(x.shape)), rng.randint(1, len(x.shape)))
    starts, ends, steps = [], [], []
    for axis in axes:
        size = x.shape[axis]
        start = rng.randrange(size)
        end = rng.choice((size, 2**31 - 1, 2**63 - 1, start + 1, start + 1 - size - 1 or size))
        back = rng.random() < 0.15
        starts.append(-1 if back else start - rng.choice((0, size)))
        ends.append(-(2**63) + 1 if back else end)
        steps.append(-1 if back else rng.choice((1, 1, 2)))
    inputs = [x.name, d.constant(starts), d.constant(ends), d.constant(axes)]
    return [*inputs, d.constant(steps)] if rng.random() < 0.6 or -1 in steps else inputs, {}


def _gather(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=1)
    assert x.shape is not None
    axis = rng.randrange(len(x.shape))
    least = -x.shape[axis] if rng.random() < 0.2 else 0
    shape: Shape = rng.choice(((), (1,), (3,), (2, 2)))
    values = [rng.randrange(least, x.shape[axis]) for _ in range(int(np.prod(shape)))]
    indices = np.asarray(values, dtype=np.int64).reshape(shape)
    return [x.name, d.constant(indices, rng.choice(("int64", "int32")))], {"axis": axis - rng.choice((0, len(x.shape)))}


def _elements(updates: bool) -> Demand:
    def draw(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
        x = d.pick(types, least=1)
        assert x.shape is not None
        axis = rng.randrange(len(x.shape))
        shape = tuple(rng.randint(1, size) for size in x.shape)
        indices = d.constant(np.resize(np.arange(x.shape[axis]), shape))
        return [x.name, indices, *([d.tensor(shape, x.type)] if updates else [])], {"axis": axis}

    return draw


def _nd(updates: bool) -> Demand:
    def draw(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
        x = d.pick(types, least=1)
        assert x.shape is not None
        depth, count = rng.randint(1, len(x.shape)), rng.choice((1, 3))
        indices = np.asarray([[rng.randrange(s) for s in x.shape[:depth]] for _ in range(count)], dtype=np.int64)
        more = [d.tensor((count, *x.shape[depth:]), x.type)] if updates else []
        return [x.name, d.constant(indices), *more], {}

    return draw


def _concat(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=1)
    assert x.shape is not None
    axis = rng.randrange(len(x.shape))
    others = []
    for _k in range(rng.randrange(3)):
        shape = (*x.shape[:axis], rng.choice((1, 2, x.shape[axis])), *x.shape[axis + 1 :])
        same = [v.name for v in d.pool if v.shape == shape and v.type == x.type]
        others.append(rng.choice(same) if same and rng.random() < 0.7 else d.tensor(shape, x.type))
    return [x.name, *others], {"axis": axis - rng.choice((0, len(x.shape)))}


def _expand(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types)
    assert x.shape is not None
    wanted = [rng.choice((1, size)) if size > 1 else rng.choice((1, 2, 4)) for size in x.shape]
    return [x.name, d.constant(np.asarray([*([2] if rng.random() < 0.3 else []), *wanted], dtype=np.int64))], {}


def _tile(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=1)
    assert x.shape is not None
    return [x.name, d.constant([rng.choice((1, 1, 2, 3)) for _ in x.shape])], {}


def _pad(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=1)
    assert x.shape is not None
    mode = rng.choice(("constant", "constant", "edge", "reflect"))
    pads = [rng.choice((0, 0, 1)) if mode != "reflect" or size > 1 else 0 for size in (*x.shape, *x.shape)]
    return [x.name, d.constant(pads)], {"mode": mode}


def _split(d: Drawer, rng: random.Random, types: tuple[str, ...], opset: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=1)
    assert x.shape is not None
    axis = rng.randrange(len(x.shape))
    size = x.shape[axis]
    first = rng.randint(1, size)
    parts = [first, size - first] if first < size else [size]
    if opset >= 18 and rng.random() < 0.4:
        return [x.name], {"axis": axis, "num_outputs": 1 if size == 1 else 2}
    return ([x.name, d.constant(parts)], {"axis": axis}) if opset >= 13 else ([x.name], {"axis": axis, "split": parts})


def _top(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=1)
    assert x.shape is not None
    axis = rng.randrange(len(x.shape))
    return [x.name, d.constant([rng.randint(1, x.shape[axis])])], {"axis": axis - rng.choice((0, len(x.shape)))}


def _resize(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, rank=4)
    assert x.shape is not None
    mode = rng.choice(("nearest", "linear", "cubic"))
    attributes: dict[str, Any] = {"mode": mode}
    if rng.random() < 0.5:
        attributes["coordinate_transformation_mode"] = rng.choice(("asymmetric", "align_corners", "half_pixel"))
    if rng.random() < 0.5:
        return [x.name, "", d.constant([1.0, 1.0, rng.choice((0.5, 2.0)), 2.0], "float")], attributes
    return [x.name, "", "", d.constant([*x.shape[:2], 4, rng.choice((2, 8))])], attributes


def _cast(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    return [d.pick(types).name], {"to": rng.choice((1, 1, 6, 7, 9, 10, 11, 2, 3, 16))}


def _quantise(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=2)
    assert x.shape is not None
    axis = rng.randrange(len(x.shape))
    shape: Shape = () if rng.random() < 0.5 else (x.shape[axis],)
    kind = x.type if x.type in ("int8", "uint8") else rng.choice(("int8", "uint8"))
    return [x.name, d.constant(np.full(shape, 0.1), "float"), d.constant(np.zeros(shape, dtype=np.int64), kind)], {
        "axis": axis
    }


def _where(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types)
    assert x.shape is not None
    return [d.like(x.shape, "bool"), x.name, d.like(x.shape, x.type)], {}


def _attention(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    batch, heads, length, width = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 4)), rng.choice((4, 8))
    floats = [t for t in ("float", "float16") if t in types]
    kind = rng.choice(floats)
    same = [v for v in d.pool if v.type == kind and v.shape is not None and len(v.shape) == 4]
    query = rng.choice(same) if same and rng.random() < 0.7 else None
    if query is not None and query.shape is not None:
        batch, heads, length, width = query.shape
    name = query.name if query is not None else d.tensor((batch, heads, length, width), kind)
    keys = rng.choice((length, 6))
    inputs = [name, d.tensor((batch, heads, keys, width), kind), d.tensor((batch, heads, keys, width), kind)]
    if rng.random() < 0.3:
        inputs.append(d.tensor((length, keys), kind))
    return inputs, {"is_causal": int(rng.random() < 0.3)}


def _einsum(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=2)
    assert x.shape is not None
    letters = "abcdef"[: len(x.shape)]
    if rng.random() < 0.5:
        return [x.name], {"equation": f"{letters}->{''.join(rng.sample(letters, len(letters)))}"}
    return [x.name, d.tensor((x.shape[-1], 3), x.type)], {"equation": f"{letters},{letters[-1]}z->{letters[:-1]}z"}


def _one_hot(d: Drawer, rng: random.Random, _: tuple[str, ...], __: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(("int64", "int32"))
    return [x.name, d.constant(np.asarray(rng.choice((3, 10)))), d.constant([0.0, 1.0], "float")], {}


def _range(d: Drawer, rng: random.Random, _: tuple[str, ...], __: int) -> tuple[list[str], dict[str, Any]]:
    kind = rng.choice(("int64", "float"))
    return [d.constant(np.asarray(v), kind) for v in (0, rng.choice((1, 7)), rng.choice((1, 2)))], {}


def _of_shape(d: Drawer, rng: random.Random, _: tuple[str, ...], __: int) -> tuple[list[str], dict[str, Any]]:
    vectors = [v for v in d.pool if v.type == "int64" and v.shape is not None and len(v.shape) == 1 and v.shape[0] < 5]
    if vectors and rng.random() < 0.3:
        return [rng.choice(vectors).name], {}
    return [d.constant(np.asarray([rng.choice((1, 2, 4)) for _ in range(rng.randrange(4))], dtype=np.int64))], {}


def _blocks(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    return [d.pick(types, rank=4).name], {"blocksize": 2}


def _classes(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=2)
    assert x.shape is not None
    shape = (x.shape[0], *x.shape[2:])
    labels = np.resize(np.arange(x.shape[1]), shape)
    return [x.name, d.constant(labels)], {"reduction": rng.choice(("mean", "sum", "none"))}


def _slope(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, least=1)
    assert x.shape is not None
    channel = (x.shape[1], *[1] * (len(x.shape) - 2)) if len(x.shape) > 1 else (1,)
    return [x.name, d.tensor(rng.choice((channel, (1,), (x.shape[-1],), x.shape)), x.type)], {}


def _permuted(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types)
    assert x.shape is not None
    return [x.name], {"perm": rng.sample(range(len(x.shape)), len(x.shape))} if rng.random() < 0.8 else {}


def _rotary(d: Drawer, rng: random.Random, types: tuple[str, ...], _: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types, rank=4)
    assert x.shape is not None
    batch, _heads, length, width = x.shape
    if width % 2:
        raise NoSuchInputError
    if rng.random() < 0.5:
        return [x.name, *(d.tensor((batch, length, width // 2), x.type) for _k in "cs")], {}
    places = d.constant(np.resize(np.arange(length), (batch, length)))
    return [x.name, *(d.tensor((length + 2, width // 2), x.type) for _k in "cs"), places], {"interleaved": 1}


def _clip(d: Drawer, rng: random.Random, types: tuple[str, ...], opset: int) -> tuple[list[str], dict[str, Any]]:
    x = d.pick(types)
    inputs = [x.name, d.tensor((), x.type) if rng.random() < 0.5 else "", d.tensor((), x.type)]
    return inputs[: rng.choice((1, 3))], {}


DEMANDS: dict[str, Demand] = {
    "Conv": _convolution, "ConvTranspose": _transposed, "MaxPool": _pool, "AveragePool": _pool, "LpPool": _pool,
    "MatMul": _product, "Gemm": _gemm, "RNN": _recurrent(1), "GRU": _recurrent(3), "LSTM": _recurrent(4),
    "BatchNormalization": _channels(4), "InstanceNormalization": _channels(2), "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm, "GroupNormalization": _group_norm, "Reshape": _reshape, "Squeeze": _axes,
    "Unsqueeze": _unsqueeze, "Slice": _slice, "Gather": _gather, "GatherElements": _elements(False),
    "ScatterElements": _elements(True), "GatherND": _nd(False), "ScatterND": _nd(True), "Concat": _concat,
    "Expand": _expand, "Tile": _tile, "Pad": _pad, "Split": _split, "TopK": _top, "Resize": _resize, "Cast": _cast,
    "QuantizeLinear": _quantise, "DequantizeLinear": _quantise, "Where": _where, "Attention": _attention,
    "Einsum": _einsum, "OneHot": _one_hot, "Range": _range, "ConstantOfShape": _of_shape, "DepthToSpace": _blocks,
    "SpaceToDepth": _blocks, "NegativeLogLikelihoodLoss": _classes, "SoftmaxCrossEntropyLoss": _classes,
    "PRelu": _slope, "Clip": _clip, "RotaryEmbedding": _rotary, "Transpose": _permuted,
    **{f"Reduce{kind}": _reduce for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum",
                                             "SumSquare")},
}  # fmt: skip
