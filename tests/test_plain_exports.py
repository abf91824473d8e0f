"""Exports of models that no table has, as the documentation of PyTorch writes them, against steps that PyTorch ran.

`data/measured/plain.json` has the figures: the peaks of steps on fake CUDA tensors (Adam, the mean of the output as the
loss), by batch size; and where a file cannot tell, in which formats the band has to hold the truth.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled

import staticmem

torch = pytest.importorskip("torch")

from plain_models import MODELS  # noqa: E402

pytestmark = pytest.mark.torch
CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "measured" / "plain.json").read_text(encoding="utf-8")
)["cases"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


def export(name: str, suffix: str, folder: Path) -> Path:
    path = folder / f"{name}{suffix}"
    if path.exists():
        return path
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    open_batch = ({0: torch.export.Dim.DYNAMIC},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, args = make().train(), inputs(4)
        if suffix == ".pt2":
            torch.export.save(torch.export.export(model, args, dynamic_shapes=open_batch), path)
        elif suffix == ".onnx":
            torch.onnx.export(
                model, args, str(path), dynamo=True, dynamic_shapes=open_batch, external_data=False, verbose=False
            )
        else:
            torch.onnx.export(
                model, args, str(path), dynamo=False, training=torch.onnx.TrainingMode.TRAINING,
                do_constant_folding=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}},
            )  # fmt: skip
    return path


def pairs(holds: str) -> Iterator[Any]:
    for case in CASES:
        for suffix in case.get(holds, ()):
            words = "-".join(str(case[key]) for key in ("model", "batch", "mode", "amp") if key in case)
            yield pytest.param(suffix, case, id=f"{words}-{suffix}")


def analyzed(suffix: str, case: dict[str, Any], folder: Path) -> staticmem.Report:
    path = export(case["model"], suffix, folder)
    options: dict[str, Any] = {key: case[key] for key in ("batch", "amp", "mode") if key in case}
    if case.get("mode") != "infer":
        options |= {"optimizer": "adam", "loss": "mean"}
    return staticmem.analyze(path, outputs="dropped", **options)


@pytest.mark.parametrize(("suffix", "case"), sampled(pairs("exact"), 3))
def test_peaks_are_those_of_the_step(suffix: str, case: dict[str, Any], folder: Path) -> None:
    assert analyzed(suffix, case, folder).peak.live_bytes == case["peak_bytes"]


@pytest.mark.parametrize(("suffix", "case"), list(pairs("within")))
def test_the_band_holds_what_a_file_cannot_tell(suffix: str, case: dict[str, Any], folder: Path) -> None:
    band = analyzed(suffix, case, folder).peak.bands["live"]
    assert band.low <= case["peak_bytes"] <= band.high
