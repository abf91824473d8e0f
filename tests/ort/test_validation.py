"""Models that really run with the ONNX Runtime, and what users get when they cannot."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime_graphs import GRAPHS, image
from sampling import sampled

from staticmem import child
from staticmem.cli.main import main
from staticmem.errors import StaticmemError
from staticmem.ort.options import SessionOptions
from staticmem.ort.validation import validation
from staticmem.ort.validation.validation import validate_session
from staticmem.scenario.request import Request
from staticmem.validate.records import Record

ROOT = Path(__file__).parents[2]
ORT = pytest.mark.skipif(not validation.installed(), reason="onnxruntime is not installed: pip install onnxruntime")
DIMS = {"batch": 2, "length": 16, "width": 24}


def saved(tmp_path: Path, name: str) -> str:
    path = tmp_path / f"{name}.onnx"
    onnx.save(GRAPHS[name](), path)
    return str(path)


def run(path: str, **options: Any) -> Record:
    known = {d for v in onnx.load(path).graph.input for d in (x.dim_param for x in v.type.tensor_type.shape.dim)}
    dims = {name: size for name, size in DIMS.items() if name in known}
    return validate_session(path, Request(dims=dims), SessionOptions(intra_op_num_threads=2, **options), "cpu")


@ORT
@pytest.mark.parametrize("name", sampled(GRAPHS, 3))
def test_requested_bytes_are_equal_at_every_node(tmp_path: Path, name: str) -> None:
    """Pattern and reuse on and off, on the graph of the file and on the optimized one."""
    path = saved(tmp_path, name)
    for level, pattern, reuse in (("disable", True, True), ("all", True, True), ("disable", False, False)):
        record = run(path, graph_optimization_level=level, enable_mem_pattern=pattern, enable_mem_reuse=reuse)
        assert record.verdict == "exact", (level, pattern, reuse, record.explanations)
        assert record.nodes.compared == record.nodes.equal > 0


@ORT
def test_a_real_export_without_weights() -> None:
    path = str(ROOT / "models" / "resnet18.onnx")
    record = validate_session(path, Request(batch=1), SessionOptions(intra_op_num_threads=2), "cpu")
    assert record.verdict == "exact"
    assert "SM511" in {note["code"] for note in record.notes}


@ORT
def test_command_line_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = saved(tmp_path, "conv_net"), tmp_path / "record.json"
    assert main(["validate", path, "--batch", "3", "--device", "cpu", "--strict"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("Verdict: exact.\n")
    assert "requested bytes equal at" in shown
    assert main(["validate", path, "--batch", "3", "--device", "cpu", "-o", str(target)]) == 0
    record = json.loads(target.read_text())
    schema = json.loads((ROOT / "schemas" / "record-1.schema.json").read_text())
    jsonschema.validate(record, schema)
    assert record["scenario"]["inputs"] == {"x": [3, 3, 32, 32]}
    assert record["device"]["kind"] == "cpu"
    assert main(["validate", path, "--batch", "3", "-o", str(target)]) == 2  # it exists


@ORT
def test_auto_says_that_it_was_the_cpu(tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this build of onnxruntime has CUDA")
    path = saved(tmp_path, "residual_net")
    record = validate_session(path, Request(), SessionOptions(), "auto")
    assert record.runtime["provider"] == "CPUExecutionProvider"
    assert record.notes[0]["code"] == "SM510"
    with pytest.raises(StaticmemError) as caught:
        validate_session(path, Request(), SessionOptions(), "cuda")
    assert caught.value.code == "SM501"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go, to see that nothing stays."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@ORT
def test_a_config_that_trains_is_no_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a config that was found says of training is left out, and said; flags are refused."""
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, "conv_net")
    (tmp_path / "staticmem.yaml").write_text("version: 1\ntrain: {optimizer: adam, batch: 3, checkpoint: [A]}\n")
    assert main(["validate", path, "--device", "cpu", "-q"]) == 0
    said = capsys.readouterr().err
    assert "Not used of the config, as a session does not train: checkpoint, mode, optimizer\n" in said
    assert main(["validate", path, "--device", "cpu", "--optimizer", "adam"]) == 2
    assert "the ONNX Runtime does not train [SM512]" in capsys.readouterr().err


def fails(path: str, *flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["validate", path, "--device", "cpu", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    return lines[0]


@ORT
def test_a_graph_that_the_runtime_cannot_run(tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="example")
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph([node], "net", [image(4)], [value])
    path = str(tmp_path / "odd.onnx")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("example", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    assert "[SM502]" in fails(path, capsys=capsys)
    assert os.listdir(scratch) == []


@ORT
def test_not_enough_memory(tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, "conv_net")
    assert "[SM503]" in fails(path, "--batch", "1000", "--memory-limit", "1MiB", capsys=capsys)
    assert "[SM503]" in fails(path, "--batch", "100000000", capsys=capsys)
    assert os.listdir(scratch) == []


@ORT
def test_a_crash_of_the_process(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the place of onnxruntime that ends the process as a segmentation fault does."""
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "onnxruntime.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    real = child.environment()
    path = os.pathsep.join((str(fake), real["PYTHONPATH"]))
    monkeypatch.setattr(child, "environment", lambda: {**real, "PYTHONPATH": path})
    with pytest.raises(StaticmemError) as caught:
        run(saved(tmp_path, "conv_net"))
    assert caught.value.code == "SM504"
    assert "SIGSEGV" in caught.value.why
    assert os.listdir(scratch) == []


@ORT
def test_a_run_that_does_not_end(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "onnxruntime.py").write_text("import time\ntime.sleep(600)\n")
    real = child.environment()
    path = os.pathsep.join((str(fake), real["PYTHONPATH"]))
    monkeypatch.setattr(child, "environment", lambda: {**real, "PYTHONPATH": path})
    with pytest.raises(StaticmemError) as caught:
        validate_session(saved(tmp_path, "residual_net"), Request(), SessionOptions(), "cpu", timeout=1)
    assert caught.value.code == "SM505"
    assert os.listdir(scratch) == []


def test_without_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validation, "installed", lambda: False)
    assert "[SM500]" in fails(saved(tmp_path, "conv_net"), capsys=capsys)


@ORT
def test_what_the_file_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = saved(tmp_path, "residual_net")
    assert "[SM509]" in fails(fixed, "--batch", "7", capsys=capsys)
    assert "[SM512]" in fails(fixed, "--optimizer", "adam", capsys=capsys)
    assert "[SM507]" in fails(str(ROOT / "models" / "resnet18.pt2"), "--batch", "1", capsys=capsys)
