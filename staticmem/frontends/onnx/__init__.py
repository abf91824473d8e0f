"""The ONNX frontend: `open_onnx` reads a file without its weights, `bind` gives the ATen graph at concrete sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from staticmem.frontends.onnx.wire import looks_like_onnx

if TYPE_CHECKING:
    from staticmem.frontends.onnx.model import OnnxModel

__all__ = ["looks_like_onnx", "open_onnx"]


def open_onnx(path: str) -> OnnxModel:
    """The model of an ONNX file.

    Raises:
        ModelFileError: the file cannot be read or is not an ONNX model.
    """
    from staticmem.frontends.onnx.guard import guarded
    from staticmem.frontends.onnx.model import OnnxModel
    from staticmem.frontends.onnx.reader import read

    proto = read(path)
    with guarded(path):
        return OnnxModel(path, proto, lambda: read(path))
