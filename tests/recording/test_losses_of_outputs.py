"""Losses of several outputs against steps that PyTorch ran, from exports, recordings and ONNX files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import staticmem

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from several_outputs import MODELS  # noqa: E402 - it imports torch

DATA = Path(__file__).parents[1] / "data" / "measured" / "several-outputs.json"
CASES: list[dict[str, Any]] = json.loads(DATA.read_text())["cases"]
IDS = ["-".join(str(value) for key, value in case.items() if key != "peak_bytes") for case in CASES]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models as plain exports and with recordings."""
    folder: Path = tmp_path_factory.mktemp("several")
    for name, (cls, shape) in MODELS.items():
        model, x = cls().train(), torch.zeros(shape)
        torch.export.save(torch.export.export(model, (x,)), folder / f"{name}.pt2")
        staticmem.export(model, (x,), folder / f"{name}.recorded.pt2")
    return folder


def sizes_of(case: dict[str, Any]) -> dict[str, Any]:
    """A recording has open sizes."""
    shape = MODELS[case["model"]][1]
    return {"batch": shape[0], **({"resolution": shape[2:]} if len(shape) == 4 else {})}


def peak(path: Path, case: dict[str, Any], **more: Any) -> int:
    words = {key: value for key, value in case.items() if key not in ("model", "peak_bytes")}
    return staticmem.analyze(path, **{**words, **more}).peak.live_bytes


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_peaks_are_exact(files: Path, case: dict[str, Any]) -> None:
    assert peak(files / f"{case['model']}.pt2", case) == case["peak_bytes"]
    assert peak(files / f"{case['model']}.recorded.pt2", case, **sizes_of(case)) == case["peak_bytes"]


@pytest.mark.filterwarnings("ignore")
def test_onnx_outputs_go_by_number_or_by_the_names_of_the_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    cls, shape = MODELS["detector"]
    path = tmp_path / "detector.onnx"
    names = ["scores", "boxes", "low", "high"]
    torch.onnx.export(cls().train(), (torch.zeros(shape),), path, dynamo=True, output_names=names, verbose=False)
    for case in CASES:
        if case["model"] == "detector":
            assert peak(path, case) == case["peak_bytes"]
            assert peak(path, case, loss="0=l1,1=5*smooth-l1") == case["peak_bytes"]


def test_reports_list_outputs_by_the_names_that_the_loss_takes(files: Path) -> None:
    for name in ("detector.pt2", "detector.recorded.pt2"):
        outputs = staticmem.analyze(files / name, batch=4).model.outputs
        assert [output.name for output in outputs] == ["scores", "boxes", "features.0", "features.1"]


@pytest.mark.parametrize("loss", ["scores=bce,boxes=5*smooth-l1", "boxes=l1,features.0=0.5*mean", "all=mse"])
def test_validate_runs_it(files: Path, loss: str) -> None:
    """On a CPU PyTorch has as many live bytes as predicted when the forward has ended."""
    from staticmem.validate.pytorch.validation import validate_torch

    record = validate_torch(str(files / "detector.pt2"), {"loss": loss, "optimizer": "sgd"}, "cpu")
    assert {m.name: m.difference for m in record.meters}["live, end of forward"] == 0
