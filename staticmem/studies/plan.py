"""A plan: several instants of one process, each of which is the step of a study, replayed through one allocator.

    plan -> a study for each kind of step -> one process (`allocators.run`) -> meters at every instant -> `RunReport`

The usual step is the plan with one instant: its process has the same calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

from staticmem.allocators.band import JITTERS, JITTERS_OF_LONG, LONG, JitteredSizes, Replays, is_quick, jitters
from staticmem.allocators.from_trace import Builder
from staticmem.allocators.process import Process
from staticmem.allocators.result import Replay
from staticmem.allocators.run import MODEL, STATE, Gathering, Run
from staticmem.allocators.settings import Layout, ascending, parse_settings
from staticmem.allocators.stretches import Stretches
from staticmem.config.config import Budget, Config, of_node
from staticmem.config.discover import read
from staticmem.config.fields import HOST, SOFTWARE
from staticmem.config.plan import CONCATENATED, LOSS, NOTHING, OUTPUTS, PREDICTIONS, WITH_STATE, WORDS, Instant, Plan
from staticmem.devices.architectures import RUNS, Standing
from staticmem.devices.host import IN_STEP, LOADING, SAVING
from staticmem.devices.kernels import KernelWorkspaces
from staticmem.devices.meters import Device, capacity_of, replay_on, standing_on, sum_slack_of_caches, usable_on
from staticmem.devices.sizing import TIGHT, Fit, Verdict, verdict
from staticmem.documents import of_plain
from staticmem.errors import UsageError
from staticmem.frontends.architectures import model_name
from staticmem.report.model import METERS
from staticmem.report.model import Band as BandInfo
from staticmem.report.run import SCHEMA, InstantReport, LargestLengths, LengthsInfo, RunChange, RunReport
from staticmem.report.sweep import SCHEMA as SWEEP_SCHEMA
from staticmem.report.sweep import CardFit, Check, Sweep, SweepRow
from staticmem.report.verdict import with_article
from staticmem.scenario.request import request_of
from staticmem.scenario.strategies import PYTORCH, facts_of
from staticmem.studies import without_cycle_search
from staticmem.studies.budgets import check
from staticmem.studies.device import DEFAULT_GPU, device_of, gpu_fit
from staticmem.studies.gathering import Batches, batches_until_full, fills
from staticmem.studies.host import host_of_instants
from staticmem.studies.largest_lengths import Replayed, find_largest
from staticmem.studies.lengths import AT_WORST, Lengths, Shape, ShapedBuilders
from staticmem.studies.study import Study, key_of
from staticmem.units import Band

if TYPE_CHECKING:
    import numpy as np

POINTS = 400  # of the timeline
SHORT = 100_000  # calls of a long run in the replays of its band


@dataclass
class _Moment:
    """An instant in the process: the indices of its first call, behind each of its steps, and behind its last call."""

    instant: Instant
    study: Study | None
    start: int
    steps: list[int] = field(default_factory=list)
    lengths: LengthsInfo | None = None
    end: int = 0


@dataclass(frozen=True)
class Played:
    """A plan as it was played: the process, its instants, and the bytes of tensors alive behind each call."""

    process: Process
    moments: tuple[_Moment, ...]
    live: np.ndarray

    @cached_property
    def stops(self) -> list[int]:
        """The calls at which memory is asked for: between instants, steps and points of the timeline."""
        stops = {0, len(self.process.calls)}
        for number, moment in enumerate(self.moments):
            stops.update((moment.start, moment.end, *moment.steps, *self.points_of(number)))
        return sorted(stops)

    def points_of(self, number: int) -> list[int]:
        """The stops of an instant in the timeline, its ends among them."""
        moment = self.moments[number]
        length = moment.end - moment.start
        parts = max(1, min(POINTS * length // max(len(self.process.calls), 1), length))
        return [moment.start + part * length // parts for part in range(parts + 1)]


class PlanStudy:
    """A plan on a card.

    Raises:
        StaticmemError: a model cannot be read, or a step of it cannot be analysed.
    """

    def __init__(self, plan: Plan, options: Mapping[str, Any], progress: Callable[[int, int], None] | None = None):
        """`options` are of the card and its software (`Request`), for all instants."""
        self.plan, self.options = plan, options
        self.progress = progress or (lambda done, count: None)
        self._opened: dict[str, Study] = {}
        self._studies: dict[Any, Study] = {}
        self._builders: dict[int, Builder] = {}
        self._drawn: dict[int, tuple[Instant, list[Shape]]] = {}  # who is kept has its id alone
        if not any(WORDS[one.word].mode for one in plan.instants):
            why = "It has no step, evaluation or generation."
            raise UsageError("the plan runs no model", why, "Add `step: {batch: 32}` to its instants.", "SM440")

    @cached_property
    def device(self) -> Device:
        """The card, with the software of the request."""
        first = next(one for one in self.plan.instants if WORDS[one.word].mode)
        return device_of(self.study(first).request)

    # -- steps ---------------------------------------------------------------------------------------------------

    def study(self, instant: Instant) -> Study:
        """The study of an instant's step; of one with batches of many lengths, of the longest."""
        if "lengths" in instant.own:
            instant = _at_shape(instant, self._shapes(instant)[-1])
        request = request_of({**self.options, **instant.options})
        key = instant.model, key_of(request)
        if key not in self._studies:
            path = self.plan.models[instant.model].path
            opened = self._opened.get(path)
            study = Study.open(path, request) if opened is None else opened.ask(request)
            self._opened.setdefault(path, study)
            if study.result.trace.cuda_graphs:
                what = f"'{instant.word}' of '{instant.model}' runs as CUDA graphs"
                why = "The pool of CUDA graphs is replayed for one step alone."
                raise UsageError(what, why, "Leave `compile_mode: reduce-overhead` out.", "SM441")
            self._studies[key] = study
        return self._studies[key]

    def builder(self, study: Study) -> Builder:
        key = id(study)
        if key not in self._builders:
            trace = study.result.trace
            self._builders[key] = Builder(trace, KernelWorkspaces(trace, self.device.setup))
        return self._builders[key]

    def _shapes(self, instant: Instant) -> list[Shape]:
        """The batches of an instant with many lengths."""
        if id(instant) not in self._drawn:
            shapes = _lengths(instant).shapes(instant.times, instant.options.get("batch", 1))
            self._drawn[id(instant)] = instant, shapes
        return self._drawn[id(instant)][1]

    def builders(self, instant: Instant) -> tuple[list[Builder], LengthsInfo | None]:
        """The builder of each step of an instant, and what there is to say of their lengths."""
        if "lengths" not in instant.own:
            return [self.builder(self.study(instant))] * instant.times, None
        shapes = self._shapes(instant)
        shaped = ShapedBuilders(lambda shape: self.builder(self.study(_at_shape(instant, shape))), shapes)
        lengths = sorted(length for _, length in shapes[:-AT_WORST])
        info = LengthsInfo(
            dim=instant.own["lengths"]["dim"],
            least=lengths[0],
            median=lengths[len(lengths) // 2],
            most=lengths[-1],
            shapes=shaped.count,
            shapes_run=len(shaped.ran),
            rounds_up=shaped.rounds_up,
            rounded_bytes=shaped.rounded_bytes,
            worst_batch=shapes[-1][0],
            worst_length=shapes[-1][1],
            worst_chance=round(_lengths(instant).chance_of_longest(shapes), 6),
        )
        return [shaped.at(shape) for shape in shapes], info

    def rows(self, instant: Instant, builder: Builder, at: int) -> int:
        """The batch of a step of an instant."""
        if "lengths" in instant.own:
            return self._shapes(instant)[at][0]
        inputs = builder.inputs
        batch: int = instant.options.get("batch") or (inputs[0].shape[0] if inputs and inputs[0].shape else 1)
        return batch

    def study_of_model(self, model: str, mode: str = "") -> Study:
        """The study of the first step of a model, of one mode if any is asked for; of a model without a step an
        inference."""
        for one in self.plan.instants:
            if one.model == model and WORDS[one.word].mode and mode in ("", WORDS[one.word].mode):
                return self.study(one)
        dims = self.plan.models[model].dims
        return self.study(Instant("evaluate", model, options={"mode": "infer", **({"dims": dims} if dims else {})}))

    # -- the process ---------------------------------------------------------------------------------------------

    def play(self, instants: Sequence[Instant], steps: Sequence[Sequence[int]] = ()) -> Played:
        """The process of some instants; `steps`: of each the numbers of those that it has, all by default."""
        self._builders.clear()  # a builder is of one process
        for number, one in enumerate(instants):
            if WORDS[one.word].mode:
                self.builder(self.study(one))
            self.progress(number + 1, 2 * len(instants))
        first = next(one for one in instants if WORDS[one.word].mode)
        parts = {name: source.parts for name, source in self.plan.models.items()}
        player = _Player(self, Run(self.builder(self.study(first)), parts), steps)
        for one in instants:
            player.play(one)
        run = player.run
        return Played(run.joined(), tuple(player.moments), run.live())

    def play_last(self, instants: Sequence[Instant]) -> Batches:
        """The process of some instants, with the steps of the last."""
        played = self.play(instants)
        return Batches(played.process, played.live, played.moments[-1].steps)

    # -- the report ----------------------------------------------------------------------------------------------

    @without_cycle_search()
    def report(self, finds_largest: bool = False) -> RunReport:
        """The meters of every instant, the verdict, and what makes it fit; if asked, the largest budget of lengths.

        Raises:
            UsageError: that is asked for without a card, or without lengths.
        """
        played = self.play(self.plan.instants)
        meters = _Meters(self, played, self.device)
        outcome = meters.verdict
        changes: tuple[RunChange, ...] = ()
        if outcome.fit in (Fit.DOES_NOT_FIT, Fit.TIGHT) and self.device.bounded:
            changes = tuple(self._changes(meters))
        paths = dict.fromkeys(model_name(source.path) for source in self.plan.models.values())
        card = self.device.gpu
        peak = max(meters.instants, key=lambda one: one.device_bytes)
        report = RunReport(
            schema=SCHEMA,
            models=tuple(paths),
            card=card.name,
            gpu=gpu_fit(card, outcome) if self.device.bounded else None,
            instants=tuple(self._filled(meters)),
            live_bytes=max(one.live_bytes for one in meters.instants),
            allocated_bytes=max(one.allocated_bytes for one in meters.instants),
            reserved_bytes=max(one.reserved_bytes for one in meters.instants),
            device_bytes=outcome.needed.expected,
            context_bytes=meters.context.expected,
            device=BandInfo(outcome.needed.low, outcome.needed.high),
            peak=peak.name,
            changes=changes,
            assumed=tuple(self._assumed()),
            points=tuple(meters.points()),
            retries=meters.retries,
            returned_bytes=meters.replay.returned if meters.replay is not None else 0,
            host=host_of_instants(list(self._on_host())),
            cause="" if meters.cause is None else meters.instants[meters.cause].name,
        )
        return replace(report, largest=self._largest()) if finds_largest else report

    def _largest(self) -> LargestLengths:
        """The largest budget of batches of many lengths."""
        if not self.device.bounded:
            why = "What fits is a matter of the memory of a card."
            raise UsageError("the largest budget of no GPU", why, "Add --gpu NAME, or `gpus: [NAME]`.", "SM449")
        limit = int(TIGHT * usable_on(self.device))

        def replay(instants: Sequence[Instant], number: int) -> Replayed:
            self._studies.clear()  # those of other sizes
            self._drawn.clear()
            meters = _Meters(self, self.play(instants), self.device)
            lengths = meters.instants[number].lengths
            assert lengths is not None
            return Replayed(meters.verdict.fit is Fit.FITS, meters.verdict.needed.high, limit, lengths)

        return find_largest(self.plan.instants, replay)

    def _filled(self, meters: _Meters) -> Iterator[InstantReport]:
        """The instants, with after how many batches of those that gather the card is full."""
        of_plan, capacity = self.plan.instants, capacity_of(self.device)
        for number, (instant, one) in enumerate(zip(of_plan, meters.instants, strict=True)):
            is_reached = not any(reached.runs_out for reached in meters.instants[: number + 1])
            if capacity is not None and fills(instant) and is_reached:
                full = batches_until_full(self.play_last, of_plan[:number], instant, self.device, capacity)
                one = replace(one, full_after=full)
            yield one

    def _on_host(self) -> Iterator[tuple[str, Study, int, tuple[str, ...]]]:
        """Moments of the process on the host, with the bytes of models that are there because they sleep, and the
        categories that a save gathers there."""
        loaded: set[str] = set()
        asleep: dict[str, int] = {}
        for one in self.plan.instants:
            if not one.model:
                continue
            study = self.study(one) if WORDS[one.word].mode else self.study_of_model(one.model)
            if one.model not in loaded:
                loaded.add(one.model)
                yield LOADING, study, sum(asleep.values()), ()
            if one.word == "sleep":
                last = study.lifetimes.by_category(max(study.lifetimes.ticks - 1, 0))
                kinds = _parts(one.own.get("parts", "model"))
                asleep[one.model] = sum(last.get(kind, 0) for kind in kinds)
            else:
                asleep.pop(one.model, None)
            gathered = _parts(one.own["full"]) if "full" in one.own and one.own.get("offload", True) else ()
            yield SAVING if one.word == "save" else IN_STEP, study, sum(asleep.values()), gathered

    def _assumed(self) -> Iterator[str]:
        if not self.device.bounded:
            card = with_article(self.device.gpu.name)
            yield f"no GPU is named: the figures are those of {card} (gpus: [NAME], or --gpu NAME)"
        for study in self._studies.values():
            for note in study._binding[1]:
                yield f"{model_name(study.model.path)}: {note.text}"
        for instant in dict.fromkeys(one.name or one.word for one in self.plan.instants if self._lacks_loss(one)):
            yield (
                f"'{instant}' computes no loss, as its model returns none; a loop that computes one from labels, as "
                "Trainer's, needs up to twice the size of the logits in float32 more"
            )

    def _lacks_loss(self, instant: Instant) -> bool:
        """Whether an evaluation gathers a loss that its model does not compute."""
        gathering = _gathering(instant)
        return gathering is not None and gathering.loss and () not in self.study(instant).result.output_shapes

    def _changes(self, before: _Meters) -> Iterator[RunChange]:
        """What makes the run fit, the cheapest first, as replayed."""
        for does, instants, device in self._tries(before):
            played = self.play(instants)
            meters = _Meters(self, played, device)
            if meters.verdict.fit is Fit.FITS or (
                meters.verdict.fit is Fit.TIGHT and before.verdict.fit is Fit.DOES_NOT_FIT
            ):
                yield RunChange(does, meters.verdict.needed.expected)

    def _tries(self, before: _Meters) -> Iterator[tuple[str, list[Instant], Device]]:
        """Changes of the plan, with the instants that it has then, and the card with its settings."""
        instants, at = list(self.plan.instants), before.worst
        worst = instants[at]
        if at:
            emptied = [*instants[:at], Instant("empty_cache", ""), *instants[at:]]
            yield f"torch.cuda.empty_cache() before '{before.instants[at].name}'", emptied, self.device
        if not self.device.settings.expandable_segments:
            settings = parse_settings("expandable_segments:True")
            yield (
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                instants,
                replace(self.device, settings=settings),
            )
        for model in self.plan.models:
            if model != worst.model and any(one.model == model for one in instants[:at]):
                asleep = Instant("sleep", model, own={"parts": WITH_STATE})
                moved = [*instants[:at], asleep, worst, Instant("wake", model), *instants[at + 1 :]]
                yield f"'{model}' on the CPU during '{before.instants[at].name}'", moved, self.device
        for number in dict.fromkeys((at, at if before.cause is None else before.cause)):
            if fills(instants[number]):
                steps = max((before.instants[number].ran or instants[number].times) // 2, 1)
                own = {**instants[number].own, "accumulation_steps": steps}
                moved = [*instants[:number], replace(instants[number], own=own), *instants[number + 1 :]]
                yield f"accumulation_steps: {steps} in '{before.instants[number].name}'", moved, self.device
            yield from self._smaller(instants, number, before.instants[number].name)

    def _smaller(self, instants: Sequence[Instant], at: int, name: str) -> Iterator[tuple[str, list[Instant], Device]]:
        """Half the batch in an instant, and in those that are as it."""
        chosen = instants[at]
        batch = chosen.options.get("batch")
        if batch is None or batch == 1:
            return
        less: dict[str, Any] = {**chosen.options, "batch": batch // 2}
        what = f"batch {batch // 2}"
        if chosen.word == "step":
            less["accumulate"] = 2 * chosen.options.get("accumulate", 1)
            what = f"micro-batches of {batch // 2} (accumulate {less['accumulate']})"
        smaller = [replace(one, options=less) if one.options == chosen.options else one for one in instants]
        yield f"{what} in '{name}'", smaller, self.device


def _named_apart(instants: Sequence[InstantReport]) -> list[InstantReport]:
    """Instants, of which no two have one name: the second `step` is `step 2`."""
    names: set[str] = set()
    apart = []
    for one in instants:
        name = next(name for name in _numbered(one.name) if name not in names)
        names.add(name)
        apart.append(one if name == one.name else replace(one, name=name))
    return apart


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name} {number}" for number in count(2))


def _gathering(instant: Instant) -> Gathering | None:
    """What an evaluation gathers."""
    own = instant.own
    if own.get("gather", NOTHING) == NOTHING:
        return None
    keep, labels = own.get("keep", OUTPUTS), own.get("labels", False)
    return Gathering(
        joins=own["gather"] == CONCATENATED,
        outputs=keep == OUTPUTS,
        predictions=keep == PREDICTIONS,
        loss=labels or keep == LOSS,
        labels=labels and keep != LOSS,
        nbytes=own.get("gathered"),
    )


def _lengths(instant: Instant) -> Lengths:
    return Lengths(**{key: value for key, value in instant.own["lengths"].items() if key != "dim"})


def _at_shape(instant: Instant, shape: Shape) -> Instant:
    """The instant with batches of one shape."""
    dims = {**instant.options.get("dims", {}), instant.own["lengths"]["dim"]: shape[1]}
    own = {key: value for key, value in instant.own.items() if key != "lengths"}
    return replace(instant, options={**instant.options, "batch": shape[0], "dims": dims}, own=own)


class _Player:
    """Plays instants in a run."""

    def __init__(self, plan: PlanStudy, run: Run, steps: Sequence[Sequence[int]] = ()) -> None:
        self.plan, self.run, self.steps = plan, run, steps
        self.moments: list[_Moment] = []

    def play(self, instant: Instant) -> None:
        study = self.plan.study(instant) if WORDS[instant.word].mode else None
        moment = _Moment(instant, study, len(self.run.calls))
        self.moments.append(moment)
        act = self._steps if study is not None else getattr(self, f"_{instant.word}")
        act(moment)
        moment.end = len(self.run.calls)

    def _steps(self, moment: _Moment) -> None:
        instant, study = moment.instant, moment.study
        assert study is not None
        trains = instant.word == "step"
        builders, moment.lengths = self.plan.builders(instant)
        in_function = not trains and instant.own.get("function", True)
        loop = f"{instant.word} {instant.model}"
        gathering, moves = _gathering(instant), instant.own.get("accumulation_steps")
        steps = self.steps[len(self.moments) - 1] if self.steps else range(len(builders))
        for number, at in enumerate(steps, 1):
            self.run.step(builders[at], instant.model, loop)
            if gathering is not None:
                self.run.gather(loop, gathering, self.plan.rows(instant, builders[at], at))
            if moves and number % moves == 0:
                self.run.move_gathered(loop)
            moment.steps.append(len(self.run.calls))
        if in_function:
            self.run.end_loop(loop)

    def _load(self, moment: _Moment) -> None:
        model = moment.instant.model
        self.run.load(self.plan.builder(self.plan.study_of_model(model)), model)

    def _save(self, moment: _Moment) -> None:
        own, model = moment.instant.own, moment.instant.model
        copies = own.get("copies", NOTHING)
        ids: list[int] = []
        if "full" in own:
            study = self.plan.study_of_model(model, "train")
            _check_shards(study, model)
            parts = _parts(own["full"])
            ids = self.run.gather_shards(self.plan.builder(study), model, parts, own.get("offload", True))
        elif copies != NOTHING:
            ids = self.run.copy(model, _parts(copies), deep=True)
        if not own.get("stays", False):
            self.run.release(ids)

    def _resume(self, moment: _Moment) -> None:
        model, parts = moment.instant.model, moment.instant.own.get("parts", WITH_STATE)
        self._load(moment)
        mode = "train" if parts == WITH_STATE else ""
        self.run.resume(self.plan.builder(self.plan.study_of_model(model, mode)), model, parts == WITH_STATE)

    def _copy(self, moment: _Moment) -> None:
        model, of = moment.instant.model, moment.instant.own["of"]
        builder = self.plan.builder(self.plan.study_of_model(of))
        if of not in self.run.there:
            self.run.load(builder, of)
        self.run.copy_model(builder, model, of)

    def _average(self, moment: _Moment) -> None:
        self.run.average(moment.instant.model, moment.instant.own.get("temporaries", 0))

    def _sleep(self, moment: _Moment) -> None:
        self.run.move_away(moment.instant.model, _parts(moment.instant.own.get("parts", "model")))

    def _wake(self, moment: _Moment) -> None:
        self.run.bring_back(moment.instant.model)

    def _end(self, moment: _Moment) -> None:
        model = moment.instant.model
        for loop in [name for name in self.run.loops if name.partition(" ")[2] == model]:
            self.run.end_loop(loop)
        self.run.end(model)

    def _empty_cache(self, moment: _Moment) -> None:
        self.run.empty_cache()


def _check_shards(study: Study, model: str) -> None:
    """Raises UsageError where a model is not in shards that one all-gather of each makes whole."""
    request = study.request
    facts = facts_of(request.parallel)
    if facts is None or not (facts.divides_parameters and facts.shares_samples and facts.library == PYTORCH):
        why = "`full` gathers the shards of FSDP2, and no step of the plan trains this model with it."
        hint = "Add `parallel: fsdp` and `devices` to its steps, or use `copies`."
        raise UsageError(f"the full state dict of '{model}', which is not in shards", why, hint, "SM451")
    if (request.expert_parallel or 1) > 1:
        why = "Experts are in shards of shards, which are gathered in two steps that a plan does not follow."
        raise UsageError(f"the full state dict of '{model}' under --expert-parallel", why, "Save shards.", "SM451")


def _parts(word: str) -> tuple[str, ...]:
    return (*MODEL, *STATE) if word == WITH_STATE else MODEL


class _Meters:
    """What a card shows at every instant of a plan that was played."""

    def __init__(self, plan: PlanStudy, played: Played, device: Device) -> None:
        self.plan, self.played, self.device = plan, played, device
        process, stops = played.process, played.stops
        self.is_quick = is_quick(process, device.settings)
        self.replay: Replay | None = None  # the one that the figures are of, where it is a whole one
        if self.is_quick:
            self.nominal = Stretches.serve(process, stops)
        else:
            self.replay = replay_on(process, replace(device, bounded=False), None)
            self.nominal = Stretches.of(self.replay, stops)
        self.free_reserved = self.nominal.reserved
        self.pressed: Replay | None = None
        self.context = device.setup.profile.overhead(device.gpu)
        if device.bounded and self.free_reserved + self.context.expected > usable_on(device):
            self.pressed = replay_on(process, device, capacity_of(device))
            if self.pressed.oom is None:
                self.replay, self.nominal = self.pressed, Stretches.of(self.pressed, stops)
        self._jittered: list[Stretches] = []
        self._ends = (0, 0)  # of a long run: by how much its band is below, and above, what is expected
        if len(process.calls) > LONG and self.is_quick:
            short = self._shortened()
            replays = Replays(short.process, None)
            (low, high), (reserved, _) = replays.reserved, replays.nominal_reserved
            self._ends = max(reserved - low, 0), max(high - reserved, 0)
        else:
            self._jittered = list(self._jitters())
        self.instants = _named_apart([self._instant(moment) for moment in played.moments])

    @property
    def retries(self) -> int:
        return self.replay.retries if self.replay is not None else 0

    def _shortened(self) -> Played:
        """The run with the steps in which reserved memory grows, the first of each instant, and the last. The others
        open no segment, and in the replays of a band seldom one: of ten over 1,000 steps of a decoder one, of 2 MiB."""
        moments = self.played.moments
        calls = len(self.played.process.calls)
        first = max(max(len(moment.steps) for moment in moments) * SHORT // calls, AT_WORST)
        chosen: list[list[int]] = []
        for moment in moments:
            ends = [moment.start, *moment.steps]
            reserved = [self.nominal.at_stop(end)[1] for end in ends]
            chosen.append(
                [
                    number
                    for number in range(len(moment.steps))
                    if number < first
                    or moment.instant.own.get("gather", NOTHING) != NOTHING  # each adds to what is gathered
                    or number >= len(moment.steps) - AT_WORST
                    or reserved[number + 1] > reserved[number]
                ]
            )
        return self.plan.play([moment.instant for moment in moments], chosen)

    def _jitters(self) -> Iterator[Stretches]:
        process = self.played.process
        sizes = JitteredSizes(process)
        chosen = jitters(JITTERS if len(process.calls) <= LONG else JITTERS_OF_LONG)
        tries = [(sizes.scaled(scale, at + 1), layout) for at, (scale, layout) in enumerate(chosen)]
        tries += [(process.bound(most), ascending) for most in (False, True) if process.bounds]
        for changed, layout in tries:
            yield from self._jitter(changed, layout)

    def _jitter(self, sizes: Sequence[int], layout: Layout) -> Iterator[Stretches]:
        """The replay with other sizes; none where that runs out of memory."""
        process, stops, settings = self.played.process, self.played.stops, self.device.settings
        if self.is_quick:
            yield Stretches.serve(process, stops, sizes, layout)
            return
        from staticmem.allocators.cuda_caching import simulate  # late: a run with default settings needs none

        total = self.device.gpu.usable if self.device.bounded else None
        replay = simulate(process.served(sizes), settings, total=total, layout=layout)
        if replay.oom is None:
            yield Stretches.of(replay, stops)

    def _instant(self, moment: _Moment) -> InstantReport:
        start, end = moment.start, moment.end
        allocated, reserved = self.nominal.between(start, end)
        band = self._band(moment, start, end, reserved)
        allocated_left, reserved_left = self.nominal.at_stop(end)
        oom = self.pressed.oom if self.pressed is not None else None
        runs_out = oom is not None and start <= oom.time < end
        live = self.played.live[max(start - 1, 0) : end]
        given_back = self.replay.segment_events if self.replay is not None else ()
        instant = moment.instant
        return InstantReport(
            name=instant.name or instant.word,
            does=instant.word,
            model=instant.model,
            times=instant.times,
            live_bytes=int(live.max(initial=0)),
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            device_bytes=band.expected,
            device_low_bytes=band.low,
            device_high_bytes=band.high,
            left_bytes=int(live[-1]) if len(live) else 0,
            cached_bytes=reserved_left - allocated_left,
            returned_bytes=sum(-event.change for event in given_back if start <= event.time < end and event.change < 0),
            runs_out=runs_out,
            ran=sum(oom is None or step <= oom.time for step in moment.steps),
            lengths=None if moment.lengths is None else self._settled(moment, moment.lengths),
        )

    def _settled(self, moment: _Moment, lengths: LengthsInfo) -> LengthsInfo:
        """With what the drawn batches reserve, and the step of them in which reserved memory grew last."""
        ends = moment.steps[:-AT_WORST]
        peaks = [self.nominal.between(start, end)[1] for start, end in pairwise([moment.start, *ends])]
        top = max(peaks, default=0)
        return replace(lengths, reserved_bytes=top, settled_after=1 + peaks.index(top) if peaks else 0)

    def _band(self, moment: _Moment, start: int, end: int, reserved: int) -> Band:
        """The device memory of an instant."""
        peaks = [stretches.between(start, end)[1] for stretches in self._jittered]
        band = Band(min([reserved, *peaks]), reserved, max([reserved, *peaks])).widened(*self._ends)
        if moment.study is not None:
            band = band.widened(*moment.study.spread).widened(0, sum_slack_of_caches(moment.study.result))
        needed = band.plus_unrelated(self.context)
        if not self.device.bounded or (self.pressed is not None and self.pressed.oom is not None):
            return needed
        return needed.at_most(usable_on(self.device))  # what does not fail takes no more

    @cached_property
    def worst(self) -> int:
        """The number of the instant that runs out of memory, or needs the most."""
        out = [number for number, one in enumerate(self.instants) if one.runs_out]
        return out[0] if out else max(range(len(self.instants)), key=lambda at: self.instants[at].device_bytes)

    @cached_property
    def cause(self) -> int | None:
        """Where an instant as the worst one ran before with less: the instant between the two in which reserved memory
        grew the most, as an evaluation whose blocks no step can use."""
        worst, moments, reserved = self.worst, self.played.moments, [one.reserved_bytes for one in self.instants]
        instant = replace(moments[worst].instant, name="", times=1)
        same = [at for at in range(worst) if replace(moments[at].instant, name="", times=1) == instant]
        between = range(same[-1] + 1, worst) if same else range(0)
        grown = {at: reserved[at] - reserved[at - 1] for at in between}
        cause = max(grown, key=lambda at: grown[at], default=None)
        return cause if cause is not None and grown[cause] > reserved[worst] - reserved[worst - 1] else None

    @cached_property
    def verdict(self) -> Verdict:
        needs = self.instants
        needed = Band(
            max(one.device_low_bytes for one in needs),
            max(one.device_bytes for one in needs),
            max(one.device_high_bytes for one in needs),
        )
        return verdict(needed, usable_on(self.device), tight=self.retries > 0, standing=self._standing())

    def _standing(self) -> Standing:
        """Whether the card runs all steps."""
        studies = {id(moment.study): moment.study for moment in self.played.moments if moment.study is not None}
        standings = [standing_on(study.result, self.device) for study in studies.values()]
        return next((s for s in standings if s.obstacle), next((s for s in standings if s.condition), RUNS))

    def points(self) -> Iterator[tuple[int, int, int]]:
        """The timeline, instant by instant."""
        for number in range(len(self.played.moments)):
            for start, end in pairwise(self.played.points_of(number)):
                yield (number, *self.nominal.between(start, end))


def plan(
    source: str | os.PathLike[str] | Mapping[str, Any], gpu: str | None = None, max_budget: bool = False
) -> RunReport:
    """The memory of a run of several instants in one process.

    Args:
        source: a config with `plan:`, as a path or as the mapping that its YAML would be.
        gpu: a card by name or size; without it the first of the config's `gpus`.
        max_budget: also the largest token budget, or batch, of the first instant with `lengths`.

    Raises:
        StaticmemError: the config has no plan, or a step of it cannot be analysed.
    """
    if isinstance(source, Mapping):
        config = of_node(of_plain(dict(source), "plan()", ""), "")
    else:
        config = read(os.fspath(source))
    return study_of_config(config, gpu).report(max_budget)


def study_of_config(config: Config, gpu: str | None, progress: Callable[[int, int], None] | None = None) -> PlanStudy:
    """The plan of a config on a card, or on the first of those that it names.

    Raises:
        UsageError: it has no plan.
    """
    if config.plan is None:
        what = f"{config.file} has no plan" if config.file else "no config with a plan"
        why, hint = "A plan says what a process does, one instant after the other.", "See 'staticmem init --plan'."
        raise UsageError(what, why, hint, "SM442")
    card = gpu or next(iter(config.gpus), None)
    of_card = {
        name: value
        for name, value in config.options.items()
        if name in SOFTWARE or name in HOST or name == "alloc_conf"
    }
    options = {**of_card, **({"gpu": card} if card is not None else {})}
    return PlanStudy(config.plan, options, progress)


def check_plan(
    config: Config, cards: Sequence[str], budgets: Sequence[Budget], progress: Callable[[int, int], None] | None = None
) -> Check:
    """The run of a config's plan against budgets, on each card; without budgets, against the memory of the cards."""
    if not cards and any(budget.metric != "live" for budget in budgets):
        cards = (DEFAULT_GPU,)  # other meters are those of a card
    runs = [study_of_config(config, card, progress).report() for card in cards or (None,)]
    fits = []
    for run in runs:
        gpu = run.gpu
        if gpu is not None:
            fits.append(
                CardFit(
                    gpu=gpu.name,
                    usable_bytes=gpu.usable_bytes,
                    fit=gpu.fit,
                    allocated_bytes=run.allocated_bytes,
                    reserved_bytes=run.reserved_bytes,
                    device_bytes=run.device_bytes,
                    device_low_bytes=run.device.low,
                    device_high_bytes=run.device.high,
                    headroom_bytes=gpu.headroom_bytes,
                    missing_bytes=gpu.missing_bytes,
                    obstacle=gpu.obstacle,
                    why=gpu.why,
                    condition=gpu.condition,
                    least_usable_bytes=gpu.least_usable_bytes,
                )
            )
    models = ", ".join(runs[0].models)
    live = runs[0].live_bytes
    row = SweepRow(0, "the run", models, {}, None, live, None, {}, None, None, None, None, tuple(fits))
    names = tuple(fit.gpu for fit in fits)
    return check(Sweep(SWEEP_SCHEMA, runs[0].models, (), METERS, names, (row,), runs[0].assumed), budgets)
