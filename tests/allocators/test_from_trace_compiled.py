"""Against real PyTorch processes under `torch.compile(mode="reduce-overhead")`, four steps, recorded on a stub of CUDA
by `real/compiled.py`: a warm-up, a recording and two replays of the CUDA graphs.

What is compiled is predicted from the exports in `models/`. The stub's cuDNN needs no workspace.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from products import Products

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import process_of_trace
from staticmem.allocators.process import GRAPH_POOL
from staticmem.allocators.settings import parse_settings
from staticmem.scenario.request import Request
from staticmem.studies import Study

ROOT = Path(__file__).parents[2]
RECORDED: list[dict[str, Any]] = json.loads((ROOT / "tests" / "data" / "allocator" / "compiled.json").read_text())


def label(case: dict[str, Any]) -> str:
    return "-".join(str(case[key]) for key in case if key not in ("torch", "phases", "oom", "retries", "pool"))


@pytest.mark.parametrize("case", RECORDED, ids=label)
def test_memory_after_every_phase_is_what_pytorch_had(case: dict[str, Any]) -> None:
    optimizer = case.get("optimizer")
    request = Request(
        batch=case["batch"], mode="train" if optimizer else "infer", optimizer=optimizer, outputs="dropped",
        compile=case.get("compile", True), compile_mode="reduce-overhead",
    )  # fmt: skip
    trace = Study.open(str(ROOT / "models" / f"{case['model']}.pt2"), request).result.trace
    found = process_of_trace(trace, Products(trace), steps=4)
    replay = simulate(found.events, parse_settings(case.get("settings")), case.get("capacity"), total=140 * 2**30)
    assert (None if replay.oom is None else found.mark_at(replay.oom.time).step) == case["oom"]
    assert replay.retries == case["retries"]
    ends = [(mark.phase, end) for mark, end in found.spans() if end <= len(replay)]
    spans = [
        (phase, *replay.peak_between(0, end), int(replay.allocated[end - 1]), int(replay.reserved[end - 1]))
        for phase, end in ends
    ]
    assert spans[: len(case["phases"])] == [tuple(row) for row in case["phases"]]
    pool = sum(s.size for s in replay.segments(len(replay) - 1) if s.stream == GRAPH_POOL)
    assert pool == case["pool"]
