"""Steps with levers to the byte against steps that PyTorch ran (data/measured/levers.json, docs/levers.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prepared import in_place, run_step
from sampling import sampled

from staticmem.frontends import open_model
from staticmem.ir import dtypes
from staticmem.ir.graph import Graph
from staticmem.ir.model_file import resolve
from staticmem.liveness import Lifetimes
from staticmem.passes.pipeline import bind
from staticmem.scenario.step import Scenario

TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS.parent / "models", TESTS / "data" / "graphs")
MEASURED: dict[str, list[dict[str, Any]]] = json.loads((TESTS / "data" / "measured" / "levers.json").read_text())
CASES = MEASURED["cases"]
FIELDS = {f.name for f in fields(Scenario)}
TOLERANCE = {"t5-small": 0.001}  # what its code decides by dtypes and by its cache is not in an export
LEVERS = ("checkpoint", "checkpoint_segments", "accumulate", "freeze", "offload_activations", "inplace_abn")


@cache
def bound(name: str, suffix: str, batch: int) -> Graph:
    path = next(p for folder in FOLDERS if (p := folder / f"{name}{suffix}").exists())
    model = open_model(str(path))
    return in_place(bind(model, resolve(model, batch=batch)))


def scenario_of(case: Mapping[str, Any]) -> Scenario:
    words: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in case.items() if k in FIELDS}
    for name in ("amp", "dtype"):
        words[name] = dtypes.parse(case[name]) if name in case else None
    return Scenario(mode="train", loss="cross-entropy", outputs="dropped", **words)


def label(case: Mapping[str, Any]) -> str:
    return "-".join(str(v) for k, v in case.items() if k in FIELDS or k in ("graph", "batch"))


def check(case: dict[str, Any], suffix: str) -> None:
    result = run_step(bound(case["graph"], suffix, case["batch"]), scenario_of(case))
    assert not [note for note in result.notes if note.code == "SM311"]  # PyTorch ran it
    lifetimes = Lifetimes(result.trace)
    tolerance = TOLERANCE.get(case["graph"], 0.0) * case["peak_bytes"] + case.get("argument_bytes", 0)
    assert abs(lifetimes.peak_bytes - case["peak_bytes"]) <= tolerance
    at = lifetimes.allocation_at(lifetimes.peak_tick)
    assert at is not None
    assert result.trace.kernels[result.trace.buffers[at].kernel].phase == case["phase"]
    forward_end = lifetimes.level_before(result.trace.marks["forward_end"])
    assert abs(forward_end - case["forward_end_bytes"]) <= tolerance


@pytest.mark.parametrize("case", sampled(CASES, 3), ids=label)
def test_peak_is_exact(case: dict[str, Any]) -> None:
    check(case, ".pt2")


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["graph"] in ("resnet18", "resnet50", "vgg16", "mobilenet_v2")], ids=label
)
def test_peak_is_exact_from_onnx(case: dict[str, Any]) -> None:
    check(case, ".onnx")


@pytest.mark.parametrize("case", MEASURED["refused"], ids=label)
def test_steps_that_pytorch_stops_are_warned_of(case: dict[str, Any]) -> None:
    """A checkpoint that begins with an activation in place changes the input that it saved."""
    result = run_step(bound(case["graph"], ".pt2", case["batch"]), scenario_of(case))
    assert [note for note in result.notes if note.code == "SM311"]


def test_the_cases_cover_every_lever() -> None:
    for lever in LEVERS:
        assert sum(lever in case for case in CASES) >= 5, lever
    assert {case.get("amp") for case in CASES} == {None, "bfloat16", "float16"}
    assert all(any(case.get(name) for case in CASES) for name in ("grad_scaler", "clip_grad_norm", "nesterov"))
    assert any(case.get("set_to_none") is False for case in CASES)
