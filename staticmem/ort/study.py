"""From an ONNX file and options of a session to the report of that session: the ONNX Runtime's half of `analyze`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staticmem.errors import DimensionError, UsageError
from staticmem.ir.graph import Note
from staticmem.ir.model_file import Binding, ModelFile, resolve
from staticmem.ort import report
from staticmem.ort.options import SESSION_OPTIONS, SessionOptions
from staticmem.report.model import GpuFit, NoteInfo, TensorInfo
from staticmem.scenario.request import Request
from staticmem.studies.study import assumed_batch, fingerprint
from staticmem.units import Band

if TYPE_CHECKING:
    from staticmem.devices.gpus import Gpu
    from staticmem.ort.memory.session import SessionPrediction

VERSION = "1.32"  # the onnxruntime whose rules are followed and were compared (docs/onnxruntime.md)
MAX_THREADS = 16  # MLAS_MAXIMUM_THREAD_COUNT: more threads take no more workspaces of convolutions
_CUDA_ONLY = tuple(one.name for one in SESSION_OPTIONS.values() if one.provider == "cuda")


@dataclass(frozen=True)
class Opened:
    """A file at bound sizes. `proto` has no weights; `shapes` has every input that a run is given."""

    model: ModelFile
    proto: Any
    binding: Binding
    shapes: Mapping[str, tuple[int, ...]]
    notes: tuple[Note, ...] = ()


def open_session(
    path: str,
    batch: int | None = None,
    resolution: tuple[int, int] | None = None,
    dims: Mapping[str, int] | None = None,
    assume: bool = False,
) -> Opened:
    """Reads an ONNX file and binds its sizes. `assume`: an open batch without a size is 1, with a note.

    Raises:
        UsageError: it is no ONNX file (SM507).
        DimensionError: a size is missing, or the file fixes another one (SM509).
        ModelFileError: the file cannot be read.
    """
    from staticmem.frontends import open_model
    from staticmem.frontends.onnx import reader
    from staticmem.ort.memory.build import inlined

    model = open_model(path, recordings=False)
    if model.format != "onnx":
        raise UsageError(
            f"{path} is no ONNX file",
            "The ONNX Runtime runs ONNX files.",
            "Use --runtime torch for .pt2, or export the model to ONNX.",
            code="SM507",
        )
    given = dict(dims or {})
    notes: list[Note] = []
    if assume and batch is None:
        assumed, notes = assumed_batch(model, given)
        given |= assumed
    binding = resolve(model, batch, resolution, given)
    if binding.rebound:
        raise DimensionError(
            f"the file fixes {', '.join(binding.rebound)}",
            "The ONNX Runtime refuses inputs of other sizes than the file gives.",
            "Leave the size away, or export the model with this dimension dynamic.",
            code="SM509",
        )
    proto = inlined(reader.read(path))
    shapes = dict(binding.shapes)
    owned = {t.name for t in proto.graph.initializer}
    for value in proto.graph.input:  # weights that the file lists as inputs, without contents
        if value.name in owned or value.name in shapes or value.type.WhichOneof("value") != "tensor_type":
            continue
        shapes[value.name] = tuple(int(d.dim_value) for d in value.type.tensor_type.shape.dim)
    return Opened(model, proto, binding, shapes, tuple(notes))


def predicted(opened: Opened, options: SessionOptions, saved: str | None) -> SessionPrediction:
    """The prediction for the graph that is executed: the one that the runtime saved (`optimized_model_filepath`), where
    it changed it."""
    from staticmem.frontends.onnx import reader
    from staticmem.frontends.onnx.reader import guarded
    from staticmem.ort.memory.build import touched
    from staticmem.ort.memory.inference import carried_over
    from staticmem.ort.memory.session import predict_session

    shapes, symbols = opened.shapes, opened.binding.symbols
    if saved is not None:
        optimized = reader.read(saved)
        with guarded(saved):
            if touched(opened.proto, optimized):
                optimized = carried_over(opened.proto, optimized)
                return predict_session(optimized, shapes, symbols, options, in_file_order=True)
    with guarded(opened.model.path):
        return predict_session(opened.proto, shapes, symbols, options, executed=saved is not None)


def session_report(
    path: str, request: Request, options: SessionOptions, optimized: str | None = None, threads_given: bool = True
) -> report.SessionReport:
    """What a session of the ONNX Runtime holds when it runs a file.

    Args:
        path: an ONNX file; weights are not read.
        request: sizes of the inputs, and the card; other options do not apply to a session (`Option.session`).
        options: of the session.
        optimized: the graph that the runtime saved at this optimization level, where there is one.
        threads_given: whether the user chose the number of threads; else a note says it where it matters.

    Raises:
        UsageError: options that the provider does not have (SM514), a limit that is too small (SM508), a .pt2 file.
        DimensionError: a size is missing, or the file fixes another one.
        ModelFileError: a file cannot be read.
    """
    check_options(options, [name for name in ("gpu", "gpus_file") if getattr(request, name) is not None])
    card = _card(request) if options.provider == "cuda" else None
    opened = open_session(path, request.batch, request.image_size, request.dims, assume=True)
    prediction = predicted(opened, options, optimized)
    notes = [*opened.notes, *prediction.notes]
    exact = prediction.exact
    if not threads_given and prediction.workspace:
        fewest = predicted(opened, replace(options, intra_op_num_threads=1), optimized)
        if (fewest.held, fewest.workspace) != (prediction.held, prediction.workspace):
            exact = False
            low, high = prediction.held_band
            low, high = min(low, fewest.held_band[0]), high if high is None else max(high, fewest.held_band[0])
            prediction = replace(prediction, held_band=(low, high))
        text = (
            f"{options.intra_op_num_threads} threads are assumed: convolutions take 64 KiB for each, of at most "
            f"{MAX_THREADS}"
        )
        notes.append(Note("assumption", "SM528", text))
    overhead: tuple[Band, Band] | None = None
    fit: GpuFit | None = None
    if card is not None:
        overhead = _overhead(card, request)
        if request.gpu is not None:
            from staticmem.devices.sizing import verdict
            from staticmem.studies.device import gpu_fit

            held, (low, high) = prediction.held, prediction.held_band
            needed = Band(min(low, held), held, held if high is None else max(high, held))
            fit = gpu_fit(card, verdict(needed.plus(overhead[0]).plus(overhead[1]), card.usable))
        text = (
            f"device memory is for this GPU: {card.name}{'' if request.gpu else ', as --gpu names no other GPU'}; "
            "context and libraries are those of a PyTorch process there, as there is no reading of the ONNX Runtime"
        )
        notes.append(Note("assumption", "SM527", text))
    size, digest = fingerprint(opened.model.path)
    model = report.SessionModel(
        opened.model.path, opened.model.format, opened.model.producer, size, digest,
        tuple(TensorInfo(s.name, s.dtype.name, opened.binding.shapes[s.name], s.shape) for s in opened.model.inputs),
        tuple(v.name for v in opened.proto.graph.output), sum(row.run == 1 for row in prediction.rows),
    )  # fmt: skip
    rows = sorted((row for row in prediction.rows if row.run == 1), key=lambda row: -row.requested)
    return report.SessionReport(
        report.SCHEMA, model, _scenario(opened, options, optimized), _peak(prediction, overhead, exact), exact,
        tuple(report.SessionNode(row.name, row.op, row.requested, row.workspace) for row in rows[: request.top]),
        card.name if card is not None else None,
        fit,
        tuple(NoteInfo(n.code, n.text, n.count) for n in notes if n.kind != "warning"),
        tuple(NoteInfo(n.code, n.text, n.count) for n in notes if n.kind == "warning"),
    )  # fmt: skip


def check_options(options: SessionOptions, of_card: Sequence[str] = ()) -> None:
    """Checks what the provider has; `of_card` are options of a request that say the card.

    Raises:
        UsageError: an option that only the other provider has (SM514).
    """
    others = [o for o in SESSION_OPTIONS.values() if o.provider not in ("", options.provider)]
    wrong = [one.name for one in others if getattr(options, one.name) != one.default]
    wrong += [f"--{name.replace('_', '-')}" for name in of_card] if options.provider == "cpu" else []
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)} does not apply to the {options.provider.upper()} provider",
            "The runtime has it for the other provider.",
            f"Add --provider {'cuda' if options.provider == 'cpu' else 'cpu'}, or leave it out.",
            code="SM514",
        )


def _scenario(opened: Opened, options: SessionOptions, optimized: str | None) -> report.SessionScenario:
    shapes = [(spec, opened.binding.shapes[spec.name]) for spec in opened.model.inputs]
    graph = "as the runtime saved it" if optimized is not None else "as in the file"
    shown = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in ("provider", "runs")}
    if options.provider == "cpu":
        shown.update(dict.fromkeys(_CUDA_ONLY))
    else:
        shown.update(enable_cpu_mem_arena=None, intra_op_num_threads=None, processor=None)
    return report.SessionScenario(
        "onnxruntime", VERSION, options.provider, "infer",
        next((shape[0] for _, shape in shapes if shape), None),
        next((size for spec, shape in shapes if (size := spec.resolution_of(shape)) is not None), None),
        dict(sorted(opened.binding.symbols.items())), options.runs, graph, shown,
    )  # fmt: skip


def _peak(prediction: SessionPrediction, overhead: tuple[Band, Band] | None, exact: bool) -> report.SessionPeak:
    rows = [row for row in prediction.rows if row.run == 1]
    top = max(rows, key=lambda row: row.requested, default=None)
    last = prediction.requested - prediction.weights.total
    block = min(prediction.block, last)
    parts = {
        "weights": prediction.weights.arena, "packed_weights": prediction.weights.packed, "pattern_block": block,
        "tensors": last - block, "cached": prediction.held - prediction.requested,
    }  # fmt: skip
    assert tuple(parts) == report.ARENA_CATEGORIES
    limit, bands = prediction.options.gpu_mem_limit, {}
    device = host = None
    if overhead is not None:
        context, libraries = overhead
        parts |= {"context": context.expected, "libraries": libraries.expected}
        both = context.plus(libraries)
        device = prediction.held + both.expected
        # kernels of CUDA take workspaces from the arena that nothing but its limit bounds
        bands["held"] = report.SessionBand(prediction.held, limit)
        bands["device"] = report.SessionBand(prediction.held + both.low, None if limit is None else limit + both.high)
    else:
        parts |= {"weights_outside": prediction.weights.outside, "inputs": prediction.inputs}
        beside = prediction.weights.outside + prediction.inputs
        host = prediction.held + beside
        if not exact:
            low, high = prediction.held_band
            bands["requested"] = report.SessionBand(*prediction.requested_band)
            bands["held"] = report.SessionBand(low, high)
            bands["host"] = report.SessionBand(low + beside, None if high is None else high + beside)
    name, op = (top.name, top.op) if top is not None else (None, None)
    workspace, held = prediction.workspace if prediction.workspace_known else None, prediction.held
    asked = prediction.requested
    return report.SessionPeak(prediction.tensors, name, op, asked, workspace, held, device, host, bands, parts)


def _card(request: Request) -> Gpu:
    from staticmem.devices import gpus
    from staticmem.studies.device import DEFAULT_GPU

    return gpus.find(request.gpu or DEFAULT_GPU, file=request.gpus_file)


def _overhead(card: Gpu, request: Request) -> tuple[Band, Band]:
    """Context and libraries of a process on a card."""
    from staticmem.devices import profile

    software = profile.load(Path(request.profile) if request.profile is not None else None)
    return software.context(card), software.libraries
