"""Small tensors that an ONNX file keeps in other files: sizes of the graph may depend on what is in them.

`onnx.save(..., save_as_external_data=True, size_threshold=0)` moves the constants of Reshape, Slice and Resize out with
the weights. A tensor of up to `SMALL` bytes, which would be read if it stood in the model, is read where it is too:
from a regular file in the model's folder or below, and never through a link that leads out of it (ADR 22). Where such
a tensor cannot be read and a size of the graph follows from it, the model is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.frontends.onnx.convert import SMALL
from staticmem.frontends.onnx.fold import FOLDED
from staticmem.ir import dtypes
from staticmem.ir.onnx_graph import Node, Subgraph

MOST = 16 << 20  # bytes of small tensors that are read of all files together; integers come first
FILES = 64  # files that are opened; exporters write one, or one for each tensor
EXTERNAL = 1  # TensorProto.DataLocation

# operator -> positions of inputs that decide the sizes of its results, or which way it takes (onnx/docs/Operators.md)
DECIDING: Mapping[str, tuple[int, ...]] = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1, 2), "Slice": (1, 2, 3, 4), "Pad": (1, 3), "Resize": (1, 2, 3),
    "Upsample": (1,), "Unsqueeze": (1,), "Squeeze": (1,), "Split": (1,), "SplitToSequence": (1,),
    "ConstantOfShape": (0,), "Range": (0, 1, 2), "OneHot": (1,), "TopK": (1,), "CenterCropPad": (1,),
    "AffineGrid": (1,), "MaxUnpool": (2,),
    "DFT": (1, 2), "STFT": (1, 3), "Loop": (0,), "HannWindow": (0,), "HammingWindow": (0,), "BlackmanWindow": (0,),
    "MelWeightMatrix": (0, 1), "Col2Im": (1, 2), "NonMaxSuppression": (2,), "SequenceAt": (1,), "If": (0,),
    **{f"Reduce{name}": (1,) for name in "Max Mean Min Prod Sum SumSquare L1 L2 LogSum LogSumExp".split()},
}  # fmt: skip


def read_small(model: Any, path: str | None) -> tuple[int, dict[str, str]]:
    """Puts small external tensors into a ModelProto; gives how many, and the names of those that could not be read, and
    why. `path`: of the model's file; None where it has none."""
    waiting = [
        (n, tensor) for n, tensor in _tensors(model.graph) if tensor.data_location == EXTERNAL and _bytes(tensor)
    ]
    missing: dict[str, str] = {}
    if not waiting:
        return 0, missing
    folder = _Folder(path)
    floating = (1, 10, 11, 16)
    try:
        for name, tensor in sorted(waiting, key=lambda pair: pair[1].data_type in floating):
            try:
                data = folder.read(tensor)
            except (OSError, ValueError) as error:
                missing[name] = getattr(error, "strerror", None) or str(error)
                continue
            del tensor.external_data[:]
            tensor.data_location = 0
            tensor.raw_data = data
    finally:
        folder.close()
    return len(waiting) - len(missing), missing


def _tensors(graph: Any) -> Iterator[tuple[str, Any]]:
    """Names and TensorProtos of initializers and constants of a GraphProto and the graphs within."""
    todo = [graph]
    while todo:
        graph = todo.pop()
        for tensor in graph.initializer:
            yield tensor.name, tensor
        for node in graph.node:
            if not node.attribute:
                continue
            for attribute in node.attribute:
                if attribute.type == 4 and node.op_type == "Constant" and node.output:
                    yield node.output[0], attribute.t
                elif attribute.type == 5:
                    todo.append(attribute.g)
                elif attribute.type == 10:
                    todo.extend(attribute.graphs)


def _bytes(tensor: Any) -> int:
    """Bytes of a tensor that is small, else 0."""
    dtype = dtypes.ONNX_CODES.get(tensor.data_type)
    if dtype is None or dtype is dtypes.string or any(size < 0 for size in tensor.dims):
        return 0
    size = dtype.nbytes(prod(tensor.dims))
    return size if size <= SMALL else 0


class _Folder:
    """Files beside a model."""

    def __init__(self, path: str | None) -> None:
        self.home = os.path.realpath(os.path.dirname(path) or ".") if path is not None else None
        self.open: dict[str, int] = {}
        self.read_bytes = 0

    def close(self) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)
        self.open = {}

    def read(self, tensor: Any) -> bytes:
        """The bytes of a tensor.

        Raises:
            OSError, ValueError: there is no such file, it is none that is read, or it is too short.
        """
        place = {entry.key: entry.value for entry in tensor.external_data}
        size, location = _bytes(tensor), place.get("location", "")
        start, length = int(place.get("offset", "0") or 0), int(place.get("length", size) or size)
        if length != size or start < 0:
            raise ValueError(f"its place has {length} bytes at {start}, and the tensor {size}")
        if self.read_bytes + size > MOST:
            raise ValueError(f"more than {MOST >> 20} MiB of small tensors are in other files")
        descriptor = self.descriptor(location)
        data = _pread(descriptor, size, start)
        if len(data) < size:
            raise ValueError(f"{location} ends before it")
        self.read_bytes += size
        return data

    def descriptor(self, location: str) -> int:
        opened = self.open.get(location)
        if opened is not None:
            return opened
        if self.home is None:
            raise ValueError("the model is no file, so nothing is beside it")
        parts = location.replace("\\", "/").split("/")
        if not location or "\0" in location or os.path.isabs(location) or ".." in parts or ":" in parts[0]:
            raise ValueError("its location is not below the folder of the model")
        path = os.path.realpath(os.path.join(self.home, location))
        if os.path.commonpath((path, self.home)) != self.home:
            raise ValueError(f"{location} is a link to another folder, and those are not followed")
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe or a device is not even opened
            raise ValueError(f"{location} is not an ordinary file")
        if len(self.open) >= FILES:
            raise ValueError(f"small tensors are in more than {FILES} files")
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # another one by now
            os.close(descriptor)
            raise ValueError(f"{location} is not an ordinary file")
        self.open[location] = descriptor
        return descriptor


def _pread(descriptor: int, size: int, start: int) -> bytes:
    if start > os.fstat(descriptor).st_size:
        return b""
    os.lseek(descriptor, start, os.SEEK_SET)
    return os.read(descriptor, size)


def check_sizes(path: str, nodes: Sequence[Node], constants: Iterable[str], missing: Mapping[str, str]) -> None:
    """Refuses a model in which a size follows from a tensor that could not be read. `constants`: names of initializers.

    Raises:
        ModelFileError: there is such a size; it names the tensor.
    """
    sources = {name: name if name in missing else "" for name in constants}
    deciding = _deciding(nodes, sources, missing)
    if deciding is not None:
        node, name = deciding
        raise ModelFileError(
            f"sizes of {path} follow from the tensor '{name}', which is in another file",
            f"{node.op} '{node.name or node.outputs[0]}' needs its contents, and it was not read: {missing[name]}.",
            "Put the file that has it beside the model, or export again with small tensors in the model"
            " (onnx.save with size_threshold=1024, the default).",
            code="SM177",
        )


def _deciding(nodes: Sequence[Node], sources: dict[str, str], missing: Mapping[str, str]) -> tuple[Node, str] | None:
    """The first node whose result sizes follow from a missing tensor, and that tensor. `known` has names of which the
    contents follow from constants and sizes: the missing tensor that they need, or nothing."""
    for node in nodes:
        for attr in node.attrs.values():
            for body in attr if isinstance(attr, tuple) else (attr,):
                if isinstance(body, Subgraph):
                    inner = {**sources, **{name: name if name in missing else "" for name in body.initializers}}
                    deciding = _deciding(body.nodes, inner, missing)
                    if deciding is not None:
                        return deciding
        if node.domain:
            continue
        for position in DECIDING.get(node.op, ()):
            name = sources.get(node.inputs[position], "") if position < len(node.inputs) else ""
            if name:
                return node, name
        if node.op in ("Shape", "Size", "Constant"):
            source = next((name for name in node.outputs if name in missing), "") if node.op == "Constant" else ""
        elif node.op in FOLDED and all(name in sources for name in node.inputs if name):
            source = next((sources[name] for name in node.inputs if sources.get(name)), "")
        else:
            continue
        sources.update(dict.fromkeys(node.outputs, source))
    return None
