"""Formats for viewers: the allocator's replay as a file that PyTorch's memory_viz and Perfetto open."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from staticmem.cli.main import main

MODEL = str(Path(__file__).parents[2] / "models" / "resnet18.pt2")
STEP = ["analyze", MODEL, "--batch", "2", "--optimizer", "sgd"]


def _report(tmp_path: Path, *more: str) -> dict[str, int]:
    path = tmp_path / "report.json"
    assert main([*STEP, *more, "-o", str(path), "--force"]) == 0
    peak: dict[str, int] = json.loads(path.read_text())["peak"]
    return peak


def test_the_suffix_pickle_gives_a_snapshot_of_the_same_process(tmp_path: Path) -> None:
    path = tmp_path / "step.pickle"
    assert main([*STEP, "-o", str(path)]) == 0
    data = pickle.loads(path.read_bytes())
    level = peak = 0
    for entry in data["device_traces"][0]:
        level += {"segment_alloc": 1, "segment_free": -1}.get(entry["action"], 0) * entry["size"]
        peak = max(peak, level)
    report = _report(tmp_path)
    assert report["bands"]["reserved"]["low"] <= peak <= report["bands"]["reserved"]["high"]  # type: ignore[index]
    assert level == sum(segment["total_size"] for segment in data["segments"])


def test_settings_and_a_full_card_are_in_the_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "step.pickle"
    flags = ["--gpu", "700MiB", "--alloc-conf", "expandable_segments:True"]
    assert main([*STEP, *flags, "-o", str(path)]) == 0
    data = pickle.loads(path.read_bytes())
    assert data["allocator_settings"]["expandable_segments"] is True
    assert data["device_traces"][0][-1]["action"] == "oom"


def test_perfetto_has_both_counters(tmp_path: Path) -> None:
    path = tmp_path / "step.perfetto.json"
    assert main([*STEP, "-o", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    counted = {e["name"]: max(c["args"]["bytes"] for c in events if c["ph"] == "C" and c["name"] == e["name"])
               for e in events if e["ph"] == "C"}  # fmt: skip
    assert counted["allocated"] == _report(tmp_path)["allocated_bytes"]
    assert counted["reserved"] >= counted["allocated"]


def test_json_is_still_the_report_and_the_format_wins_over_the_suffix(tmp_path: Path) -> None:
    path = tmp_path / "anything.json"
    assert main([*STEP, "-f", "perfetto", "-o", str(path)]) == 0
    assert "traceEvents" in json.loads(path.read_text())


def test_a_terminal_is_spared_bytes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main([*STEP, "-f", "snapshot"]) == 2
    assert "SM143" in capsys.readouterr().err


def test_stdout_gets_the_bytes_when_it_is_a_pipe(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main([*STEP, "-f", "snapshot"]) == 0
    assert pickle.loads(capfdbinary.readouterr().out)["segments"]
