"""Exports a module's code for analysis: the graph in a format that other tools read, and the recording beside it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from staticmem.errors import ModelFileError, StaticmemError, UsageError
from staticmem.frontends import traced_sizes
from staticmem.ir.model_file import TracedSizes
from staticmem.recording import (
    EXPORTERS,
    NEITHER,
    NO_GRAPH,
    NOT_RECORDED,
    WITHOUT_DATA,
    no_graph,
    not_recorded,
    tracing,
    writing,
)
from staticmem.recording.record import PARTS, record
from staticmem.recording.told import alone, both_lines, lines_of, with_recording


@dataclass(frozen=True)
class ExportRequest:
    """What is exported, and how."""

    module: Any
    inputs: tuple[Any, ...]
    kind: str  # .pt2 or .onnx
    exporter: str = "dynamo"  # of .onnx
    train: bool = True
    stack_traces: bool = False
    loss: Callable[[Any], Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # further inputs, by keyword
    progress: Callable[[int, int], None] | None = None  # is told how much of how much has been done
    axes: Sequence[tracing.Axes] | None = None  # names of the sizes that stay open; those of `tracing.open_axes`


def export(
    module: Any,
    inputs: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    exporter: str = "dynamo",
    loss: Callable[[Any], Any] | None = None,
) -> None:
    """Writes a module's code to `path`, a `.pt2` or an `.onnx` without weights, with a recording for `analyze`.

    Args:
        module: on any device; it is exported in the mode that it is in, and recorded in every mode.
        inputs: example inputs, also on the meta device. Sizes that the code leaves open stay open.
        path: its suffix decides the format.
        exporter: of `.onnx`: "dynamo" or "torchscript".
        loss: takes what the module returns and gives the loss; without it `analyze` has a loss of its own.

    Raises:
        UsageError: a suffix or an exporter that is not known.
        ModelFileError: it cannot be exported; the message is PyTorch's.
    """
    kind = os.path.splitext(path)[1].lower()
    if kind not in (".pt2", ".onnx") or exporter not in EXPORTERS:
        what = f"no format for '{os.fspath(path)}'" if exporter in EXPORTERS else f"no exporter '{exporter}'"
        why = f"Formats are .pt2 and .onnx; exporters of .onnx are {', '.join(EXPORTERS)}."
        raise UsageError(what, why, "Example: staticmem.export(model, inputs, 'model.pt2')", "SM141")
    data, lines = exported(ExportRequest(module, tuple(inputs), kind, exporter, module.training, False, loss))
    for line in lines:
        if line.startswith((NOT_RECORDED, NO_GRAPH)):
            warnings.warn(line, stacklevel=2)
    with open(path, "wb") as file:
        file.write(data)


def exported(request: ExportRequest) -> tuple[bytes, list[str]]:
    """The bytes of the file, and lines that tell the user of its sizes and of what could not be made.

    A `.pt2` may have the recording alone, which is what `analyze` reads.

    Raises:
        ModelFileError: neither can be made, or no graph for an `.onnx`; the message is PyTorch's.
    """
    document: dict[str, Any] | None = None
    unrecorded: ModelFileError | None = None

    def tell(done: int, total: int = PARTS) -> None:
        if request.progress is not None:
            request.progress(done, total + 1)  # and the graph

    try:  # first: an export that fails may leave its tensors in the module
        document = record(
            request.module, request.inputs, request.kwargs, request.loss, axes=request.axes, progress=tell
        )
    except ModelFileError as error:
        unrecorded = error
    tell(PARTS)
    try:
        data, lines = graph_file(request)
    except ModelFileError as error:
        if document is None:
            error.why += f". {NEITHER}: {unrecorded.why}" if unrecorded is not None else ""
            error.hint = WITHOUT_DATA
            raise
        return alone(document, request.kind, error), [*lines_of(document, _axes_of_tensors(request)), no_graph(error)]
    if document is None:
        assert unrecorded is not None
        return data, [*lines, not_recorded(unrecorded)]
    own = lines_of(document, _axes_of_tensors(request))
    return with_recording(data, request.kind, document), both_lines(own, lines)


def _read_axes(request: ExportRequest) -> Sequence[tracing.Axes]:
    return request.axes if request.axes is not None else tracing.open_axes(request.inputs, request.kwargs)


def _axes_of_tensors(request: ExportRequest) -> list[tracing.Axes]:
    """The axes of those leaves of the inputs that are tensors."""
    leaves = tracing.leaves_of(request.inputs, request.kwargs)
    return [names for leaf, names in zip(leaves, _read_axes(request), strict=True) if hasattr(leaf, "shape")]


def graph_file(request: ExportRequest) -> tuple[bytes, list[str]]:
    """The bytes of the file without a recording, and lines that tell the user of its sizes.

    Raises:
        ModelFileError: it cannot be exported; the message is PyTorch's.
    """
    if request.kind == ".onnx" and request.exporter == "torchscript":
        return _scripted(request)
    last: ModelFileError | None = None
    for rung in tracing.attempts(_read_axes(request)):  # the format may lack what the code computes of open sizes
        traced = tracing.trace(
            request.module, request.inputs, request.kwargs, as_given=False, axes=rung, stack_traces=request.stack_traces
        )
        lines = [f"Open sizes: {', '.join(traced.open) or 'none'}"]
        if traced.fixed:
            lines.append(f"Fixed by the code: {', '.join(traced.fixed)}")
        try:
            return _written(request, traced), lines
        except ModelFileError as error:
            last = error
    assert last is not None
    raise last


def _written(request: ExportRequest, traced: tracing.Trace) -> bytes:
    is_archive = request.kind == ".pt2"
    write = writing.pt2_bytes if is_archive else writing.onnx_bytes
    named = is_archive and traced_sizes.usable(traced.names)
    sizes = traced.named_sizes if named else traced.sizes
    extra = {traced_sizes.NAME: traced_sizes.write(sizes)}
    try:
        return write(traced.program, stack_traces=request.stack_traces, extra=extra)
    except StaticmemError:
        raise
    except Exception as error:
        exporter = "torch.export.save" if is_archive else "torch.onnx.export"
        raise tracing.failed(request.module, error, exporter) from error


def _scripted(request: ExportRequest) -> tuple[bytes, list[str]]:
    """The same by the TorchScript exporter. torch.export says which sizes the code fixes, where it can."""
    module, inputs, lines = request.module, request.inputs, []
    try:
        traced = tracing.trace(module, inputs, as_given=False, stack_traces=False)
        axes, sizes = traced.axes, replace(traced.named_sizes, names={})
    except ModelFileError:
        lines = ["What the code fixes is not known: torch.export fails on it"]
        opened = tracing.open_axes(inputs)
        axes = tuple({axis: n for axis, n in names.items() if n == "batch"} for names in opened)
        sizes = TracedSizes()
    extra = {traced_sizes.NAME: traced_sizes.write(sizes)}
    last: ModelFileError | None = None
    for rung in tracing.attempts(axes):
        try:
            data = writing.torchscript_bytes(module, inputs, rung, train=request.train, extra=extra)
        except ModelFileError as error:
            last = error
            continue
        names = dict.fromkeys(name for opened in rung for name in opened.values())
        return data, [f"Open sizes: {', '.join(names) or 'none'}", *lines]
    assert last is not None
    raise last
