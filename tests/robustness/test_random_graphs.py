"""Causes that `scripts/faults/fuzz_graphs.py` found: random graphs of any operators through several verbs."""

from __future__ import annotations

import importlib
import os
import re
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

import staticmem
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


def numbers(name: str, values: list[int]) -> Any:
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)


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


def test_a_weight_that_a_weight_is_multiplied_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A product of two weights is no Linear, but the second had been turned for one."""
    weights = [helper.make_tensor(n, FLOAT, s, [0.0] * 8) for n, s in (("v", [8]), ("w", [8, 1]))]
    path = model(tmp_path / "a.onnx", [helper.make_node("MatMul", ["v", "w"], ["y"])], [], [info("y", [1])], weights)
    assert main(["analyze", path]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        (helper.make_node("Einsum", ["x", "x"], ["y"], equation="1,2"), [2, 8]),
        (helper.make_node("Split", ["x", "parts"], ["y", "z"], axis=1), [2, 8]),
        (helper.make_node("LSTM", ["s", "w", "r"], ["y"], hidden_size=-1), [2, 1, 1, 8]),
        (helper.make_node("Relu", ["far"], ["y"]), [2, 8]),
    ],
    ids=["Einsum", "Split", "LSTM", "too large"],
)
def test_sizes_that_nothing_can_have(
    node: Any, shape: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels that are fewer than dimensions, negative parts, a negative hidden size, an input of 2^60 bytes."""
    ends = [info("x", [2, 8]), info("s", [2, 1, 4]), info("far", [2**29, 2**29])]
    weights = [numbers("parts", [-2, 10]), *(helper.make_tensor(n, FLOAT, [1, 4, 4], [0.0] * 16) for n in "wr")]
    nodes = [node, helper.make_node("Sigmoid", ["y"], ["q"])]
    path = model(tmp_path / "a.onnx", nodes, [e for e in ends if e.name in node.input], [info("q", shape)], weights)
    for words in (["analyze"], ["layers"], ["analyze", "--optimizer", "adam"]):
        code = main([words[0], path, *words[1:], "-f", "json"])
        captured = capsys.readouterr()
        assert code in (0, 2)
        assert "SM190" not in captured.err
        if code == 0:  # else it is the error, which names the sizes
            assert not re.search(r"(?<![e\d])-[1-9]", captured.out.split('"coverage"')[0]), captured.out


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


def test_results_that_only_the_operator_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mean and deviation of a LayerNormalization are read: they were produced by nothing."""
    nodes = [
        helper.make_node("LayerNormalization", ["x", "w"], ["a", "mean", "deviation"]),
        helper.make_node("LayerNormalization", ["x", "w"], ["b", "", "deviation2"]),
        helper.make_node("Add", ["deviation", "deviation2"], ["c"]),
        helper.make_node("Neg", ["mean"], ["d"]),
    ]
    ends = [info("a", [2, 4, 8]), info("b", [2, 4, 8]), info("c", [2, 4, 1]), info("d", [2, 4, 1])]
    weights = [helper.make_tensor("w", FLOAT, [8], [0.0] * 8)]
    path = model(tmp_path / "a.onnx", nodes, [info("x", [2, 4, 8])], ends, weights)
    for optimizer in (None, "adam"):
        assert staticmem.analyze(path, optimizer=optimizer).coverage.ops.unknown == 0
    assert main(["layers", path]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("attribute", ["value_strings", "value", "sparse_value"])
def test_constants_without_an_array(attribute: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Strings and sparse tensors in a Constant have no contents for sizes; what reads them found nothing."""
    value: Any = ["a", "b"]
    if attribute == "value":
        value = helper.make_tensor("t", TensorProto.STRING, [2], [b"a", b"b"])
    made = helper.make_node("Constant", [], ["c"], **({} if attribute == "sparse_value" else {attribute: value}))
    kind = TensorProto.STRING
    if attribute == "sparse_value":
        values, places = (
            helper.make_tensor("v", FLOAT, [1], [1.0]),
            helper.make_tensor("i", TensorProto.INT64, [1], [1]),
        )
        sparse = helper.make_sparse_tensor(values, places, [2])
        made.attribute.append(
            onnx.AttributeProto(name=attribute, type=onnx.AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse)
        )
        kind = FLOAT
    nodes = [made, helper.make_node("Gather", ["c", "i"], ["s"]), helper.make_node("Relu", ["x"], ["y"])]
    ends = [info("x", [2, 8]), info("i", [3], TensorProto.INT64)]
    path = model(tmp_path / "a.onnx", nodes, ends, [info("y", [2, 8]), info("s", [3], kind)])
    for verb in ("analyze", "layers"):
        assert main([verb, path]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("operator", ["Unsqueeze", "Squeeze", "Slice"])
def test_no_axes(operator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result is the input, which nothing seemed to produce."""
    read = ["x", "none", "none"] if operator == "Slice" else ["x", "none"]
    nodes = [helper.make_node(operator, read, ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    path = model(tmp_path / "a.onnx", nodes, [info("x", [2, 8])], [info("y", [2, 8])], [numbers("none", [])])
    for verb in ("analyze", "layers"):
        assert main([verb, path]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(("start", "end", "step", "size"), [(-1, -(2**63) + 1, -1, 8), (5, 1, -2, 2), (6, 4, -1, 2)])
def test_backwards_over_a_part(start: int, end: int, step: int, size: int, tmp_path: Path) -> None:
    """PyTorch flips a slice of it: 1,024 x `size` floats, where all of the axis was counted."""
    nodes = [helper.make_node("Slice", ["x", "s", "e", "a", "t"], ["y"])]
    values = [numbers(name, [v]) for name, v in (("s", start), ("e", end), ("a", 1), ("t", step))]
    path = model(tmp_path / "a.onnx", nodes, [info("x", [1024, 8])], [info("y", [1024, size])], values)
    report = staticmem.analyze(path)
    assert report.phases.first_call_bytes == 1024 * 4 * (8 + size)
    assert report.peak.live_bytes == 1024 * 4 * (8 + 2 * size)


# -- a few hundred drawn files, the same every time ------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "scripts" / "faults"), *sys.path])  # the script puts its folders there
        module = importlib.import_module("fuzz_graphs")
        patch.setattr(module.fuzz_verbs, "dear", 0.05)
        yield module


ARCHIVE = ROOT / "tests" / "data" / "random_graphs.zip"


@old
@pytest.mark.parametrize("kind", ["valid", "damaged"])
def test_drawn_files(kind: str, drawn: ModuleType, tmp_path: Path) -> None:
    """`scripts/faults/fuzz_graphs.py` drew them by the schemas of all operators, and says what they have to stand."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name.startswith(kind)}
    assert len(files) == 110
    found = {name: text for name, data in files.items() if (text := drawn.tried(data, tmp_path / name, 60))}
    assert not found, found


def test_what_is_drawn(drawn: ModuleType) -> None:
    """Operators of every family, bodies, functions and open sizes."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name.startswith("valid")}
    protos = [onnx.ModelProto.FromString(data) for data in files.values()]
    operators = {node.op_type for proto in protos for node in proto.graph.node}
    assert len(operators) > 100
    assert {"If", "Loop", "Scan", "Conv", "MatMul"} <= operators
    assert any(proto.functions for proto in protos)
    assert any(d.dim_param for p in protos for i in p.graph.input for d in i.type.tensor_type.shape.dim)
    if version("onnx").startswith("1.23."):
        assert all(drawn.made(*name[:-5].split("-")) == files[name] for name in [*files][:5])


def test_a_worker_that_dies_is_a_finding(drawn: ModuleType) -> None:
    def make(number: int) -> bytes:
        if number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return b""

    def task(number: int, _: bytes) -> str | None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2:
            time.sleep(60)
        return "wrong" if number == 3 else None

    found = dict(drawn.fuzz_workers.run(make, task, iter(range(5)), workers=2, limit=0.5 - drawn.fuzz_workers.GRACE))
    assert {number: text and text[:22] for number, text in found.items()} == {
        0: None, 1: "the process died: SIGK", 2: "no answer after 0.5 s", 3: "wrong", 4: None
    }  # fmt: skip
