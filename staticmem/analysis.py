"""The one entry point of the command line and of Python: a path and a scenario become a `Report`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from staticmem import dtypes
from staticmem.dtypes import DType
from staticmem.errors import UsageError, did_you_mean
from staticmem.frontends import open_model
from staticmem.graph.ir import Graph, Note
from staticmem.graph.model import ModelFile, SymbolRange, resolve
from staticmem.lifetimes import liveness
from staticmem.recover import inplace
from staticmem.recover.add_norms import unfold_batch_norms
from staticmem.report.build import Sources, build
from staticmem.report.model import Band, GpuFit, NoteInfo, Report, Textbook
from staticmem.training.scenario import IMPLEMENTATIONS, LOSSES, MODES, OPTIMIZERS, SDPA_KERNELS, Scenario
from staticmem.training.step import StepResult, run_step

PRECISIONS = ("float32", "float16", "bfloat16")
METHODS = ("liveness", "textbook")
BAND_LIMIT = 50_000  # ops; beyond it the two further runs of the step would cost more than the band is worth
HASH_LIMIT = 8 << 20  # bytes: a larger file has weights in it, which nothing else here reads


@contextmanager
def _no_cycle_search() -> Iterator[None]:
    """Python's cyclic collector off: an analysis makes many objects that all live to its end, so that each of its
    searches finds nothing and costs a third of the time. What the analysis leaves, later searches find."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_cycle_search()
def analyze(
    path: str | os.PathLike[str],
    *,
    batch: int | None = None,
    resolution: int | tuple[int, int] | None = None,
    dims: Mapping[str, int] | None = None,
    mode: str | None = None,
    optimizer: str | None = None,
    optimizer_impl: str = "foreach",
    momentum: float = 0.0,
    loss: str = "auto",
    dtype: str | None = None,
    amp: str | None = None,
    sdpa: str = "auto",
    unfold_batchnorm: bool = False,
    inplace_activations: str = "auto",
    method: str = "liveness",
    gpu: str | None = None,
    top: int = 10,
) -> Report:
    """The memory of one step of the model in a file.

    Args:
        path: an ONNX file or an archive of torch.export.
        batch: size of axis 0 of every input. An open batch dimension without it is taken as 1, and the report says so.
        resolution: height and width of 4-D image inputs; one number for both.
        dims: sizes of other open dimensions by name.
        mode: "train" or "infer"; by default training where an optimizer is given. Training without an optimizer is
            forward and backward.
        dtype: casts the whole model ("float16", "bf16", ...); amp: runs the forward under torch.autocast.
        sdpa: the kernel of scaled_dot_product_attention; "auto" chooses as PyTorch does on an sm_90 GPU.
        unfold_batchnorm: puts a batch norm behind every convolution with a bias, for files whose norms were folded.
        inplace_activations: "auto", "none" or "all": what ran in place, where the file does not say (ONNX).
        method: "textbook" adds the textbook estimate to the report.
        gpu: a card by name or size ("h100-sxm-80gb", "24GB"): adds allocated, reserved and device memory, and whether
            it fits.
        top: how many of the largest tensors `top_tensors` has.

    Raises:
        StaticmemError: the file or the scenario cannot be analysed; the message says what to do.
    """
    path = os.fspath(path)
    scenario, notes = _scenario(mode, optimizer, optimizer_impl, momentum, loss, dtype, amp)
    scenario = replace(scenario, sdpa=_known("sdpa", sdpa, SDPA_KERNELS))
    method = _known("method", method, METHODS)
    inplace_activations = _known("inplace-activations", inplace_activations, inplace.POLICIES)
    model = open_model(path)
    given = dict(dims or {})
    if batch is None:
        assumed, batch_notes = _assumed_batch(model, given)
        given |= assumed
        notes += batch_notes
    if isinstance(resolution, int):
        resolution = (resolution, resolution)
    binding = resolve(model, batch=batch, resolution=resolution, dims=given)
    graph = model.bind(binding)
    graph = _in_place(graph, inplace_activations, notes)
    if unfold_batchnorm:
        graph = unfold_batch_norms(graph)
    bound = graph
    result = run_step(bound, scenario)
    graph = result.graph  # without what only the export has
    said = " ".join(note.text for note in graph.notes)
    unknown = {target: count for target, count in result.unknown.items() if target not in said}
    if unknown:
        notes.append(_unknown(unknown))
    if scenario.training and not result.trained:
        notes.append(Note("warning", "SM202", "no parameter receives a gradient: nothing is trained"))
    size, digest = _fingerprint(path)
    lifetimes = liveness(result.trace)
    band = _live_band(bound, scenario, notes)
    report = build(Sources(model, size, digest, binding, graph, scenario, result, lifetimes, notes, band), top)
    if gpu is not None:
        report = _with_device(report, result, gpu)
    return report if method == "liveness" else _with_textbook(report, graph)


def _with_device(report: Report, result: StepResult, query: str) -> Report:
    """The report with the meters of a card beside the live one."""
    from staticmem.meters import on_device

    found = on_device(result, query)
    bands = dict(report.peak.bands)
    for name, band in (("allocated", found.allocated), ("reserved", found.reserved), ("device", found.device)):
        bands[name] = Band(band.low, band.high)
    peak = replace(
        report.peak,
        bands=bands,
        allocated_bytes=found.allocated.expected,
        reserved_bytes=found.reserved.expected,
        device_bytes=found.device.expected,
        context_bytes=found.context.expected,
    )
    card, verdict = found.gpu, found.verdict
    fit = GpuFit(
        card.slug, card.name, card.architecture, card.usable, verdict.fit.value, max(verdict.headroom, 0),
        verdict.missing, card.assumed,
    )  # fmt: skip
    text = (
        "workspaces, context and loaded libraries of the card are data with sources, partly assumed, and were not "
        "verified on hardware; the bands say how far they are known (docs/hardware.md)"
    )
    return replace(report, peak=peak, gpu=fit, assumptions=(*report.assumptions, NoteInfo("SM401", text, 1)))


_WHY_TEXTBOOK = (
    "They differ because the textbook adds up results that never coexist, and knows nothing of the gradients of "
    "parameters, of optimizer state, and of what autograd saves or frees; liveness is what PyTorch holds at the worst "
    "moment."
)


def _with_textbook(report: Report, graph: Graph) -> Report:
    """The report with the textbook estimate of the same graph beside it."""
    from staticmem.textbook import textbook_estimate

    book = textbook_estimate(graph)
    forward, backward = book.intermediate_bytes_forward, book.intermediate_bytes_with_backward
    total = book.parameter_bytes + (backward if report.scenario.mode == "train" else forward)
    shown = Textbook(book.parameter_bytes, forward, backward, total, _WHY_TEXTBOOK)
    warnings = report.warnings
    if book.unsized:
        text = "results without a shape in the file, which the textbook estimate leaves out"
        warnings = (*warnings, NoteInfo("SM203", text, len(book.unsized)))
    return replace(report, textbook=shown, warnings=warnings)


def _live_band(graph: Graph, scenario: Scenario, notes: list[Note]) -> tuple[int, int] | None:
    """Bounds of an inference peak where no stack trace tells which values the model's code keeps in variables.

    In training autograd holds what matters, and the peak is in backward: no reference case moved.
    """
    if scenario.training or any(op.stack for op in graph.ops) or len(graph.ops) > BAND_LIMIT:
        return None
    notes.append(
        Note(
            "assumption",
            "SM306",
            "the file has no stack traces, so which values Python variables keep alive is assumed",
        )
    )
    low, high = (liveness(run_step(graph, scenario, policy).trace).peak_bytes for policy in ("last-use", "named"))
    return low, high


def _fingerprint(path: str) -> tuple[int, str | None]:
    """Size in bytes and SHA-256 of a file; None for a large one."""
    size = os.stat(path).st_size
    if size > HASH_LIMIT:
        return size, None
    import hashlib

    with open(path, "rb") as file:
        return size, hashlib.sha256(file.read()).hexdigest()


def _in_place(graph: Graph, policy: str, notes: list[Note]) -> Graph:
    """The graph under the policy; says so where the flag has no effect, and where a guess is left at out of place."""
    if graph.inplace_known:
        if policy != "auto":
            notes.append(Note("warning", "SM304", "--inplace-activations is not used: the file says what ran in place"))
        return graph
    changed = inplace.apply(graph, policy)
    if changed is graph and inplace.apply(graph, "all") is not graph:
        text = "activations are taken to run out of place, the file does not say (--inplace-activations all changes it)"
        notes.append(Note("assumption", "SM305", text))
    return changed


def _unknown(unknown: Mapping[str, int]) -> Note:
    names = sorted(unknown)
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    text = f"no rule for {listed}: inputs and results are kept for backward as a precaution; the peak may be too high"
    return Note("warning", "SM201", text, sum(unknown.values()))


def _scenario(
    mode: str | None,
    optimizer: str | None,
    impl: str,
    momentum: float,
    loss: str,
    dtype: str | None,
    amp: str | None,
) -> tuple[Scenario, list[Note]]:
    """The scenario of validated words, and what has to be said about it."""
    notes: list[Note] = []
    if optimizer is not None:
        optimizer = _known("optimizer", optimizer, OPTIMIZERS)
    impl, loss = _known("optimizer-impl", impl, IMPLEMENTATIONS), _known("loss", loss, LOSSES)
    mode = _known("mode", mode, MODES) if mode is not None else "train" if optimizer is not None else "infer"
    if momentum and optimizer != "sgd":
        raise UsageError(
            f"--momentum does not apply to {optimizer or 'a step without optimizer'}",
            "Only sgd has a momentum buffer here.",
            "Use --optimizer sgd, or leave --momentum out.",
            code="SM132",
        )
    if not 0 <= momentum < 1:
        raise UsageError(
            f"--momentum {momentum} is out of range", "It is a fraction: 0 <= momentum < 1.", "Try 0.9.", code="SM132"
        )
    if impl == "fused" and optimizer == "rmsprop":
        raise UsageError(
            "rmsprop has no fused implementation",
            "PyTorch has fused kernels for sgd, adam, adamw and adagrad.",
            "Use --optimizer-impl foreach.",
            code="SM133",
        )
    if mode == "infer" and optimizer is not None:
        notes.append(Note("warning", "SM302", f"the optimizer ({optimizer}) is not used: inference was asked for"))
        optimizer = None
    if mode == "train" and optimizer is None:
        notes.append(Note("assumption", "SM303", "no optimizer: forward and backward only"))
    if mode == "train" and optimizer is not None:
        text = "a step after the first: optimizer state exists, and zero_grad() has set gradients to None"
        notes.append(Note("assumption", "SM300", text))
    scenario = Scenario(mode, optimizer, impl, momentum, loss, _precision("dtype", dtype), _precision("amp", amp))
    return scenario, notes


def _known(flag: str, word: str, known: tuple[str, ...]) -> str:
    if word.lower() in known:
        return word.lower()
    raise UsageError(
        f"unknown {flag} '{word}'",
        f"--{flag} is one of {', '.join(known)}.",
        did_you_mean(word.lower(), known),
        code="SM134",
    )


def _precision(flag: str, name: str | None) -> DType | None:
    """A floating-point type by PyTorch's name or a short one; "none" is None."""
    if name is None or name.lower() == "none":
        return None
    found = dtypes.parse(name)
    if found is None or found.name not in PRECISIONS:
        known = ("fp32", "fp16", "bf16", *PRECISIONS, "none")
        raise UsageError(
            f"unknown {flag} '{name}'", f"--{flag} is one of {', '.join(known)}.", did_you_mean(name, known), "SM134"
        )
    return found


def _assumed_batch(model: ModelFile, dims: Mapping[str, int]) -> tuple[dict[str, int], list[Note]]:
    """Sizes for open batch dimensions (axis 0) that nobody gave: 1, or the least that the export allows."""
    assumed: dict[str, int] = {}
    for spec in model.inputs:
        axis = spec.shape[0] if spec.shape else None
        if isinstance(axis, str) and axis not in dims and f"{spec.name}[0]" not in dims:
            assumed[axis] = max(1, model.symbols.get(axis, SymbolRange()).low or 1)
    sizes = ", ".join(str(size) for size in dict.fromkeys(assumed.values()))
    notes = [Note("assumption", "SM301", f"batch {sizes} assumed; give --batch N")] if assumed else []
    return assumed, notes
