"""`analyze --runtime onnxruntime` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cli_files as files
import jsonschema
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime_graphs import GRAPHS

from staticmem.cli.main import main
from staticmem.devices import gpus, profile
from staticmem.ort.options import SessionOptions
from staticmem.ort.report import CPU_CATEGORIES, CUDA_CATEGORIES
from staticmem.ort.study import session_report
from staticmem.studies import Request

ROOT = files.ROOT
RESNET = str(ROOT / "models" / "resnet18.onnx")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["analyze", *words, "--runtime", "onnxruntime"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def analyzed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = run(capsys, *words, "-f", "json")
    assert (code, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    schema = json.loads((ROOT / "schemas" / "session-1.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(report, schema)
    return report


@pytest.fixture
def chain(tmp_path: Path) -> str:
    """x [n, 256] -> Exp -> Exp -> Exp -> y: 1024 bytes for each of n rows."""
    nodes = [helper.make_node("Exp", [a], [b], f"exp_{a}") for a, b in ("xa", "ab", "by")]
    graph = helper.make_graph(
        nodes, "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 256])],
    )  # fmt: skip
    path = tmp_path / "chain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return str(path)


def test_meters_of_a_chain(chain: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two values of 1 MiB are alive at each node. With a pattern the last run asks for their block (2 MiB) and for the
    result. The arena grows by 1 MiB and then by 2, which is enough for both."""
    mib = 1 << 20
    found = analyzed(capsys, chain, "-b", "1024", "--optimization", "disable")
    assert found["exact"] is True
    assert found["peak"]["tensors_bytes"] == 2 * mib
    assert found["peak"]["requested_bytes"] == 3 * mib
    assert found["peak"]["by_category"]["pattern_block"] == 2 * mib
    assert found["peak"]["by_category"]["inputs"] == mib
    plain = analyzed(capsys, chain, "-b", "1024", "--optimization", "disable", "--no-mem-pattern")
    assert plain["peak"]["requested_bytes"] == plain["peak"]["tensors_bytes"] == 2 * mib
    assert plain["peak"]["by_category"]["pattern_block"] == 0
    assert plain["peak"]["held_bytes"] == found["peak"]["held_bytes"] == 3 * mib
    none = analyzed(capsys, chain, "-b", "1024", "--optimization", "disable", "--no-mem-pattern", "--no-cpu-mem-arena")
    assert none["peak"]["held_bytes"] == none["peak"]["requested_bytes"] == 2 * mib
    assert "SM524" in {note["code"] for note in none["assumptions"]}


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_categories_add_up(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.onnx"
    onnx.save(GRAPHS[name](), path)
    known = {d.dim_param for v in onnx.load(path).graph.input for d in v.type.tensor_type.shape.dim}
    request = Request(dims={n: s for n, s in (("batch", 2), ("length", 16), ("width", 24)) if n in known})
    for options in (SessionOptions(), SessionOptions(enable_cpu_mem_arena=False), SessionOptions(provider="cuda")):
        peak = session_report(str(path), request, options).peak
        cuda = options.provider == "cuda"
        assert set(peak.by_category) == set(CUDA_CATEGORIES if cuda else CPU_CATEGORIES)
        assert sum(peak.by_category.values()) == (peak.device_bytes if cuda else peak.host_bytes)
        assert min(peak.by_category.values()) >= 0
        assert peak.tensors_bytes <= peak.held_bytes


def test_device_of_cuda(chain: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = analyzed(capsys, chain, "-b", "1024", "--provider", "cuda", "--gpu", "l4", "--gpu-mem-limit", "1GiB")
    card, known = gpus.find("l4"), profile.load()
    peak, overhead = found["peak"], known.overhead(card)
    assert peak["device_bytes"] == peak["held_bytes"] + overhead.expected
    assert peak["bands"]["device"] == {"low": peak["held_bytes"] + overhead.low, "high": 2**30 + overhead.high}
    assert peak["host_bytes"] is None
    assert peak["workspace_bytes"] is None
    assert found["exact"] is False
    assert found["gpu"]["fit"] == "fits"
    assert found["device"] == card.name
    assert {"SM525", "SM526"} <= {note["code"] for note in found["warnings"]}
    unlimited = analyzed(capsys, chain, "-b", "1024", "--provider", "cuda")
    assert unlimited["peak"]["bands"]["device"]["high"] is None
    assert unlimited["gpu"] is None
    code, _, err = run(capsys, chain, "-b", "1024", "--provider", "cuda", "--gpu-mem-limit", "1MiB")
    assert code == 2
    assert "[SM508]" in err


def test_a_card_is_of_the_cuda_provider(capsys: pytest.CaptureFixture[str]) -> None:
    """Main memory has no card: the verdict on it would be one on nothing."""
    assert main(["analyze", RESNET, "--no-config", "--runtime", "onnxruntime", "-b", "1", "--gpu", "t4"]) == 2
    assert "--gpu does not apply to the CPU provider [SM514]" in capsys.readouterr().err


def test_arena_strategy_changes_what_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    words = (RESNET, "-b", "4", "--provider", "cuda")
    doubled = analyzed(capsys, *words)["peak"]["held_bytes"]
    same = analyzed(capsys, *words, "--arena-extend-strategy", "kSameAsRequested")["peak"]["held_bytes"]
    assert same < doubled


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, RESNET, "-b", "4")
    assert (code, err) == (0, "")
    for heading in ("Meters", "What it is made of", "Nodes at which most is requested (first run)", "Assumptions"):
        assert f"\n{heading}\n" in out
    assert "  SM520  " in out
    assert "  SM528  " in out
    answer = " ".join(out.split("\n\n")[0].split())
    needs, _, rest = answer.partition(". ")
    assert needs.endswith(" of main memory with weights and inputs")
    assert "\n\nONNX Runtime (CPU), resnet18.onnx, batch 4\n" in out
    code, quiet, _ = run(capsys, RESNET, "-b", "4", "-q")
    assert quiet.splitlines() == [f"{needs} (ONNX Runtime (CPU), resnet18.onnx, batch 4). {rest}"]
    assert "threads are assumed" not in run(capsys, RESNET, "-b", "4", "--threads", "2")[1]


def test_batch_is_assumed(chain: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = analyzed(capsys, chain)
    assert found["scenario"]["batch"] == 1
    assert "SM301" in {note["code"] for note in found["assumptions"]}


def test_saved_graph_is_the_executed_one(chain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A runtime that took two nodes out."""
    shorter = onnx.load(chain)
    del shorter.graph.node[1:]
    shorter.graph.node[0].output[0] = "y"
    saved = tmp_path / "saved.onnx"
    onnx.save(shorter, saved)
    found = analyzed(capsys, chain, "-b", "2", "--optimized-model", str(saved))
    assert (found["model"]["nodes"], found["exact"]) == (1, True)
    assert found["scenario"]["executed_graph"] == "as the runtime saved it"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--optimizer", "adam"), "SM512"),
        (("--mode", "train"), "SM512"),
        (("--amp", "bf16"), "SM513"),
        (("--max-batch", "--gpu", "l4"), "SM513"),
        (("-f", "html"), "SM513"),
        (("--gpu-mem-limit", "1GiB"), "SM514"),
        (("--provider", "cuda", "--no-cpu-mem-arena"), "SM514"),
        (("--provider", "rocm"), "SM134"),
        (("--optimization", "most"), "SM134"),
        (("--resolution", "64"), "SM509"),
    ],
)
def test_flags_that_make_no_sense(words: tuple[str, ...], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, RESNET, *words)
    assert (status, out) == (2, "")
    assert f"[{code}]" in err


def test_other_files_and_other_runtimes(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(files.SEED))
    assert code == 2
    assert "[SM507]" in err
    assert main(["analyze", RESNET, "--provider", "cuda", "--no-mem-pattern"]) == 2
    assert "--provider, --mem-pattern do not apply to PyTorch" in capsys.readouterr().err


def test_strict_tells_what_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How many elements are not zero is known to nobody before the run."""
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["y"], "where")], "data",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [2, "found"])],
    )  # fmt: skip
    path = tmp_path / "data.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    code, _, err = run(capsys, str(path), "--strict")
    assert code == 1
    assert "strict: sizes that depend on data are not counted" in err


def test_schema_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    """Write it again with: staticmem schema session > schemas/session-1.schema.json"""
    assert main(["schema", "session"]) == 0
    assert capsys.readouterr().out == (ROOT / "schemas" / "session-1.schema.json").read_text(encoding="utf-8")


def test_what_a_config_says_of_training_is_left_out(
    chain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("version: 1\ntrain: {optimizer: adam, batch: 8}\n", encoding="utf-8")
    code, out, err = run(capsys, chain, "--config", str(config), "-f", "json")
    assert code == 0
    assert json.loads(out)["scenario"]["batch"] == 8
    assert err == "Not used of the config, as a session does not train: optimizer\n"


def test_a_reshape_that_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The session was predicted, where the runtime ends the run with an error."""
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, "seq", 8]), ("y", None))]
    shape = helper.make_tensor("shape", TensorProto.INT64, [3], [-1, 16, 8])
    graph = helper.make_graph([helper.make_node("Reshape", ["x", "shape"], ["y"])], "g", ends[:1], ends[1:], [shape])
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=8).SerializeToString())
    words = ["analyze", str(path), "--runtime", "onnxruntime", "--dim"]
    assert main([*words, "seq=32"]) == 0
    capsys.readouterr()
    assert main([*words, "seq=30"]) == 2
    error = capsys.readouterr().err
    assert "SM502" in error
    assert "[1, 30, 8]" in error
