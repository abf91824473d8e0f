"""The stages of a step add up to its curve of live bytes."""

from __future__ import annotations

import csv
import io
import json
from itertools import pairwise
from pathlib import Path

import pytest

from staticmem.cli.main import main
from staticmem.report.changes import schedule
from staticmem.studies import Request, Study

MODELS = Path(__file__).resolve().parents[2] / "models"
SCENARIOS = [
    ("resnet18.pt2", Request(batch=2, optimizer="adam")),
    ("resnet18.onnx", Request(batch=2)),
    ("mobilenet_v2.pt2", Request(batch=2, optimizer="sgd", momentum=0.9, optimizer_impl="for-loop", amp="bf16")),
]


@pytest.mark.parametrize(("name", "request_"), SCENARIOS)
def test_stages_add_up(name: str, request_: Request) -> None:
    lifetimes = Study.open(MODELS / name, request_).lifetimes
    stages = schedule(lifetimes)
    total = 0
    for stage in stages:
        total += sum(b.size for b in stage.allocated) - sum(b.size for b in stage.freed)
        assert stage.total == total
        assert stage.highest >= stage.total
    assert total == lifetimes.live[-1]
    assert max(stage.highest for stage in stages) == lifetimes.peak_bytes
    made = [b.id for stage in stages for b in stage.allocated]
    assert made == [b.id for b in lifetimes.trace.buffers]
    freed = [b.id for stage in stages for b in stage.freed]
    assert sorted(freed) == [i for i, died in enumerate(lifetimes.died) if died < lifetimes.ticks]


def test_stages_have_one_op_and_phase() -> None:
    study = Study.open(MODELS / "resnet18.pt2", Request(batch=2, optimizer="adam"))
    kernels = study.result.trace.kernels
    stages = schedule(study.lifetimes)
    for stage in stages[1:]:
        assert {(kernels[k].phase, kernels[k].op) for k in stage.kernels} == {(stage.phase, stage.op)}
    assert [s.phase for s in stages] == sorted(
        (s.phase for s in stages), key=["setup", "forward", "backward", "optimizer"].index
    )


def test_what_is_of_no_op_is_a_stage_of_its_own_and_what_was_there_before_is_one() -> None:
    study = Study.open(MODELS / "seed.pt2", Request(batch=2, optimizer="adam", amp="bf16", grad_scaler=True))
    kernels = study.result.trace.kernels
    first, *others = schedule(study.lifetimes)
    assert (first.phase, first.op) == ("setup", -1)
    assert list(first.kernels) == list(dict.fromkeys(b.kernel for b in first.allocated))
    assert {k for k, kernel in enumerate(kernels) if kernel.phase == "setup"} >= set(first.kernels) >= {0}
    assert "setup" not in {stage.phase for stage in others}
    assert {len(stage.kernels) for stage in others if stage.op < 0} == {1}
    for one, two in pairwise(others):
        assert (one.phase, one.op) != (two.phase, two.op) or one.op < 0


def trace(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["trace", str(MODELS / "resnet18.pt2"), "--batch", "2", "--optimizer", "adam", *words]) == 0
    return capsys.readouterr().out


def test_json_and_csv_agree(capsys: pytest.CaptureFixture[str]) -> None:
    listing = json.loads(trace(capsys, "-f", "json"))
    rows = list(csv.DictReader(io.StringIO(trace(capsys, "-f", "csv"))))
    for stage in listing["stages"]:
        mine = [row for row in rows if int(row["stage"]) == stage["index"]]
        for sign, key in (("+", "allocated_bytes"), ("-", "freed_bytes")):
            assert sum(int(row["bytes"]) for row in mine if row["sign"] == sign) == stage[key]
    assert listing["stages"][listing["peak_stage"]]["highest_bytes"] == listing["peak_bytes"]


def test_selection(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = json.loads(trace(capsys, "-f", "json", "--phase", "backward", "--module", "layer1", "--min-size", "1MiB"))
    assert chosen["stages"]
    for stage in chosen["stages"]:
        assert stage["phase"] == "backward"
        assert stage["module"].startswith("layer1.")
        assert max(stage["allocated_bytes"], stage["freed_bytes"]) >= 2**20
    text = trace(capsys, "--phase", "optimizer")
    assert "_foreach_sqrt" in text
    assert "threshold_backward" not in text.rsplit("Peak", 1)[0]
    assert "no stage matches" in trace(capsys, "--module", "nothing")


def test_min_size_is_an_amount(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "model.pt2", "--min-size", "much"]) == 2
    assert "--min-size 'much' is not an amount of memory" in capsys.readouterr().err
