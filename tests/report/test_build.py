"""The report adds up, on real exports."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import staticmem
from staticmem.report import schema
from staticmem.report.json import dumps, to_json
from staticmem.report.model import CATEGORIES, Report

ROOT = Path(__file__).parents[2]

SCENARIOS: dict[str, dict[str, Any]] = {
    "inference": {"batch": 4},
    "adam": {"batch": 4, "optimizer": "adam"},
    "sgd momentum": {"batch": 4, "optimizer": "sgd", "momentum": 0.9},
    "no optimizer": {"batch": 4, "mode": "train"},
    "fused": {"batch": 4, "optimizer": "adamw", "optimizer_impl": "fused"},
    "autocast": {"batch": 4, "optimizer": "adam", "amp": "bf16"},
    "cast": {"batch": 4, "dtype": "fp16"},
}
MODELS = ("seed.pt2", "resnet18.pt2", "resnet18.onnx", "mobilenet_v2.pt2")


@functools.cache
def report_of(model: str, scenario: str) -> Report:
    return staticmem.analyze(ROOT / "models" / model, top=7, **SCENARIOS[scenario])


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SCENARIOS)
def report(request: pytest.FixtureRequest, model: str) -> Report:
    return report_of(model, request.param)


def test_categories_and_modules_sum_to_the_peak(report: Report) -> None:
    peak = report.peak
    assert set(peak.by_category) == set(CATEGORIES)
    assert sum(peak.by_category.values()) == peak.live_bytes
    assert sum(row.bytes for row in peak.by_module) == peak.live_bytes
    for row in peak.by_module:
        assert sum(row.by_category.values()) == row.bytes


def test_tensors_alive_sum_to_the_peak(report: Report) -> None:
    assert sum(entry.bytes for entry in report.alive) == report.peak.live_bytes
    assert len(report.alive) == report.peak.tensors
    assert report.top_tensors == report.alive[:7]
    sizes = [entry.bytes for entry in report.alive]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size % 512 == 0 for size in sizes)
    assert all(entry.why and all(entry.why) for entry in report.alive)


def test_the_peak_is_that_of_a_phase(report: Report) -> None:
    phases = report.phases
    peaks = {"forward": phases.forward, "backward": phases.backward, "optimizer": phases.optimizer}
    known = {name: at.peak_bytes for name, at in peaks.items() if at is not None}
    assert report.peak.live_bytes == max(known.values()) == known[report.peak.phase]
    at = peaks[report.peak.phase]
    assert at is not None
    assert (at.at_op, at.node, at.module) == (report.peak.at_op, report.peak.node, report.peak.module)
    assert phases.start_bytes <= phases.forward_end_bytes <= phases.forward.peak_bytes


def test_parameters(report: Report) -> None:
    parameters = report.parameters
    assert sum(part.count for part in parameters.by_dtype.values()) == parameters.count
    assert sum(part.bytes for part in parameters.by_dtype.values()) == parameters.bytes
    held = [entry for entry in report.alive if entry.category == "parameter"]
    assert len(held) == parameters.tensors
    assert 0 <= report.peak.by_category["parameter"] - parameters.bytes < 512 * parameters.tensors


def test_json_is_valid_and_deterministic(report: Report) -> None:
    text = dumps(report)
    assert json.loads(text) == to_json(report)
    jsonschema.validate(json.loads(text), schema.schema())
    assert text == dumps(report)
    assert "alive" not in json.loads(text)


def test_known_numbers() -> None:
    """ResNet-18 has 11,689,512 parameters in 62 tensors (torchvision); Adam keeps two more of each, gradients one."""
    report = report_of("resnet18.pt2", "adam")
    assert report.parameters.count == 11_689_512
    assert report.parameters.bytes == 46_758_048
    assert report.parameters.tensors == 62
    assert report.multipliers.state_over_parameters == 4.0
    assert report.multipliers.optimizer_step_over_parameters == 1.0  # foreach: a whole-model list of square roots
    assert report_of("resnet18.pt2", "fused").multipliers.optimizer_step_over_parameters == 0.0
    assert report_of("resnet18.pt2", "no optimizer").multipliers.state_over_parameters == 2.0
    assert report_of("resnet18.pt2", "no optimizer").phases.optimizer is None
    assert report_of("resnet18.pt2", "cast").parameters.bytes == 46_758_048 // 2
    inference = report_of("resnet18.pt2", "inference")
    assert inference.multipliers.state_over_parameters is None
    assert inference.phases.backward is None


def test_why_names_owner_and_module() -> None:
    report = report_of("resnet18.pt2", "adam")
    first = next(e for e in report.alive if e.module == "conv1" and e.category == "activation")
    assert first.why == ("saved for the backward of batch_norm in bn1",)
    state = next(e for e in report.alive if e.name == "fc.weight.exp_avg")
    assert (state.module, state.category, state.why) == ("fc", "optimizer_state", ("optimizer state of fc.weight",))


def test_schema_file_is_fresh() -> None:
    """Write it again with: staticmem schema > schemas/report-1.schema.json"""
    jsonschema.Draft7Validator.check_schema(schema.schema())
    assert (ROOT / "schemas" / "report-1.schema.json").read_text() == schema.dumps(schema.schema())


def test_schema_can_reject() -> None:
    data = to_json(report_of("seed.pt2", "adam"))
    data["peak"]["live_bytes"] = 1.5
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema.schema())
    data = to_json(report_of("seed.pt2", "adam"))
    del data["peak"]["by_category"]["gradient"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema.schema())
