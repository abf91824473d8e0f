"""Puts recordings into files that have a graph."""

from __future__ import annotations

from typing import Any

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
