"""Against three steps of real PyTorch processes on a stub of CUDA, for kernels that allocate inside of themselves.

`real/kernels.py` recorded them with PyTorch 2.14. The stub's cuDNN needs no workspace for a convolution; all else
that PyTorch allocates is in the figures, and is predicted here from the exports alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import process_of_trace
from staticmem.devices import kernels
from staticmem.devices.kernels import KernelWorkspaces, Setup
from staticmem.studies import Request, Study

DATA = Path(__file__).parents[1] / "data"
RECORDED: list[dict[str, Any]] = json.loads((DATA / "allocator" / "kernels.json").read_text())
LANGUAGE = {"gpt2": 0.01, "bert-base": 0.06}  # share of reserved memory that may differ


def label(case: dict[str, Any]) -> str:
    return "-".join(str(value) for key, value in case.items() if key not in ("torch", "phases"))


@pytest.mark.parametrize("case", RECORDED, ids=label)
def test_memory_after_every_phase(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte in vision networks. Dropout allocates its mask before its result, the rules after it; and in BERT
    PyTorch adds the two gradients of the tied embedding into a new buffer, where the rules add in place."""
    monkeypatch.setattr(kernels, "_convolution_needs", lambda *_: ())
    amp = "bf16" if case.get("amp") else None
    request = Request(batch=case["batch"], optimizer=case["optimizer"], amp=amp, outputs="dropped")
    study = Study.open(DATA / "graphs" / f"{case['model']}.pt2", request)
    trace = study.result.trace
    found = process_of_trace(trace, KernelWorkspaces(trace, Setup(torch=case["torch"])))
    replay = simulate(found.events)
    spans = [(mark.phase, *replay.peak_between(0, end)) for mark, end in found.spans()][1:]
    assert [span[0] for span in spans] == [row[0] for row in case["phases"]]
    if case["model"] not in LANGUAGE:
        assert spans == [tuple(row) for row in case["phases"]]
    for (_, allocated, reserved), (_, real_allocated, real_reserved) in zip(spans, case["phases"], strict=True):
        assert allocated == pytest.approx(real_allocated, rel=0.002)
        assert reserved == pytest.approx(real_reserved, rel=LANGUAGE.get(case["model"], 0))
