"""The meters beyond live: nested, banded, and honest about what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

import staticmem
from staticmem import devices as hardware
from staticmem.devices.meters import on_device
from staticmem.errors import StaticmemError, UsageError
from staticmem.report.model import CATEGORIES, DEVICE_CATEGORIES, Band, Report
from staticmem.report.verdict import verdict
from staticmem.studies import Request, Study
from staticmem.studies.bench import card_rows
from staticmem.studies.device import device_of

MODELS = Path(__file__).parents[2] / "models"
GIB = 2**30


def _report(model: str, gpu: str, **scenario: object) -> Report:
    return staticmem.analyze(str(MODELS / model), gpu=gpu, **scenario)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "scenario"),
    [
        ("resnet18.pt2", {"batch": 32, "optimizer": "adam"}),
        ("mobilenet_v2.onnx", {"batch": 8, "mode": "infer"}),
        ("vgg16.pt2", {"batch": 16, "optimizer": "sgd", "momentum": 0.9, "amp": "bf16"}),
    ],
)
def test_each_meter_contains_the_one_before(model: str, scenario: dict[str, object]) -> None:
    peak = _report(model, "h100-sxm-80gb", **scenario).peak
    assert peak.allocated_bytes is not None
    assert peak.reserved_bytes is not None
    assert peak.device_bytes is not None
    assert peak.context_bytes is not None
    assert peak.live_bytes <= peak.allocated_bytes <= peak.reserved_bytes
    assert peak.reserved_bytes + peak.context_bytes == peak.device_bytes
    for name, value in (("allocated", peak.allocated_bytes), ("reserved", peak.reserved_bytes)):
        assert peak.bands[name].low <= value <= peak.bands[name].high
    assert peak.bands["device"].low <= peak.device_bytes <= peak.bands["device"].high


def test_verdicts_follow_the_size_of_the_card() -> None:
    scenario: dict[str, object] = {"batch": 64, "optimizer": "adam"}
    fits = {size: _report("resnet18.pt2", size, **scenario).gpu for size in ("80GB", "1GiB")}
    large, small = fits["80GB"], fits["1GiB"]
    assert large is not None
    assert small is not None
    assert large.fit == "fits"
    assert large.missing_bytes == 0
    assert small.fit == "does not fit"
    assert small.headroom_bytes == 0
    assert small.missing_bytes > 0
    assert small.usable_bytes == GIB


def test_without_a_card_one_is_assumed_and_said() -> None:
    report = staticmem.analyze(str(MODELS / "resnet18.pt2"), batch=2)
    assert report.gpu is None
    assert report.device is not None
    assert report.device.assumed
    assert report.device.architecture == "sm_90"
    named = _report("resnet18.pt2", "h100-sxm-80gb", batch=2)
    assert report.peak == named.peak
    assert set(report.peak.bands) == {"live", "allocated", "reserved", "device", "context"}
    assert "SM405" in [note.code for note in report.assumptions]
    assert "SM405" not in [note.code for note in named.assumptions]


def test_what_was_not_verified_is_said() -> None:
    report = _report("resnet18.pt2", "l40s", batch=2)
    assert "SM404" in [note.code for note in report.assumptions]


# -- on the memory of a card -------------------------------------------------------------------------------------

PRESSED: dict[str, object] = {"batch": 16, "optimizer": "adamw"}


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.6f}GiB"


@pytest.fixture(scope="module")
def roomy() -> Report:
    return _report("vgg16.pt2", "80GB", **PRESSED)


def test_where_memory_is_short_cached_blocks_go_back(roomy: Report) -> None:
    """A card with a little less than the step takes where there is room runs it, within its memory, with retries."""
    need = roomy.peak.device_bytes or 0
    assert roomy.device is not None
    assert (roomy.device.retries, roomy.device.returned_bytes) == (0, 0)
    short = _report("vgg16.pt2", _gib(need * 97 // 100), **PRESSED)
    assert short.gpu is not None
    assert short.device is not None
    assert short.gpu.fit == "tight"
    assert short.gpu.missing_bytes == 0
    assert short.device.retries > 0
    assert short.device.returned_bytes > 0
    assert (short.peak.device_bytes or 0) <= short.gpu.usable_bytes
    for name in ("allocated", "reserved", "device"):
        assert short.peak.bands[name].high <= short.gpu.usable_bytes
    assert "PyTorch frees" in verdict(short)
    assert "PyTorch frees" not in verdict(roomy)


def test_what_does_not_fit_is_expected_without_a_limit(roomy: Report) -> None:
    live = roomy.peak.live_bytes
    short = _report("vgg16.pt2", _gib(live), **PRESSED)
    assert short.gpu is not None
    assert short.gpu.fit == "does not fit"
    assert short.peak == _report("vgg16.pt2", _gib(live + 2**20), **PRESSED).peak
    least = short.gpu.least_usable_bytes or 0
    assert short.gpu.missing_bytes == least - short.gpu.usable_bytes
    assert least < (short.peak.device_bytes or 0)


def test_the_least_memory_that_holds_a_step(roomy: Report) -> None:
    """A card with it holds the step, one with a segment less does not, and every card that does not says the same."""
    live = roomy.peak.live_bytes
    cards = [_report("vgg16.pt2", _gib(size), **PRESSED).gpu for size in (live, live + 2**28)]
    least = {card.least_usable_bytes for card in cards if card is not None}
    assert len(least) == 1
    size = least.pop()
    assert size is not None
    held = _report("vgg16.pt2", f"{-(-size // 2**20)}MiB", **PRESSED).gpu
    less = _report("vgg16.pt2", f"{size // 2**20 - 2}MiB", **PRESSED).gpu
    assert held is not None
    assert less is not None
    assert (held.fit, less.fit) == ("tight", "does not fit")
    assert held.why == "PyTorch must free cached memory"
    assert less.missing_bytes == size - less.usable_bytes


def test_without_a_card_no_capacity_binds() -> None:
    scenario: dict[str, object] = {"batch": 4096, "optimizer": "adam"}
    free = staticmem.analyze(str(MODELS / "resnet18.pt2"), **scenario)  # type: ignore[arg-type]
    assert (free.peak.device_bytes or 0) > 80 * GIB
    assert free.device is not None
    assert free.device.retries == 0
    named = _report("resnet18.pt2", "h100-sxm-80gb", **scenario)
    assert named.gpu is not None
    assert named.gpu.fit == "does not fit"
    assert named.peak == free.peak


def test_a_large_graph_is_replayed_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staticmem.studies.study.REPLAY_LIMIT", 100)
    report = staticmem.analyze(str(MODELS / "resnet18.pt2"), batch=2)
    assert report.device is None
    assert report.peak.allocated_bytes is None
    assert report.peak.device_by_category == {}
    assert "SM406" in [note.code for note in report.assumptions]
    assert _report("resnet18.pt2", "l40s", batch=2).peak.allocated_bytes is not None


# -- what device memory consists of ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "scenario"),
    [
        ("resnet18.pt2", {"batch": 32, "optimizer": "adam"}),
        ("resnet18.pt2", {"batch": 16, "optimizer": "adam", "alloc_conf": "expandable_segments:True"}),
        ("vgg16.pt2", {"batch": 8, "optimizer": "sgd", "cudnn_benchmark": True}),
        ("mobilenet_v2.onnx", {"batch": 8, "mode": "infer"}),
        ("vgg16.pt2", {"batch": 16, "optimizer": "adamw", "gpu": "4GB"}),
    ],
)
def test_the_parts_of_device_memory_add_up(model: str, scenario: dict[str, object]) -> None:
    peak = staticmem.analyze(str(MODELS / model), **scenario).peak  # type: ignore[arg-type]
    parts = peak.device_by_category
    assert tuple(parts) == DEVICE_CATEGORIES
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == peak.device_bytes
    assert parts["context"] + parts["libraries"] == peak.context_bytes
    within = sum(parts.values()) - parts["cached"] - (peak.context_bytes or 0)
    assert within == peak.allocated_bytes
    assert sum(parts[name] for name in CATEGORIES) <= peak.live_bytes
    assert parts["parameter"] == peak.by_category["parameter"]


# -- the software on the card ------------------------------------------------------------------------------------

TRAINING: dict[str, object] = {"batch": 16, "optimizer": "adam"}


def test_a_kept_cublas_workspace_is_allocated_memory() -> None:
    """PyTorch 2.15 gives it back after each call (profiles/pytorch.yaml), so less lives at the peak, not more."""
    kept = _report("vgg16.pt2", "h100-sxm-80gb", torch_version="2.14", **TRAINING).peak
    passing = _report("vgg16.pt2", "h100-sxm-80gb", torch_version="2.15", **TRAINING).peak
    assert kept.device_by_category["workspace"] >= 2 * 33_554_432  # the handles of both threads
    assert passing.device_by_category["workspace"] < 2 * 33_554_432


def test_expandable_segments_hold_less_in_reserve() -> None:
    plain = _report("resnet18.pt2", "h100-sxm-80gb", **TRAINING).peak
    expandable = _report("resnet18.pt2", "h100-sxm-80gb", alloc_conf="expandable_segments:True", **TRAINING).peak
    assert plain.device_by_category["cached"] > expandable.device_by_category["cached"]
    assert expandable.device_by_category["rounding"] == 0  # every remainder of 512 bytes is split off


def test_a_memory_fraction_is_a_smaller_card() -> None:
    fits = _report("resnet18.pt2", "h100-sxm-80gb", alloc_conf="per_process_memory_fraction:0.5", **TRAINING)
    short = _report("resnet18.pt2", "h100-sxm-80gb", alloc_conf="per_process_memory_fraction:0.005", **TRAINING)
    assert fits.gpu is not None
    assert short.gpu is not None
    assert fits.gpu.fit == "fits"
    assert short.gpu.fit == "does not fit"
    assert fits.peak.reserved_bytes == short.peak.reserved_bytes  # what it would need


def test_without_tensor_cores_convolutions_need_less_workspace() -> None:
    with_tf32 = _report("vgg16.pt2", "a100-sxm-80gb", **TRAINING).peak
    without = _report("vgg16.pt2", "a100-sxm-80gb", tf32=False, **TRAINING).peak
    assert (without.reserved_bytes or 0) < (with_tf32.reserved_bytes or 0)


def test_the_search_of_cudnn_benchmark_is_in_the_report() -> None:
    """Reserved memory may rise or fall: the search takes large buffers, and gives the cache back when it ends."""
    plain = _report("vgg16.pt2", "a100-sxm-80gb", **TRAINING)
    search = _report("vgg16.pt2", "a100-sxm-80gb", cudnn_benchmark=True, **TRAINING)
    assert plain.device is not None
    assert search.device is not None
    assert (plain.device.cudnn_benchmark, search.device.cudnn_benchmark) == (False, True)
    assert search.peak.reserved_bytes != plain.peak.reserved_bytes


def test_a_profile_of_ones_own_replaces_the_figures(tmp_path: Path) -> None:
    text = (Path(hardware.__file__).parent / "profiles" / "pytorch.yaml").read_text(encoding="utf-8")
    own = tmp_path / "mine.yaml"
    own.write_text(
        text.replace("readings:\n", "readings:\n    l40s: {mib: 417, source: my own card}\n", 1), encoding="utf-8"
    )
    known = _report("resnet18.pt2", "l40s", batch=2).peak
    mine = _report("resnet18.pt2", "l40s", batch=2, profile=str(own)).peak
    assert mine.device_by_category["context"] == 417 * 2**20
    assert mine.reserved_bytes == known.reserved_bytes


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ({"torch_version": "new"}, "SM403"),
        ({"alloc_conf": "expandable:True"}, "SM144"),
        ({"cudnn": "guess"}, "SM134"),
        ({"profile": "/nowhere/profile.yaml"}, "SM401"),
    ],
)
def test_wrong_words_are_told_before_the_file_is_read(words: dict[str, object], code: str) -> None:
    with pytest.raises(StaticmemError) as error:
        staticmem.analyze("/nowhere/model.onnx", **words)  # type: ignore[arg-type]
    assert error.value.code == code


def test_an_unknown_card_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="h1000"):
        _report("resnet18.pt2", "h1000", batch=2)


def test_what_the_file_leaves_open_widens_every_band() -> None:
    """Of this export of an inference nobody knows what variables the code kept: beside the same step without that doubt
    each band is wider by the doubt, and so is what a card has to have room for."""
    study = Study.open(str(MODELS / "resnet50.onnx"), Request(batch=8, mode="infer", gpu="h100-sxm-80gb"))
    peak, (less, more) = study.report.peak, study.spread
    assert less + more > 0
    assert peak.bands["live"] == Band(peak.live_bytes - less, peak.live_bytes + more)
    device = device_of(study.request)
    sure = on_device(study.result, device)
    wide = sure.widened(less, more)
    for name in ("allocated", "reserved", "device"):
        low, expected, high = getattr(sure, name)
        assert getattr(wide, name) == (low - less, expected, high + more)
        assert peak.bands[name] == Band(low - less, high + more)
    low, expected, high = sure.verdict.needed
    assert wide.verdict.needed == (low - less, expected, high + more)
    row = next(row for row in card_rows(study.result, device, study.spread) if row.asked)
    assert (row.low, row.high) == (wide.device.low, wide.device.high)
