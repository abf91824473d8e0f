"""`Study`: one model under one request, stage by stage. Each stage is computed once, at its first use.

    model -> binding -> graph -> result (the step's trace) -> lifetimes -> device meters -> report

What needs more than the report of one request (sweeps, sizing, diffs, timelines) starts from a study.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from staticmem import files
from staticmem.engine.step import StepResult, run_step
from staticmem.errors import DimensionError, ModelFileError, StaticmemError, UsageError
from staticmem.frontends import open_model
from staticmem.frontends.architectures import architecture_of
from staticmem.frontends.recent import MODELS, Recent
from staticmem.frontends.recording_format import part_of
from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Note
from staticmem.ir.model_file import Binding, ModelFile, SymbolRange, resolve
from staticmem.liveness import Lifetimes
from staticmem.liveness.intervals import added_by_held_outputs
from staticmem.ops.registry import kinds_of
from staticmem.passes import pipeline
from staticmem.passes.pipeline import Pass
from staticmem.passes.variables.unseen_code import has_unseen_code
from staticmem.report.build import Sources, build
from staticmem.report.model import Report
from staticmem.scenario.checkpointing import NO_CHECKPOINTS
from staticmem.scenario.compiling import WHOLE
from staticmem.scenario.losses import AUTO, CAUSAL_LM, HEAD_LOSSES, OF_TRANSFORMERS
from staticmem.scenario.presets import PRESETS
from staticmem.scenario.request import OPTIONS, Request
from staticmem.scenario.step import HELD, Scenario
from staticmem.scenario.strategies import facts_of
from staticmem.studies.position_tables import check_positions
from staticmem.studies.steps import JUDGED, OF_SIZES, Step, step_of
from staticmem.units import format_bytes

if TYPE_CHECKING:
    from staticmem.devices.gpus import Gpu
    from staticmem.devices.meters import Device, DeviceMeters
    from staticmem.parallel.division import Strategy
    from staticmem.studies.live_band import LiveBand

REPLAY_LIMIT = 1_000_000  # ticks of a trace; beyond it the allocator is replayed only with --gpu
HASH_LIMIT = 8 << 20  # bytes: a larger file has weights in it, which nothing else here reads

Key = tuple[Any, ...]
Made = TypeVar("Made")

_fingerprints: Recent[tuple[files.Stamp, str]] = Recent(MODELS)  # by path


class Study:
    """A model and a request; attributes are the stages.

    Any of them raises `StaticmemError` where the file or the scenario cannot be analysed.
    """

    def __init__(self, model: ModelFile, request: Request) -> None:
        self.model, self.request = model, request
        self.progress: Callable[[int, int], None] | None = None  # as in `Replays.bands`, for `meters`
        self.without: frozenset[str] = frozenset()  # passes that are left out (`pipeline.passes_to_leave_out`)
        self.steps_back = True  # whether passes are left out where the step fails

    @classmethod
    def open(cls, model: object, request: Request, inputs: Sequence[Any] | None = None) -> Study:
        """The study of a file, whose content decides the format, or of an object (`recording.objects`)."""
        request.scenario()  # raises for wrong options before a large file is read
        if request.names_device:
            from staticmem.studies.device import device_of

            device_of(request)
        if isinstance(model, str | os.PathLike):
            if inputs is not None:
                hint = "Leave them out; batch, resolution and dims change sizes."
                raise UsageError("inputs are given with a file", "A file has the shapes of its inputs.", hint, "SM170")
            path = os.fspath(model)
            architecture = architecture_of(path)
            if architecture is None:
                return cls(open_model(path), request)
            from staticmem.recording.architectures import built_model  # late: most models are files

            usual = _usual_options(request, request.scenario()[0])
            return cls(_choose_recording(built_model(architecture, usual), request), request)
        from staticmem.recording.objects import model_of

        exported, batch = model_of(model, inputs)
        if request.batch is None and batch:
            request = replace(request, batch=batch)
        return cls(_choose_recording(exported, request), request)

    def ask(self, request: Request) -> Study:
        """The same model under another request: the file is not read again."""
        other = Study(_choose_recording(self.model, request), request)
        other.without, other.steps_back = self.without, self.steps_back
        return other

    @property
    def scenario(self) -> Scenario:
        """What the step does; bytes play no part in it."""
        return self._scenario[0]

    @cached_property
    def _scenario(self) -> tuple[Scenario, list[Note]]:
        """The scenario as asked, with the loss that its model has."""
        scenario, notes = self._asked
        own_loss, unlabelled = self.model.own_loss, self.model.unlabelled
        if scenario.training and (own_loss or unlabelled):
            notes = [*notes, Note("assumption", "SM330", own_loss or unlabelled)]
        if scenario.training and own_loss:
            loss = AUTO if scenario.loss == OF_TRANSFORMERS else scenario.loss
            return replace(scenario, loss=loss), notes
        # the code of such a model computes `ForCausalLMLoss` from labels, as every trainer has it do
        has_causal_loss = self.model.loss_function == "ForCausalLM"
        by_itself = scenario.loss == AUTO and scenario.training and has_causal_loss
        if scenario.loss != OF_TRANSFORMERS and not by_itself:
            return scenario, notes
        loss, text = self._loss_of_transformers() if scenario.training else (AUTO, "")
        return replace(scenario, loss=loss), [*notes, *([Note("assumption", "SM330", text)] if text else [])]

    @cached_property
    def _asked(self) -> tuple[Scenario, list[Note]]:
        packing = self.model.packing
        if packing is not None and packing.layers:
            from staticmem.studies.packed_layers import scenario_of

            return scenario_of(self.request, packing.layers)
        if packing is None or not packing.quantize or self.request.quantize is not None:
            return self.request.scenario()
        scenario, notes = replace(self.request, quantize=packing.quantize).scenario()
        compute = dtypes.parse(packing.compute) or scenario.dtype or dtypes.bfloat16
        assert scenario.quantize is not None
        return replace(scenario, quantize=replace(scenario.quantize, compute=compute)), notes

    def _loss_of_transformers(self) -> tuple[str, str]:
        """The loss that a model of transformers computes from labels, and what the report says of it.

        Source: transformers 5.23, loss/loss_utils.py: `ForCausalLMLoss`, `ForMaskedLMLoss` and `ForTokenClassification`
        cast the scores of tokens to float32; losses of one label a sample read them as they are.
        """
        with self._judged():
            bound = pipeline.bind(self.model, self.binding)
            if bound.recorded is not None and bound.recorded.loss:
                return AUTO, ""
            shape = self._first_output(bound)
        if shape is None or len(shape) != 3 or shape[-1] < 2:
            return AUTO, ""
        asked = "loss: transformers"
        strategy = facts_of(self.request.parallel)
        compiles = bool(self.request.compile)  # an optimizer's compiled code does not touch the model's loss
        if compiles or (strategy is not None and strategy.runs_parts):
            other = "--compile" if compiles else f"--parallel {self.request.parallel}"
            return AUTO, f"{asked}, except the copy of scores in float32 of its models: not covered with {other}"
        text = f"which is causal-lm: {list(shape)} are scores of tokens, which its models cast to float32 (T5's do not)"
        return CAUSAL_LM, f"{asked}, {text}"

    @property
    def binding(self) -> Binding:
        """Sizes of all inputs and symbols, and the passes that are left out."""
        binding = self._binding[0]
        return replace(binding, without=self.without) if self.without else binding

    @cached_property
    def _binding(self) -> tuple[Binding, list[Note]]:
        request, dims = self.request, dict(self.request.dims or {})
        notes: list[Note] = []
        if request.batch is None:
            assumed, notes = assumed_batch(self.model, dims)
            dims |= assumed
        generation = self._asked[0].generation
        if generation is not None:
            from staticmem.studies.generation import binding_at

            return binding_at(self.model, request, dims, generation.prompt), notes
        return resolve(self.model, batch=request.batch, resolution=request.image_size, dims=dims), notes

    @property
    def graph(self) -> Graph:
        """The ATen calls that the step runs, with sizes bound."""
        return self.prepared[0]

    @cached_property
    def prepared(self) -> tuple[Graph, list[Note]]:
        """The graph of the step, and notes of what it takes to run in place.

        The bound graph is not kept: it would hold all that passes made of it.
        """
        with self._judged():
            return self._or_without_passes(self._edited)

    def _edited(self) -> tuple[Graph, list[Note]]:
        bound = pipeline.bind(self.model, self.binding)
        if self.scenario.generation is not None:
            from staticmem.studies.generation import generated_graph

            graph = generated_graph(self.model, self.binding, self.scenario.generation, self._decoder)
        else:
            graph = self._after_passes(bound, self.request.inplace_activations)
            check_positions(graph)
        return graph, self._inplace_notes(bound, graph)

    def _decoder(self, bound: Graph) -> Graph:
        """The bound graph of a decoder for generation, which makes its masks itself."""
        return self._after_passes(bound, self.request.inplace_activations, pipeline.DECODER)

    def _after_passes(self, bound: Graph, inplace: str, passes: Iterable[Pass] = pipeline.STEP) -> Graph:
        """The bound graph after passes. `inplace`: the policy where the file does not say what ran in place."""
        logits = self._logits(bound)
        return pipeline.for_step(bound, replace(self.scenario, inplace_activations=inplace), passes, logits)

    def _logits(self, bound: Graph) -> tuple[int, ...] | None:
        """Sizes of the first output of a recording, for a loss that runs the last linear layer."""
        if bound.programs is None or not self.scenario.training or self.scenario.loss not in HEAD_LOSSES:
            return None
        return self._first_output(bound)

    def _first_output(self, bound: Graph) -> tuple[int, ...] | None:
        """Sizes of the first output: those of the file or recording, else of a forward."""
        if not bound.outputs:
            return None
        value, recorded = bound.values.get(bound.outputs[0]), bound.recorded
        if recorded is not None and bound.outputs[0] in recorded.output_shapes:
            return recorded.output_shapes[bound.outputs[0]]
        if bound.programs is None:
            return value.shape if value is not None else None
        plain = Scenario(torch=self._asked[0].torch, inplace_activations="none")
        shapes = run_step(pipeline.for_step(bound, plain), plain).output_shapes
        return shapes[0] if shapes else None

    @property
    def result(self) -> StepResult:
        """The trace of the step, of one rank where the request is parallel; `result.graph` lacks what only the export
        has."""
        return self._step[0]

    @property
    def lifetimes(self) -> Lifetimes:
        """When each buffer lives, and the curve of live bytes."""
        return self._step[1]

    @cached_property
    def _step(self) -> Step:
        if self.request.communicators:
            return self._rank[2]
        with self._judged():
            return self._or_without_passes(lambda: step_of(self.model, self.graph, self.scenario))

    def _or_without_passes(self, make: Callable[[], Made]) -> Made:
        """What a stage makes; where the graph does not evaluate, what it makes without the passes to blame for that."""
        try:
            return make()
        except (ModelFileError, DimensionError) as error:
            if not self.steps_back or self.without or error.code not in JUDGED:
                raise
            without = pipeline.passes_to_leave_out(self._works)
            if without is None:
                raise
            self.without = without
            self.__dict__.pop("prepared", None)  # made with them
            return make()

    def _works(self, without: frozenset[str]) -> bool:
        """Whether the step runs without these passes."""
        study = self.ask(self.request)
        study.without, study.steps_back = without, False
        try:
            return study.result is not None
        except StaticmemError:
            return False

    @cached_property
    def _rank(self) -> tuple[Study, Strategy, Step]:
        """The rank that needs the most: the study of the step of one device that it comes from, the strategy, its step.

        Ranks that share a sequence differ in what they send and merge.
        """
        from staticmem.parallel.rank import on_one_device, on_rank, strategy_of
        from staticmem.parallel.strategies.context import parts

        strategy, one = strategy_of(self.request), on_one_device(self.request)
        requests = parts(one, self.model, self.binding) if (one.context_parallel or 1) > 1 else [one]
        ranks = []
        for request in requests:
            study, of_rank = self.ask(request), replace(strategy, context=request.context)
            result = on_rank(study.result, of_rank)
            ranks.append((study, of_rank, (result, Lifetimes(result.trace))))
        return max(ranks, key=lambda rank: rank[2][1].peak_bytes)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Errors that blame a file of ONNX say what onnx.checker says of it."""
        try:
            yield
        except (ModelFileError, DimensionError) as error:
            given = bool(self.binding.symbols or self.binding.rebound)  # sizes that the user chose may not fit
            if self.model.format != "onnx" or error.code not in JUDGED or (given and error.code in OF_SIZES):
                raise
            from staticmem.frontends.onnx.reader import judged

            raise judged(error, self.model.path) from error

    @cached_property
    def meters(self) -> DeviceMeters:
        """What the step takes on the card of the request. Bands are without what the file leaves open (`spread`)."""
        from staticmem.devices.meters import on_device

        return on_device(self.result, self.device, progress=self.progress)

    @property
    def replays(self) -> bool:
        """Whether the report has the meters of a card: those of a large graph are worked out for a card with a name."""
        return self.request.gpu is not None or self.result.trace.ticks <= REPLAY_LIMIT

    @cached_property
    def device(self) -> Device:
        """The card of the request, or the one that stands for all, and the software on it."""
        from staticmem.studies.device import device_of

        return device_of(self.request)

    @cached_property
    def band(self) -> LiveBand:
        """What the file leaves open that may move the peak."""
        from staticmem.studies.live_band import LiveBand

        request, step = self.request, self._step  # which may leave out passes
        one = self._rank[0] if request.communicators else self
        least = one.graph.least_in_data
        fewest = one.ask(replace(one.request, dims={**(one.request.dims or {}), **least})) if least else None
        if not request.communicators:
            return LiveBand(self.model, self.binding, self.graph, request, step, fewest=fewest)
        from staticmem.parallel.rank import on_one_device, on_rank

        strategy = self._rank[1]
        rank = partial(on_rank, strategy=strategy)
        heaviest = self.ask(on_one_device(request, worst=True)) if one.scenario.experts is not None else None
        return LiveBand(one.model, one.binding, one.graph, one.request, step, rank, heaviest, fewest)

    @property
    def live_band(self) -> tuple[int, int] | None:
        """Bounds of the peak; None where nothing that the file leaves open moves it."""
        return self.band.bounds

    @property
    def spread(self) -> tuple[int, int]:
        """Bytes by which the live peak may be lower, and higher, than its expected value."""
        live = self.lifetimes.peak_bytes
        low, high = self.live_band or (live, live)
        return max(live - low, 0), max(high - live, 0)

    @cached_property
    def notes(self) -> list[Note]:
        """Notes of the request, besides those of the graph and of the step."""
        from staticmem.studies.unsaid_training import leaves_checkpoints_open

        result = self.result
        notes = [*self._scenario[1], *self._binding[1], *idle_in(self)]
        if result.unknown:
            notes += _unknown_ops(result)
        if self.request.gpu is not None:
            notes += _other_gpu(self.model.asked_of_gpu, self.device.gpu)
        if self.scenario.training and not result.trained:
            notes.append(Note("warning", "SM202", "no parameter receives a gradient: nothing is trained"))
        if self.scenario.outputs == HELD:
            notes += _held_outputs(self.lifetimes, self.scenario.training)
        open_code = result.graph.recorded is None and WHOLE not in self.scenario.compile
        if self.live_band is not None and open_code and not self.request.communicators:
            notes.insert(0, Note("assumption", "SM308", self._what_settles()))
            if self.scenario.training and leaves_checkpoints_open(result.graph, self.scenario):
                text = (
                    "the file has no source lines, which would show what runs in checkpoints and in functions with a "
                    "backward of their own: none is taken to, and the lower end of the band has everything in them "
                    "(--checkpoint says which modules run in one, or none)"
                )
                notes.append(Note("assumption", "SM386", text))
            if has_unseen_code(result.graph):
                text = "the file does not show all of the model's code, so which values variables keep alive is assumed"
                notes.append(Note("assumption", "SM306", text))
            if self.band.ends_of_inplace is not None and not self.band.left_out:
                text = "the file leaves open what ran in place, which the band of the peak covers"
                notes.append(Note("assumption", "SM307", text))
        return notes + self.band.left_out

    def _inplace_notes(self, bound: Graph, graph: Graph) -> list[Note]:
        """Where --inplace-activations has no effect, and where the guess left everything out of place."""
        if graph.inplace_known:
            text = "--inplace-activations is not used: the file says what ran in place"
            return [] if self.request.inplace_activations == "auto" else [Note("warning", "SM304", text)]
        name = pipeline.IN_PLACE[-1].name
        if any(edit.name == name for edit in graph.edits):
            return []
        by_all = self._after_passes(bound, "all", pipeline.IN_PLACE)
        if all(edit.name != name for edit in by_all.edits):
            return []
        text = (
            "activations are assumed out of place (ONNX does not record it); in place the peak may be lower "
            "(--inplace-activations all)"
        )
        return [Note("assumption", "SM305", text)]

    def _what_settles(self) -> str:
        """The command that records what the band is about."""
        path = self.model.path
        command = "staticmem export file.py:factory -o model.pt2"
        if self.graph.format == "onnx":
            name = "FILE.onnx" if path.startswith("<") else os.path.basename(path)  # <graph>: a model in memory
            command = f"staticmem annotate {name} --from file.py:factory"
        return f"the file leaves open what the peak depends on (its band); to record it: {command}"

    @cached_property
    def report(self) -> Report:
        """All of it as frozen values."""
        request, graph = self.request, self.result.graph
        size, digest = fingerprint(self.model.path)
        model, scenario, result, lifetimes = self.model, self.scenario, self.result, self.lifetimes
        binding, notes, band = self.binding, self.notes, self.live_band
        sources = Sources(model, size, digest, binding, graph, scenario, result, lifetimes, notes, band)
        report = build(sources, request.top)
        if request.communicators:
            shared = replace(report.scenario, parallel=request.parallel, devices=request.devices)
            shared = replace(shared, expert_parallel=request.expert_parallel, replicas=request.replicas)
            if (request.context_parallel or 1) > 1:
                shared = replace(
                    shared,
                    context_parallel=request.context_parallel,
                    devices=request.devices or request.context_parallel,
                )
            report = replace(report, scenario=shared)
        from staticmem.studies.device import with_device, without_device

        if self.replays:
            report = with_device(report, request, self.device, self.meters, self.spread)
        else:
            report = without_device(report)
        if request.host:
            from staticmem.studies.host import host_of

            report = replace(report, host=host_of(self))
        if request.method == "textbook":
            from staticmem.studies.textbook import with_textbook

            report = with_textbook(report, graph)
        return report


def _choose_recording(model: ModelFile, request: Request) -> ModelFile:
    """The model; of code that is recorded on demand, the recording that holds at the request's sizes."""
    if not model.is_recorded_again:
        return model
    sizes = dict(request.dims or {})
    firsts = {spec.shape[0] for spec in model.inputs if spec.shape}
    batches = {first for first in firsts if isinstance(first, str)} or firsts - {1} or firsts
    if request.batch is not None and "batch" in model.fixed_axes.values():
        sizes["batch"] = request.batch
    for spec in model.inputs:
        # a size that the code has fixed goes by its place
        dims = [dim if isinstance(dim, str) else f"{spec.name}[{axis}]" for axis, dim in enumerate(spec.shape or ())]
        first = (spec.shape or (None,))[0]
        if request.batch is not None and first in batches and (isinstance(first, str) or len(batches) == 1):
            sizes[dims[0]] = request.batch
        sides = spec.resolution_of(tuple(dims))
        if request.image_size is not None and sides is not None:
            sizes |= dict(zip(sides, request.image_size, strict=True))
    scenario = request.scenario()[0]
    return model.at(sizes, scenario.training, _usual_options(request, scenario))


def _usual_options(request: Request, scenario: Scenario) -> dict[str, str]:
    """The options of a name that the step decides where nobody gives them: whether labels go in, and keys and values
    come out; and of a packed checkpoint, whether weights are whole, and their type."""
    usual, of_weights = {}, {}
    cast = scenario.dtype in dtypes.HALVES
    of_weights["part"] = part_of(scenario.training, scenario.amp is not None, cast)
    if request.quantize is not None:
        of_weights["dequantize"] = "yes"
    if scenario.dtype is not None:
        of_weights["dtype"] = scenario.dtype.name
    if scenario.training and scenario.amp is not None:
        of_weights["frozen"] = scenario.amp.name
    if request.gpu is not None:
        from staticmem.devices.architectures import capability
        from staticmem.studies.device import device_of

        card = device_of(request).gpu
        chip = capability(card.chip or card.architecture)
        of_weights |= {"card": f"{chip[0]}.{chip[1]}"} if chip else {}
    strategy = facts_of(request.parallel)
    in_parts = strategy is not None and strategy.runs_parts  # which are those of the model alone
    if in_parts or scenario.loss not in (AUTO, OF_TRANSFORMERS):
        usual["labels"] = "no"
    of_trainer = request.preset is not None and not PRESETS[request.preset].caches
    if in_parts or of_trainer or request.checkpoint not in ((), NO_CHECKPOINTS):
        usual["use_cache"] = "no"
    return {**of_weights, **usual} if scenario.training else of_weights


def _other_gpu(asked: Sequence[str], card: Gpu) -> list[Note]:
    """That code which asks which GPU it runs on was recorded as on another one."""
    from staticmem.devices.architectures import RECORDED_AS, capability

    chip = capability(card.chip or card.architecture)
    if not asked or chip in (None, RECORDED_AS):
        return []
    major, minor = chip or RECORDED_AS
    text = (
        f"the code asks which GPU it runs on ({', '.join(asked)[:80]}), and was recorded with the answers of an H100 "
        f"(compute capability 9.0): on the {card.name} ({major}.{minor}) it may run other ops, which no band here has"
    )
    return [Note("warning", "SM389", text)]


def key_of(request: Request) -> Key:
    """A request as a hashable key."""
    values = (getattr(request, f.name) for f in fields(Request))
    return tuple(tuple(sorted(v.items())) if isinstance(v, Mapping) else v for v in values)


def fingerprint(path: str) -> tuple[int, str | None]:
    """Size in bytes and SHA-256 of a file; None for a large one. An object has neither."""
    if not os.path.exists(path) and (path.startswith("<") or architecture_of(path) is not None):  # it has no file
        return 0, None
    size = os.stat(path).st_size
    if size > HASH_LIMIT:
        return size, None
    stamp = files.stamp(path)
    cached = _fingerprints.get(path)
    if cached is not None and cached[0] == stamp:
        return size, cached[1]
    import hashlib

    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    if stamp is not None:
        _fingerprints.put(path, (stamp, digest))
    return size, digest


def _held_outputs(lifetimes: Lifetimes, training: bool) -> list[Note]:
    """A note of the outputs that the loop holds, where they lift the peak."""
    added = added_by_held_outputs(lifetimes)
    if not added:
        return []
    text = (
        f"the training loop holds the model's outputs during backward, which is {format_bytes(added)} of the peak "
        "(--outputs dropped: it does not)"
    )
    if not training:
        text = (
            "the loop holds the outputs of the call before, out = model(x), until it has the next, which is "
            f"{format_bytes(added)} of the peak (--outputs dropped: it does not, as the first call)"
        )
    return [Note("assumption", "SM337", text)]


def _unknown_ops(result: StepResult) -> list[Note]:
    """A note of the ops without a rule, but for those that a note of the graph names already."""
    texts = " ".join(note.text for note in result.graph.notes)
    unknown = {target: count for target, count in result.unknown.items() if target not in texts}
    if not unknown:
        return []
    kept = sorted(unknown.keys() & result.unknown_kept.keys())
    others = sorted(unknown.keys() - result.unknown_kept.keys())
    notes = []
    for names, text in (
        (
            kept,
            "inputs and results are kept for backward as a precaution; the peak may be too high, or too low by what",
        ),
        (
            others,
            "autograd has no node of theirs, so that nothing is kept for backward; the peak may be too low by what",
        ),
    ):
        if names:
            listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            text = f"no rule for {listed}: {text} they allocate besides"
            notes.append(Note("warning", "SM201", text, sum(unknown[name] for name in names)))
    return notes


def assumed_batch(model: ModelFile, dims: Mapping[str, int]) -> tuple[dict[str, int], list[Note]]:
    """Sizes for open batch dimensions (axis 0) without a given size: 1, or the least that the export allows."""
    assumed: dict[str, int] = {}
    for spec in model.inputs:
        axis = spec.shape[0] if spec.shape else None
        if isinstance(axis, str) and axis not in dims and f"{spec.name}[0]" not in dims:
            assumed[axis] = max(1, model.symbols.get(axis, SymbolRange()).low or 1)
    sizes = ", ".join(map(str, dict.fromkeys(assumed.values())))
    return assumed, [Note("assumption", "SM301", f"batch {sizes} assumed; give --batch N")] if assumed else []


# what an option acts on
_ACTS_ON = {"tf32": "convolution", "cudnn_benchmark": "convolution", "cudnn": "convolution", "sdpa": "fused attention"}

OF_THE_GRAPH = (*_ACTS_ON, "unfold_batchnorm", "inplace_activations", "method")
UNFOLDED = "SM324"  # the note of batch norms that were put back


def unused(request: Request, notes: Iterable[Note]) -> list[str]:
    """What was asked and has no effect on a result that is no report, by the notes of a study."""
    shown = ["--method textbook is not used: 'staticmem analyze' shows the estimate"] * (request.method == "textbook")
    shown += ["options of the host are not used: 'staticmem analyze' shows its memory"] * request.host
    return [note.text for note in notes if note.code in ("SM302", "SM304")] + shown


def idle_in(study: Study) -> Iterator[Note]:
    """Notes of options that were given and act on no op of a study's graph, or not on a recording."""
    request, (graph, notes) = study.request, study.prepared
    yield from notes
    if request.unfold_batchnorm and not any(note.code == UNFOLDED for note in graph.notes):
        why = "the recording has what ran, and nothing was folded"
        if graph.recorded is None:
            why = "no convolution has a bias that a folded batch norm could have left"
        yield Note("warning", "SM302", f"--unfold-batchnorm is not used: {why}")
    for name, kind in _ACTS_ON.items():
        if getattr(request, name) != OPTIONS[name].default and not any(_acts_on(kind, base) for base in graph.bases):
            yield Note("warning", "SM302", f"{OPTIONS[name].spelt} is not used: the model has no {kind}")


def _acts_on(kind: str, base: str) -> bool:
    if kind == "convolution":
        return "convolution" in kinds_of(base)
    return "attention" in base or "encoder_layer" in base
