"""The ONNX frontend: `open_onnx` reads a file without its weights, `bind` gives the ATen graph at concrete sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from staticmem.frontends.onnx.wire import looks_like_onnx

if TYPE_CHECKING:
    from staticmem.frontends.onnx.model import OnnxModel
    from staticmem.frontends.recorded import RecordedModel

__all__ = ["looks_like_onnx", "open_onnx"]


def open_onnx(path: str, keep: bool = False, recordings: bool = True) -> OnnxModel | RecordedModel:
    """The model of an ONNX file: that of the recording which it carries, if it does and `recordings` are asked for.
    `keep`: the one that was read last, where it has the same bytes without weights.

    Raises:
        ModelFileError: the file cannot be read or is not an ONNX model.
    """
    from staticmem import files
    from staticmem.frontends import recent
    from staticmem.frontends.carried import STALE, of_proto
    from staticmem.frontends.onnx.model import OnnxModel
    from staticmem.frontends.onnx.reader import guarded, parse, read, stripped

    stamp = files.stamp(path) if keep else None
    data = stripped(path)
    keep = keep and len(data) <= recent.LARGEST
    key = ("onnx", path, recent.digest(data), recordings) if keep else None
    cached: Any = recent.models.get(key) if keep else None  # the key is of an ONNX file
    if cached is not None:
        recent.note(path, stamp, key)
        return cached  # type: ignore[no-any-return]
    proto = parse(data, path)
    del data  # a large graph needs the memory
    recorded, stale = of_proto(proto, path) if recordings else (None, False)
    if recorded is not None:
        if keep:
            recorded.graphs = recent.Graphs()
            recent.models.put(key, recorded)
            recent.note(path, stamp, key)
        return recorded
    from staticmem.frontends.onnx.external import read_small

    with guarded(path):
        count, missing = read_small(proto, path)
        keep = keep and not count  # the digest is of this file alone
        model = OnnxModel(path, proto, lambda: read(path), missing)
        model.notes = (*model.notes, *((STALE,) if stale else ()))
    if keep and len(model.nodes) <= recent.MOST_OPS:
        model.graphs = recent.Graphs()
        recent.models.put(key, model)
        recent.note(path, stamp, key)
    return model
