"""`Study`: one model under one request, stage by stage. Each stage is computed once, when it is first asked for.

    model -> binding -> graph -> result (the step's trace) -> lifetimes -> device meters -> report

What needs more than the report of one request (sweeps, sizing, diffs, timelines) starts from a study.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from staticmem import files
from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.frontends import open_model
from staticmem.frontends.recent import MODELS, Recent
from staticmem.ir.graph import Graph, Note, bases_of
from staticmem.ir.model_file import Binding, ModelFile, SymbolRange, resolve
from staticmem.liveness import Lifetimes, liveness
from staticmem.ops.activations import SAVE_LESS_IN_PLACE
from staticmem.passes import pipeline
from staticmem.passes.frames.unseen_code import has_unseen_code
from staticmem.passes.pipeline import Pass
from staticmem.report.build import Sources, build
from staticmem.report.model import Report
from staticmem.scenario.request import Request
from staticmem.scenario.step import Scenario
from staticmem.studies.steps import Step, step_of

BAND_LIMIT = 50_000  # ops; beyond it the two further runs of the step would cost more than the band is worth
HASH_LIMIT = 8 << 20  # bytes: a larger file has weights in it, which nothing else here reads

_fingerprints: Recent[tuple[files.Stamp, str]] = Recent(MODELS)  # by path


class Study:
    """A model and a request; attributes are the stages.

    Any of them raises `StaticmemError` where the file or the scenario cannot be analysed.
    """

    def __init__(self, model: ModelFile, request: Request) -> None:
        self.model, self.request = model, request
        self._scenario_notes: list[Note] = []
        self._size_notes: list[Note] = []

    @classmethod
    def open(cls, model: object, request: Request, inputs: Sequence[Any] | None = None) -> Study:
        """The study of a file, whose content decides the format, or of an object (`frontends.objects`)."""
        request.scenario()  # wrong words are told before a large file is read
        if request.names_device:
            from staticmem.studies.device import device_of

            device_of(request)
        if isinstance(model, str | os.PathLike):
            if inputs is not None:
                raise UsageError(
                    "inputs are given with a file", "A file says of which shape its inputs are.",
                    "Leave them out; batch, resolution and dims change sizes.", code="SM170",
                )  # fmt: skip
            return cls(open_model(os.fspath(model)), request)
        from staticmem.frontends.objects import model_of

        found, batch = model_of(model, inputs)
        if request.batch is None and batch:
            request = replace(request, batch=batch)
        return cls(found, request)

    def ask(self, request: Request) -> Study:
        """The same model under another request: the file is not read again."""
        return Study(self.model, request)

    @cached_property
    def scenario(self) -> Scenario:
        """What the step does; bytes play no part in it."""
        scenario, self._scenario_notes = self.request.scenario()
        return scenario

    @cached_property
    def binding(self) -> Binding:
        """Sizes of all inputs and symbols."""
        request, given = self.request, dict(self.request.dims or {})
        if request.batch is None:
            assumed, self._size_notes = assumed_batch(self.model, given)
            given |= assumed
        return resolve(self.model, batch=request.batch, resolution=request.image_size, dims=given)

    @cached_property
    def graph(self) -> Graph:
        """The ATen calls that the step runs, with sizes bound."""
        return self._graph(self.request.inplace_activations)

    def _graph(self, inplace: str, passes: Iterable[Pass] = pipeline.STEP) -> Graph:
        """The bound graph after passes. `inplace`: the policy where the file does not say what ran in place."""
        bound = self.model.bind(self.binding)
        return pipeline.for_step(bound, self.scenario, inplace, self.request.unfold_batchnorm, passes)

    @cached_property
    def result(self) -> StepResult:
        """The trace of the step, of one rank where the request is parallel; `result.graph` lacks what only the export
        has."""
        if self.request.parallel is not None:
            from staticmem.studies.ranks import rank_step

            return rank_step(self)
        return self._step.result

    @cached_property
    def _step(self) -> Step:
        return step_of(self.model, self.graph, self.scenario)

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """When each buffer lives, and the curve of live bytes."""
        return self._step.lifetimes if self.request.parallel is None else liveness(self.result.trace)

    @cached_property
    def live_band(self) -> tuple[int, int] | None:
        """Bounds of the peak where the file leaves open what ran in place, and in inference also where no stack trace
        tells which values the model's code keeps in variables.

        In training autograd holds what matters of those, and the peak is in backward: no reference case moved.
        """
        graph, scenario = self.graph, self.scenario
        if self.request.parallel is not None or len(graph.ops) > BAND_LIMIT:
            return None
        if scenario.training:
            return self._training_band()
        ends = self._ends_of_inplace()
        if not has_unseen_code(graph):
            if ends is None:
                return None
            policies = ("expected", "expected")
        else:
            policies, ends = ("last-use", "named"), ends or (graph, graph)
        peaks = [
            step_of(self.model, end, scenario, policy).lifetimes.peak_bytes
            for end, policy in zip(ends, policies, strict=True)
        ]
        peaks.append(self.lifetimes.peak_bytes)
        return min(peaks), max(peaks)

    def _training_band(self) -> tuple[int, int] | None:
        """From as much in place as the file leaves open to as little, where that can move the peak of a step.

        Most ops save as much either way, and what is in place then only matters while the op runs: for a peak that is
        in the forward pass. A few save their result where else they save their operand (`SAVE_LESS_IN_PLACE`).
        """
        in_forward = self.lifetimes.peak_tick < self.result.trace.marks.get("forward_end", 0)
        if not in_forward and SAVE_LESS_IN_PLACE.isdisjoint(bases_of(self.graph.ops)):
            return None
        ends = self._ends_of_inplace() or ()
        peaks = [self.lifetimes.peak_bytes]
        peaks += [step_of(self.model, end, self.scenario).lifetimes.peak_bytes for end in ends]
        low, high = min(peaks), max(peaks)
        return (low, high) if low < high else None

    def _ends_of_inplace(self) -> tuple[Graph, Graph] | None:
        """The graph with as much in place as the file leaves open, and with as little; None where that is the same."""
        if self.graph.inplace_known or self.request.inplace_activations != "auto":
            return None
        most, least = (self._graph(policy, pipeline.IN_PLACE).ops for policy in ("most", "least"))
        if all(one.target == other.target for one, other in zip(most, least, strict=True)):
            return None
        return self._graph("most"), self._graph("least")

    @property
    def spread(self) -> tuple[int, int]:
        """Bytes by which the live peak may be lower, and higher, than it is said to be."""
        live = self.lifetimes.peak_bytes
        low, high = self.live_band or (live, live)
        return max(live - low, 0), max(high - live, 0)

    @cached_property
    def notes(self) -> list[Note]:
        """What has to be said beside the notes of the graph and of the step."""
        result = self.result
        notes = [*self._scenario_notes, *self._size_notes, *self._inplace_notes()]
        said = " ".join(note.text for note in result.graph.notes)
        unknown = {target: count for target, count in result.unknown.items() if target not in said}
        if unknown:
            notes.append(_unknown(unknown))
        if self.scenario.training and not result.trained:
            notes.append(Note("warning", "SM202", "no parameter receives a gradient: nothing is trained"))
        if self.live_band is not None and not self.scenario.training and has_unseen_code(result.graph):
            text = "the file has no stack traces, so which values Python variables keep alive is assumed"
            notes.append(Note("assumption", "SM306", text))
        elif self.live_band is not None:
            text = "the file leaves open what ran in place, which the band of the peak covers"
            notes.append(Note("assumption", "SM307", text))
        return notes

    def _inplace_notes(self) -> list[Note]:
        """Where --inplace-activations has no effect, and where the guess left everything out of place."""
        if self.graph.inplace_known:
            text = "--inplace-activations is not used: the file says what ran in place"
            return [] if self.request.inplace_activations == "auto" else [Note("warning", "SM304", text)]
        name = pipeline.IN_PLACE[0].name
        if any(edit.name == name for edit in self.graph.edits) or not self._graph("all", pipeline.IN_PLACE).edits:
            return []
        text = (
            "activations are taken to run out of place, the file does not say: in place the peak may be lower "
            "(--inplace-activations all)"
        )
        return [Note("assumption", "SM305", text)]

    @cached_property
    def report(self) -> Report:
        """All of it as frozen values."""
        request, graph = self.request, self.result.graph
        size, digest = fingerprint(self.model.path)
        sources = Sources(
            self.model, size, digest, self.binding, graph, self.scenario, self.result, self.lifetimes, self.notes,
            self.live_band,
        )  # fmt: skip
        report = build(sources, request.top)
        if request.parallel is not None:
            shared = replace(report.scenario, parallel=request.parallel, devices=request.devices)
            report = replace(report, scenario=shared)
        from staticmem.studies.device import with_device

        report = with_device(report, self.result, request)
        if request.method == "textbook":
            from staticmem.studies.compare import with_textbook

            report = with_textbook(report, graph)
        return report


def fingerprint(path: str) -> tuple[int, str | None]:
    """Size in bytes and SHA-256 of a file; None for a large one. An object has neither."""
    if path.startswith("<") and not os.path.exists(path):  # an object in memory
        return 0, None
    size = os.stat(path).st_size
    if size > HASH_LIMIT:
        return size, None
    stamp = files.stamp(path)
    known = _fingerprints.get(path)
    if known is not None and known[0] == stamp:
        return size, known[1]
    import hashlib

    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    if stamp is not None:
        _fingerprints.put(path, (stamp, digest))
    return size, digest


def _unknown(unknown: Mapping[str, int]) -> Note:
    names = sorted(unknown)
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    text = (
        f"no rule for {listed}: inputs and results are kept for backward as a precaution; "
        "the peak may be too high, or too low by what they make besides"
    )
    return Note("warning", "SM201", text, sum(unknown.values()))


def assumed_batch(model: ModelFile, dims: Mapping[str, int]) -> tuple[dict[str, int], list[Note]]:
    """Sizes for open batch dimensions (axis 0) that nobody gave: 1, or the least that the export allows."""
    assumed: dict[str, int] = {}
    for spec in model.inputs:
        axis = spec.shape[0] if spec.shape else None
        if isinstance(axis, str) and axis not in dims and f"{spec.name}[0]" not in dims:
            assumed[axis] = max(1, model.symbols.get(axis, SymbolRange()).low or 1)
    sizes = ", ".join(str(size) for size in dict.fromkeys(assumed.values()))
    notes = [Note("assumption", "SM301", f"batch {sizes} assumed; give --batch N")] if assumed else []
    return assumed, notes
