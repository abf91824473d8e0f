"""Reader of torch.export archives (`.pt2`): a zip with JSON inside, read without torch and without any weight.

Source of the format: torch/_export/serde/schema.py (schema major 8) and torch/export/pt2_archive/constants.py. The
archive is untrusted: member sizes are bounded, nothing is unpickled, expressions are parsed by `ir.expressions`.

Which names of a `.pt2` file are one tensor: tied weights, and modules that are registered twice.

torch.export.save writes every storage once, and the config of the weights says which one a name has
(torch/export/pt2_archive/_package.py). Tensors on the meta device have no storage to tell them apart, so that
`staticmem export` adds a member of its own.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from staticmem import files
from staticmem.errors import ModelFileError
from staticmem.frontends import fields, recent, traced_sizes
from staticmem.frontends.carried import NO_GRAPH, STALE, of_archive
from staticmem.frontends.output_names import of_treespec
from staticmem.frontends.recorded import RecordedModel
from staticmem.frontends.recording_format import MEMBER
from staticmem.ir import dtypes, expressions
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Note
from staticmem.ir.model_file import InputSpec, ModelFile, SymbolRange, TracedSizes

SUPPORTED_MAJOR = 8
MAX_JSON_BYTES = 1 << 30  # the JSON of a 100,000-op graph is about 100 MB
_HEADER = 30  # bytes before the name of a member (APPNOTE.TXT 4.3.7, "local file header")
MAX_RATIO = 400  # JSON of this kind compresses 10-60 times; a bomb 1000 and more


def read_archive(path: str, keep: bool = False, recordings: bool = True) -> ExportedArchive | RecordedModel:
    """The model of a `.pt2` file: that of the recording which it carries, if it does. `keep`: the one that was read
    last, where all that is read of it has the same bytes. Without `recordings` the file's own graph is read.

    Raises:
        ModelFileError: not an archive of torch.export, or of a schema that this version does not know.
    """
    stamp = files.stamp(path) if keep else None
    try:
        with zipfile.ZipFile(path) as archive:
            name = _model_member(archive, path, recordings)
            key = _key(archive, name, path) if keep else None
            cached = recent.models.get(key) if key is not None else None
            if isinstance(cached, ExportedArchive | RecordedModel):
                recent.note(path, stamp, key)
                return cached
            text = _read_json(archive, name, path) if name else NO_GRAPH
            recorded, stale = of_archive(archive, text, path) if recordings else (None, False)
            if recorded is not None:
                if key is not None:
                    recorded.graphs = recent.Graphs()
                    recent.models.put(key, recorded)
                    recent.note(path, stamp, key)
                return recorded
            if not name:
                raise _without_graph(path)
            tied = tied_names(archive)
            traced = sizes(archive, path)
            document = _parsed(_renamed(text, traced.names), name, path)
    except zipfile.BadZipFile as error:
        raise ModelFileError(
            f"{path} is a damaged archive",
            f"It starts like a zip file, but {str(error)[0].lower() + str(error)[1:]}.",
            "Copy or export it again; it may have been cut off.",
            code="SM102",
        ) from error
    except (NotImplementedError, RuntimeError, EOFError, OSError, ValueError, zlib.error) as error:
        raise ModelFileError(
            f"{path} cannot be read", f"Reading it failed: {error}.", "Copy or export it again.", code="SM102"
        ) from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    major = version.get("major") if isinstance(version, dict) else None
    if major != SUPPORTED_MAJOR:
        raise ModelFileError(
            f"{path} has torch.export schema {major}",
            f"This version of staticmem reads schema major {SUPPORTED_MAJOR} (PyTorch 2.6 and later).",
            "Export the model with a PyTorch of that schema, or update staticmem.",
            code="SM103",
        )
    try:
        notes = (STALE,) if stale else ()
        model = ExportedArchive(path, document, tied=tied, sizes=traced, notes=notes)
        small = len(model.graph.get("nodes") or ()) <= recent.MOST_OPS
    except fields.MALFORMED as error:
        raise malformed(path, error) from error
    if key is not None and small:
        model.graphs = recent.Graphs()
        recent.models.put(key, model)
        recent.note(path, stamp, key)
    return model


def _key(archive: zipfile.ZipFile, name: str, path: str) -> Hashable:
    """What an archive is known by: the members that are read, as they are packed (a thirtieth of the JSON), and the
    sizes of all, which tell tensors apart. None for large ones."""
    infos = archive.infolist()
    read = [i for i in infos if i.filename == name or i.filename.endswith((*CONFIGS, f"/extra/{MEMBER}"))]
    if archive.fp is None or sum(max(i.file_size, i.compress_size) for i in read) > recent.LARGEST:
        return None
    stamps: list[Hashable] = [(i.filename, i.file_size) for i in infos]
    for info in read:
        archive.fp.seek(info.header_offset)
        header = archive.fp.read(_HEADER)  # its last two words are the lengths of the name and of an extra field
        if len(header) < _HEADER:
            return None
        archive.fp.seek(sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28)), os.SEEK_CUR)
        packed = recent.digest(archive.fp.read(info.compress_size))
        stamps.append((info.filename, info.compress_type, info.flag_bits, info.CRC, packed))
    return ("pt2", path, tuple(stamps))


def malformed(path: str, error: Exception) -> ModelFileError:
    """The error for an archive whose JSON breaks the schema."""
    return ModelFileError(
        f"{path} is not a well-formed torch.export archive",
        f"Its graph lacks or misplaces {str(error)[:160] or type(error).__name__}.",
        "Export the model again with torch.export.save.",
        code="SM104",
    )


def _without_graph(path: str) -> ModelFileError:
    return ModelFileError(
        f"{path} has a recording of the code and no graph",
        "PyTorch could not export the graph when the file was written, and this needs it.",
        "'staticmem analyze' and all that predicts read the recording; for the graph export the model again.",
        code="SM105",
    )


def _model_member(archive: zipfile.ZipFile, path: str, recordings: bool) -> str:
    """The member that has the graph; "" where there is a recording alone, and `recordings` are asked for."""
    names = [n for n in archive.namelist() if n.endswith(".json") and ("/models/" in n or n.startswith("models/"))]
    if names:
        return sorted(names)[0]
    if any(n.endswith(f"/extra/{MEMBER}") for n in archive.namelist()):
        if recordings:
            return ""
        raise _without_graph(path)
    if any(n.endswith("data.pkl") for n in archive.namelist()):
        from staticmem.frontends.other_inputs import EXPORT  # late: few files need it

        raise ModelFileError(
            f"{path} holds a pickle, not an exported graph",
            "It was written by torch.save or torch.jit.save; staticmem never unpickles a file.",
            EXPORT,
            code="SM105",
        )
    raise ModelFileError(
        f"{path} is a zip file without a graph",
        "A torch.export archive has a member models/model.json.",
        "Write it with torch.export.save from PyTorch 2.6 or later.",
        code="SM105",
    )


def _read_json(archive: zipfile.ZipFile, name: str, path: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ModelFileError(
            f"{path} cannot be read",
            f"Its member {name} is packed by a method that torch.export does not use.",
            "Write it with torch.export.save.",
            code="SM102",
        )
    if info.file_size > MAX_JSON_BYTES or info.file_size > MAX_RATIO * max(info.compress_size, 1024):
        raise ModelFileError(
            f"{path} unpacks to an absurd size",
            f"Its member {name} says {info.file_size:,} bytes, {info.compress_size:,} compressed.",
            "If this is a real model, report it.",
            code="SM106",
        )
    return archive.read(name)


def _renamed(text: bytes, names: Mapping[str, str]) -> bytes:
    """The JSON with its symbols as `staticmem export` calls the sizes."""
    if not names:
        return text
    symbol = re.compile(rb"\b(" + "|".join(names).encode() + rb")\b")
    return symbol.sub(lambda match: names[match[1].decode()].encode(), text)


def _parsed(text: bytes, name: str, path: str) -> Any:
    try:
        return json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelFileError(
            f"{path} has a damaged graph", f"{name} is not JSON: {error}.", "Export the model again.", code="SM104"
        ) from error


@dataclass
class ExportedArchive(ModelFile):
    """A `ModelFile` over the archive's JSON."""

    path: str
    document: Mapping[str, Any] = field(repr=False)
    format: str = "pt2"
    tied: Mapping[str, str] = field(default_factory=dict)  # names of one tensor, by the first of them
    graphs: recent.Graphs | None = field(default=None, repr=False)  # where the model is kept, so are its graphs
    sizes: TracedSizes = field(default_factory=TracedSizes)
    notes: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        module = fields.mapping(self.document["graph_module"])
        self.graph: Mapping[str, Any] = fields.mapping(module["graph"])
        self.signature: Mapping[str, Any] = fields.mapping(module["signature"])
        self.tensors: Mapping[str, Any] = fields.mapping(self.graph["tensor_values"])
        self.producer = f"torch.export {self.document.get('torch_version', '')}".strip()
        self.symbols: dict[str, SymbolRange] = {}
        for name, bounds in fields.mapping(self.document.get("range_constraints") or {}).items():
            low, high = _bound(bounds, "min_val"), _bound(bounds, "max_val")
            self.symbols[name] = SymbolRange(max(self.sizes.least.get(name, low or 1), 1), high)
        self.inputs = tuple(self._input(name) for name in self._user_inputs())
        self.output_names = self._output_names(module)

    @staticmethod
    def _output_names(module: Mapping[str, Any]) -> list[str]:
        """What the model's outputs are called, as far as the signature of the call of the whole model says it."""
        calls = fields.items(module.get("module_call_graph") or [])
        signature = fields.mapping(calls[0]).get("signature") if calls else None
        specification = fields.mapping(signature).get("out_spec") if signature is not None else None
        return of_treespec(specification) if specification else []

    def _user_inputs(self) -> list[str]:
        names = []
        for spec in fields.items(self.signature["input_specs"]):
            kind, body = fields.only(spec)
            if kind != "user_input":
                continue
            kind, value = fields.only(body["arg"])
            if kind == "as_tensor":
                names.append(fields.text(value["name"]))
        return names

    def _input(self, name: str) -> InputSpec:
        meta = self.tensors[name]
        shape: list[int | str] = []
        for axis, size in enumerate(fields.items(meta["sizes"])):
            if "as_int" in size:
                shape.append(fields.size(size["as_int"]))
                continue
            expression = expressions.parse(fields.text(size["as_expr"]["expr_str"]))
            # a derived input size (2*s0) has a name of its own; the binder checks it against its symbols
            symbol = expression if isinstance(expression, str) else f"{name}[{axis}]"
            shape.append(symbol)
            self.symbols.setdefault(symbol, SymbolRange())
        return InputSpec(name, dtype_of(meta["dtype"]), tuple(shape))


def _bound(bounds: Any, key: str) -> int | None:
    """One end of a symbol's range; None where there is none."""
    value = fields.mapping(bounds).get(key)
    if value is None or (type(value) is int and abs(value) >= fields.MAX_INTEGER):
        return None
    return fields.integer(value)


def dtype_of(code: Any) -> DType:
    """The element type of a `ScalarType` number."""
    return dtypes.PT2_CODES[fields.integer(code)]


CONFIG = "data/weights/model_weights_config.json"
TIED = "staticmem_tied.json"  # a member under `extra/`: {name: the first name of the same tensor}
CONFIGS = (CONFIG, f"/extra/{TIED}", f"/extra/{traced_sizes.NAME}")  # ends of the names of members that are read here
MAX_BYTES = 1 << 28  # of JSON; larger lists of weights are no real model's


def tied_names(archive: zipfile.ZipFile) -> dict[str, str]:
    """Names of parameters and buffers that are the tensor of an earlier name, by that name; {} where nothing tells."""
    try:
        return {**_group_by_storage(archive), **_written(archive)}
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


def _group_by_storage(archive: zipfile.ZipFile) -> dict[str, str]:
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
