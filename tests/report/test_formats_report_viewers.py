"""The snapshot, as PyTorch's own reader of snapshots takes it, and the counter track."""

from __future__ import annotations

import io
import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prepared import run_step

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import process_of_trace
from staticmem.allocators.process import Process
from staticmem.allocators.result import Replay
from staticmem.engine.step import StepResult
from staticmem.frontends import open_model
from staticmem.ir.model_file import resolve
from staticmem.passes.pipeline import bind
from staticmem.report.formats.report_viewers import PHASES, Replayed, dump_snapshot, dump_trace
from staticmem.scenario.step import Scenario

MODELS = Path(__file__).parents[2] / "models"
MIB = 2**20


@cache
def replayed(capacity: int | None = None) -> tuple[StepResult, Process, Replay]:
    model = open_model(str(MODELS / "resnet18.pt2"))
    result = run_step(
        bind(model, resolve(model, batch=4, resolution=None, dims={})), Scenario(mode="train", optimizer="adam")
    )
    found = process_of_trace(result.trace)
    return result, found, simulate(found.events, capacity=capacity)


def made(capacity: int | None = None) -> dict[str, Any]:
    result, found, replay = replayed(capacity)
    data = pickle.loads(dump_snapshot(Replayed(found, replay, result.trace, result.graph)))
    assert isinstance(data, dict)
    return data


def test_the_pickle_has_plain_types_only() -> None:
    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name}")

    result, found, replay = replayed()
    data = dump_snapshot(Replayed(found, replay, result.trace, result.graph))
    assert Plain(io.BytesIO(data)).load() == made()
    assert data == dump_snapshot(Replayed(found, replay, result.trace, result.graph))


def test_segments_add_up_to_what_the_replay_says() -> None:
    _, _, replay = replayed()
    segments = made()["segments"]
    assert sum(s["total_size"] for s in segments) == replay.reserved[-1]
    assert sum(s["allocated_size"] for s in segments) == replay.allocated[-1]
    for segment in segments:
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])


def test_the_trace_gives_the_curve_of_reserved_and_ends_at_the_segments() -> None:
    _, _, replay = replayed()
    data = made()
    reserved = peak = 0
    live = {}
    for entry in data["device_traces"][0]:
        if entry["action"] == "segment_alloc":
            reserved += entry["size"]
            peak = max(peak, reserved)
        elif entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
    assert peak == replay.peak_reserved
    blocks = [b for s in data["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    assert {b["address"]: b["requested_size"] for b in blocks} == live


def test_frames_name_kernel_tensor_modules_and_step() -> None:
    entries = made()["device_traces"][0]
    convolutions = [e for e in entries if e["action"] == "alloc" and e["frames"][0]["name"].startswith("aten.conv")]
    names = [frame["name"] for frame in convolutions[0]["frames"]]
    assert "conv1" in names
    assert names[-1] == "forward"
    assert convolutions[0]["frames"][-1]["filename"] == "step 1"


def test_running_out_of_memory_is_the_last_entry() -> None:
    _, _, replay = replayed(capacity=150 * MIB)
    assert replay.oom is not None
    last = made(150 * MIB)["device_traces"][0][-1]
    assert (last["action"], last["size"]) == ("oom", replay.oom.requested)
    assert last["device_free"] == replay.oom.free


@pytest.mark.parametrize("capacity", [None, 150 * MIB])
def test_pytorch_reads_it(capacity: int | None) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    data = made(capacity)
    _, _, replay = replayed(capacity)
    text = viz.trace(data)
    assert text.count("cudaMalloc") == sum(e.action == "segment_alloc" for e in replay.segment_events)
    assert ("OutOfMemoryError" in text) == (capacity is not None)
    assert viz.segsum(data)
    lines = viz.memory(data, format_flamegraph=lambda text: text).splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == int(replay.reserved[-1])
    assert "<html>" in viz.trace_plot(data)
    assert viz.segment_plot(data)


def test_the_counter_track_is_json_with_both_peaks() -> None:
    result, found, replay = replayed()
    data = json.loads(dump_trace(Replayed(found, replay, result.trace)))
    events = data["traceEvents"]
    for name, peak in (("allocated", replay.peak_allocated), ("reserved", replay.peak_reserved)):
        assert max(e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == name) == peak
    phases = [e["name"] for e in events if e["ph"] == "X" and e["tid"] == PHASES]
    assert phases[:4] == ["setup", "step 1: forward", "step 1: backward", "step 1: optimizer"]
    assert len(phases) == 10
    slices = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 for e in slices)
    assert any(e["name"] == "aten.convolution.default" for e in slices)
