"""The same request has the same verdict wherever it is asked: `analyze --gpu`, the page, `sweep`, `size`, batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.devices import gpus
from staticmem.devices.gpus import Gpu
from staticmem.devices.meters import on_device
from staticmem.devices.sizing import TIGHT, Fit, verdict
from staticmem.studies import Study, request_of
from staticmem.studies.bench import Bench, Verdicts, card_fit, card_rows, largest_of, on
from staticmem.studies.device import device_of
from staticmem.studies.largest import largest_batch
from staticmem.studies.sizing import Options, size

ROOT = Path(__file__).parents[2]
OPEN = ROOT / "models" / "resnet50.onnx"  # of an inference nobody knows what variables the code kept
SUMS = ROOT / "tests" / "data" / "graphs" / "vit_b_16.pt2"  # its backward has sums over many rows
MIB = 1 << 20


def _study(path: Path, **words: Any) -> Study:
    return Study.open(path, request_of(words))


def _sized(path: Path, card: Gpu, words: Mapping[str, Any]) -> Any:
    return size(_study(path, **words), Options([card], batches=False)).cards[0]


def test_what_the_file_leaves_open_makes_it_tight_everywhere() -> None:
    """On a card of which 95 % hold the band without that doubt, and not with it."""
    words: dict[str, Any] = {"mode": "infer", "batch": 8}
    bare = on_device(_study(OPEN, **words).result, device_of(request_of({**words, "gpu": "8GiB"})))
    more = _study(OPEN, **words).spread[1]
    assert more > 4 * MIB
    for part, word in ((more // 2, "tight"), (more + MIB, "fits")):
        gpu = f"{-(-int((bare.device.high + part) / TIGHT) // MIB)}MiB"
        study = _study(OPEN, **words, gpu=gpu)
        assert study.report.gpu is not None
        rows = card_rows(study.result, device_of(study.request), study.spread)
        row = _sized(OPEN, gpus.find(gpu), words)
        said = (study.report.gpu.fit, next(row for row in rows if row.asked).fit, card_fit(study, gpu).fit, row.fit)
        assert set(said) == {word}
        band = study.report.peak.bands["device"]
        assert (row.device_low_bytes, row.device_high_bytes) == (band.low, band.high)


def test_the_largest_batches_are_those_that_analyze_says_fit() -> None:
    gpu = "2GiB"

    def fit(batch: int) -> str:
        report = staticmem.analyze(OPEN, mode="infer", batch=batch, gpu=gpu)
        assert report.gpu is not None
        return report.gpu.fit

    study = _study(OPEN, mode="infer", batch=8)
    safe = largest_batch(Bench(study), gpu).safe_batch
    assert (fit(safe), fit(safe + 1)) == ("fits", "tight")
    assert size(study, Options([gpus.find(gpu)])).cards[0].safe_batch == safe


def _by_the_largest(found: Verdicts, card: Gpu) -> Fit:
    """The verdict from the replay that the largest card of the architecture stands for."""
    stands = largest_of(card.architecture, gpus.cards().values(), card.alternatives)
    assert stands is not None
    reserved = on_device(found.result, on(found.device, stands)).reserved
    return verdict(reserved.plus(found.device.setup.profile.overhead(card)), card.usable).fit


@pytest.mark.parametrize("name", ["rtx-4060", "rtx-3060"])
def test_a_card_near_its_limit_is_replayed_with_its_own_multiprocessors(name: str) -> None:
    """Partial sums depend on them. The card has just so much memory that the largest of its architecture would have
    another verdict."""
    study = _study(SUMS, batch=32, optimizer="adam")
    cards = tuple(gpus.cards().values())
    device = device_of(study.request)
    own = on_device(study.result, on(device, gpus.find(name))).device.high
    found = Verdicts(study.result, device, lambda: (0, 0), cards)
    theirs = found.of(replace(gpus.find(name), usable=1 << 50)).needed.high
    assert own != theirs
    card = replace(gpus.find(name), usable=int((own + theirs) / 2 / TIGHT))
    assert found.of(card).fit is on_device(study.result, on(device, card)).verdict.fit
    assert found.of(card).fit is not _by_the_largest(found, card)


@pytest.mark.parametrize("name", ["mi300x", "b300", "arc-b580", "gtx-1080-ti"])
def test_where_another_chip_stands_in_the_band_reaches_over_all_that_it_may_be_like(name: str) -> None:
    """Expected is the one that stands in, and the others are within the band."""
    study = _study(ROOT / "tests" / "data" / "graphs" / "alexnet.pt2", batch=64, optimizer="sgd")
    device, card = device_of(study.request), gpus.find(name)
    mine = on_device(study.result, on(device, card))
    assert card.alternatives
    assert card.architecture not in card.alternatives
    alone = on_device(study.result, on(device, replace(card, chip=card.architecture)))
    assert mine.reserved.expected == alone.reserved.expected
    assert mine.reserved.high - mine.reserved.low > alone.reserved.high - alone.reserved.low
    for architecture in card.alternatives:
        like = on_device(study.result, on(device, replace(card, architecture=architecture, chip=architecture)))
        assert mine.reserved.low <= like.reserved.expected <= mine.reserved.high
    verdicts = Verdicts(study.result, device, lambda: (0, 0), tuple(gpus.cards().values()))
    assert verdicts.of(card).fit is mine.verdict.fit


def test_the_spread_is_not_asked_for_where_it_decides_nothing() -> None:
    study = _study(OPEN, mode="infer", batch=8)
    asked = []

    def spread() -> tuple[int, int]:
        asked.append(True)
        return 0, 0

    found = Verdicts(study.result, device_of(study.request), spread, ())
    assert not found.fits(gpus.find("300MiB"))
    assert not asked
    assert found.fits(gpus.find("80GB"))
    assert asked


@pytest.mark.parametrize(
    "conf", ["per_process_memory_fraction:0.5", pytest.param("expandable_segments:True", marks=pytest.mark.exhaustive)]
)
def test_settings_of_the_allocator_count(conf: str) -> None:
    words: dict[str, Any] = {"batch": 64, "optimizer": "sgd", "alloc_conf": conf}
    path = ROOT / "models" / "resnet18.pt2"
    study = _study(path, **words)
    bench = Bench(study)
    said = []
    for gpu in ("2GiB", "4GiB", "24GB"):
        report = staticmem.analyze(path, gpu=gpu, **words)
        assert report.gpu is not None
        assert _sized(path, gpus.find(gpu), words).fit == report.gpu.fit
        assert bench.verdict(study.request, gpus.find(gpu)).fit.value == report.gpu.fit
        said.append(report.gpu.fit)
    assert len(set(said)) > 1
    found = largest_batch(Bench(study), "6GiB")
    fits = [
        staticmem.analyze(path, gpu="6GiB", **{**words, "batch": b}).gpu for b in (found.safe_batch, found.batch + 1)
    ]
    assert fits[0] is not None
    assert fits[1] is not None
    assert fits[0].fit == "fits"
    assert fits[1].fit != "fits"
    assert largest_batch(Bench(_study(path, batch=64, optimizer="sgd")), "6GiB").batch != found.batch
