"""Peaks to the byte against steps that PyTorch ran (data/measured/live.json, docs/internals/measurements.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import staticmem

HERE = Path(__file__).parent
FOLDERS = (HERE.parent / "models", HERE / "data" / "graphs")
SUFFIXES = (".pt2", ".onnx", "_ts.onnx")  # torch.export, and the two ONNX exporters
RESULTS = ("peak_bytes", "phase", "op", "forward_end_bytes")
CASES: list[dict[str, Any]] = json.loads((HERE / "data" / "measured" / "live.json").read_text())["cases"]


def _pairs() -> Iterator[Any]:
    """Every case with every export of its model that is here."""
    for case in CASES:
        given = [str(v) for k, v in case.items() if k not in (*RESULTS, "graph", "loss", "mode")]
        for suffix in SUFFIXES:
            for folder in FOLDERS:
                path = folder / f"{case['graph']}{suffix}"
                if path.exists():
                    yield pytest.param(path, case, id="-".join([path.name, case["mode"], *given]))


@pytest.mark.parametrize(("path", "case"), list(_pairs()))
def test_peak_is_exact(path: Path, case: dict[str, Any]) -> None:
    scenario = {k: v for k, v in case.items() if k not in (*RESULTS, "graph")}
    report = staticmem.analyze(path, **{"outputs": "dropped", **scenario})
    assert report.peak.live_bytes == case["peak_bytes"]
    assert (report.peak.phase, report.peak.at_op) == (case["phase"], case["op"])
    assert report.phases.forward_end_bytes == case.get("forward_end_bytes", report.phases.forward_end_bytes)


def test_cases_cover_what_the_command_line_offers() -> None:
    """Every case has an export here; every optimizer, both modes and mixed precision are among them."""
    names = {path.name for folder in FOLDERS for path in folder.iterdir()}
    assert all(f"{case['graph']}.pt2" in names for case in CASES)
    assert {case.get("optimizer") for case in CASES} == {None, "sgd", "adam", "adamw", "rmsprop", "adagrad"}
    assert {case["mode"] for case in CASES} == {"train", "infer"}
    assert {case.get("amp") for case in CASES} == {None, "bfloat16", "float16"}
