"""The comparison with readings of real cards: what it says of right and of wrong predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import staticmem

ROOT = Path(__file__).parents[1]
MODEL = "models/resnet18.pt2"


def _compare(*words: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "compare_readings.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_errors_and_bands_are_told_by_meter(tmp_path: Path) -> None:
    peak = staticmem.analyze(ROOT / MODEL, batch=4, gpu="rtx-3060").peak
    assert peak.allocated_bytes is not None
    assert peak.device_bytes is not None
    readings = [
        {"model": MODEL, "request": {"batch": 4}, "allocated_bytes": peak.allocated_bytes},
        {"model": MODEL, "request": {"batch": 4}, "device_bytes": peak.device_bytes * 4},
    ]
    path = tmp_path / "readings.json"
    path.write_text(json.dumps({"request": {"gpu": "rtx-3060"}, "readings": readings}), encoding="utf-8")
    text = _compare(str(path), "--all")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if not line.lstrip().startswith(("+", "-"))}
    assert rows["allocated"] == ["1", "0.00%", "0.00%", "100%"]
    assert rows["device"] == ["1", "75.00%", "75.00%", "0%"]
    assert "reserved" not in rows
    assert "-75.00% device" in text


def test_published_readings_are_where_the_docs_say(tmp_path: Path) -> None:
    """DenseNet-121 at batch 84 on a Titan V: within 0.5 %, the workspaces of cuBLAS aside."""
    lines = [line.split() for line in _compare().splitlines()]
    allocated = next(line for line in lines if line[0] == "allocated")
    assert int(allocated[1]) >= 1
    assert float(allocated[3].rstrip("%")) < 0.5
