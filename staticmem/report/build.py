"""The report of a step, from its graph, its scenario and its lifetimes."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.trace import Kernel
from staticmem.engine.step import StepResult
from staticmem.ir.graph import Graph, Note
from staticmem.ir.model_file import Binding, ModelFile
from staticmem.ir.record import record
from staticmem.liveness import Lifetimes
from staticmem.liveness import PhasePeak as Interval
from staticmem.liveness.why import module_of_op
from staticmem.ops import lookup
from staticmem.report.alive import Alive
from staticmem.report.model import (
    SCHEMA,
    Band,
    Coverage,
    DTypeBytes,
    ModelInfo,
    ModuleBytes,
    Multipliers,
    NoteInfo,
    OpCount,
    Parameters,
    Peak,
    PhasePeak,
    Phases,
    Report,
    ScenarioInfo,
    TensorInfo,
    UnknownOp,
)
from staticmem.scenario.step import Scenario


@record(frozen=True)
class Sources:
    """Everything that a report is made of."""

    model: ModelFile
    file_bytes: int
    sha256: str | None
    binding: Binding
    graph: Graph
    scenario: Scenario
    result: StepResult
    lifetimes: Lifetimes
    notes: Sequence[Note] = ()
    live_band: tuple[int, int] | None = None  # bounds of the peak in bytes, where the file leaves it open


def build(sources: Sources, top: int) -> Report:
    """The report; `top_tensors` has the `top` largest tensors alive at the peak."""
    alive = Alive(sources.graph, sources.lifetimes)
    notes = (*sources.graph.notes, *sources.result.notes, *sources.notes)
    peak = _peak(sources, alive)
    parameters = _parameters(sources)
    phases = _phases(sources)
    return Report(
        schema=SCHEMA,
        model=_model(sources),
        scenario=_scenario(sources),
        meter="live",
        peak=peak,
        parameters=parameters,
        phases=phases,
        multipliers=_multipliers(sources, peak, phases),
        top_tensors=alive[:top],
        coverage=_coverage(sources),
        assumptions=_notes(notes, ("assumption",)),
        warnings=_notes(notes, ("warning",)),
        notes=_notes(notes, ("dropped", "regrouped")),
        alive=alive,
    )


def _model(s: Sources) -> ModelInfo:
    graph, binding = s.graph, s.binding
    inputs = tuple(
        TensorInfo(spec.name, spec.dtype.name, binding.shapes[spec.name], spec.shape) for spec in s.model.inputs
    )
    outputs = [
        TensorInfo(name, dtype.name, shape)
        for name, shape, dtype in zip(graph.outputs, s.result.output_shapes, s.result.output_dtypes, strict=False)
    ]
    return ModelInfo(
        s.model.path, graph.format, graph.producer, s.file_bytes, s.sha256, inputs, tuple(outputs), len(graph.ops)
    )


def _scenario(s: Sources) -> ScenarioInfo:
    scenario, training = s.scenario, s.scenario.training
    shapes = [(spec, s.binding.shapes[spec.name]) for spec in s.model.inputs]
    batch = next((shape[0] for _, shape in shapes if shape), None)
    resolution = next((shape[2:] for spec, shape in shapes if len(shape) == 4 and spec.dtype.is_floating_point), None)
    return ScenarioInfo(
        mode=scenario.mode,
        batch=batch,
        resolution=resolution,
        dims=dict(sorted(s.binding.symbols.items())),
        optimizer=scenario.optimizer,
        optimizer_impl=scenario.optimizer_impl if scenario.optimizer else None,
        momentum=scenario.momentum,
        loss=s.result.loss if training else None,
        dtype=scenario.dtype.name if scenario.dtype else None,
        amp=scenario.amp.name if scenario.amp else None,
    )


# -- the peak ----------------------------------------------------------------------------------------------------


def _peak(s: Sources, alive: Alive) -> Peak:
    lifetimes = s.lifetimes
    categories, modules = alive.by_module()
    rows = [ModuleBytes(name, sum(parts.values()), parts) for name, parts in modules.items()]
    rows.sort(key=lambda row: (-row.bytes, row.module))
    at = lifetimes.allocation_at(lifetimes.peak_tick)
    if at is None:
        phase, op, node, module = "setup", "", None, None
    else:
        kernel = _maker(lifetimes, at)
        phase, op = kernel.phase, kernel.name
        node, module = _place(s.graph, kernel.op)
    live = lifetimes.peak_bytes
    low, high = s.live_band or (live, live)
    bands = {"live": Band(min(low, live), max(high, live))}
    return Peak(live, phase, op, node, module, len(alive), categories, tuple(rows), bands)


def _maker(lifetimes: Lifetimes, buffer: int) -> Kernel:
    trace = lifetimes.trace
    return trace.kernels.pick((trace.buffers.kernels[buffer],))[0]


def _place(graph: Graph, op: int) -> tuple[str | None, str | None]:
    """Name of the graph's op, and of its module."""
    return (graph.ops[op].name, module_of_op(graph, op)) if 0 <= op < len(graph.ops) else (None, None)


# -- sums --------------------------------------------------------------------------------------------------------


def _parameters(s: Sources) -> Parameters:
    count = nbytes = trainable = tensors = 0
    by_dtype: dict[str, tuple[int, int]] = {}
    for p in s.graph.parameters:
        if p.alias_of is not None:
            continue
        dtype = p.value.dtype
        if s.scenario.dtype is not None and dtype.is_floating_point:
            dtype = s.scenario.dtype
        numel, size = p.value.numel, dtype.nbytes(p.value.numel)
        tensors, count, nbytes = tensors + 1, count + numel, nbytes + size
        trainable += numel if p.trainable else 0
        known = by_dtype.get(dtype.name, (0, 0))
        by_dtype[dtype.name] = (known[0] + numel, known[1] + size)
    return Parameters(count, nbytes, trainable, tensors, {k: DTypeBytes(*v) for k, v in sorted(by_dtype.items())})


def _phases(s: Sources) -> Phases:
    lifetimes = s.lifetimes
    end = lifetimes.trace.marks["forward_end"]

    def phase(name: str) -> PhasePeak | None:
        found = lifetimes.phases.get(name)
        return None if found is None else _phase_peak(s, found)

    forward = lifetimes.phases["forward"]
    optimizer = phase("optimizer") if s.scenario.optimizer is not None else None
    return Phases(
        start_bytes=lifetimes.level_before(forward.start),
        forward=_phase_peak(s, forward),
        forward_end_bytes=lifetimes.level_before(end),
        forward_end_activation_bytes=lifetimes.by_category(end - 1).get("activation", 0) if end else 0,
        backward=phase("backward"),
        optimizer=optimizer,
    )


def _phase_peak(s: Sources, interval: Interval) -> PhasePeak:
    if interval.buffer is None:
        return PhasePeak(interval.nbytes, None, None, None)
    kernel = _maker(s.lifetimes, interval.buffer)
    return PhasePeak(interval.nbytes, kernel.name, *_place(s.graph, kernel.op))


def _multipliers(s: Sources, peak: Peak, phases: Phases) -> Multipliers:
    lifetimes = s.lifetimes
    last = lifetimes.by_category(max(lifetimes.ticks - 1, 0))
    parameters = last.get("parameter", 0)
    state = sum(last.get(name, 0) for name in ("parameter", "gradient", "optimizer_state"))
    forward, activations = phases.forward_end_bytes, phases.forward_end_activation_bytes
    backward = phases.backward.peak_bytes if phases.backward is not None else None
    step = None
    if phases.optimizer is not None:
        step = phases.optimizer.peak_bytes - lifetimes.level_before(lifetimes.phases["optimizer"].start)
    return Multipliers(
        peak_over_parameters=_ratio(peak.live_bytes, parameters),
        state_over_parameters=_ratio(state, parameters) if s.scenario.training else None,
        backward_over_forward=_ratio(backward, forward),
        backward_over_activations=_ratio(None if backward is None else backward - forward, activations),
        optimizer_step_over_parameters=_ratio(step, parameters),
    )


def _ratio(a: int | None, b: int) -> float | None:
    return None if a is None or b == 0 else round(a / b, 4)


def _coverage(s: Sources) -> Coverage:
    result = s.result
    ruled = 0
    for target, count in result.covered.items():
        found = lookup(target)
        ruled += count if found is not None and found.state == "ruled" else 0
    unknown = sum(result.unknown.values())
    rows = [UnknownOp(op, n, result.unknown_bytes[op]) for op, n in result.unknown.items()]
    rows.sort(key=lambda row: (-row.bytes, row.op))
    return Coverage(OpCount(ruled, len(s.graph.ops) - ruled - unknown, unknown), tuple(rows))


def _notes(notes: Sequence[Note], kinds: Sequence[str]) -> tuple[NoteInfo, ...]:
    """Notes of these kinds, in order; those that say the same are one."""
    merged: dict[tuple[str, str], int] = {}
    for note in notes:
        if note.kind in kinds:
            key = (note.code, note.text)
            merged[key] = merged.get(key, 0) + note.count
    return tuple(NoteInfo(code, text, count) for (code, text), count in merged.items())
