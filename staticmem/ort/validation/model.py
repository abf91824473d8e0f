"""A model that the ONNX Runtime can run: weights that are missing become random data in a temporary folder, and inputs
are random for any signature: types and sizes from the file, ranges of indices from what reads them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.ir import dtypes

BLOCK = 1 << 20  # elements of random data that are repeated: memory does not depend on the values
WINDOWS = 1 << 14
DATA = "weights.bin"
INLINE = 1024  # bytes: smaller tensors stay in the file, where shape inference reads them
_VARIANCE = 4  # the input of BatchNormalization that holds running variances
_TYPED = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")  # fields of a TensorProto


@dataclass(frozen=True, slots=True)
class Prepared:
    """The file to run. `filled` are how many tensors got random data, `nbytes` their size."""

    path: str
    filled: int = 0
    nbytes: int = 0


def prepare(path: str, folder: str) -> Prepared:
    """The model of `path` with all weights: itself where nothing is missing, else a copy in `folder`.

    Raises:
        ModelFileError: the file cannot be read as an ONNX model.
    """
    import numpy as np
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError, ValueError, RuntimeError) as error:
        raise ModelFileError(
            f"{path} cannot be read as an ONNX model",
            f"{(str(error).splitlines() or [type(error).__name__])[0]}.",
            "Check the file with onnx.checker.check_model.",
            code="SM151",
        ) from error
    home = os.path.dirname(os.path.abspath(path))
    tensors = list(_tensors(model.graph))
    missing = [t for t in tensors if _missing(t, home)]
    if not missing:
        return Prepared(path)
    lost = {id(t) for t in missing}
    for tensor in tensors:
        if tensor.data_location == onnx.TensorProto.EXTERNAL and id(tensor) not in lost:
            _load(tensor, home, path)
    positive = _variances(model.graph)
    total = 0
    noise = np.random.default_rng(0).standard_normal(BLOCK + WINDOWS, dtype=np.float32)
    with open(os.path.join(folder, DATA), "wb") as file:
        for number, tensor in enumerate(tensors):
            if id(tensor) in lost:
                # a window of its own: the runtime keeps one packed copy of weights with equal contents
                total += _fill(tensor, file, positive, noise[number % WINDOWS :][:BLOCK])
            elif len(tensor.raw_data) > INLINE:
                _externalise(tensor, file, tensor.raw_data)
    target = os.path.join(folder, "model.onnx")
    with open(target, "wb") as file:
        file.write(model.SerializeToString())
    return Prepared(target, len(missing), total)


def _tensors(graph: Any) -> Any:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == 4:
                yield attribute.t
            elif attribute.type == 5:
                yield from _tensors(attribute.g)


def _missing(tensor: Any, home: str) -> bool:
    """Whether a tensor has no contents, in the file or beside it."""
    dtype = dtypes.ONNX_CODES.get(tensor.data_type)
    if dtype is None or dtype is dtypes.string:
        return False
    size = dtype.nbytes(math.prod(tensor.dims))
    if tensor.data_location == 1:
        place = {entry.key: entry.value for entry in tensor.external_data}
        name = os.path.normpath(os.path.join(home, place.get("location", "")))
        if not name.startswith(home + os.sep) or not os.path.isfile(name):
            return True
        return os.path.getsize(name) < int(place.get("offset", 0)) + size
    if size == 0:
        return False
    return not tensor.raw_data and not any(len(getattr(tensor, field)) for field in _TYPED)


def _load(tensor: Any, home: str, path: str) -> None:
    from onnx.external_data_helper import load_external_data_for_tensor

    try:
        load_external_data_for_tensor(tensor, home)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelFileError(
            f"the external data of {path} cannot be read",
            f"Tensor '{tensor.name}': {error}.",
            "Put the data file beside the model, or leave it away: staticmem then uses random data.",
            code="SM151",
        ) from error
    tensor.data_location = 0
    del tensor.external_data[:]


def _variances(graph: Any) -> set[str]:
    """Tensors that must be positive: variances of norms."""
    names: set[str] = set()
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            names.update(node.input[_VARIANCE : _VARIANCE + 1])
        for attribute in node.attribute:
            if attribute.type == 5:
                names |= _variances(attribute.g)
    return names


def _fill(tensor: Any, file: Any, positive: set[str], noise: Any) -> int:
    """Random data for floating-point weights, zeros for indices and all else: they are in range wherever used."""
    import numpy as np

    dtype = dtypes.ONNX_CODES[tensor.data_type]
    numel = math.prod(tensor.dims)
    size = dtype.nbytes(numel)
    for name in _TYPED:
        tensor.ClearField(name)
    if dtype.name not in ("float16", "float32", "float64"):
        block = bytes(min(size, BLOCK))
    else:
        random = noise[: min(numel, BLOCK)]
        values = np.abs(random) + 0.5 if tensor.name in positive else random * 0.02
        block = values.astype(dtype.name).tobytes()
    if size <= INLINE:
        tensor.data_location = 0
        del tensor.external_data[:]
        tensor.raw_data = block[:size]
        return size
    _externalise(tensor, file, block, size)
    return size


def _externalise(tensor: Any, file: Any, block: bytes, size: int | None = None) -> None:
    """Writes `size` bytes of repeated `block` and points the tensor at them."""
    size = len(block) if size is None else size
    offset = file.tell()
    pad = -offset % 4096  # ORT maps external data; page boundaries let it
    file.write(bytes(pad))
    offset += pad
    left = size
    while left > 0:
        part = block if left >= len(block) else block[:left]
        file.write(part)
        left -= len(part)
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = 1
    for key, value in (("location", DATA), ("offset", str(offset)), ("length", str(size))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


# -- inputs ------------------------------------------------------------------------------------------------------------

# what hands indices on without changing their values
_PASS = ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Flatten", "Slice", "Expand", "Transpose", "Concat")


@dataclass(frozen=True, slots=True)
class RandomInput:
    """How to make an input: its dtype, sizes, and for integers the bound of its values (exclusive)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    high: int


def plan_inputs(graph: Any, shapes: Mapping[str, Sequence[int]]) -> list[RandomInput]:
    """Inputs of a GraphProto whose sizes are bound. Initializers that are listed as inputs are left to the file."""
    owned = {t.name for t in graph.initializer}
    planned: list[RandomInput] = []
    for proto in graph.input:
        if proto.name in owned or proto.type.WhichOneof("value") != "tensor_type":
            continue
        dtype = dtypes.ONNX_CODES.get(proto.type.tensor_type.elem_type, dtypes.float32)
        if proto.name not in shapes:
            continue
        shape = tuple(int(s) for s in shapes[proto.name])
        planned.append(RandomInput(proto.name, dtype.name, shape, _bound(graph, proto.name)))
    return planned


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
