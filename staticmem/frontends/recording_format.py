"""The document of a recording: what `staticmem.recording` writes and `frontends.recorded` reads.

JSON, packed with LZMA: programs of several modes are nearly the same text.

| key | content |
|---|---|
| `format`, `version` | `staticmem.recording` and a number: a reader takes no higher one |
| `torch`, `staticmem` | versions that recorded it |
| `graph` | fingerprint of the graph of the file that carries it (`fingerprint`) |
| `model` | class of the module |
| `loss` | whether the first output of the programs of training is the loss |
| `symbols` | name of each open size: smallest and largest value; null: no bound |
| `sizes` | the sizes of the example, and what the code asked of sizes (`frontends.traced_sizes`) |
| `bounds` | of a size that is in the data: `[shape, op]`, it is at most the number of elements of that shape |
| `inputs` | `[name, dtype, shape]`; shapes have integers and expressions of symbols as text |
| `parameters` | `[name, dtype, shape, requires_grad, index of the parameter whose storage it shares or -1]` |
| `buffers` | the same |
| `targets` | ATen targets, which ops name by their index |
| `stacks` | module calls `[index of the calling one or -1, path, class, call]` |
| `programs` | one for each mode: `training`, `amp` (a dtype or null), and the program |

A program has `ops`, `released` (values that Python lets go of after each op), `released_before`, `kept` (`[value,
dtype, shape, base]` from the call before; `base` is the value whose storage it shares or -1), `lasting` (values that
the module keeps when its forward has returned), `regions` (`[start, end, depth, reentrant, name]` of checkpoints),
`functions`, and `outputs`. Values are integers: inputs, parameters and buffers first. An op is `[target, stack, flags,
args, kwargs, outputs]`, and the dtypes and shapes of its results where no rule gives them.
"""

from __future__ import annotations

import base64
import json
import lzma
from typing import Any

from staticmem.errors import ModelFileError

FORMAT, VERSION = "staticmem.recording", 1
FUNCTION = "staticmem::function"
NO_GRAD = 1  # flag of an op: it runs under no_grad()
AUTOCAST = {2: "bfloat16", 4: "float16"}  # flags of an op: the dtype of the region of torch.autocast that it runs in
REF, SIZE, DTYPE, TEXT = "%", "=", ":", "'"  # the first character of an argument that is a string
# ops whose result has a size that is in the data: as `size` of the call, which the rules take
DATA_SIZED = frozenset(
    f"aten::{name}"
    for name in "nonzero argwhere masked_select index.Tensor _unique2 unique_dim unique_consecutive bincount".split()
)
MEMBER = "staticmem_recording.txt"  # extra file of a .pt2 archive
PROPERTY = "staticmem.recording"  # metadata property of a ModelProto
MAX_PACKED = 1 << 28  # bytes
MAX_BYTES = 1 << 30  # of the text: as the JSON of an archive (`export_program.MAX_JSON_BYTES`)
_MEMORY = 1 << 28  # bytes that the unpacker may take
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 24}]


def needs_shapes(target: str) -> bool:
    """Whether the results of an op are written with their shapes: no rule may know the op."""
    return not target.startswith("aten::")


def pack(document: Any) -> bytes:
    """The bytes of a document."""
    text = json.dumps(document, separators=(",", ":")).encode()
    return lzma.compress(text, format=lzma.FORMAT_XZ, filters=_FILTERS)


def unpack(data: bytes, path: str) -> Any:
    """The document in bytes.

    Raises:
        ModelFileError: they are damaged, or unpack to more than any recording.
    """
    try:
        if len(data) > MAX_PACKED:
            raise ValueError(f"it has {len(data):,} bytes")
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)
        text = decompressor.decompress(data, MAX_BYTES)
        if not decompressor.eof:
            raise ValueError("it ends too early, or unpacks to more than a recording has")
        document = json.loads(text)
    except (lzma.LZMAError, ValueError, EOFError, RecursionError, MemoryError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise damaged(path, "it is another document")
    return document


def damaged(path: str, why: str) -> ModelFileError:
    """The error for a recording that breaks this format."""
    return ModelFileError(
        f"the recording in {path} is damaged",
        f"Reason: {why[:160]}.",
        "Record the model again: staticmem export or staticmem annotate.",
        code="SM108",
    )


def to_text(data: bytes) -> str:
    """Packed bytes as a text: PyTorch reads extra files as UTF-8, and metadata properties are strings."""
    return base64.b64encode(data).decode()


def from_text(text: str, path: str) -> bytes:
    """The bytes in a metadata property."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise damaged(path, str(error)) from error
