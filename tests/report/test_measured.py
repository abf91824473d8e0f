"""Peaks against measurements: PyTorch 2.15.0 ran these steps; all live storages were counted, rounded up to 512 bytes.

The step measured is the second one, with the loss that `auto` picks for these models but for the first two. The loop
drops the outputs, or holds them where the scenario says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import staticmem

MODELS = Path(__file__).parents[2] / "models"

ADAM = {"optimizer": "adam"}
MOMENTUM = {"optimizer": "sgd", "momentum": 0.9}
MIXED = {"optimizer": "adamw", "amp": "bfloat16"}

MEASURED: list[tuple[str, int, dict[str, Any], int]] = [
    ("seed", 1, {"optimizer": "sgd", "loss": "mean"}, 495_334_400),
    ("seed", 1, {"optimizer": "sgd", "loss": "mean", "outputs": "held"}, 556_441_600),
    ("seed", 1, {}, 250_609_152),
    ("resnet18", 32, ADAM, 872_827_392),
    ("resnet18", 32, {**ADAM, "outputs": "held"}, 872_955_392),
    ("resnet18", 16, {"optimizer": "sgd"}, 430_883_328),
    ("resnet18", 64, MIXED, 973_804_544),
    ("resnet18", 32, {}, 271_600_640),
    ("resnet50", 32, ADAM, 3_089_885_184),
    ("resnet50", 16, MOMENTUM, 1_609_889_792),
    ("resnet50", 64, MIXED, 3_226_710_528),
    ("resnet50", 64, {**MIXED, "outputs": "held"}, 3_226_838_528),
    ("resnet50", 1, ADAM, 512_006_656),  # the optimizer's step is the peak
    ("resnet50", 32, {}, 455_714_304),
    ("resnet50_hw", 8, {**MOMENTUM, "resolution": 512}, 3_836_999_680),
    ("vgg16", 32, ADAM, 4_540_251_648),
    ("vgg16", 64, MIXED, 5_164_332_032),
    ("vgg16", 32, {}, 1_394_782_208),
    ("vgg16_hw", 8, {**MOMENTUM, "resolution": 128}, 1_835_279_872),
    ("mobilenet_v2", 32, ADAM, 2_566_055_936),
    ("mobilenet_v2", 32, {}, 367_476_224),
    ("mobilenet_v2", 16, {"optimizer": "rmsprop"}, 1_292_790_272),
]


@pytest.mark.parametrize(("model", "batch", "scenario", "measured"), MEASURED)
def test_peak_is_exact(model: str, batch: int, scenario: dict[str, Any], measured: int) -> None:
    report = staticmem.analyze(MODELS / f"{model}.pt2", batch=batch, **{"outputs": "dropped", **scenario})
    assert report.peak.live_bytes == measured
