"""Causes that `scripts/fuzz_graphs.py` found: random graphs of any operators through several verbs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from staticmem.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
FLOAT = TensorProto.FLOAT
old = pytest.mark.skipif(
    tuple(map(int, version("onnx").split(".")[:2])) < (1, 21),
    reason="older ones have fewer operators, and crash on some",
)


def info(name: str, shape: list[Any], kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any] | None = None) -> str:
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights or [])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    path.write_bytes(made.SerializeToString())
    return str(path)


def test_a_page_where_one_sample_does_what_no_other_batch_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transposed axes of length 1 are no change of layout; the sliders began at batch 2, and 1 was asked for."""
    nodes = [helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0]), helper.make_node("Add", ["x", "x"], ["z"])]
    path = model(tmp_path / "a.onnx", nodes, [info("x", ["n", 16])], [info("y", [16, "n"]), info("z", ["n", 16])])
    for words in ([], ["--optimizer", "adam"], ["--batch", "3"]):
        assert main(["analyze", path, "-f", "html", *words]) == 0
        assert "<html" in capsys.readouterr().out


def test_strings_have_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of the step before was counted as 512 bytes of floats, that of this step as strings of none."""
    nodes = [helper.make_node("Concat", ["x", "x"], ["y"], axis=0)]
    kind = TensorProto.STRING
    path = model(tmp_path / "a.onnx", nodes, [info("x", [2, 8], kind)], [info("y", [4, 8], kind)])
    assert main(["analyze", path]) == 0
    capsys.readouterr()
    for verb in ("analyze", "layers"):
        assert main([verb, path, "--optimizer", "adam"]) == 2
        assert "SM131" in capsys.readouterr().err


@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_that_is_multiplied_by_and_multiplied(
    bias: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """x @ w is a Linear, whose weight PyTorch has as [out, in]; w @ v reads the same tensor as [in, out]."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("MatMul", ["w", "v"], ["b"])]
    if bias:
        nodes[0] = helper.make_node("Gemm", ["x", "w", "c"], ["a"])
    weights = [helper.make_tensor(n, FLOAT, s, [0.0] * s[0] * s[-1]) for n, s in (("w", [4, 16]), ("v", [16, 3]))]
    weights.append(helper.make_tensor("c", FLOAT, [16], [0.0] * 16))
    ends = [info("a", [2, 16]), info("b", [4, 3])]
    path = model(tmp_path / "a.onnx", nodes, [info("x", [2, 4])], ends, weights[: 2 + bias])
    for verb in ("analyze", "layers"):
        assert main([verb, path]) == 0, capsys.readouterr().err


# -- a few hundred drawn files, the same every time ------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])  # the script puts its folders there
        module = importlib.import_module("fuzz_graphs")
        patch.setattr(module.fuzz_verbs, "dear", 0.05)
        yield module


ARCHIVE = ROOT / "tests" / "data" / "random_graphs.zip"


@old
@pytest.mark.parametrize("kind", ["valid", "damaged"])
def test_drawn_files(kind: str, drawn: ModuleType, tmp_path: Path) -> None:
    """`scripts/fuzz_graphs.py` drew them by the schemas of all operators, and says what they have to stand."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name.startswith(kind)}
    assert len(files) == 110
    found = {name: text for name, data in files.items() if (text := drawn.tried(data, tmp_path / name, 60))}
    assert not found, found


@old
def test_what_is_drawn(drawn: ModuleType) -> None:
    """Operators of every family, bodies, functions and open sizes; the same bytes for the same number."""
    protos = [onnx.ModelProto.FromString(drawn.made("valid", 7, number)) for number in range(60)]
    operators = {node.op_type for proto in protos for node in proto.graph.node}
    assert len(operators) > 80
    assert {"If", "Loop", "Scan", "Conv", "MatMul"} <= operators
    assert any(proto.functions for proto in protos)
    assert any(d.dim_param for p in protos for i in p.graph.input for d in i.type.tensor_type.shape.dim)
    assert drawn.made("damaged", 7, 1) == drawn.made("damaged", 7, 1)


def test_a_worker_that_dies_is_a_finding(drawn: ModuleType) -> None:
    def task(number: int) -> str | None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2:
            time.sleep(60)
        return "wrong" if number == 3 else None

    found = dict(drawn.fuzz_workers.run(task, iter(range(5)), workers=2, limit=0.5 - drawn.fuzz_workers.GRACE))
    assert {number: text and text[:22] for number, text in found.items()} == {
        0: None, 1: "the process died: SIGK", 2: "no answer after 0.5 s", 3: "wrong", 4: None
    }  # fmt: skip
