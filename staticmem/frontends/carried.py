"""Recordings in model files: where a format keeps one, and whether it is of the graph that the file has.

- `.onnx`: a metadata property of the ModelProto, packed and in base64.
- `.pt2`: an extra file, the same. Where the code can be recorded and not exported, the archive has nothing else.

A recording has a fingerprint of the graph beside which it was written. A tool that changes the graph and keeps the
metadata (an optimiser, a quantiser) leaves a recording of another graph, which is not used.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import TYPE_CHECKING, Any

from staticmem.frontends import recording_format as written
from staticmem.ir.graph import Note

if TYPE_CHECKING:
    from staticmem.frontends.recorded import RecordedModel

NO_GRAPH = b""  # the JSON of the graph of an archive that has none
ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes at every export


def fingerprint_of_json(text: bytes) -> str:
    """Of the graph of an archive: its JSON."""
    return _digest(hashlib.sha256(text))


def fingerprint_of_proto(graph: Any) -> str:
    """Of a GraphProto: its nodes, inputs and outputs, and names and sizes of its initializers. Metadata, documentation,
    sizes of values and contents of weights do not count: tools add and strip them without changing the graph."""
    digest = hashlib.sha256()

    def add(*texts: str) -> None:
        digest.update("\x00".join(texts).encode() + b"\x01")

    for value in (*graph.input, *graph.output):
        add(value.name)
    for tensor in graph.initializer:
        add(tensor.name, str(tensor.data_type), *map(str, tensor.dims))
    for node in graph.node:
        add(node.op_type, node.domain, *node.input, "", *node.output)
        for attribute in sorted(node.attribute, key=lambda a: a.name):
            add(
                attribute.name,
                str(attribute.i),
                str(attribute.f),
                *map(str, attribute.ints),
                *map(str, attribute.floats),
            )
            digest.update(attribute.s)
            if attribute.HasField("g"):
                add(fingerprint_of_proto(attribute.g))
    return _digest(digest)


def _digest(digest: Any) -> str:
    """Half of it: it tells changes, and keeps out nobody who means harm."""
    return f"sha256:{digest.hexdigest()[:32]}"


def of_proto(proto: Any, path: str) -> tuple[RecordedModel | None, bool]:
    """The model that a ModelProto carries a recording of, if it does. Second: there is a recording of another graph."""
    text = next((p.value for p in proto.metadata_props if p.key == written.PROPERTY), None)
    if text is None:
        return None, False
    from staticmem.frontends.recorded import RecordedModel  # few files carry one

    document = written.unpack(written.from_text(text, path), path)
    if document.get("graph") == fingerprint_of_proto(proto.graph):
        return RecordedModel(path, document, "onnx"), False
    return None, True


def of_archive(archive: zipfile.ZipFile, graph: bytes, path: str) -> tuple[RecordedModel | None, bool]:
    """The same of an archive; `graph` is the JSON of its graph, NO_GRAPH where it has none. Second: there is a
    recording of another graph."""
    for info in archive.infolist():
        if info.filename.endswith(f"/extra/{written.MEMBER}"):
            if info.file_size > written.MAX_PACKED:
                raise written.damaged(path, f"it has {info.file_size:,} bytes")
            text = archive.read(info).decode("ascii", "replace")
            document = written.unpack(written.from_text(text, path), path)
            if document.get("graph") == fingerprint_of_json(graph):
                from staticmem.frontends.recorded import RecordedModel

                return RecordedModel(path, document, "pt2"), False
            return None, True
    return None, False


STALE = Note(
    "warning",
    "SM327",
    "the recording in the file is of another graph (a tool has changed the file since), and is not used: record it "
    "again with staticmem annotate",
)


def into_archive(data: bytes, document: dict[str, Any]) -> bytes:
    """The bytes of an archive with a recording, in place of the one that it has and of sizes, which it knows."""
    from staticmem.frontends import traced_sizes  # exports alone write one

    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(packed, "w") as target:
        replaced = (f"/extra/{written.MEMBER}", f"/extra/{traced_sizes.NAME}")
        names = [name for name in source.namelist() if not name.endswith(replaced)]
        graph = next(name for name in sorted(names) if name.endswith(".json") and "/models/" in f"/{name}")
        document["graph"] = fingerprint_of_json(source.read(graph))
        root = graph.partition("models/")[0]
        for name in (*names, f"{root}extra/{written.MEMBER}"):
            info = zipfile.ZipInfo(name, ZIP_DATE)
            info.compress_type = source.getinfo(name).compress_type if name in names else zipfile.ZIP_DEFLATED
            content = source.read(name) if name in names else written.to_text(written.pack(document)).encode()
            target.writestr(info, content, compresslevel=9)
    return packed.getvalue()


def archive_of(document: dict[str, Any]) -> bytes:
    """The bytes of an archive that has a recording and no graph."""
    document["graph"] = fingerprint_of_json(NO_GRAPH)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as target:
        members = {
            "archive_format": b"pt2",
            f"extra/{written.MEMBER}": written.to_text(written.pack(document)).encode(),
        }
        for name, content in members.items():
            info = zipfile.ZipInfo(f"model/{name}", ZIP_DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(info, content, compresslevel=9)
    return packed.getvalue()


def into_proto(proto: Any, document: dict[str, Any]) -> None:
    """Puts a recording into a ModelProto, in place of the one that it has."""
    document["graph"] = fingerprint_of_proto(proto.graph)
    kept = [(p.key, p.value) for p in proto.metadata_props if p.key != written.PROPERTY]
    del proto.metadata_props[:]
    for key, value in (*kept, (written.PROPERTY, written.to_text(written.pack(document)))):
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
