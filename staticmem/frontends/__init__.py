"""Frontends: a file becomes a `ModelFile`. What it is decides its content, never its name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from staticmem import files
from staticmem.errors import ModelFileError

if TYPE_CHECKING:
    from staticmem.frontends.export_program import ExportedArchive
    from staticmem.frontends.onnx.decode import Decoded
    from staticmem.frontends.onnx.model import OnnxModel
    from staticmem.ir.graph import Graph
    from staticmem.ir.model_file import Binding, ModelFile

HEAD = 4096  # bytes that tell what a file is


def open_model(path: str, recordings: bool = True) -> ModelFile:
    """The model in a file: ONNX, or an archive of torch.export; that of a recording which the file carries, if
    `recordings` are asked for. The last few are kept (`frontends.recent`). `models:NAME` is a file of staticmem's own.

    Raises:
        ModelFileError: nothing is there, it cannot be read, or it is no graph that staticmem reads.
    """
    from staticmem.frontends import recent
    from staticmem.frontends.architectures import CARRIED, carried_file

    if path.startswith(f"{CARRIED}:"):
        path = carried_file(path)
    opened_before = recent.unchanged(path) if recordings else None
    if opened_before is not None:
        return opened_before
    from staticmem.frontends.other_inputs import refused_file, unknown_file

    head = _head(path)
    refused = refused_file(path, head)
    if refused is not None:
        raise refused
    if head.startswith(b"PK"):
        from staticmem.frontends.export_program import read_archive

        return read_archive(path, keep=recordings, recordings=recordings)
    from staticmem.frontends.onnx import looks_like_onnx, open_onnx

    if looks_like_onnx(head):
        try:
            return open_onnx(path, keep=recordings, recordings=recordings)
        except ModelFileError as error:
            if path in error.what:
                raise
            raise ModelFileError(f"{path}: {error.what}", error.why, error.hint, error.code) from error
    raise unknown_file(path, head)


def decode(model: ModelFile, binding: Binding) -> Decoded | Graph:
    """What a file holds at these sizes: of ONNX its nodes with the sizes of all values, of torch.export the ATen graph.

    Raises:
        DimensionError: a size contradicts a shape that is fixed in the file; the message names the node.
    """
    from staticmem.frontends import recorded

    if isinstance(model, recorded.RecordedModel):
        return recorded.decode(model, binding)
    if model.format == "onnx":
        from staticmem.frontends.onnx import decode as of_onnx

        return of_onnx.decode(cast("OnnxModel", model), binding)
    from staticmem.frontends import export_binder

    return export_binder.decode(cast("ExportedArchive", model), binding)


def _head(path: str) -> bytes:
    try:
        if os.path.isfile(os.path.join(path, "model_index.json")):
            why = "It has the parts of a pipeline of diffusers, and none of them is the model."
            hint = "Write a function that builds the part which is trained or run: staticmem export file.py:FUNCTION"
            raise ModelFileError(f"{path} is a pipeline of diffusers", why, hint, code="SM101")
        if os.path.isdir(path):
            raise ModelFileError(
                f"{path} is a directory", "A model is one file.", "Give the .onnx or .pt2 file in it.", code="SM101"
            )
        with files.opened(path, seekable=True) as file:
            head = file.read(HEAD)
    except FileNotFoundError as error:
        from staticmem.frontends.other_inputs import missing_file

        raise missing_file(path) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelFileError(
            f"{path} cannot be read",
            f"{reason}.",
            "Check the path and its rights. A model from a pipe is '-'.",
            "SM101",
        ) from error
    if not head:
        raise ModelFileError(
            f"{path} is empty", "It has no bytes.", "Export the model again, or copy it again.", code="SM101"
        )
    return head
