"""The meters beyond live: nested, banded, and honest about what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

import staticmem
from staticmem.errors import UsageError
from staticmem.report.model import Report

MODELS = Path(__file__).parents[1] / "models"
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


def test_without_a_card_only_live_is_claimed() -> None:
    report = staticmem.analyze(str(MODELS / "resnet18.pt2"), batch=2)
    assert report.gpu is None
    assert report.peak.device_bytes is None
    assert set(report.peak.bands) == {"live"}


def test_what_was_not_verified_is_said() -> None:
    report = _report("resnet18.pt2", "l40s", batch=2)
    assert "SM401" in [note.code for note in report.assumptions]


def test_an_unknown_card_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="h1000"):
        _report("resnet18.pt2", "h1000", batch=2)
