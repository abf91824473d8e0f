"""The report of a step, from its graph, its scenario and its lifetimes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from staticmem.eager.trace import Hold, round_up
from staticmem.engine.step import StepResult
from staticmem.ir.graph import Graph, Note
from staticmem.ir.model_file import Binding, ModelFile
from staticmem.ir.record import record
from staticmem.liveness import Lifetimes
from staticmem.liveness.intervals import added_by_held_outputs
from staticmem.liveness.why import module_of, module_of_op, reasons, short
from staticmem.ops import lookup
from staticmem.report import model as records
from staticmem.scenario.step import Scenario

_SETTLES = "SM308"  # the command that settles what a band is about
FEW = 64  # entries for which who holds them is looked up by themselves, and not for all at once


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


def build(sources: Sources, top: int) -> records.Report:
    """The report; `top_tensors` has the `top` largest tensors alive at the peak."""
    alive = Alive(sources.graph, sources.lifetimes)
    notes = [*sources.graph.notes, *sources.result.notes, *sources.notes]
    notes.sort(key=lambda note: note.code != _SETTLES)  # the first that a reader sees
    peak, phases = _peak(sources, alive), _phases(sources)
    return records.Report(
        schema=records.SCHEMA,
        model=_model(sources),
        scenario=_scenario(sources),
        meter="live",
        peak=peak,
        parameters=_parameters(sources),
        phases=phases,
        multipliers=_multipliers(sources, peak, phases),
        top_tensors=alive[:top],
        coverage=_coverage(sources),
        assumptions=_notes(notes, "assumption"),
        warnings=_notes(notes, "warning"),
        notes=_notes(notes, "dropped", "regrouped"),
        compiled=_compiled(sources) if sources.result.compiled is not None else None,
        generation=_generation(sources) if sources.scenario.generation is not None else None,
        alive=alive,
    )


def _compiled(s: Sources) -> records.CompiledInfo | None:
    done = s.result.compiled
    if done is None:
        return None
    eager = len(done.breaks) + len(done.unpredicted)
    trace = s.result.trace
    copied = sum(round_up(trace.buffers.nbytes[copy]) for graph in trace.cuda_graphs for copy in graph.copied)
    return records.CompiledInfo(
        done.torch, done.graphs, eager, done.saved_bytes, done.recomputed_bytes, len(trace.cuda_graphs), copied
    )


def _generation(s: Sources) -> records.GenerationInfo | None:
    asked, generated = s.scenario.generation, s.graph.generated
    if asked is None or generated is None:
        return None
    buffers = s.result.trace.buffers
    by_name = {name: nbytes for name, nbytes in zip(buffers.names, buffers.nbytes, strict=True) if name}
    batch = (s.graph.inputs[0].shape or (1,))[0]
    sizes = [(by_name.get(c.key, 0) + by_name.get(c.value, 0), c.tokens) for c in generated.caches]
    of_all = sum(nbytes for nbytes, _ in sizes)
    token = sum(nbytes // (batch * tokens) for nbytes, tokens in sizes)
    return records.GenerationInfo(
        asked.prompt, asked.new_tokens, asked.cache, len(sizes), asked.longest, token, of_all // batch, of_all
    )


def _model(s: Sources) -> records.ModelInfo:
    graph, shapes, result = s.graph, s.binding.shapes, s.result
    of_mode = s.model.inputs_of_mode
    inputs = [
        records.TensorInfo(spec.name, spec.dtype.name, shapes[spec.name], spec.shape)
        for spec in s.model.inputs
        if of_mode.get(spec.name) in (None, s.scenario.training)
    ]
    outputs = []
    called = dict(zip(graph.outputs, graph.output_names, strict=False))  # as --loss names them
    for name, shape, dtype in zip(graph.outputs, result.output_shapes, result.output_dtypes, strict=False):
        outputs.append(records.TensorInfo(called.get(name) or name, dtype.name, shape))
    source = (s.model.path, graph.format, graph.producer, s.file_bytes, s.sha256)
    return records.ModelInfo(*source, tuple(inputs), tuple(outputs), len(graph.ops))


def _scenario(s: Sources) -> records.ScenarioInfo:
    scenario = s.scenario
    batch = resolution = None
    for spec in s.model.inputs:
        shape = s.binding.shapes[spec.name]
        if batch is None and shape:
            batch = shape[0]
        if resolution is None:
            resolution = spec.resolution_of(shape)
    return records.ScenarioInfo(
        mode=scenario.mode,
        batch=batch,
        resolution=resolution,
        dims=dict(sorted(s.binding.symbols.items())),
        optimizer=scenario.optimizer,
        optimizer_impl=scenario.optimizer_impl if scenario.optimizer else None,
        momentum=scenario.momentum,
        loss=_loss(s),
        dtype=scenario.dtype.name if scenario.dtype else None,
        amp=scenario.amp.name if scenario.amp else None,
        compile=scenario.compile,
        compile_optimizer=scenario.compile_optimizer,
        compile_mode=scenario.compile_mode,
    )


def _loss(s: Sources) -> str | None:
    if not s.scenario.training:
        return None
    recorded = s.graph.recorded
    return "recorded" if recorded is not None and recorded.loss else s.result.loss


def _peak(s: Sources, alive: Alive) -> records.Peak:
    lifetimes, live = s.lifetimes, s.lifetimes.peak_bytes
    categories, modules = alive.by_module()
    rows = [records.ModuleBytes(name, sum(parts.values()), parts) for name, parts in modules.items()]
    rows.sort(key=lambda row: (-row.bytes, row.module))
    phase, op, node, module = _allocation(s, lifetimes.allocation_at(lifetimes.peak_tick))
    if s.graph.generated is not None and phase == "forward":
        phase = "prefill"
    low, high = s.live_band or (live, live)
    bands = {"live": records.Band(min(low, live), max(high, live))}
    return records.Peak(live, phase, op or "", node, module, len(alive), categories, tuple(rows), bands)


def _allocation(s: Sources, buffer: int | None) -> tuple[str, str | None, str | None, str | None]:
    """The phase and the kernel that allocate a buffer, and the graph's op and module whose kernel it is."""
    if buffer is None:
        return "setup", None, None, None
    trace = s.lifetimes.trace
    kernel = trace.kernels.pick((trace.buffers.kernels[buffer],))[0]
    if not 0 <= kernel.op < len(s.graph.ops):
        return kernel.phase, kernel.name, None, None
    return kernel.phase, kernel.name, s.graph.ops[kernel.op].name, module_of_op(s.graph, kernel.op)


def _parameters(s: Sources) -> records.Parameters:
    count = nbytes = trainable = tensors = 0
    by_dtype: dict[str, records.DTypeBytes] = {}
    for p in s.graph.parameters:
        if p.alias_of is not None:
            continue
        dtype, count_of = p.value.dtype, p.count
        if s.scenario.dtype is not None and dtype.is_floating_point and p.cast:
            dtype = s.scenario.dtype
        size = dtype.nbytes(p.value.numel)
        tensors, count, nbytes = tensors + 1, count + count_of, nbytes + size
        trainable += count_of if p.trainable else 0
        before = by_dtype.get(dtype.name)
        so_far = (before.count, before.bytes) if before is not None else (0, 0)
        by_dtype[dtype.name] = records.DTypeBytes(so_far[0] + count_of, so_far[1] + size)
    return records.Parameters(count, nbytes, trainable, tensors, dict(sorted(by_dtype.items())))


def _phases(s: Sources) -> records.Phases:
    lifetimes = s.lifetimes
    end, added = lifetimes.trace.marks["forward_end"], added_by_held_outputs(lifetimes)
    peaks = {}
    for name, interval in lifetimes.phases.items():
        peaks[name] = records.PhasePeak(interval.nbytes, *_allocation(s, interval.buffer)[1:])
    return records.Phases(
        start_bytes=lifetimes.level_before(lifetimes.phases["forward"].start),
        forward=peaks["forward"],
        forward_end_bytes=lifetimes.level_before(end),
        forward_end_activation_bytes=lifetimes.by_category(end - 1).get("activation", 0) if end else 0,
        backward=peaks.get("backward"),
        optimizer=peaks.get("optimizer") if s.scenario.optimizer is not None else None,
        decode=peaks.get("decode"),
        first_call_bytes=None if s.scenario.training or not added else lifetimes.peak_bytes - added,
    )


def _multipliers(s: Sources, peak: records.Peak, phases: records.Phases) -> records.Multipliers:
    lifetimes = s.lifetimes
    last = lifetimes.by_category(max(lifetimes.ticks - 1, 0))
    parameters, activations = last.get("parameter", 0), phases.forward_end_activation_bytes
    state = added = step = backward = None
    if s.scenario.training:
        state = parameters + last.get("gradient", 0) + last.get("optimizer_state", 0)
    if phases.backward is not None:
        backward = phases.backward.peak_bytes
        added = backward - phases.forward_end_bytes
    if phases.optimizer is not None:
        step = phases.optimizer.peak_bytes - lifetimes.level_before(lifetimes.phases["optimizer"].start)
    return records.Multipliers(
        peak_over_parameters=_ratio(peak.live_bytes, parameters),
        state_over_parameters=_ratio(state, parameters),
        backward_over_forward=_ratio(backward, phases.forward_end_bytes),
        backward_over_activations=_ratio(added, activations),
        optimizer_step_over_parameters=_ratio(step, parameters),
    )


def _ratio(a: int | None, b: int) -> float | None:
    return None if a is None or b == 0 else round(a / b, 4)


def _coverage(s: Sources) -> records.Coverage:
    result = s.result
    ruled = 0
    for target, count in result.covered.items():
        entry = lookup(target)
        ruled += count if entry is not None and entry.state == "ruled" else 0
    unknown = sum(result.unknown.values())
    rows = [records.UnknownOp(op, n, result.unknown_bytes[op]) for op, n in result.unknown.items()]
    rows.sort(key=lambda row: (-row.bytes, row.op))
    return records.Coverage(records.OpCount(ruled, len(s.graph.ops) - ruled - unknown, unknown), tuple(rows))


def _notes(notes: Sequence[Note], *kinds: str) -> tuple[records.NoteInfo, ...]:
    """Notes of these kinds, in order; those that say the same are one."""
    merged: dict[tuple[str, str], int] = {}
    for note in notes:
        if note.kind in kinds:
            key = (note.code, note.text)
            merged[key] = merged.get(key, 0) + note.count
    return tuple([records.NoteInfo(code, text, count) for (code, text), count in merged.items()])


class Alive(Sequence[records.TensorEntry]):
    """Everything alive at the peak, largest first; equal sizes in order of allocation. As good as a tuple of it.

    Entries are built on access: a large graph has millions, and a reader needs the first ones.
    """

    def __init__(self, graph: Graph, lifetimes: Lifetimes) -> None:
        self.graph, self.lifetimes = graph, lifetimes
        sizes = lifetimes.sizes
        ids = [id for id in lifetimes.alive_ids(lifetimes.peak_tick) if sizes[id]]
        ids.sort(key=sizes.__getitem__, reverse=True)  # a stable sort: ids go up among equals
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> records.TensorEntry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[records.TensorEntry, ...]: ...
    def __getitem__(self, index: int | slice) -> records.TensorEntry | tuple[records.TensorEntry, ...]:
        if isinstance(index, slice):
            return self._entries(self.ids[index])
        return self._entries([self.ids[index]])[0]

    def __iter__(self) -> Iterator[records.TensorEntry]:
        return iter(self._entries(self.ids))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)  # a copy, or another process, has the entries without the step

    def by_module(self) -> tuple[Mapping[str, int], Mapping[str, Mapping[str, int]]]:
        """Bytes of each category, and of each category in each module; in order of the largest tensors."""
        trace, sizes, graph = self.lifetimes.trace, self.lifetimes.sizes, self.graph
        buffers, ops = trace.buffers, trace.kernels.ops
        categories, names, kernels = buffers.categories, buffers.names, buffers.kernels
        every = dict.fromkeys(records.CATEGORIES, 0)
        modules: dict[str, dict[str, int]] = {}
        for id in self.ids:
            category, size = categories[id], sizes[id]
            module = module_of(graph, category, names[id], ops[kernels[id]])
            parts = modules.get(module)
            if parts is None:
                parts = modules[module] = {}
            parts[category] = parts.get(category, 0) + size
            every[category] = every.get(category, 0) + size
        return every, modules

    def _entries(self, ids: Sequence[int]) -> tuple[records.TensorEntry, ...]:
        if len(ids) > FEW or "_holds" in self.__dict__:
            holds: Mapping[int, Sequence[Hold]] = self._holds
        else:
            holds = self.lifetimes.holds(self.lifetimes.peak_tick, ids)
        trace, graph, entries = self.lifetimes.trace, self.graph, []
        for id, buffer in zip(ids, trace.buffers.pick(ids), strict=True):
            kernel = trace.kernels.pick((buffer.kernel,))[0]
            op = short(kernel.name)
            entry = records.TensorEntry(
                name=buffer.name or f"({op})",
                module=module_of(graph, buffer.category, buffer.name, kernel.op),
                op=op,
                shape=buffer.shape,
                dtype=buffer.dtype.name,
                bytes=buffer.size,
                category=buffer.category,
                why=reasons(graph, kernel, buffer, holds.get(id, ())),
            )
            entries.append(entry)
        return tuple(entries)

    @cached_property
    def _holds(self) -> Mapping[int, Sequence[Hold]]:
        return self.lifetimes.holds(self.lifetimes.peak_tick)
