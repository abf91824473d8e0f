"""What `fuzz_coverage.py` and `fuzz.py` of `scripts/faults/` found: each ended in a traceback, or took for ever."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

import staticmem
from staticmem import StaticmemError
from staticmem.cli.main import main
from staticmem.config.discover import read
from staticmem.devices.gpus import cards
from staticmem.frontends.onnx import loops as loops_of_onnx
from staticmem.report.json import dumps
from staticmem.studies.prices import load as load_prices
from staticmem.version import torch_release

ROOT = Path(__file__).resolve().parents[2]
SEED = str(ROOT / "models" / "seed.pt2")
toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs a command that has to fail with three lines; what it says."""
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert "SM190" not in captured.err, captured.err
    assert captured.err.count("\n") == 3
    return captured.err


# -- YAML and TOML -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["!!int ''", "!!int '+'", "!!float ''", "!!bool x", "!!int 0x", "!!binary '='", "!!null x"]
)
def test_a_tag_that_its_value_does_not_fit(value: str, tmp_path: Path) -> None:
    """PyYAML's constructors end in IndexError, KeyError, AttributeError."""
    path = tmp_path / "a.yaml"
    path.write_text(f"version: 1\nmodel: {value}\n")
    with pytest.raises(StaticmemError) as caught:
        read(str(path)).model  # noqa: B018 - what is read is refused before
    assert caught.value.code in ("SM191", "SM192", "SM193", "SM194", "SM195")
    path.write_text(f"version: 1\ncurrency: {value}\nprices: {{}}\n")
    with pytest.raises(StaticmemError) as caught:
        load_prices(str(path), cards())
    assert caught.value.code == "SM401"


@toml
@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000 + "]" * 100_000,
        "a = " + "{b = " * 5_000 + "1" + "}" * 5_000,
        "a = " + "9" * 5_000,
        ".".join("a" * 50) + " = 1",
        ".".join("a" * 250_000) + " = 1",  # tomllib would take 250 GB
        "[" + ".".join("a" * 250_000) + "]",
        ". ".join(['"a"'] * 100_000) + " = 1",
    ],
    ids=["lists", "tables", "a number", "50 dots", "dots", "dots of a table", "dots of quoted keys"],
)
def test_toml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(f"[tool.staticmem]\n{text}\n")
    with pytest.raises(StaticmemError):
        read(str(path))


@toml
def test_texts_with_dots_are_no_long_keys(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    sentence = "One. Two three. " * 100
    path.write_text(
        f'[project]\nreadme = "{sentence}"\n[tool.a]\n"x.{"y" * 100}".z = 1\n[tool.staticmem]\nmodel = "m.pt2"\n'
    )
    assert read(str(path)).model is not None


def test_a_version_of_thousands_of_digits() -> None:
    with pytest.raises(StaticmemError):
        torch_release("9" * 5_000 + ".1")
    assert torch_release("2.13.0+cpu") == (2, 13)


# -- records -----------------------------------------------------------------------------------------------------


def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "records" / "torch-cpu-resnet18.json").read_text())
    return found


@pytest.mark.parametrize("memory", ["24 GB", [], 1.5, 10**30, True])
def test_the_memory_of_a_record_is_a_number(memory: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = record()
    made["device"] = {"kind": "cuda", "name": "NVIDIA L4", "memory": memory}
    made["meters"] += [
        {"name": name, "predicted": None, "measured": 1 << 28, "note": ""} for name in ("context", "libraries")
    ]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(made))
    text = refused(capsys, "calibrate", str(path)) if memory != [] else "SM231"  # nothing is as good as none
    assert "SM231" in text


@pytest.mark.parametrize(
    "words",
    [
        {"batch": "x"}, {"batch": True}, {"nope": 1}, {"dims": [1]}, {"resolution": [2, 2, 2]}, {"momentum": 10**400},
        {"top": 1.5}, {"gpu": 5}, {"profile": "/etc/passwd"}, {"gpus_file": "/etc/passwd"},
    ],
)  # fmt: skip
def test_the_request_of_a_record(words: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is predicted again with the words of another machine: they are checked, and name no file of this one."""
    made = record()
    made["scenario"]["request"] = words
    path = tmp_path / "r.json"
    path.write_text(json.dumps(made))
    text = refused(capsys, "reconcile", str(path), "--models", str(ROOT / "models"))
    assert "SM231" in text
    assert "root:" not in text


def test_a_resolution_is_two_numbers() -> None:
    with pytest.raises(StaticmemError):
        staticmem.analyze(SEED, resolution=(2, 2, 2))  # type: ignore[arg-type]


# -- saved reports -----------------------------------------------------------------------------------------------


def saved(**words: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dumps(staticmem.analyze(SEED, optimizer="adam", **words)))
    return found


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a negative size": lambda d: d["peak"]["by_module"][0].update(bytes=-289),
    "a size of 400 digits": lambda d: d["peak"].update(live_bytes=10**400),
    "a float of 400 digits": lambda d: d["multipliers"].update(peak_over_parameters=10**400),
    "a fit that is none": lambda d: d["gpu"].update(fit="a" * 100),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_saved_report_that_is_refused(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    document = saved(gpu="l4")
    path.write_text(json.dumps(document))
    assert main(["report", str(path), "-f", "html", "-o", str(tmp_path / "sound.html")]) == 0
    capsys.readouterr()
    CHANGES[kind](document)
    path.write_text(json.dumps(document))
    assert "SM173" in refused(capsys, "report", str(path), "-f", "html", "-o", str(tmp_path / "a.html"))


def test_a_strategy_that_is_not_known_is_shown_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A later version may have more of them."""
    document = saved(parallel="ddp", devices=2)
    document["scenario"]["parallel"] = "someday"
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    assert main(["report", str(path)]) == 0
    assert "someday, one of 2 devices" in capsys.readouterr().out


@pytest.mark.parametrize("top", [0, 1, 5])
def test_explaining_a_saved_report_says_what_it_does_not_list(
    top: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It has the largest tensors only: a module may have none of them."""
    path = tmp_path / "a.json"
    document = saved()
    document["top_tensors"] = document["top_tensors"][:top]
    path.write_text(json.dumps(document))
    assert main(["report", str(path), "--explain-peak"]) == 0
    text = capsys.readouterr().out
    listed = {row["module"]: 0 for row in document["peak"]["by_module"]}
    for entry in document["top_tensors"]:
        listed[entry["module"]] += entry["bytes"]
    short = sum(row["bytes"] > listed[row["module"]] for row in document["peak"]["by_module"])
    assert text.count("in tensors that this report does not list") == short > 0


def test_nothing_is_alive(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    document = saved()
    document["peak"]["live_bytes"] = 0
    path.write_text(json.dumps(document))
    assert main(["report", str(path), "--explain-peak"]) == 0
    assert capsys.readouterr().out


def test_a_part_is_larger_than_the_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The bar of it is not drawn to its length."""
    path = tmp_path / "a.json"
    document = saved()
    document["peak"]["live_bytes"] = 1
    path.write_text(json.dumps(document))
    assert main(["report", str(path)]) == 0
    assert len(capsys.readouterr().out) < 10_000


# -- ONNX --------------------------------------------------------------------------------------------------------


def info(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def written(tmp_path: Path, nodes: list[Any], ends: list[Any], weights: list[Any], **words: Any) -> str:
    """A model of opset 18; `ends` are its input and its output."""
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, **words).SerializeToString())
    return str(path)


def loops(tmp_path: Path, turns: int, depth: int) -> str:
    """Loops in loops, each of the same number of turns."""
    nodes = [helper.make_node("Relu", ["a0"], ["b0"])]
    for k in range(depth):
        inputs = [info(f"i{k}", [], TensorProto.INT64), info(f"c{k}", [], TensorProto.BOOL), info(f"a{k}", [4])]
        outputs = [info(f"d{k}", [], TensorProto.BOOL), info(f"b{k}", [4])]
        body = helper.make_graph([helper.make_node("Identity", [f"c{k}"], [f"d{k}"]), *nodes], f"g{k}", inputs, outputs)
        nodes = [helper.make_node("Loop", ["n", "", f"a{k + 1}"], [f"b{k + 1}"], body=body)]
    weights = [helper.make_tensor("n", TensorProto.INT64, [], [turns])]
    return written(tmp_path, nodes, [info(f"a{depth}", [4]), info(f"b{depth}", [4])], weights)


def scans(tmp_path: Path, size: int, depth: int) -> str:
    """Scans in scans over a tensor with an axis for each."""
    nodes = [helper.make_node("Relu", ["a0"], ["b0"])]
    for k in range(depth):
        ends = [[info(f"{s}{k}", [1]), info(f"{v}{k}", [size] * (k + 1))] for s, v in (("s", "a"), ("t", "b"))]
        body = helper.make_graph([helper.make_node("Identity", [f"s{k}"], [f"t{k}"]), *nodes], f"g{k}", *ends)
        outputs = [f"q{k}", f"b{k + 1}"]
        nodes = [helper.make_node("Scan", ["z", f"a{k + 1}"], outputs, body=body, num_scan_inputs=1)]
    weights = [helper.make_tensor("z", TensorProto.FLOAT, [1], [0.0])]
    shape = [size] * (depth + 1)
    return written(tmp_path, nodes, [info(f"a{depth}", shape), info(f"b{depth}", shape)], weights)


def test_loops_in_loops_make_no_more_nodes_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6**4 turns; each loop alone is within the limit."""
    monkeypatch.setattr("staticmem.frontends.onnx.loops.MAX_NODES", 200)
    report = staticmem.analyze(loops(tmp_path, 6, 4))
    assert 6 <= report.model.ops <= 400
    assert [note for note in report.warnings if note.code == "SM266"]
    monkeypatch.undo()
    report = staticmem.analyze(loops(tmp_path, 6, 3))
    assert report.model.ops == 6**3
    assert not report.warnings


def test_scans_in_scans_make_no_more_nodes_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staticmem.frontends.onnx.loops.MAX_NODES", 200)
    made: list[int] = []
    unroll = loops_of_onnx.unroll

    def counted(graph: Any, *words: Any) -> Any:
        done = unroll(graph, *words)
        made.append(len(graph.node))
        return done

    monkeypatch.setattr(loops_of_onnx, "unroll", counted)
    with pytest.raises(StaticmemError):  # one turn instead of four does not fit the sizes that the file states
        staticmem.analyze(scans(tmp_path, 4, 6))
    assert len(made) > 2
    assert max(made) <= 2_000  # beside the bodies: reads of a slice, and stacks; 4**6 are 4,096 bodies


@pytest.mark.parametrize("make", [loops, scans])
def test_a_session_runs_no_more_bodies_than_its_limit(
    make: Callable[[Path, int, int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from staticmem.ort import study as session
    from staticmem.ort.memory import replay, sizes
    from staticmem.ort.options import SessionOptions
    from staticmem.scenario.request import Request

    started = 0
    run = replay._Frame.run

    def counted(self: Any) -> Any:
        nonlocal started
        started += 1
        return run(self)

    monkeypatch.setattr(replay._Frame, "run", counted)
    session.session_report(make(tmp_path, 5, 3), Request(), SessionOptions())
    whole, started = started, 0
    assert whole % (1 + 5 + 25 + 125) == 0  # for each run of the model
    monkeypatch.setattr(sizes, "MAX_RUNS", 20)
    session.session_report(make(tmp_path, 5, 3), Request(), SessionOptions())
    assert started * 3 < whole


def test_two_functions_of_one_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 18)]
    function = helper.make_function("f", "F", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], opsets)
    ends = [info("x", [2]), info("y", [2])]
    path = written(tmp_path, [helper.make_node("F", ["x"], ["y"], domain="f")], ends, [], functions=[function] * 2)
    for words in ([], ["--runtime", "onnxruntime"]):
        assert "SM2" in (text := refused(capsys, "analyze", path, *words)) or "SM1" in text


@pytest.mark.parametrize("op", ["SplitToSequence", "If", "Loop", "Scan", "SequenceAt"])
def test_a_session_with_a_node_that_lacks_its_inputs(
    op: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body = helper.make_graph([], "body", [], [])
    words = {"If": {"then_branch": body, "else_branch": body}, "Loop": {"body": body}, "Scan": {"body": body}}
    nodes = [helper.make_node(op, [], ["y"], **words.get(op, {})), helper.make_node("Relu", ["x"], ["z"])]
    path = written(tmp_path, nodes, [info("x", [2]), info("z", [2])], [])
    code = main(["analyze", path, "--runtime", "onnxruntime"])
    assert code in (0, 2)
    assert "SM190" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--runtime", "onnxruntime"]])
def test_a_scan_that_does_not_say_what_it_scans(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Inference of onnx 1.17 ends the process there."""
    body = helper.make_graph([], "body", [], [])
    inner = helper.make_graph([helper.make_node("Scan", [], ["s"], body=body)], "then", [], [info("s", [2])])
    flag = helper.make_tensor("f", TensorProto.BOOL, [], [True])
    nodes = [helper.make_node("If", ["f"], ["y"], then_branch=inner, else_branch=inner)]
    path = written(tmp_path, nodes, [info("x", [2]), info("y", [2])], [flag])
    assert "num_scan_inputs" in refused(capsys, "analyze", path, *words)
