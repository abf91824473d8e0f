"""Against three steps of real PyTorch processes, recorded on a stub of CUDA by `real/processes.py`.

The events come from the exports in `models/` alone. The stub's cuDNN needs no workspace; what cuBLAS gets from PyTorch
2.15 on an sm_90 device is given here: 32 MiB for each product, taken and given back inside it
(aten/src/ATen/cuda/CublasHandlePool.cpp), and 1 MiB where a linear layer goes to cublasLt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prepared import run_step
from products import Products

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import process_of_trace
from staticmem.allocators.process import Process
from staticmem.allocators.settings import parse_settings
from staticmem.frontends import open_model
from staticmem.ir import dtypes
from staticmem.ir.model_file import resolve
from staticmem.passes.pipeline import bind
from staticmem.scenario.step import Scenario

ROOT = Path(__file__).parents[2]
RECORDED: list[dict[str, Any]] = json.loads((ROOT / "tests" / "data" / "allocator" / "processes.json").read_text())
MIB = 2**20


def process_of(case: dict[str, Any]) -> Process:
    model = open_model(str(ROOT / "models" / f"{case['model']}.pt2"))
    graph = bind(model, resolve(model, batch=case["batch"], resolution=None, dims={}))
    optimizer = case.get("optimizer")
    scenario = Scenario(
        mode="train" if optimizer else "infer",
        optimizer=optimizer,
        optimizer_impl=case.get("impl", "foreach"),
        momentum=case.get("momentum", 0.0),
        loss=case.get("loss", "auto"),
        amp=dtypes.bfloat16 if "amp" in case else None,
        outputs=case.get("outputs", "dropped"),
    )
    trace = run_step(graph, scenario).trace
    return process_of_trace(trace, Products(trace), data=case.get("data", "resident"))


def label(case: dict[str, Any]) -> str:
    return "-".join(str(value) for key, value in case.items() if key not in ("torch", "phases", "oom", "retries"))


@pytest.mark.parametrize("case", RECORDED, ids=label)
def test_memory_after_every_phase_is_what_pytorch_had(case: dict[str, Any]) -> None:
    found = process_of(case)
    settings = parse_settings(case.get("settings"))
    replay = simulate(found.events, settings, case.get("capacity"), total=140 * 2**30)
    assert replay.retries == case["retries"]
    if case["oom"] is not None:
        assert replay.oom is not None
        assert found.mark_at(replay.oom.time).step == case["oom"]
    else:
        assert replay.oom is None
    spans = [(mark.phase, *replay.peak_between(0, end)) for mark, end in found.spans()]
    assert spans[: len(case["phases"])] == [tuple(row) for row in case["phases"]]
