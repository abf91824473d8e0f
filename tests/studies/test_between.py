"""Steps between those that were run are the steps that a run of their own gives, and so are the cards that they fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.allocators.band import Replays
from staticmem.allocators.patterns import Patterns
from staticmem.devices import gpus
from staticmem.devices.meters import SharedReplays, Unlimited, process_on
from staticmem.devices.sizing import TIGHT, Fit
from staticmem.engine.step import StepResult, run_step
from staticmem.ir.graph import Graph
from staticmem.report.sweep import SweepRow
from staticmem.studies import Request, Study, request_of
from staticmem.studies.bench import Bench, on
from staticmem.studies.between import InterpolatedSteps, InterpolatingBench
from staticmem.studies.device import device_of
from staticmem.studies.largest import LargestBatches
from staticmem.studies.sizing import Options, size
from staticmem.studies.sizing_search import BATCH
from staticmem.units import MIB

ROOT = Path(__file__).parents[2]
OPEN = ROOT / "models" / "resnet18.onnx"  # it leaves open what ran in place
GRAPHS = ROOT / "tests" / "data" / "graphs"


def lines(path: Path, low: int, high: int, **settings: Any) -> tuple[Study, InterpolatedSteps | None]:
    study = Study.open(path, request_of(settings))
    batches = low, (low + high) // 2, high
    return study, InterpolatedSteps.through([(b, study.ask(replace(study.request, batch=b))) for b in batches])


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        (OPEN, {"optimizer": "adam"}),
        (OPEN, {"optimizer": "sgd", "amp": "bf16", "channels_last": True}),
        (GRAPHS / "alexnet.pt2", {"mode": "infer"}),
        (GRAPHS / "vit_b_16.pt2", {"optimizer": "adamw", "amp": "fp16"}),
    ],
)
def test_a_step_between_is_the_step_that_runs(path: Path, settings: dict[str, Any]) -> None:
    study, between = lines(path, 16, 300, **settings)
    assert between is not None
    for batch in (17, 40, 129):
        alone = study.ask(replace(study.request, batch=batch))
        step, ran = between.at(batch).trace, alone.result.trace
        assert list(step.buffers) == list(ran.buffers)
        assert step.reads == ran.reads
        assert (step.phases, step.ticks) == (ran.phases, ran.ticks)
        assert between.live(batch) == alone.lifetimes.peak_bytes
        assert between.spread(batch) == alone.spread


def test_what_is_open_is_compared_too() -> None:
    """At batch 2 the peak is the optimizer's, and what ran in place does not move it; at larger ones it does."""
    settings = {"optimizer": "adam"}
    assert lines(OPEN, 2, 300, **settings)[1] is None
    study, between = lines(OPEN, 16, 300, **settings)
    assert between is not None
    assert between.spread(100)[1] > 1 << 20
    bench = InterpolatingBench(Bench(study), study.request, BATCH)
    bench.widen(2, 300)
    assert bench.lines is not None
    assert bench.lines.low == 16


def test_a_line_that_is_not_confirmed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that a search names is run; where the line said otherwise, the search is done without lines."""
    study = Study.open(GRAPHS / "alexnet.pt2", Request(optimizer="adam"))
    card, search = gpus.find("l4"), LargestBatches(Bench(study, many_cards=True), study.request)
    right = search.tried(card)
    assert search.between.lines is not None
    search = LargestBatches(Bench(study, many_cards=True), study.request)
    own = InterpolatedSteps.at

    def wrong(between: InterpolatedSteps, batch: int) -> Any:
        step = own(between, batch)
        sizes = step.trace.buffers.nbytes
        if batch not in (between.low, (between.low + between.high) // 2, between.high):
            sizes[-1] += 1 << 30
        return step

    monkeypatch.setattr(InterpolatedSteps, "at", wrong)
    assert search.tried(card) == right
    assert search.between.lines is None


def test_steps_of_other_structures_have_none_between() -> None:
    """A step of two micro-batches runs the forward twice."""
    study = Study.open(GRAPHS / "alexnet.pt2", Request(optimizer="sgd"))
    other = study.ask(Request(optimizer="sgd", batch=40, accumulate=2))
    asked = [(10, study.ask(Request(optimizer="sgd", batch=10))), (40, other)]
    assert InterpolatedSteps.through([*asked, (70, study.ask(Request(optimizer="sgd", batch=70)))]) is None


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"optimizer": "adam", "cudnn_benchmark": True}])
def test_a_process_by_a_pattern_is_the_process_of_its_own(settings: dict[str, Any]) -> None:
    study, between = lines(OPEN, 16, 300, **settings)
    assert between is not None
    patterns, device = Patterns(), device_of(study.request)
    for batch in (20, 128, 230):
        for name in ("h100", "l4", "4090", "a100-sxm-80gb", "t4"):
            result, card = between.at(batch), on(device, gpus.find(name))
            shared, own = process_on(result, card, patterns), process_on(result, card)
            assert (shared.calls, shared.sizes, shared.scales, shared.marks) == (
                own.calls, own.sizes, own.scales, own.marks,
            )  # fmt: skip
            assert (shared.bounds, shared.strays, shared.fallbacks) == (own.bounds, own.strays, own.fallbacks)
            assert (shared.empties, list(shared.origins)) == (own.empties, list(own.origins))


def test_cards_whose_kernels_take_the_same_share_replays() -> None:
    study = Study.open(OPEN, Request(optimizer="adam", batch=24))
    shared, device = SharedReplays(), device_of(study.request)
    cards = [gpus.find(name) for name in ("l4", "rtx-4090", "rtx-4060", "h100", "t4")]
    replays = []
    for card in cards:
        roomy, own = shared.unlimited(study.result, on(device, card)), Unlimited(study.result, on(device, card))
        assert roomy.replays.nominal == own.replays.nominal
        assert roomy.replays.bands() == own.replays.bands()
        replays.append(id(roomy.replays))
    assert 1 < len(set(replays)) < len(cards)


def test_a_few_replays_say_what_the_band_says() -> None:
    study = Study.open(OPEN, Request(optimizer="adam", batch=48))
    device = device_of(study.request)
    high = Unlimited(study.result, device).replays.bands()[1].high
    for limit, beyond in ((high, False), (high - 1, True), (high // 2, True)):
        replays = Unlimited(study.result, device).replays
        assert replays.some_reserves(limit.__lt__, limit) is beyond


@pytest.mark.parametrize("batch", [3, 48])
def test_segments_alone_have_the_upper_end_of_the_band(batch: int) -> None:
    result, device = Study.open(OPEN, Request(optimizer="adam", batch=batch)).result, device_of(Request())
    shared = SharedReplays()
    replays, band = shared.unlimited(result, device).replays, Unlimited(result, device).replays.bands()[1]
    assert (replays.nominal_reserved[0], replays.reserved[1]) == (band.expected, band.high)
    assert replays.bands()[1] == band


@pytest.mark.parametrize("name", ["l4", "rtx-4060", "mi300x", "t4"])
def test_a_verdict_without_its_band_is_the_verdict(name: str) -> None:
    """On cards whose memory is a little above and below what the step needs."""
    study, card = Study.open(OPEN, Request(optimizer="adam", batch=48)), gpus.find(name)
    need = Bench(study).verdict(Request(optimizer="adam", batch=48), card).needed
    for usable in (need.expected, need.high, int(need.high / TIGHT) - MIB, int(need.high / TIGHT) + MIB, 2 * need.high):
        other = replace(card, usable=usable)
        quick, whole = Bench(study), Bench(study)
        asked = Request(optimizer="adam", batch=48)
        outcome = whole.verdict(asked, other)
        assert quick.safe(asked, other) is (outcome.fit is Fit.FITS)
        assert outcome.fit is not Fit.FITS or quick.highest(asked, other) == (outcome.needed.high, usable)


def test_the_large_pool_alone_may_say_that_it_is_too_much() -> None:
    """Then there is no replay of both pools."""
    replays = Unlimited(Study.open(OPEN, Request(optimizer="adam", batch=48)).result, device_of(Request())).replays
    high = replays.bands()[1].high

    def not_asked(reserved: int) -> bool:
        raise AssertionError(reserved)

    again = Replays(replays.process, None)
    assert again.some_reserves(not_asked, high * 3 // 4)
    assert not again.some_reserves(high.__lt__, high)


def test_the_batches_of_three_cards_are_found_on_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search tries tens of batches and runs those that decide the line, and those that it names."""
    cards = [gpus.find(name) for name in ("t4", "l4", "a100")]
    search = LargestBatches(Bench(Study.open(OPEN, Request(optimizer="adam"))), Request(optimizer="adam"))
    ran: list[int] = []

    def counted(graph: Graph, *rest: Any) -> StepResult:
        ran.append(len(graph.ops))
        return run_step(graph, *rest)

    monkeypatch.setattr("staticmem.studies.steps.run_step", counted)
    found = [search.both_sizes(card) for card in cards]
    assert search.between.lines is not None
    assert len(ran) <= 46
    monkeypatch.setattr(InterpolatingBench, "widen", lambda *_: None)  # no line: each batch is run
    plain = LargestBatches(Bench(search.bench.study), search.request)
    ran.clear()
    assert [plain.both_sizes(card) for card in cards] == found
    assert len(ran) > 75


def fits_of(row: SweepRow) -> Any:
    return replace(row, index=0, method="run")


@pytest.mark.parametrize("path", ["models/resnet18.onnx", "tests/data/graphs/alexnet.pt2"])
def test_rows_with_cards_are_those_of_configurations_alone(path: str) -> None:
    """Also of a card that is too small for the larger batches, whose allocator gives memory back."""
    cards = ["2GiB", "l4", "rtx-4090"]
    batches = [1, 2, 24, 25, 40, 57, 64, 90]
    table = staticmem.sweep(ROOT / path, {"batch": batches, "optimizer": ["sgd", "adam"]}, gpus=cards)
    assert {row.method for row in table.rows} == {"run", "arrays"}
    assert {card.fit for row in table.rows for card in row.cards} == {"fits", "tight", "does not fit"}
    for row in table.rows:
        one = {name: [row.settings[name]] for name in ("batch", "optimizer")}
        alone = staticmem.sweep(ROOT / path, one, gpus=cards).rows[0]
        assert alone.method == "run"
        assert fits_of(row) == fits_of(alone)


def test_batches_of_the_whole_catalogue_are_those_of_analyze() -> None:
    """Each fits by a report of its own, and the next that was tried does not."""
    path, settings = GRAPHS / "alexnet.pt2", {"optimizer": "adam"}
    cards = [gpus.find(name) for name in "t4 l4 rtx-4060 rtx-4090 a10 a100-sxm-40gb h100 rtx-5080 mi210".split()]
    study = Study.open(path, request_of(settings))
    rows = {row.slug: row for row in size(study, Options(cards)).cards}
    assert len(rows) == 9
    rungs = LargestBatches(Bench(study, many_cards=True), study.request).values
    for slug in ("l4", "rtx-4090", "mi210"):
        batch = rows[slug].safe_batch
        assert batch
        beyond = rungs[rungs.index(batch) + 1]
        for asked, fits in ((batch, True), (beyond, False)):
            gpu = study.ask(request_of({**settings, "batch": asked, "gpu": slug})).report.gpu
            assert gpu is not None
            assert (gpu.fit == "fits") is fits, (slug, asked)
