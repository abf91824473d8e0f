"""Whose fault a refusal is: the file's where `onnx.checker` refuses it too, else ours. Asked for a refusal only."""

from __future__ import annotations

import os
from functools import lru_cache

from staticmem.errors import StaticmemError
from staticmem.frontends.onnx import isolation

LARGEST = 256 << 20  # bytes of a file that the checker is asked about: it reads all of it
# what staticmem and the ONNX Runtime do without: contents in other files, shapes of results, an order of nodes
_HARMLESS = (
    "should be stored in", "external data", "Data of TensorProto", "Field 'shape' of 'type' is required",
    "topologically sorted",
)  # fmt: skip


def checked(path: str) -> str | None:
    """What `onnx.checker` says against a file; empty where it accepts it, None where it cannot tell."""
    try:
        stamp = os.stat(path)
    except (OSError, ValueError):
        return None  # a model in memory
    return _checked(path, stamp.st_size, stamp.st_mtime_ns) if stamp.st_size <= LARGEST else None


@lru_cache(16)
def _checked(path: str, _size: int, _modified: int) -> str | None:
    try:
        isolation.check(path)
    except isolation.RefusedError as error:
        text = " ".join(str(error).split())
        return None if any(word in text for word in _HARMLESS) else text[:200] or "no message"
    except isolation.FailedError:
        return None
    return ""


def judged(error: StaticmemError, path: str) -> StaticmemError:
    """An error of a kind that blames the file, with what `onnx.checker` says of it."""
    verdict = checked(path)
    if verdict is None:
        return error
    if verdict:
        why, hint = f"{error.why} onnx.checker refuses the file: {verdict.rstrip('.')}.", "Export the model again."
    else:
        why = f"{error.why} onnx.checker accepts the file: the fault is in how staticmem reads this operator."
        hint = "Report it with the file, or export the model without that node."
    return type(error)(error.what, why, hint, error.code)
