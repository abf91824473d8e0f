"""The ONNX frontend: `open_onnx` reads a file without its weights, `bind` gives the ATen graph at concrete sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from staticmem.frontends.onnx.wire import looks_like_onnx

if TYPE_CHECKING:
    from staticmem.frontends.onnx.model import OnnxModel

__all__ = ["looks_like_onnx", "open_onnx"]


def open_onnx(path: str, keep: bool = False) -> OnnxModel:
    """The model of an ONNX file. `keep`: the one that was read last, where it has the same bytes without weights.

    Raises:
        ModelFileError: the file cannot be read or is not an ONNX model.
    """
    from staticmem import files
    from staticmem.frontends import recent
    from staticmem.frontends.onnx.model import OnnxModel
    from staticmem.frontends.onnx.reader import guarded, parse, read, stripped

    stamp = files.stamp(path) if keep else None
    data = stripped(path)
    keep = keep and len(data) <= recent.LARGEST
    key = ("onnx", path, recent.digest(data)) if keep else None
    known = recent.models.get(key) if keep else None
    if isinstance(known, OnnxModel):
        recent.note(path, stamp, key)
        return known
    proto = parse(data, path)
    del data  # a large graph needs the memory
    with guarded(path):
        model = OnnxModel(path, proto, lambda: read(path))
    if keep and len(model.nodes) <= recent.MOST_OPS:
        model.graphs = recent.Graphs()
        recent.models.put(key, model)
        recent.note(path, stamp, key)
    return model
