"""Which names of a `.pt2` file are one tensor: tied weights, and modules that are registered twice.

torch.export.save writes every storage once, and the config of the weights says which one a name has
(torch/export/pt2_archive/_package.py). Tensors on the meta device have no storage to tell them apart, so that
`staticmem export` adds a member of its own.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from typing import Any

from staticmem.frontends import fields, traced_sizes
from staticmem.ir.model_file import TracedSizes

CONFIG = "data/weights/model_weights_config.json"
TIED = "staticmem_tied.json"  # a member under `extra/`: {name: the first name of the same tensor}
CONFIGS = (CONFIG, f"/extra/{TIED}", f"/extra/{traced_sizes.NAME}")  # ends of the names of members that are read here
MAX_BYTES = 1 << 28  # of JSON; larger lists of weights are no real model's


def tied_names(archive: zipfile.ZipFile) -> dict[str, str]:
    """Names of parameters and buffers that are the tensor of an earlier name, by that name; {} where nothing tells."""
    try:
        return {**_by_storage(archive), **_written(archive)}
    except (*fields.MALFORMED, ValueError, KeyError, RecursionError):
        return {}  # it only helps: without it every name counts


def sizes(archive: zipfile.ZipFile, path: str) -> TracedSizes:
    """What `staticmem export` wrote of open sizes; nothing in other files."""
    for info in archive.infolist():
        if info.filename.endswith(f"/extra/{traced_sizes.NAME}") and info.file_size <= traced_sizes.MAX_CHARACTERS:
            return traced_sizes.read(archive.read(info).decode(), path)
    return TracedSizes()


def tied_tensors(state: Mapping[str, Any]) -> dict[str, str]:
    """The same of a state dict in memory; {} where a storage without memory stands for tensors of several shapes, as
    `torch.export.load` makes of a file without weights."""
    shapes: dict[int, Any] = {}
    for tensor in state.values():
        key = tensor.untyped_storage()._cdata
        if tensor.is_meta and shapes.setdefault(key, tensor.shape) != tensor.shape:
            return {}
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and first.setdefault(place, name) != name:
            tied[name] = first[place]
    return tied


def _member(archive: zipfile.ZipFile, ending: str) -> Any:
    for info in archive.infolist():
        if info.filename.endswith(ending) and info.file_size <= MAX_BYTES:
            return json.loads(archive.read(info))
    return {}


def _by_storage(archive: zipfile.ZipFile) -> dict[str, str]:
    sizes = {info.filename.rpartition("/")[2]: info.file_size for info in archive.infolist()}
    first: dict[tuple[str, str], str] = {}
    tied: dict[str, str] = {}
    for name, entry in fields.mapping(_member(archive, CONFIG).get("config") or {}).items():
        path = fields.text(entry["path_name"])
        if sizes.get(path):  # none of a tensor on the meta device
            key = path, json.dumps({k: v for k, v in entry["tensor_meta"].items() if k != "requires_grad"})
            if first.setdefault(key, name) != name:
                tied[name] = first[key]
    return tied


def _written(archive: zipfile.ZipFile) -> dict[str, str]:
    return {fields.text(k): fields.text(v) for k, v in fields.mapping(_member(archive, f"/extra/{TIED}")).items()}
