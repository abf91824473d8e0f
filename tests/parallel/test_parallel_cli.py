"""`--parallel` and `--devices` as users type them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.devices.profile import NCCL

ROOT = Path(__file__).parents[2]
BLOCKS = ROOT / "tests" / "data" / "graphs" / "mlp_blocks.pt2"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["analyze", str(BLOCKS), "--batch", "2", "--optimizer", "adamw", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, _ = run(capsys, "-f", "json", *words)
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_report_is_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--parallel", "ddp", "--devices", "2", "--gpu", "t4")
    assert (found["scenario"]["parallel"], found["scenario"]["devices"]) == ("ddp", 2)
    assert sum(found["peak"]["by_category"].values()) == found["peak"]["live_bytes"]
    assert sum(found["peak"]["device_by_category"].values()) == found["peak"]["device_bytes"]
    assert found["peak"]["by_category"]["communication"] > 0
    assert any(note["code"] == "SM350" for note in found["assumptions"])
    schema = json.loads((ROOT / "schemas" / "report-1.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(found, schema)


def test_a_communicator_is_beside_the_allocator(capsys: pytest.CaptureFixture[str]) -> None:
    """Inference: DDP changes nothing of the step, so the communicator is all that differs."""
    words = ("--mode", "infer", "--gpu", "t4")
    one, two = as_json(capsys, *words), as_json(capsys, *words, "--parallel", "ddp", "--devices", "2")
    assert two["peak"]["reserved_bytes"] == one["peak"]["reserved_bytes"]
    assert two["peak"]["device_bytes"] - one["peak"]["device_bytes"] == NCCL[1].expected


def test_the_terminal_names_strategy_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--parallel", "fsdp", "--devices", "4", "--top", "40")
    assert code == 0
    assert "FSDP2, one of 4 devices" in " ".join(out.split("\n\n")[1].split())
    assert "sharded gradients of" in out
    assert "gathered for" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--parallel", "fsdp"), "SM180", "--devices 8"), (("--parallel", "zero", "--devices", "2"), "SM134", "zero1"),
        (("--parallel", "tp", "--devices", "3"), "SM182", "divisible"), (("--devices", "0"), "SM110", "--devices"),
        (("--parallel", "pp", "--devices", "9"), "SM182", "4 blocks"),
        (("--parallel", "ddp", "--devices", "70000"), "SM181", "65,536"),
    ],
)  # fmt: skip
def test_bad_words(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: str, said: str) -> None:
    exit_code, out, err = run(capsys, *words)
    assert (exit_code, out) == (2, "")
    assert f"[{code}]" in err
    assert said in err
    assert len(err.splitlines()) == 3


def test_none_is_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "--parallel", "none") == as_json(capsys)


def test_python() -> None:
    one = staticmem.analyze(BLOCKS, batch=2, optimizer="adamw")
    many = staticmem.analyze(BLOCKS, batch=2, optimizer="adamw", parallel="fsdp", devices=4)
    assert many.peak.live_bytes < one.peak.live_bytes
    assert many.scenario.devices == 4


def test_devices_without_a_strategy_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found, one = as_json(capsys, "--devices", "4"), as_json(capsys)
    assert found["peak"]["live_bytes"] == one["peak"]["live_bytes"]


@pytest.mark.parametrize("format", ["html", "md", "table"])
def test_other_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str) -> None:
    target = tmp_path / "out"
    code, _, _ = run(capsys, "--parallel", "zero3", "--devices", "4", "-f", format, "-o", str(target))
    assert code == 0
    assert "communication" in target.read_text(encoding="utf-8")


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_nothing_is_shared_out_of_a_model_without_parameters(
    parallel: str, optimizer: str | None, tmp_path: Path
) -> None:
    import onnx
    from onnx import TensorProto, helper

    path = tmp_path / "relu.onnx"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    one = staticmem.analyze(path, optimizer=optimizer)
    rank = staticmem.analyze(path, optimizer=optimizer, parallel=parallel, devices=2)
    assert rank.peak.live_bytes == one.peak.live_bytes
    assert any(note.code == "SM350" and "changes nothing" in note.text for note in rank.assumptions)


def test_devices_without_a_strategy_are_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", str(BLOCKS), "--optimizer", "adam", "--gpu", "l4", "--devices", "2", "-q"]) == 0
    assert capsys.readouterr().out.startswith("One L4 trains it")
