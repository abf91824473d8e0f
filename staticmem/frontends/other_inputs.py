"""What people give in place of a model file, and what they can do: files of other formats, and names of no file.

The content of a file decides what it is. Where the content has no mark, the suffix of its name only decides the advice.
"""

from __future__ import annotations

import difflib
import os
import re

from staticmem.errors import ModelFileError, closest
from staticmem.frontends.architectures import CARRIED, CONFIG, HUB, PACKAGES, is_offline

EXPORT = "Export the model from its code: staticmem export model.py:FACTORY -o model.pt2 (or torch.onnx.export)."
_CONFIG = "Give its config.json, if it is a model of transformers; or export the graph with 'staticmem export'."
_KERAS = "Convert it to ONNX, for example with tf2onnx."
_BEFORE_ENGINE = "Give the ONNX file or the PyTorch code that the engine was built from."
_PICKLE = "a pickle (torch.save?); staticmem never unpickles a file"

# By first bytes: what it is, and what to do. The signatures are those of the formats' own specifications.
_BY_CONTENT: tuple[tuple[bytes, str, str], ...] = (
    (b"GGUF", "a GGUF file: weights without a graph", _CONFIG),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras?)", _KERAS),
    (b"\x80\x02", _PICKLE, EXPORT),
    (b"\x80\x04", _PICKLE, EXPORT),
    (b"\x80\x05", _PICKLE, EXPORT),
    (b"\x1f\x8b", "a gzip file", "Unpack it first."),
    (b"BZh", "a bzip2 file", "Unpack it first."),
    (b"\x7fELF", "a program", EXPORT),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "Fetch it: git lfs pull."),
)

# By the end of the name, where the content says nothing
_BY_SUFFIX: tuple[tuple[tuple[str, ...], str, str], ...] = (
    ((".safetensors",), "a file of weights (safetensors), without a graph", _CONFIG),
    ((".gguf",), "a GGUF file: weights without a graph", _CONFIG),
    ((".engine", ".plan", ".trt"), "an engine of TensorRT, compiled for one GPU", _BEFORE_ENGINE),
    ((".tflite",), "a model of TensorFlow Lite", "Convert it to ONNX: python -m tf2onnx.convert --tflite FILE."),
    ((".keras", ".h5", ".hdf5"), "a model of Keras", _KERAS),
    ((".pb",), "a graph of TensorFlow", _KERAS),
    ((".mlmodel", ".mlpackage"), "a model of Core ML", EXPORT),
    ((".onnx.data", ".onnx_data", ".data"), "the weights of an ONNX model", "Give the .onnx file beside it."),
    ((".pt", ".pth", ".ckpt", ".bin"), "a file of PyTorch, likely weights (a state_dict), without a graph", EXPORT),
)


def refused_file(path: str, head: bytes) -> ModelFileError | None:
    """The error for a file whose first bytes are those of another format; None where they are not known."""
    for magic, what, hint in _BY_CONTENT:
        if head.startswith(magic):
            return _no_graph(path, f"It is {what}.", hint)
    if head[4:8] == b"TFL3":  # the FlatBuffers identifier of TensorFlow Lite's schema
        return _find_advice(".tflite", path)
    if head[:2] == b"PK" and head[30:43] == b"metadata.json":  # the first member of the zip that Keras 3 writes
        return _find_advice(".keras", path)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:
        # safetensors: the length of the header, then the header in JSON, of at most 100 MB
        return _find_advice(".safetensors", path)
    return None


def unknown_file(path: str, head: bytes) -> ModelFileError:
    """The error for a file that is no graph and has no known mark."""
    by_suffix = _find_advice(os.path.basename(path).lower(), path)
    if by_suffix is not None:
        return by_suffix
    if path.lower().endswith(".py"):
        return _no_graph(path, "It is Python code, which only 'staticmem export' runs.", _write_export_code(path))
    try:
        head.decode()
        text = b"\x00" not in head
    except UnicodeDecodeError as error:
        text = error.start > len(head) - 4  # a character cut at the end
    what = "It is a text file." if text else "It is neither an ONNX model nor an archive of torch.export."
    return _no_graph(path, what, EXPORT)


def missing_file(path: str) -> ModelFileError:
    """The error for a path where nothing is: a file with a similar name, or what its form suggests."""
    what = f"{path} does not exist"
    near = _similar_file(path)
    if near:
        return ModelFileError(what, "There is no such file.", f"Did you mean '{near}'?", code="SM101")
    code = re.fullmatch(r"(.+\.py):\w+", path)
    if code is not None:
        why = "It names a function in a file of Python code, which only 'staticmem export' runs."
        return ModelFileError(what, why, _write_export_code(path), code="SM101")
    name = re.fullmatch(r"(\w+):(.+)", path)
    meant = closest(name[1], (*PACKAGES, CARRIED, HUB)) if name is not None else ""
    if name is not None and meant:
        return ModelFileError(what, "There is no such file.", meant.replace("'?", f":{name[2]}'?"), code="SM101")
    if re.match(r"https?://", path):
        why = "It is an address, and nothing is fetched from the network."
        return ModelFileError(what, why, "Download the file, and give its path.", code="SM101")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) and not path.lower().endswith((".onnx", ".pt2")):
        why = "A model of the Hugging Face Hub is asked for by its name: its config, no weights."
        hint = f"Give hf:{path} (pip install 'staticmem[transformers,hub]')."
        if is_offline():
            hint = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so nothing is asked. Give the path of a config.json."
        return ModelFileError(what, why, hint, code="SM101")
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_]*", path):
        hint = f"A model of a package has its name before it: torchvision:{path}, timm:{path}; example: models:resnet50"
        return ModelFileError(what, "There is no such file.", hint, code="SM101")
    if path.partition(",")[0].endswith(CONFIG) and os.path.exists(path.partition(",")[0]):
        hint = f"Options stand after the name of a model: transformers:{path}"
        return ModelFileError(what, "There is no such file.", hint, code="SM101")
    return ModelFileError(what, "There is no such file.", "Check the path.", code="SM101")


def _no_graph(path: str, why: str, hint: str) -> ModelFileError:
    return ModelFileError(f"{path} is not a model graph", why, hint, code="SM107")


def _find_advice(name: str, path: str) -> ModelFileError | None:
    for suffixes, what, hint in _BY_SUFFIX:
        if name.endswith(suffixes):
            return _no_graph(path, f"It is {what}.", hint)
    return None


def _write_export_code(path: str) -> str:
    target = path if ":" in path else f"{path}:FUNCTION"
    return f"Export what the function returns: staticmem export {target} -o model.pt2"


def _similar_file(path: str) -> str:
    """A model file with a similar name in the same folder."""
    folder, name = os.path.split(path)
    try:
        names = [n for n in os.listdir(folder or ".") if n.endswith((".onnx", ".pt2"))]
    except OSError:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return os.path.join(folder, close[0]) if close else ""
