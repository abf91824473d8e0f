"""Reads an ONNX file into a ModelProto without its weights.

Whose fault a refusal is: the file's where `onnx.checker` refuses it too, else ours. Asked for a refusal only.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from staticmem.errors import ModelFileError, StaticmemError
from staticmem.frontends.onnx import isolation, wire

ModelProto = Any
RELEASE = 4 << 20  # bytes of a file that are passed before their pages are let go


def read(path: str) -> ModelProto:
    """The model of a file, large tensor payloads left out. Of external data small tensors are read.

    Raises:
        ModelFileError: the file cannot be read or is not an ONNX model.
    """
    from staticmem.frontends.onnx.external import read_small

    proto = parse(stripped(path), path)
    read_small(proto, path)
    return proto


def stripped(path: str) -> bytes:
    """The bytes of a file's ModelProto without large tensor payloads.

    Raises:
        ModelFileError: the file cannot be read or is not a protobuf message.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelFileError(f"{path} is empty", "It has no bytes.", "Export the model again.", code="SM150")
            # not closed by hand: slices of it live in exceptions' frames; it goes when they go
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            data = wire.strip(memoryview(mapped), _release(mapped))
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be read", f"{error.strerror or error}.", "Check the path.", code="SM101"
        ) from error
    return data


def _release(mapped: mmap.mmap) -> Callable[[int], None]:
    """Lets pages go that were passed: the kernel maps many around those that are read, and they count as memory."""
    released = 0

    def passed(end: int) -> None:
        nonlocal released
        end -= end % mmap.PAGESIZE
        if end - released >= RELEASE and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, released, end - released)
            released = end

    return passed


def parse(data: bytes, path: str = "the file") -> ModelProto:
    """A ModelProto of stripped bytes, checked for what the later stages rely on."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, ValueError, RuntimeError) as error:
        raise wire.damaged(f"Its protobuf message cannot be decoded ({error}).") from error
    if not model.HasField("graph") or not (model.graph.node or model.graph.output or model.graph.input):
        raise ModelFileError(
            f"{path} is not an ONNX model",
            "Its protobuf message has no graph.",
            "Give a .onnx file that torch.onnx.export or another exporter wrote.",
            code="SM153",
        )
    return model


# what damaged strings, missing fields and absurd sizes raise in code that relies on the rules
BROKEN = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RecursionError, RuntimeError)


@contextmanager
def guarded(path: str) -> Iterator[None]:
    """Turns what a malformed graph raises, wherever in the reading that shows, into a `ModelFileError`.

    The cause stays chained for whoever debugs it.
    """
    try:
        yield
    except Exception as error:
        of_onnx = type(error).__module__.startswith(("onnx.", "google.protobuf."))  # their own kinds, of C++ too
        if not isinstance(error, BROKEN) and not of_onnx:
            raise
        text = str(error).splitlines()[0][:160] if str(error) else "no further message"
        refusal = ModelFileError(
            f"the graph of {path} cannot be understood",
            f"Something in it is against the rules of ONNX or those of staticmem ({type(error).__name__}: {text}).",
            "Check it with onnx.checker.check_model, and report it if the checker accepts it.",
            code="SM157",
        )
        raise judged(refusal, path) from error


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
