"""Models as people write them: exports with the source lines of their code, against steps that PyTorch ran.

`data/measured/own.json` has the figures, `data/own/` the exports (docs/internals/measurements.md, "62
models as people write them").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import staticmem

HERE = Path(__file__).parent
FOLDER = HERE / "data" / "own"
SUFFIXES = (
    ".pt2",
    ".onnx",
    "_opt.onnx",
    "_ts.onnx",
)  # torch.export; the ONNX exporters: dynamo, optimised, TorchScript
CASES: list[dict[str, Any]] = json.loads((HERE / "data" / "measured" / "own.json").read_text())["cases"]
UNMEASURED = ("film_vqa.pt2", "film_vqa.onnx")  # its GRU runs in cuDNN, which the reference does not have
SCENARIO = ("optimizer", "amp", "mode", "loss")


def _pairs() -> Iterator[Any]:
    """Every case with every export of its model that it holds for."""
    for case in CASES:
        for suffix in SUFFIXES:
            if suffix in case["exact"]:
                words = "-".join(str(case[key]) for key in SCENARIO if key in case)
                yield pytest.param(FOLDER / f"{case['graph']}{suffix}", case, id=f"{case['graph']}{suffix}-{words}")


def analyzed(path: Path, case: dict[str, Any]) -> staticmem.Report:
    return staticmem.analyze(path, outputs="dropped", **{key: case[key] for key in SCENARIO if key in case})


@pytest.mark.parametrize(("path", "case"), list(_pairs()))
def test_peak_is_exact(path: Path, case: dict[str, Any]) -> None:
    report = analyzed(path, case)
    assert report.peak.live_bytes == case["peak_bytes"] + case.get("kept_by_losses", 0)
    assert report.peak.phase == case["phase"]


def test_every_export_is_of_a_case() -> None:
    known = {f"{case['graph']}{suffix}" for case in CASES for suffix in case["exact"]}
    assert {path.name for path in FOLDER.iterdir()} == known | set(UNMEASURED)


@pytest.mark.parametrize(("name", "code"), [
    ("checkpoint_inside.pt2", "SM316"),  # checkpoints in the code
    ("tcn.pt2", "SM321"),  # modules under two names
    ("attention_unet_supervised.pt2", "SM331"),  # outputs that are in no loss
    ("film_vqa.pt2", "SM341"),  # what cuDNN keeps
])  # fmt: skip
def test_the_report_says_what_was_concluded(name: str, code: str) -> None:
    report = staticmem.analyze(FOLDER / name, optimizer="adam")
    assert code in {note.code for note in (*report.assumptions, *report.warnings)}


def test_a_region_of_no_grad_that_reads_no_gradient_is_certain() -> None:
    """Its inputs have names, so that it is of set_grad_enabled: a checkpoint would have no gradients there either."""
    report = staticmem.analyze(FOLDER / "frozen_no_grad.onnx", optimizer="adam", freeze="none", checkpoint="none")
    band = report.peak.bands["live"]
    assert band.low == report.peak.live_bytes
    assert band.high < 2 * band.low  # what variables and list modules may hold: with gradients it would be 2.3 times


def test_frozen_parameters_are_told() -> None:
    """The frozen backbone of the file has neither gradients nor states at the peak."""
    report = staticmem.analyze(FOLDER / "frozen_requires_grad.pt2", optimizer="adam")
    made = {t.name for t in report.alive if t.category in ("gradient", "optimizer_state")}
    assert made
    assert not any(name.startswith("backbone.") for name in made)


def test_both_exporters_know_a_recurrent_layer() -> None:
    """Of the tuple that a GRU returns only the state is read, and a dynamo export has nothing else of it."""
    peaks = {staticmem.analyze(FOLDER / f"film_vqa{s}", optimizer="adam").peak.live_bytes for s in (".pt2", ".onnx")}
    assert len(peaks) == 1
