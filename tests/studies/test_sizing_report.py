"""The sizing report: what adds up, what decides, every format, and bad input."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from staticmem.cli.main import main
from staticmem.devices import gpus
from staticmem.devices.sizing import TIGHT
from staticmem.errors import StaticmemError
from staticmem.report import schema
from staticmem.report.formats import Formats
from staticmem.report.formats import sizing as text
from staticmem.report.formats import sizing_html as page
from staticmem.report.formats import sizing_markdown as markdown
from staticmem.report.formats.sizing import count_text, outcome
from staticmem.report.json import dumps
from staticmem.report.sizing import Sizing
from staticmem.report.text import PLAIN, Style, View
from staticmem.studies import Request, Study, request_of, sizing_search
from staticmem.studies.bench import Bench
from staticmem.studies.recommend import recommend
from staticmem.studies.sizing import Options, size
from staticmem.studies.sizing_search import last, rungs

ROOT = Path(__file__).parents[2]
BLOCKS = ROOT / "tests" / "data" / "graphs" / "mlp_blocks.pt2"
RESNET = ROOT / "models" / "resnet50.pt2"
SOME = ("rtx-3070", "t4", "l40s", "h100-sxm-80gb", "mi300x")


def sized(path: Path = RESNET, cards: tuple[str, ...] = SOME, **words: Any) -> Sizing:
    asked = request_of({"batch": 128, "optimizer": "adamw", **words})
    chosen = [gpus.find(name) for name in cards]
    return size(Study.open(path, asked), Options(chosen, command="staticmem size resnet50.pt2 --batch 128"))


@pytest.fixture(scope="module")
def resnet() -> Sizing:
    return sized()


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["size", str(BLOCKS), "--batch", "32", "--optimizer", "adam", "--gpu", "t4", "--gpu", "l4", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


# -- processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--gpu", "a100"), ("--parallel", "fsdp")])
def test_processes_give_the_report_of_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    alone = json.loads(run(capsys, *words, "-f", "json", "-j", "1")[1])
    monkeypatch.setattr("staticmem.studies.workers.WORTH_PROCESSES", 0.0)
    together = json.loads(run(capsys, *words, "-f", "json", "-j", "2")[1])
    assert alone.pop("command") != together.pop("command")
    assert alone == together


# -- what is run -------------------------------------------------------------------------------------------------


def test_three_cards_are_answered_by_few_steps_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts stand for time, which depends on the machine: steps, processes of cards, replays that count segments,
    and replays with every placement. They may fall."""
    counts: Counter[str] = Counter()
    most = {"steps": 41, "processes": 159, "counts of segments": 730, "whole replays": 23}

    def count(name: str, place: str) -> None:
        module, function = place.rsplit(".", 1)
        ran = getattr(import_module(module), function)

        def counted(*args: Any, **words: Any) -> Any:
            counts[name] += 1
            return ran(*args, **words)

        monkeypatch.setattr(place, counted)

    count("steps", "staticmem.studies.steps.run_step")
    count("processes", "staticmem.devices.meters.process_on")
    count("counts of segments", "staticmem.allocators.band.reserve")
    count("counts of segments", "staticmem.allocators.peaks.reserve")
    count("whole replays", "staticmem.devices.meters.replay_on")
    sized(ROOT / "models" / "resnet18.pt2", ("a100-80gb", "h100", "l4"), batch=64, optimizer="adam")
    assert counts.keys() == most.keys()
    assert {name: number for name, number in counts.items() if number > most[name]} == {}


# -- shares of a global batch ------------------------------------------------------------------------------------


class _Bench:
    """Steps that need a MiB a sample, of which 8 are safe. `refused` are batches that the model does not take."""

    study = SimpleNamespace(model=None)

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        self.refused = refused

    def expected(self, request: Request, card: object) -> int:
        assert request.batch is not None
        if request.batch in self.refused:
            raise StaticmemError("no", "The model takes no such batch.", "", "SM115")
        return request.batch << 20

    def safe(self, request: Request, card: object) -> bool:
        return self.expected(request, card) <= 8 << 20


@pytest.mark.parametrize(
    ("total", "low", "refused", "found"),
    [
        (32, 1, (), (8, 4)),
        (32, 2, (1,), (8, 4)),
        (16, 8, (1,), (8, 2)),  # the least of the file alone is safe
        (32, 1, (1,), (8, 4)),
        (64, 16, (), "16.0 MiB are needed at 16 samples at a time"),
        (62, 1, (1,), (2, 31)),
        (7, 2, (), "no micro-batch below 7 and of 2 or more, the least of the file, divides 7 samples"),
        (6, 4, (), "no micro-batch below 6 and of 4 or more, the least of the file, divides 6 samples"),
        (7, 1, (1,), "The model takes no such batch."),
    ],
)
def test_micro_batches_of_a_global_batch(
    monkeypatch: pytest.MonkeyPatch, total: int, low: int, refused: tuple[int, ...], found: tuple[int, int] | str
) -> None:
    monkeypatch.setattr(sizing_search, "batch_range", lambda _: (low, 64))
    bench: Any = _Bench(refused)
    outcome = sizing_search._accumulated(bench, gpus.find("l4"), Request(), total)
    assert (outcome if isinstance(outcome, str) else (outcome.batch, outcome.accumulate)) == found


@pytest.mark.parametrize(
    ("total", "low", "found"),
    [
        (32, 1, 4),
        (9, 1, "9 samples cannot be shared evenly by 2 devices"),
        (6, 4, "2 devices have 3 samples each, the file takes 4 or more"),
        (36, 4, "9.00 MiB are needed on each of 4 at 9 samples each"),
    ],
)
def test_devices_that_share_a_global_batch(
    monkeypatch: pytest.MonkeyPatch, total: int, low: int, found: int | str
) -> None:
    monkeypatch.setattr(sizing_search, "batch_range", lambda _: (low, 64))
    bench: Any = _Bench()
    outcome = sizing_search._divide_total(bench, "fsdp", gpus.find("l4"), Request(), total)
    assert (outcome if isinstance(outcome, str) else outcome.devices) == found


def test_processes_are_not_started_for_what_takes_less(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staticmem.studies.workers.WORTH_PROCESSES", 1e9)
    monkeypatch.setattr("staticmem.studies.workers.in_processes", lambda *_: pytest.fail("started"))
    assert run(capsys, "-j", "8")[0] == 0


def test_an_error_of_a_process_is_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlp_blocks has no open dimension but its batch."""
    monkeypatch.setattr("staticmem.studies.workers.WORTH_PROCESSES", 0.0)
    failure = StaticmemError("it failed", "Because.", "Do.", "SM199")
    monkeypatch.setattr("staticmem.studies.workers.in_processes", lambda tasks, *_: iter([(tasks[0], failure)]))
    code, out, err = run(capsys, "-j", "2")
    assert (code, out) == (2, "")
    assert err.startswith("error: it failed [SM199]")


# -- what adds up ------------------------------------------------------------------------------------------------


def test_a_row_is_the_report_of_that_card(resnet: Sizing) -> None:
    """The same need as `analyze --gpu` says."""
    for row in resnet.cards[:4]:
        report = Study.open(RESNET, request_of({"batch": 128, "optimizer": "adamw", "gpu": row.slug})).report
        assert report.gpu is not None
        assert (row.device_bytes, row.fit) == (report.peak.device_bytes, report.gpu.fit)
        band = report.peak.bands["device"]
        assert (row.device_low_bytes, row.device_high_bytes) == (band.low, band.high)


def test_rows_are_in_the_order_of_memory_and_add_up(resnet: Sizing) -> None:
    usable = [row.usable_bytes for row in resnet.cards]
    assert usable == sorted(usable)
    for row in resnet.cards:
        assert row.device_low_bytes <= row.device_bytes <= row.device_high_bytes
        least = row.least_usable_bytes
        assert row.missing_bytes == (0 if least is None else least - row.usable_bytes)
        assert row.headroom_bytes == (max(row.usable_bytes - row.device_bytes, 0) if least is None else 0)
        assert least is None or row.usable_bytes < least <= row.device_bytes
        assert (row.fit == "fits") == (row.device_high_bytes <= row.usable_bytes * TIGHT)


def test_more_memory_takes_no_smaller_batch(resnet: Sizing) -> None:
    same = [row for row in resnet.cards if row.slug in ("h100-sxm-80gb", "mi300x")]  # one architecture is replayed
    batches = [row.safe_batch or 0 for row in same]
    assert batches == sorted(batches)
    assert all((row.safe_batch_with_checkpointing or 0) >= (row.safe_batch or 0) for row in resnet.cards)


def test_the_largest_batch_fits_the_card_and_the_next_does_not(resnet: Sizing) -> None:
    """By what `analyze --gpu` says of them."""
    row = next(row for row in resnet.cards if row.slug == "t4")
    assert row.safe_batch
    said = []
    for batch in (row.safe_batch, row.safe_batch + 1):
        report = Study.open(RESNET, request_of({"batch": batch, "optimizer": "adamw", "gpu": "t4"})).report
        assert report.gpu is not None
        said.append(report.gpu.fit)
    assert said[0] == "fits"
    assert said[1] != "fits"


def test_the_fewest_devices_fit_and_half_of_them_do_not() -> None:
    card, request = gpus.find("t4"), request_of({"batch": 1, "optimizer": "adamw"})
    bench = Bench(Study.open(ROOT / "tests" / "data" / "graphs" / "llama-1b.pt2", request))
    sizing = size(bench.study, Options([card], batches=False))
    (row,) = sizing.cards
    assert row.fit == "does not fit"
    checked = 0
    for count in row.counts:
        if count.devices is None:
            assert count.why
            continue
        words = {"checkpoint": (sizing.blocks,)} if count.checkpointing else {}
        asked = replace(request, parallel=count.strategy, devices=count.devices, **words)  # type: ignore[arg-type]
        assert bench.safe(asked, card)
        assert not bench.safe(replace(asked, devices=count.devices // 2), card)
        checked += 1
    assert checked > 2


def test_what_fits_one_needs_one(resnet: Sizing) -> None:
    for row in resnet.cards:
        if row.fit == "fits":
            assert {count_text(count) for count in row.counts} == {"1"}


def test_levers_are_what_analyze_says(resnet: Sizing) -> None:
    assert resnet.levers
    saved = [lever.saved_bytes for lever in resnet.levers]
    assert saved == sorted(saved, reverse=True)
    by_flags = {lever.flags: lever for lever in resnet.levers}
    best = by_flags[f"--checkpoint {resnet.blocks}"]
    study = Study.open(RESNET, request_of({"batch": 128, "optimizer": "adamw", "checkpoint": ("Bottleneck",)}))
    assert study.lifetimes.peak_bytes == best.live_bytes
    card = next(row for row in resnet.cards if row.slug == resnet.recommended)
    assert (resnet.levers_of, resnet.curves_of) == (card.name, card.name)
    assert best.device_bytes == card.device_bytes - best.saved_bytes


def test_curves_rise_and_have_the_asked_batch(resnet: Sizing) -> None:
    batches = [point.batch for point in resnet.batches]
    needs = [point.device_bytes for point in resnet.batches]
    assert 128 in batches
    assert batches == sorted(batches, key=lambda batch: batch or 0)
    assert needs == sorted(needs)
    assert next(p.live_bytes for p in resnet.batches if p.batch == 128) == resnet.live_bytes


# -- the sentence ------------------------------------------------------------------------------------------------


def test_the_smallest_card_that_fits_is_named_first(resnet: Sizing) -> None:
    fitting = [row for row in resnet.cards if row.fit == "fits"]
    assert resnet.recommended == fitting[0].slug
    assert resnet.recommendation.startswith(f"One {fitting[0].name} trains it at batch 128 with ")


def test_prices_decide_where_there_are_some() -> None:
    from staticmem.report.sizing import Price

    prices = {"h100-sxm-80gb": Price("EUR", 10.0, None), "l40s": Price("EUR", 20.0, None)}
    chosen = [gpus.find(name) for name in SOME]
    study = Study.open(RESNET, request_of({"batch": 128, "optimizer": "adamw"}))
    found = size(study, Options(chosen, prices, batches=False))
    assert found.recommended == "h100-sxm-80gb"
    assert next(row.price for row in found.cards if row.slug == "l40s") == Price("EUR", 20.0, None)


def test_several_cards_where_one_is_too_small() -> None:
    found = sized(cards=("rtx-3070", "t4"), batch=220)
    assert found.recommendation.startswith("One Tesla T4 trains it at batch 220 with checkpointed blocks, with ")
    assert "\nNo GPU can without them: the Tesla T4 is short by " in found.recommendation
    assert "short by 0" not in found.recommendation


def test_one_card_that_is_tight_comes_before_several() -> None:
    """It holds the step; the sentence says why it is tight, and how many have room."""
    found = sized(cards=("rtx-3070", "t4"), batch=160)
    says = r"One Tesla T4 trains it at batch 160, but it is tight: .*PyTorch .*\nWith checkpointed blocks it fits"
    assert re.match(says, found.recommendation)
    assert found.recommended == "t4"
    row = next(row for row in found.cards if row.slug == "t4")
    assert (row.fit, row.missing_bytes) == ("tight", 0)
    assert row.why
    assert row.fit_with_checkpointing == "fits"
    assert {(count.devices, count.checkpointing) for count in row.counts if count.checkpointing} <= {(1, True)}


@pytest.mark.parametrize("batch", [450, 520, 600])
def test_several_cards_are_those_that_analyze_calls_safe(batch: int) -> None:
    """With the band of their own step, not of the expected need alone."""
    for row in sized(cards=("t4",), batch=batch).cards:
        for count in row.counts:
            if count.devices is None or count.checkpointing or count.devices == 1:
                continue
            asked = request_of({"batch": batch, "optimizer": "adamw", "gpu": row.slug})
            asked = replace(asked, parallel=count.strategy, devices=count.devices)
            gpu = Study.open(RESNET, asked).report.gpu
            assert gpu is not None
            assert gpu.fit == "fits"


def test_a_card_whose_several_are_not_confirmed_is_not_recommended() -> None:
    found = sized(cards=("rtx-3070",), batch=220)
    none = recommend(found.cards, request_of({"batch": 220}), found.scenario, lambda row, count: False)
    assert none[0].startswith("No GPU of the list can train it at batch 220")


# -- a global batch ----------------------------------------------------------------------------------------------


def shared_out(total: int, *cards: str, **words: Any) -> Sizing:
    study = Study.open(BLOCKS, request_of({"optimizer": "adam", **words}))
    return size(study, Options([gpus.find(name) for name in cards], batches=False, global_batch=total))


def test_devices_share_a_global_batch() -> None:
    """As few as fit: half of them do not, and the shares add up."""
    found = shared_out(16384, "6GiB")
    assert found.global_batch == found.scenario.batch == 16384
    assert found.strategies == ("ddp", "accumulate", "zero2", "zero3", "fsdp")
    bench, card = Bench(Study.open(BLOCKS, request_of({"optimizer": "adam"}))), gpus.find("6GiB")
    asked, checked = bench.study.request, 0
    for count in found.cards[0].counts:
        assert count.devices is not None
        assert count.batch is not None
        assert count.devices * count.batch * count.accumulate == 16384
        if count.checkpointing:
            continue
        if count.strategy == "accumulate":
            steps = [replace(asked, batch=count.batch * more, accumulate=count.accumulate // more) for more in (1, 2)]
        else:
            sizes = ((count.batch, count.devices), (count.batch * 2, count.devices // 2))
            steps = [replace(asked, batch=n, devices=devices, parallel=count.strategy) for n, devices in sizes]
        assert bench.safe(steps[0], card)
        assert count.devices == 2 or not bench.safe(steps[1], card)
        checked += 1
    assert checked >= 4
    assert "micro-batches of" in found.recommendation
    assert "6GiB" in text.render(found)


def test_a_global_batch_is_shared_down_to_the_least_batch_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study.open(BLOCKS, request_of({"optimizer": "adam"}))
    symbols = {name: replace(bounds, low=2) for name, bounds in study.model.symbols.items()}
    monkeypatch.setattr(study.model, "symbols", symbols)
    found = size(study, Options([gpus.find("4GiB")], batches=False, global_batch=16384))
    assert all(count.batch is None or count.batch >= 2 for count in found.cards[0].counts)
    few = size(study, Options([gpus.find("1GiB")], batches=False, global_batch=16))
    assert any("at 2 samples" in count.why for count in few.cards[0].counts)


def test_one_large_card_or_several_small_ones() -> None:
    found = shared_out(16384, "4GiB", "80GB")
    assert found.recommended == "80gb"
    assert re.search(r"\n\d+ x GPU of 4GiB train it at batch 16384 with DDP, [\d,]+ on each too", found.recommendation)
    small = next(row for row in found.cards if row.slug == "4gib")
    large = next(row for row in found.cards if row.slug == "80gb")
    assert [count_text(count) for count in large.counts] == ["1 x 16,384", "16,384, once", *["1 x 16,384"] * 3]
    assert re.fullmatch(r"\d+ x [\d,]+", count_text(small.counts[0]))
    rows = list(csv.DictReader(io.StringIO(str(Formats("sizing")["csv"].render(found, PLAIN)))))
    assert rows[0]["batch_ddp"] == str(small.counts[0].batch)


def test_a_global_batch_that_nothing_holds_says_why() -> None:
    odd = shared_out(16383, "4GiB").cards[0].counts[0]
    assert odd.devices is None
    assert odd.why == "16,383 samples cannot be shared evenly by 2 devices"
    found = shared_out(16384, "1400MiB")
    assert found.cards[0].counts[0].devices is None
    assert re.search("are needed on each of 1,024 at 16 samples each", found.cards[0].counts[0].why)
    assert "DDP: " in text.render(found)


@pytest.mark.parametrize("words", [("--batch", "4"), ("--parallel", "ddp"), ("--accumulate", "2")])
def test_a_global_batch_is_shared_in_one_way_only(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    line = ["size", str(BLOCKS), "--optimizer", "adam", "--gpu", "l4", "--global-batch", "64", *words]
    assert main(line) == 2
    assert "[SM135]" in capsys.readouterr().err
    assert main(["size", str(BLOCKS), "--gpu", "l4", "--global-batch", "64"]) == 2
    assert "without training [SM135]" in capsys.readouterr().err


def test_prices_are_of_as_many_cards_as_are_named() -> None:
    from staticmem.report.sizing import Price

    study = Study.open(BLOCKS, request_of({"optimizer": "adam"}))
    cards = [gpus.find("4GiB"), gpus.find("80GB")]
    prices = {"4gib": Price("EUR", None, 0.25), "80gb": Price("EUR", 9000.0, 2.5)}
    found = size(study, Options(cards, prices, batches=False, global_batch=16384))
    assert "headroom (9,000 EUR, 2.50 EUR an hour)" in found.recommendation
    small = next(row for row in found.cards if row.slug == "4gib").counts[0]
    assert f"({(small.devices or 0) * 0.25:.2f} EUR an hour) too." in found.recommendation
    assert "0.25 EUR/h" in text.render(found)  # the column is there without -v


def test_nothing_fits() -> None:
    found = sized(cards=("rtx-3070",), batch=20000)
    assert found.recommended is None
    assert "short by" in found.recommendation


def test_ranks_are_sized_as_asked() -> None:
    found = sized(BLOCKS, ("t4",), parallel="fsdp", devices=4, batch=8)
    assert found.strategies == ()
    assert found.scenario.devices == 4
    assert found.recommendation.startswith("4 x Tesla T4 train it at batch 8 each with FSDP2")
    one = sized(BLOCKS, ("t4",), parallel="zero3", batch=8)
    assert one.strategies == ("zero3",)


def test_inference() -> None:
    found = sized(cards=("t4",), optimizer=None)
    assert found.recommendation.startswith("One Tesla T4 runs it at batch 128")
    assert found.cards[0].fit_with_checkpointing is None


# -- searches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", range(-1, 20))
@pytest.mark.parametrize("guess", [0, 3, 7, 19])
def test_last(limit: int, guess: int) -> None:
    assert last(range(20), lambda value: value <= limit, guess) == limit


def test_rungs_are_eight_to_an_octave() -> None:
    found = rungs(1, 1 << 16)
    assert found[:18] == [*range(1, 17), 18, 20]
    assert all(b - a <= max(1, a / 8) for a, b in pairwise(found))
    assert found[-1] <= 1 << 16


# -- formats -----------------------------------------------------------------------------------------------------


def test_json_follows_the_schema_that_is_shipped(resnet: Sizing) -> None:
    kept = (ROOT / "schemas" / "sizing-1.schema.json").read_text(encoding="utf-8")
    assert kept == schema.dumps(schema.schema("sizing")), "staticmem schema sizing > schemas/sizing-1.schema.json"
    jsonschema.validate(json.loads(dumps(resnet)), json.loads(kept))


def test_the_sentence_on_accuracy_is_that_of_the_documentation() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").replace("\n", " ")
    assert f"{text.LIVE_CASES} settings of optimizer and precision, {text.LIVE_EXACT} are exact" in page
    assert f"the largest error is {text.LIVE_MOST}." in page
    measured = (ROOT / "docs" / "internals" / "measurements.md").read_text(encoding="utf-8")
    assert f"| `.pt2` | {text.LIVE_CASES} | {text.LIVE_EXACT} | 0.00 % | 0.00 % | {text.LIVE_MOST} |" in measured


def test_csv_has_a_row_a_card(resnet: Sizing) -> None:
    rows = list(csv.DictReader(io.StringIO(str(Formats("sizing")["csv"].render(resnet, PLAIN)))))
    assert [row["slug"] for row in rows] == [row.slug for row in resnet.cards]
    assert [int(row["device_bytes"]) for row in rows] == [row.device_bytes for row in resnet.cards]
    assert rows[0]["devices_zero3"] in ("", "1", "2", "4", "8")


def test_markdown_says_the_sentence_first(resnet: Sizing) -> None:
    made = markdown.render(resnet)
    assert made.startswith("## One ")
    assert made.count("\n|") > len(resnet.cards)
    assert "    staticmem size resnet50.pt2 --batch 128" in made


def test_the_terminal_says_the_sentence_first(resnet: Sizing) -> None:
    made = text.render(resnet)
    assert made.split("\n\n")[0].replace("\n", " ") == resnet.recommendation.replace("\n", " ")
    for row in resnet.cards:
        assert row.name in made
        assert outcome(row) in made
    assert text.render(resnet, View(Style(unicode=False))).isascii()


class Reader(HTMLParser):
    """Tags and attributes of a page, and whether it is well-formed as far as its elements go."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.tags.add(tag)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_without_network(resnet: Sizing) -> None:
    made = page.render(resnet)
    reader = Reader()
    reader.feed(made)
    assert reader.open == []
    assert not {"iframe", "object", "embed", "form"} & reader.tags
    assert not [value for name, value in reader.attributes if name in ("src", "style") or name.startswith("on")]
    links = [value for name, value in reader.attributes if name == "href"]
    assert links == ["data:,"]
    assert len(made) < 2 << 20
    inside = re.search(r'<script type="application/json" id="sm-sizing">(.*?)</script>', made, re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1]) == json.loads(dumps(resnet))
    assert made.count("<svg") > len(resnet.cards)


def test_names_of_a_model_stay_text(resnet: Sizing) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    model = replace(resnet.model, path=evil, producer=evil)
    bad = replace(resnet, model=model, step=evil, blocks=evil, recommendation=evil, command=evil, unknown_ops=(evil,))
    made = page.render(bad)
    assert "<img" not in made
    reader = Reader()
    reader.feed(made)
    assert "img" not in reader.tags
    prose = re.sub(r"`[^`]*`", "", markdown.render(replace(bad, command="")))  # a code span is text
    assert "<img" not in prose
    assert "\x1b" not in text.render(replace(bad, recommendation="\x1b[2J"))


@pytest.mark.exhaustive
def test_the_same_input_gives_the_same_report(resnet: Sizing) -> None:
    again = sized()
    assert page.render(again) == page.render(resnet)
    assert dumps(again) == dumps(resnet)


# -- the command line --------------------------------------------------------------------------------------------


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert out.startswith("One Tesla T4 trains it at batch 32 with ")
    code, out, _ = run(capsys, "-q")
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize("suffix", ["md", "html", "json", "csv", "txt"])
def test_the_suffix_gives_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    target = tmp_path / f"sizing.{suffix}"
    code, out, err = run(capsys, "-o", str(target), "--no-batches", "--date", "2026-11-21")
    assert (code, out) == (0, "")
    assert f"Wrote {target}" in err
    made = target.read_text(encoding="utf-8")
    assert "Tesla T4" in made
    assert ("2026-11-21" in made) == (suffix in ("md", "html", "json"))
    code, _, err = run(capsys, "-o", str(target))
    assert code == 2
    assert "--force" in err


def test_dates(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(run(capsys, "-f", "json", "--no-batches")[1])["date"] is None
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert json.loads(run(capsys, "-f", "json", "--no-batches")[1])["date"] == "1970-01-01"


def test_a_config_names_model_and_cards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"version: 1\nmodel: {{path: {BLOCKS}}}\ntrain: {{optimizer: adam, batch: 32}}\ngpus: [l4]\n", encoding="utf-8"
    )
    assert main(["size", str(config), "-f", "json", "--no-batches"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["slug"] for row in found["cards"]] == ["l4"]
    assert found["scenario"]["batch"] == 32


PRICES = "version: 1\ncurrency: EUR\nprices:\n  l4: {buy: 2500, hour: 0.7}\n"


def test_prices_are_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(PRICES, encoding="utf-8")
    _, out, _ = run(capsys, "--prices", str(path), "-f", "csv", "--no-batches")
    rows = {row["slug"]: row for row in csv.DictReader(io.StringIO(out))}
    assert (rows["l4"]["price_buy"], rows["l4"]["currency"], rows["t4"]["price_buy"]) == ("2500.0", "EUR", "")


SHEET = "gpu,buy,hour,currency\nl4,2500,0.7,EUR\nt4,,0.3,EUR\n"


def test_prices_of_a_sheet(tmp_path: Path) -> None:
    from staticmem.report.sizing import Price
    from staticmem.studies.prices import load

    path = tmp_path / "prices.csv"
    path.write_bytes(b"\xef\xbb\xbf" + SHEET.replace("\n", "\r\n").encode())  # as a spreadsheet writes it
    assert load(str(path), gpus.cards()) == {"l4": Price("EUR", 2500.0, 0.7), "t4": Price("EUR", None, 0.3)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (SHEET.replace("l4", "l5"), "prices.l5"), (SHEET.replace("2500", "nan"), "prices.l4.buy"),
        (SHEET.replace("2500", "a lot"), "prices.l4.buy"), (SHEET.replace("0.3,EUR", "0.3,USD"), "2 currencies"),
        (SHEET.replace("gpu", "card"), "does not name the columns"), (SHEET + "l4,1,1,EUR\n", "row 4 has l4 again"),
        (SHEET + "l40,1\n", "Row 4"), (SHEET + "l40,1,2,EUR,5\n", "Row 4"), ('gpu\n"', "is not CSV"),
        ("\0", "is no"), ("", "does not name the columns"),
    ],
)  # fmt: skip
def test_bad_sheets(tmp_path: Path, content: str, said: str) -> None:
    from staticmem.errors import UsageError
    from staticmem.studies.prices import load

    path = tmp_path / "prices.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load(str(path), gpus.cards())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (PRICES.replace("l4", "l5"), "prices.l5"), (PRICES.replace("2500", "-1"), "prices.l4.buy"),
        (PRICES.replace("buy", "bye"), "unknown key"), ("version: 1\n", "lacks 'currency'"), ("[", "not YAML"),
    ],
)  # fmt: skip
def test_bad_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(content, encoding="utf-8")
    code, out, err = run(capsys, "--prices", str(path))
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--date", "21.11.2026"), "SM110"), (("--date", "2026-13-01"), "SM110"), (("--min-memory", "big"), "SM110"),
        (("--vendor", "intel"), "SM183"), (("--class", "cheap"), "SM134"), (("--gpu", "l5"), "SM402"),
        (("--parallel", "zero4"), "SM134"), (("--gpus-file", "none.yaml"), "SM401"),
    ],
)  # fmt: skip
def test_bad_flags(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: str) -> None:
    exit_code, out, err = run(capsys, *words)
    assert (exit_code, out) == (2, "")
    assert f"[{code}]" in err
    assert len(err.splitlines()) == 3


# -- staticmem gpus ----------------------------------------------------------------------------------------------


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["gpus", "-q", *words]) == 0
    return capsys.readouterr().out.split()


def test_filters(capsys: pytest.CaptureFixture[str]) -> None:
    everything = listed(capsys)
    assert len(everything) == len(gpus.cards())
    large = listed(capsys, "--min-memory", "80GB", "--vendor", "nvidia", "--year", "2022")
    assert "h100-sxm-80gb" in large
    assert not {"l40s", "mi300x", "a100-sxm-80gb"} & set(large)
    assert set(listed(capsys, "--max-memory", "10GB")) == {"rtx-3070", "rtx-4060", "rtx-3080"}
    assert set(listed(capsys, "--vendor", "amd", "--vendor", "intel")) == {
        c.slug for c in gpus.cards().values() if c.vendor != "NVIDIA"
    }
    assert "rtx-4090" in listed(capsys, "--class", "consumer")


def test_the_catalog_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "-f", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    card = next(c for c in found["cards"] if c["slug"] == "l40s")
    assert card["tflops"]["bf16"] == 362.05
    assert {s["figure"] for s in card["sources"]} == {"nominal", "nvml", "usable"}
    assert {"bandwidth", "bf16"} <= set(card["assumed"])  # not compared with a page of the vendor
    assert main(["gpus", "-f", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == len(found["cards"])
    assert main(["gpus"]) == 0
    assert "L40S" in capsys.readouterr().out


def test_a_card_of_which_less_is_known_is_named_last() -> None:
    found = sized(cards=("mi210", "h200"), batch=256)
    assert found.recommended == "h200"
    assert sized(cards=("mi210",), batch=256).recommended == "mi210"
