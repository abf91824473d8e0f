"""A predicted snapshot against what PyTorch wrote: peaks, alignment, who is missing; and files that are no snapshot."""

from __future__ import annotations

import json
import os
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from staticmem.cli.main import main
from staticmem.errors import UsageError
from staticmem.report.formats.report_viewers import dump_snapshot
from staticmem.scenario.request import Request
from staticmem.studies import Study
from staticmem.studies.device import replay_of
from staticmem.validate import plain_pickle, snapshot_compare, snapshots

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "resnet18.pt2")
MIB = 2**20


@cache
def _predicted() -> bytes:
    study = Study.open(MODEL, Request(batch=2, optimizer="sgd"))
    return dump_snapshot(replay_of(study.request, study.result))


def _document() -> Any:
    return pickle.loads(_predicted())


def _real(document: Any) -> Any:
    """The same process as PyTorch would have recorded it: frames of C++ and Python in place of ours."""
    frames = [
        {"filename": "??", "line": 0, "name": "at::native::something"},
        {"filename": "/home/me/train.py", "line": 12, "name": "forward"},
    ]
    for event in document["device_traces"][0]:
        event["frames"] = frames
    return document


def _compared(document: Any) -> snapshot_compare.SnapshotComparison:
    mine = snapshots.snapshot_of(plain_pickle.loads(_predicted()), "predicted")
    theirs = snapshots.snapshot_of(plain_pickle.loads(pickle.dumps(document, 4)), "real")
    return snapshot_compare.compare(mine, theirs)


def test_the_same_process_is_equal_throughout() -> None:
    found = _compared(_real(_document()))
    assert found.allocated[0] == found.allocated[1] > 100 * MIB
    assert found.reserved[0] == found.reserved[1] >= found.allocated[0]
    assert found.matched == found.allocations[0] == found.allocations[1] > 100
    assert found.predicted_only == found.measured_only == ()
    assert all(moment.predicted == moment.measured for moment in found.moments)
    assert all(category.matched == category.predicted for category in found.categories)
    assert {category.name for category in found.categories} >= {"activation", "gradient", "temporary"}
    assert "train.py:12" in found.measured_at


def test_peaks_are_those_of_the_replay() -> None:
    from staticmem.devices.meters import replayed
    from staticmem.studies.device import device_of

    study = Study.open(MODEL, Request(batch=2, optimizer="sgd"))
    _, replay = replayed(study.result, device_of(study.request))
    found = snapshots.snapshot_of(plain_pickle.loads(_predicted()), "predicted")
    assert found.peak_reserved[0] == replay.peak_reserved
    assert 0 <= replay.peak_allocated - found.peak_allocated[0] < 2 * MIB  # blocks are not split below 1 MiB


def test_what_only_one_side_has_is_told() -> None:
    document = _real(_document())
    events = document["device_traces"][0]
    last = max(i for i, e in enumerate(events) if e["action"] == "alloc")
    extra = {"action": "alloc", "addr": 1 << 60, "size": 33 * MIB + 1, "stream": 0, "time_us": 0}
    extra["frames"] = [{"filename": "/home/me/extra.py", "line": 5, "name": "debug"}]
    events.insert(last - 40, extra)
    found = _compared(document)
    assert found.matched == found.allocations[0]
    assert [(g.what, g.count, g.nbytes) for g in found.measured_only] == [("debug", 1, 33 * MIB + 512)]
    assert found.moments[-1].measured - found.moments[-1].predicted == 33 * MIB + 512
    gone = _real(_document())
    steps = [i for i, e in enumerate(gone["device_traces"][0]) if e["action"] == "alloc"]
    dropped = max(steps[-60:], key=lambda i: int(gone["device_traces"][0][i]["size"]))
    size = gone["device_traces"][0][dropped]["size"]
    del gone["device_traces"][0][dropped]
    found = _compared(gone)
    assert found.matched == found.allocations[0] - 1
    assert sum(g.nbytes for g in found.predicted_only) == -(-size // 512) * 512


def test_a_recording_that_began_late() -> None:
    """What was there before is in the segments only."""
    document = _real(_document())
    events = document["device_traces"][0]
    document["device_traces"][0] = events[len(events) * 2 // 3 :]
    found = _compared(document)
    assert found.matched == found.allocations[0]
    assert any("before the real recording began" in note for note in found.notes)
    assert abs(found.moments[-1].measured - found.moments[-1].predicted) < MIB


def test_a_long_step_is_paired_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    document = _real(_document())
    events = document["device_traces"][0]
    last = max(i for i, e in enumerate(events) if e["action"] == "alloc")
    events[last]["size"] += 4096
    monkeypatch.setattr(snapshot_compare, "WORK", 10)
    found = _compared(document)
    assert not found.aligned
    assert found.matched > 0
    assert any("too long" in note for note in found.notes)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted, real = tmp_path / "predicted.pickle", tmp_path / "real.pickle"
    predicted.write_bytes(_predicted())
    real.write_bytes(pickle.dumps(_real(_document()), 4))
    assert main(["compare-snapshot", str(predicted), str(real)]) == 0
    table = capsys.readouterr().out
    assert "allocated" in table
    assert "+0.00%" in table
    words = ["--batch", "2", "--optimizer", "sgd", "-f", "json"]
    assert main(["compare-snapshot", MODEL, str(real), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["matched"] == found["allocations"][0]
    assert main(["compare-snapshot", MODEL, str(real), "--batch", "3", "--optimizer", "sgd", "-q"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil-was-here",)


EVENT = {"action": "alloc", "addr": 1, "size": 512, "frames": []}
NO_SNAPSHOTS: dict[str, Any] = {
    "a list": [1, 2],
    "no traces": {"segments": []},
    "no devices": {"segments": [], "device_traces": []},
    "nothing recorded": {"segments": [], "device_traces": [[]]},
    "a negative size": {"segments": [], "device_traces": [[{**EVENT, "size": -5}]]},
    "a size that is text": {"segments": [], "device_traces": [[{**EVENT, "size": "large"}]]},
    "frames that are numbers": {"segments": [], "device_traces": [[{**EVENT, "frames": [1, 2]}]]},
    "events that are lists": {"segments": [], "device_traces": [[[1, 2]]]},
    "a segment that is none": {"segments": [5], "device_traces": [[EVENT]]},
}


@pytest.mark.parametrize("document", NO_SNAPSHOTS.values(), ids=NO_SNAPSHOTS.keys())
def test_plain_values_that_are_no_snapshot(document: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps(document, 4))
    with pytest.raises(UsageError) as caught:
        snapshots.read(str(path))
    assert caught.value.code == "SM234"


def test_hostile_files_are_three_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in (
        ("evil", pickle.dumps({"segments": [_Evil()]}, 4)),
        ("deep", b"\x80\x04" + b"(" * 100_000),
        ("cut", _predicted()[:5000]),
        ("model", b"\x08\x07"),
    ):
        Path(name).write_bytes(data)
        assert main(["compare-snapshot", MODEL, name, "--batch", "2"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 3
        assert "[SM233]" in lines[0]
    assert not (tmp_path / "evil-was-here").exists()
    assert main(["compare-snapshot", MODEL, "nowhere.pickle"]) == 2
    assert "[SM233]" in capsys.readouterr().err
