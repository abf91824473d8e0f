"""Puts recordings into files that have a graph."""

from __future__ import annotations

from typing import Any

from staticmem.errors import StaticmemError
from staticmem.frontends import carried


def with_recording(data: bytes, kind: str, document: dict[str, Any]) -> bytes:
    """The bytes of a file, `.pt2` or `.onnx`, that carries the recording, in place of the one that it has.

    All else in the file stays as it is.
    """
    if kind == ".pt2":
        return carried.into_archive(data, document)
    import onnx

    proto = onnx.ModelProto()
    proto.ParseFromString(data)
    carried.into_proto(proto, document)
    return bytes(proto.SerializeToString(deterministic=True))


def alone(document: dict[str, Any], kind: str, error: StaticmemError) -> bytes:
    """The bytes of a file that has a recording and no graph.

    Raises:
        StaticmemError: `error`, which says why there is no graph, for a format that cannot be without.
    """
    if kind != ".pt2":
        error.hint = "An .onnx is its graph. 'staticmem analyze' needs none: write the recording with -o model.pt2."
        raise error
    return carried.archive_of(document)
