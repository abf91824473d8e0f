"""Steps that really run with PyTorch on the CPU: every op, the peak, the end of the forward; and what users get when
they cannot run. The CUDA half is tested on readings made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from made_records import CARD, readings
from sampling import sampled

from staticmem import child
from staticmem.cli.main import main
from staticmem.errors import StaticmemError
from staticmem.frontends import open_model
from staticmem.ir.model_file import resolve
from staticmem.passes.pipeline import bind
from staticmem.scenario.request import Request
from staticmem.validate.pytorch import reconcile, validation
from staticmem.validate.pytorch.prediction import options_of, predicted, request_from
from staticmem.validate.pytorch.reconcile import Row
from staticmem.validate.pytorch.validation import validate_torch
from staticmem.validate.records import Record

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"
GRAPHS = ROOT / "tests" / "data" / "graphs"
SCHEMA = json.loads((ROOT / "schemas" / "record-1.schema.json").read_text(encoding="utf-8"))
MLP = str(GRAPHS / "mlp_blocks.pt2")


def _meter(record: Record, name: str) -> Any:
    return next(meter for meter in record.meters if meter.name == name)


CASES = [
    (MODELS / "resnet18.pt2", {"batch": 1, "optimizer": "adam"}),
    (MODELS / "resnet18.onnx", {"batch": 1}),
    (MODELS / "mobilenet_v2.pt2", {"batch": 1, "optimizer": "rmsprop", "momentum": 0.9}),
    (MODELS / "vgg16_hw.pt2", {"batch": 1, "resolution": [64, 64], "mode": "train"}),
    (GRAPHS / "mlp_blocks.pt2", {"batch": 2, "optimizer": "adamw", "optimizer_impl": "fused", "accumulate": 2}),
    (GRAPHS / "mlp_blocks.pt2", {"batch": 2, "optimizer": "adagrad", "set_to_none": False, "freeze": "bias$"}),
    (GRAPHS / "mlp_blocks.pt2", {"batch": 2, "optimizer": "adam", "zero_grad": "after-forward"}),
]


@pytest.mark.torch
@pytest.mark.parametrize(("path", "words"), sampled(CASES, 3), ids=lambda value: getattr(value, "name", "")[:20])
def test_every_op_of_a_step_is_as_predicted(path: Path, words: dict[str, Any]) -> None:
    record = validate_torch(str(path), words, "cpu", threads=1)
    jsonschema.validate(record.to_json(), SCHEMA)
    assert _meter(record, "live, peak").difference == 0
    assert _meter(record, "live, end of forward").difference == 0
    assert record.nodes.equal >= 0.98 * record.nodes.compared > 0, record.explanations
    assert {note["code"] for note in record.notes} >= {"SM228"}


@pytest.mark.torch
def test_attention_runs_the_kernel_that_both_devices_have(tmp_path: Path) -> None:
    """A small encoder: attention of the math kernel, dropout with its mask of bytes."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Linear(32, 10)).train()
    path = tmp_path / "encoder.pt2"
    torch.export.save(torch.export.export(model, (torch.randn(2, 8, 32),)), path)
    record = validate_torch(str(path), {"optimizer": "adamw"}, "cpu")
    assert _meter(record, "live, peak").difference == 0, record.explanations
    texts = " ".join(str(note["text"]) for note in record.notes)
    assert "math kernel" in texts
    assert "native_dropout" in texts


@pytest.mark.torch
@pytest.mark.parametrize("path", sorted(MODELS.glob("*.pt2"))[:3], ids=lambda path: path.stem)
def test_the_graph_that_runs_is_the_one_that_pytorch_loads(path: Path) -> None:
    """The run reads the file as `analyze` does; here torch.export reads our own files, op by op."""
    import torch

    program = torch.export.load(str(path))
    theirs = [
        str(node.target) for node in program.graph.nodes if node.op == "call_function" and "aten" in str(node.target)
    ]
    model = open_model(str(path))
    graph = bind(model, resolve(model, batch=2))
    mine = [op.target for op in graph.ops if op.target.startswith("aten::")]

    def name(target: str) -> str:
        return target.replace("aten.", "aten::").removesuffix(".default")

    assert [name(t) for t in theirs if "sym_size" not in t] == [t for t in mine if "sym_size" not in t]


@pytest.mark.torch
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "record.json"
    words = ["validate", MLP, "--runtime", "torch", "--batch", "2", "--optimizer", "adam"]
    assert main([*words, "--device", "cpu", "--strict", "-o", str(target)]) == 0
    record = json.loads(target.read_text(encoding="utf-8"))
    jsonschema.validate(record, SCHEMA)
    assert record["runtime"]["name"] == "torch"
    assert record["scenario"]["request"] == {"batch": 2, "optimizer": "adam"}
    assert record["verdict"] == "exact"
    assert str(tmp_path) not in target.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main([*words, "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert "live, peak" in table
    assert "Ops: live bytes equal at" in table
    assert table.rstrip().endswith("Verdict: exact.")


@pytest.mark.torch
def test_errors_are_three_lines_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = {"batch": 2, "optimizer": "adam"}
    limits: tuple[tuple[str, dict[str, Any]], ...] = (("SM222", {"memory_limit": 2**20}), ("SM224", {"timeout": 0.05}))
    for code, more in limits:
        with pytest.raises(StaticmemError) as caught:
            validate_torch(MLP, words, "cpu", **more)
        assert caught.value.code == code
        assert caught.value.why
        assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.torch
def test_no_cuda_here() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(StaticmemError) as caught:
        validate_torch(MLP, {"batch": 2}, "cuda")
    assert caught.value.code == "SM225"
    record = validate_torch(MLP, {"batch": 2}, "auto")
    assert record.notes[0]["code"] == "SM227"
    assert record.device["kind"] == "cpu"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ({"optimizer": "adam", "checkpoint": ["Block"]}, "SM226"),
        ({"optimizer": "adam", "checkpoint_segments": 2}, "SM226"),
        ({"optimizer": "adam", "compile": True}, "SM226"),
        ({"optimizer": "adam", "parallel": "ddp", "devices": 2}, "SM226"),
        ({"optimizer": "lion"}, "SM226"),
        ({"optimizer": "adam", "loss": "causal-lm"}, "SM226"),
        ({"optimizer": "adam-8bit"}, "SM226"),
        ({"optimizer": "adam", "grad_scaler": True}, "SM226"),
    ],
)
def test_steps_that_a_graph_cannot_run(words: dict[str, Any], code: str) -> None:
    with pytest.raises(StaticmemError) as caught:
        predicted(MLP, {"batch": 2, **words}, "cpu")
    assert caught.value.code == code


def test_sizes_that_the_file_fixes() -> None:
    with pytest.raises(StaticmemError) as caught:
        predicted(str(MODELS / "resnet18.onnx"), {"batch": 2, "resolution": [96, 96]}, "cpu")
    assert caught.value.code == "SM236"


def test_words_survive_json() -> None:
    request = Request(batch=3, resolution=(64, 32), optimizer="adam", dims={"s1": 4}, checkpoint=("a", "b"))
    assert request_from(json.loads(json.dumps(options_of(request)))) == request
    assert options_of(Request()) == {}


@pytest.mark.torch
@pytest.mark.parametrize(
    "target", ["aten::from_file", "aten::no_such_op", "os::system", "aten::relu.nothing", "c10d::x"]
)
def test_only_ops_that_are_known_are_called(target: str) -> None:
    """A graph comes from a file: `aten::from_file` would open or make another one."""
    from staticmem.ir.graph import Graph, Op
    from staticmem.validate.pytorch.program import NotRunnableError, Program

    op = Op("call", target, ("/etc/passwd", False, 16), {}, ("x",))
    graph = Graph("g", "pt2", "", (), (), (), (op,), ("x",))
    with pytest.raises(NotRunnableError):
        Program(graph, "cpu")


# -- the child's failures, without a child ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code"),
    [("memory", "SM222"), ("import", "SM220"), ("device", "SM225"), ("op", "SM221"), ("step", "SM221")],
)
def test_what_the_child_says(kind: str, code: str) -> None:
    assert child.failed({"kind": kind, "message": "because"}, validation.FAILURES).code == code


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [(-11, "", "SM223"), (-9, "", "SM222"), (1, "MemoryError", "SM222"), (3, "what", "SM223"), (-200, "", "SM223")],
)
def test_how_the_child_ended(status: int, said: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "stderr").write_text(said, encoding="utf-8")
    assert child.crashed(status, str(tmp_path / "stderr"), validation.FAILURES).code == code


# -- alignment -------------------------------------------------------------------------------------------------------


def _row(op: str, size: int, live: int = 0, optional: bool = False) -> Row:
    return Row("forward", op, 0, (size,), live, optional)


def test_alignment_tells_what_is_missing_and_what_has_another_name() -> None:
    mine = [_row("conv", 1024), _row("cudnn", 512), _row("mask", 2048), _row("relu", 1024)]
    theirs = [_row("conv", 1024), _row("native", 512), _row("extra", 4096), _row("relu", 1024)]
    found = reconcile.align(mine, theirs)
    assert [(a.op, b.op) for a, b in found.pairs] == [("conv", "conv"), ("cudnn", "native"), ("relu", "relu")]
    assert [row.op for row in found.predicted_only] == ["mask"]
    assert [row.op for row in found.measured_only] == ["extra"]
    text = " ".join(reconcile.explanations(found, ()))
    assert "predicted and not seen: forward mask 1 times, 2,048 bytes" in text
    assert "seen and not predicted: forward extra 1 times, 4,096 bytes" in text
    assert "cudnn is native (1)" in text
    assert reconcile.nodes(found).compared == 5


def test_results_that_are_in_place_unwatched_may_be_missing() -> None:
    mine = [_row("a", 512), _row("b", 1024), _row("c", 512)]
    theirs = [_row("a", 512), _row("add", 1024, optional=True), _row("b", 1024), _row("c", 512)]
    found = reconcile.align(mine, theirs)
    assert len(found.pairs) == 3
    assert found.measured_only == ()


# -- CUDA ------------------------------------------------------------------------------------------------------------


def test_a_cuda_run_is_compared_with_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "require_torch", lambda: None)
    monkeypatch.setattr(validation, "measure", lambda *args, **kwargs: readings())
    record = validate_torch(str(MODELS / "resnet18.pt2"), {"batch": 4, "optimizer": "adam"}, "cuda")
    jsonschema.validate(record.to_json(), SCHEMA)
    assert record.device["name"] == CARD
    assert record.device["driver"] == "595.1"
    bands = {meter.name: (meter.low, meter.high, meter.measured) for meter in record.meters}
    assert bands["libraries"] == (None, None, (820 - 360 - 380) * 2**20)
    low, high, measured = bands["allocated"]
    assert low is not None
    assert high is not None
    assert 150 * 2**20 < low <= high < 600 * 2**20
    assert measured == 300 * 2**20
    assert record.verdict in ("agrees", "differs")
    inside = readings(allocated=low, reserved=bands["reserved"][0], process=bands["device"][0])
    monkeypatch.setattr(validation, "measure", lambda *args, **kwargs: inside)
    assert validate_torch(str(MODELS / "resnet18.pt2"), {"batch": 4, "optimizer": "adam"}, "cuda").verdict == "agrees"
    unread = readings(process=None, context=None, device={"name": CARD, "total": 2**34, "nvml": "not read: x"})
    monkeypatch.setattr(validation, "measure", lambda *args, **kwargs: unread)
    record = validate_torch(str(MODELS / "resnet18.pt2"), {"batch": 4, "optimizer": "adam"}, "cuda")
    assert _meter(record, "device").measured is None
    assert "SM227" in {note["code"] for note in record.notes}
