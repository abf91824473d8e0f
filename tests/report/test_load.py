"""Saved reports come back as they were; what is no report is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from staticmem import StaticmemError, analyze
from staticmem.report.json import dumps
from staticmem.report.load import load_report
from staticmem.report.model import Report

MODELS = Path(__file__).resolve().parents[2] / "models"


@pytest.fixture(scope="module")
def report() -> Report:
    return analyze(MODELS / "resnet18.pt2", batch=2, optimizer="adam", gpu="24GB", method="textbook", top=10**6)


def test_round_trip(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(dumps(report))
    assert load_report(str(path)) == report
    assert dumps(load_report(str(path))) == dumps(report)


def test_symbolic_shapes_come_back(tmp_path: Path) -> None:
    made = analyze(MODELS / "resnet50_hw.pt2", batch=2, resolution=64)
    (tmp_path / "r.json").write_text(dumps(made))
    loaded = load_report(str(tmp_path / "r.json"))
    assert loaded == replace(made, alive=made.top_tensors)
    assert any(isinstance(n, str) for n in loaded.model.inputs[0].symbolic or ())


def damaged(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def run(data: dict[str, Any]) -> dict[str, Any]:
        change(data)
        return data

    return run


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damaged(lambda d: d.pop("schema")), "is not a report"),
        (damaged(lambda d: d.update(schema="staticmem.report/9")), "is not a report"),
        (damaged(lambda d: d["peak"].update(live_bytes="much")), "'peak.live_bytes' is 'much'"),
        (damaged(lambda d: d["peak"].update(live_bytes=True)), "'peak.live_bytes' is True"),
        (damaged(lambda d: d["peak"].pop("phase")), "It has no 'peak.phase'"),
        (damaged(lambda d: d.update(peak=[])), "it must be an object"),
        (damaged(lambda d: d["top_tensors"][0].update(shape={})), "'top_tensors[0].shape'"),
        (lambda d: [d], "is not a report"),
        (damaged(lambda d: d["peak"]["bands"].pop("reserved")), "peak.bands lacks 'reserved'"),
        (damaged(lambda d: d["peak"]["device_by_category"].pop("cached")), "peak.device_by_category lacks 'cached'"),
    ],
)
def test_what_is_no_report(report: Report, tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(change(json.loads(dumps(report)))))
    with pytest.raises(StaticmemError) as caught:
        load_report(str(path))
    assert said in f"{caught.value.what} {caught.value.why}"
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"schema": NaN}', "\x00"])
def test_what_is_no_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(StaticmemError):
        load_report(str(path))
    with pytest.raises(StaticmemError):
        load_report(str(tmp_path / "none.json"))


def test_fields_of_later_versions_are_left_out(report: Report, tmp_path: Path) -> None:
    data = json.loads(dumps(report))
    data["later"], data["peak"]["later"] = 1, [2]
    (tmp_path / "r.json").write_text(json.dumps(data))
    assert load_report(str(tmp_path / "r.json")) == report
