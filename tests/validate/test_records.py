"""Records: read from files, aggregated, predicted again; and the records in this repository against this version."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from made_records import cuda_record

from staticmem.cli.main import main
from staticmem.errors import UsageError
from staticmem.validate import summary
from staticmem.validate.records import Meter, Record, load_record, load_records, sha256
from staticmem.validate.summary import models_in, repredicted

ROOT = Path(__file__).parents[2]
MODELS = [str(ROOT / "models"), str(ROOT / "tests" / "data" / "graphs")]
COMMITTED = sorted((ROOT / "records").glob("*.json"))
SCHEMA = json.loads((ROOT / "schemas" / "record-1.schema.json").read_text(encoding="utf-8"))
MODEL = ROOT / "models" / "resnet18.pt2"
LIVE = 0.001  # of live memory on the CPU: what docs/validate.md promises
WORSE = 0.01  # of a meter on CUDA: so far it may move away from a reading until somebody has to look


def _saved(record: Record, path: Path) -> str:
    path.write_text(record.dumps(), encoding="utf-8")
    return str(path)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = cuda_record(allocated=(100, 120, 130))
    jsonschema.validate(record.to_json(), SCHEMA)
    assert load_record(_saved(record, tmp_path / "a.json")) == record


@pytest.mark.parametrize(
    ("low", "high", "measured", "expected"),
    [(10, 20, 15, 0), (10, 20, 25, 5), (10, 20, 4, -6), (None, None, 4, None), (1, 1, None, None)],
)
def test_difference_of_a_band(low: int | None, high: int | None, measured: int | None, expected: int | None) -> None:
    assert Meter("m", low, high, measured).difference == expected


def test_errors_of_many_records() -> None:
    """Readings of 100 against predictions of 100 to 119: errors of 0 % to 19 %."""
    records = [(f"{k}.json", cuda_record(allocated=(100 + k, 100 + k, 100))) for k in range(20)]
    (row,) = summary.errors(records)
    assert (row.runtime, row.device, row.meter, row.records) == ("torch", "cuda", "allocated", 20)
    assert row.median == pytest.approx(0.095)
    assert row.p95 == pytest.approx(0.18)
    assert row.maximum == pytest.approx(0.19)
    assert row.bias == pytest.approx(0.095)
    assert row.in_band == pytest.approx(0.05)
    assert row.worst == "19.json"
    assert summary.verdicts(records) == {"agrees": 20}


def test_a_band_counts_by_its_middle_and_holds_its_inside() -> None:
    (row,) = summary.errors([("a", cuda_record(reserved=(80, 140, 100)))])
    assert row.median == pytest.approx(0.1)
    assert row.in_band == 1


@pytest.mark.parametrize("kind", ["table", "md", "csv", "json"])
def test_reconcile(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k in range(3):
        _saved(cuda_record(allocated=(100, 100, 100 + k)), tmp_path / f"{k}.json")
    assert main(["reconcile", str(tmp_path), "-f", kind]) == 0
    out = capsys.readouterr().out
    if kind == "json":
        found = json.loads(out)
        assert found["meters"][0]["records"] == 3
        assert found["verdicts"] == {"agrees": 3}
    elif kind == "csv":
        (row,) = csv.DictReader(io.StringIO(out))
        assert float(row["maximum"]) == pytest.approx(1 - 100 / 102)
    else:
        assert "0.99%" in out
        assert "33%" in out
        assert out.rstrip().endswith("3 records: 3 agrees.")


def test_names_from_a_record_stay_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = cuda_record()
    meters = (Meter("=cmd|' /C calc'!A0", 1, 1, 1),)
    runtime = {**record.runtime, "name": "\x1b[31m<b>|"}
    path = _saved(replace(record, runtime=runtime, meters=meters), tmp_path / "a.json")
    assert main(["reconcile", path, "-f", "csv"]) == 0
    assert ",'=cmd" in capsys.readouterr().out
    assert main(["reconcile", path]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main(["reconcile", path, "-f", "md"]) == 0
    assert "<b>" not in capsys.readouterr().out


def _changed(**parts: Any) -> dict[str, Any]:
    return {**cuda_record().to_json(), **parts}


BAD: dict[str, Any] = {
    "a list": [],
    "another schema": _changed(schema="other/1"),
    "no meters": _changed(meters=None),
    "a meter without a name": _changed(meters=[{"predicted": None, "measured": 1}]),
    "a measure that is text": _changed(meters=[{"name": "x", "predicted": None, "measured": "much"}]),
    "a huge number": _changed(meters=[{"name": "x", "predicted": None, "measured": 10**40}]),
    "another verdict": _changed(verdict="wonderful"),
    "nodes that are a list": _changed(nodes=[]),
}


@pytest.mark.parametrize("document", BAD.values(), ids=BAD.keys())
def test_files_that_are_no_records(document: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["reconcile", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "[SM231]" in lines[0]


def test_no_records(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_records([str(tmp_path)])
    assert caught.value.code == "SM232"
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_records([str(tmp_path)])
    assert caught.value.code == "SM231"


def _cpu_record(measured: int) -> Record:
    """A record of a real model on a CPU, whose prediction is of another time."""
    made = cuda_record()
    return replace(
        made,
        device={"kind": "cpu", "name": "a processor"},
        model={"name": MODEL.name, "sha256": sha256(str(MODEL)), "format": "pt2"},
        scenario={**made.scenario, "request": {"batch": 2, "optimizer": "sgd", "checkpoint": []}},
        meters=(Meter("live, peak", 1, 1, measured, "last step"),),
    )


def test_a_record_is_predicted_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = repredicted(_cpu_record(10**9), models_in(MODELS)[sha256(str(MODEL))])
    (meter,) = found.meters
    assert meter.low == meter.high
    assert meter.low is not None
    assert 100 * 2**20 < meter.low < 200 * 2**20
    path = _saved(_cpu_record(meter.low), tmp_path / "a.json")
    assert main(["reconcile", path, "--models", MODELS[0], "-f", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["meters"][0]["in_band"] == 1
    assert main(["reconcile", path, "--models", str(tmp_path / "nowhere")]) == 2
    assert "[SM101]" in capsys.readouterr().err


def test_a_record_of_a_card_is_predicted_again_for_that_card() -> None:
    record = cuda_record(allocated=(1, 1, 10**9), device=(1, 1, 10**9))
    found = repredicted(record, str(MODEL))
    bands = {meter.name: (meter.low, meter.high) for meter in found.meters}
    low, high = bands["allocated"]
    assert low is not None
    assert high is not None
    assert 40 * 2**20 < low <= high < 200 * 2**20
    assert (bands["device"][0] or 0) > low + 256 * 2**20  # the context is in it
    assert bands["context"] == (None, None)
    assert repredicted(replace(record, runtime={"name": "onnxruntime", "version": "1"}), str(MODEL)) is not found


def judged(record: Record, known: dict[str, str]) -> list[str]:
    """What is wrong with today's prediction of a record; an empty list where nothing is."""
    path = known.get(str(record.model["sha256"]))
    if path is None:
        return []
    wrong = []
    for old, new in zip(record.meters, repredicted(record, path).meters, strict=True):
        if new.difference is None or old.difference is None or not new.measured:
            continue
        if record.device["kind"] == "cpu" and record.runtime["name"] == "torch":
            if abs(new.difference) > LIVE * new.measured:
                wrong.append(f"{new.name}: {new.difference:+,} bytes of {new.measured:,}")
        elif abs(new.difference) > abs(old.difference) + WORSE * new.measured:
            wrong.append(f"{new.name}: {new.difference:+,} bytes, and it was {old.difference:+,}")
    return wrong


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_records_agree_with_this_version(path: Path) -> None:
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), SCHEMA)
    assert judged(load_record(str(path)), models_in(MODELS)) == []


def test_the_judgement_sees_what_is_wrong() -> None:
    known = models_in(MODELS)
    right = repredicted(_cpu_record(0), known[sha256(str(MODEL))]).meters[0].low
    assert right is not None
    assert judged(_cpu_record(right), known) == []
    assert judged(_cpu_record(right + right // 100), known) != []
    on_card = replace(cuda_record(allocated=(10**9, 10**9, 10**9)), model=_cpu_record(0).model)
    assert judged(on_card, known) != []
