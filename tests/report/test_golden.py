"""The formats, character by character. After a change that is meant: pytest tests/report --overwrite-golden"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.report import json as report_json
from staticmem.report.formats.report import render
from staticmem.report.model import Report
from staticmem.report.text import Style, View

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50-adam": ("models/resnet50.pt2", {"batch": 32, "optimizer": "adam"}),
    "mobilenet-infer": ("models/mobilenet_v2.pt2", {}),
    "vgg16-amp": ("models/vgg16.pt2", {"batch": 8, "optimizer": "adamw", "amp": "bf16", "optimizer_impl": "fused"}),
    "seed-onnx-textbook": ("models/seed.onnx", {"optimizer": "sgd", "loss": "mean", "method": "textbook", "top": 4}),
}


def check(name: str, text: str, overwrite: bool) -> None:
    path = GOLDEN / name
    if overwrite:
        path.write_text(text, encoding="utf-8", newline="\n")
    assert text == path.read_text(encoding="utf-8"), f"{name} differs; if that is meant: pytest --overwrite-golden"


def report_of(case: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.chdir(ROOT)  # the report repeats the path as it was given
    path, scenario = CASES[case]
    return staticmem.analyze(path, **scenario)


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    overwrite = bool(request.config.getoption("--overwrite-golden"))
    report = report_of(case, monkeypatch)
    check(f"{case}.txt", render(report), overwrite)
    check(f"{case}.json", report_json.dumps(report), overwrite)


def test_golden_variants(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Everything alive by module, verbose, decimal, on a narrow terminal that knows neither colour nor Unicode."""
    overwrite = bool(request.config.getoption("--overwrite-golden"))
    report = report_of("seed-onnx-textbook", monkeypatch)
    text = render(report, View(Style(unicode=False, width=80), "decimal", verbose=True, explain=True))
    check("seed-onnx-explain-ascii.txt", text, overwrite)
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()[:-1]) <= 80  # the verdict may be longer
