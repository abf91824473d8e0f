"""The headers of a checkpoint's safetensors files: names, dtypes and shapes of its tensors, without the tensors.

They are hostile input, read without the package safetensors. Format: 8 bytes with the length of a JSON text, little
endian, then the text (https://huggingface.co/docs/safetensors/index#format). `recording.hub` compares them with
the architecture that is built.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from staticmem import files

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LENGTH = 8  # bytes of the length
LARGEST = 100_000_000  # bytes of a header, as the package safetensors has it (MAX_HEADER_SIZE)
LARGEST_INDEX = 32 << 20  # bytes: 700 for each of 40,000 tensors
MOST_FILES = 2000
MOST_TENSORS = 1 << 20
# bits of an element; source: safetensors 0.8, `Dtype` in src/tensor.rs
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
TORCH = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}  # those that models are loaded in
_FILE = re.compile(r"[A-Za-z0-9][\w.-]{0,199}\.safetensors", re.ASCII)


class Tensor(NamedTuple):
    """One tensor of a checkpoint; `dtype` by its name in the format."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.elements * _BITS[self.dtype] // 8


def header_length(start: bytes) -> int:
    """The length of the text, by the first bytes of a file.

    Raises:
        ValueError: it is no such file.
    """
    length = int.from_bytes(start[:LENGTH], "little")
    if len(start) < LENGTH or not 2 <= length <= LARGEST:
        raise ValueError("its first bytes are no length of a header")
    return length


def tensors_of(text: bytes) -> list[Tensor]:
    """The tensors of a header, in the order in which they lie in the file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or len(content) > MOST_TENSORS:
            raise ValueError("its header is no table of tensors")
        rows = [(*_offsets(row), _tensor(name, row)) for name, row in content.items() if name != "__metadata__"]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from error
    rows.sort(key=lambda row: row[:2])
    if any(end - start != tensor.size for start, end, tensor in rows):
        raise ValueError("its header is damaged: a tensor has not the bytes of its shape")
    return [tensor for _, _, tensor in rows]


def _offsets(row: Mapping[str, Any]) -> tuple[int, int]:
    start, end = row["data_offsets"]
    if type(start) is not int or type(end) is not int or not 0 <= start <= end:
        raise ValueError("its header is damaged: places in the file that are none")
    return start, end


def _tensor(name: str, row: Mapping[str, Any]) -> Tensor:
    shape, dtype = row["shape"], row["dtype"]
    if dtype not in _BITS or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape) or len(shape) > 64:
        raise ValueError(f"its header has a tensor of the dtype '{str(dtype)[:20]}' or of a shape that is none")
    return Tensor(name, dtype, tuple(shape))


def files_of_index(text: bytes) -> list[str]:
    """The files that an index names.

    Raises:
        ValueError: it is damaged.
    """
    try:
        names = sorted(set(json.loads(text)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{INDEX} is damaged ({type(error).__name__})") from error
    if len(names) > MOST_FILES or not all(isinstance(name, str) and _FILE.fullmatch(name) for name in names):
        raise ValueError(f"{INDEX} names files that are none of a checkpoint")
    return names


def tensors_of_folder(folder: str) -> list[Tensor]:
    """The tensors of a checkpoint that lies in a folder, none where it has none.

    Raises:
        ValueError: a header is damaged, or a file is not there.
    """
    try:
        if os.path.isfile(os.path.join(folder, SINGLE)):
            names = [SINGLE]
        elif os.path.isfile(index := os.path.join(folder, INDEX)):
            names = files_of_index(files.read(index, LARGEST_INDEX))
        else:
            return []
        return [tensor for name in names for tensor in _of_file(os.path.join(folder, name))]
    except OSError as error:
        raise ValueError(f"{error.filename or folder} cannot be read: {error.strerror}") from error


def _of_file(path: str) -> list[Tensor]:
    with files.opened(path, seekable=True) as file:
        return tensors_of(file.read(header_length(file.read(LENGTH))))


def loaded_dtype(tensors: Iterable[Tensor]) -> str | None:
    """The dtype in which a model is loaded where the config has none: of those that a model can be in, the one with the
    most bytes of the checkpoint. Weights in 8 bits and fewer are not loaded in their type, and their scales are small.

    transformers takes that of the first floating weight, by name (5.24, modeling_utils.py, `_get_dtype`,
    `get_state_dict_dtype`), and takes all others to have the same.
    """
    sizes = Counter[str]()
    for tensor in tensors:
        if tensor.dtype in TORCH:
            sizes[TORCH[tensor.dtype]] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else None
