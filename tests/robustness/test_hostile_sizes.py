"""Sizes below zero, names that stand twice, and loops whose length is that of the batch."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import SparseTensorProto, TensorProto, helper, numpy_helper

import staticmem
from staticmem import StaticmemError
from staticmem.cli.main import main
from staticmem.frontends.onnx.evaluate import EVALUATE
from staticmem.ir.onnx_graph import Node

FLOAT, STRING = TensorProto.FLOAT, TensorProto.STRING


def info(name: str, shape: list[Any] | None, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any], **fields: Any) -> Any:
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights, **fields)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def negative(kind: int = FLOAT) -> Any:
    tensor = TensorProto(name="w", data_type=kind)
    tensor.dims.extend([1, -(2**31), 5, 5])
    return tensor


def dense(kind: int = FLOAT) -> Any:
    return model([helper.make_node("Identity", ["w"], ["y"])], [], [info("y", None, kind)], [negative(kind)])


def pooled() -> Any:
    """Results that have no sizes, as they hang on the negative one."""
    return model([helper.make_node("MaxPool", ["w"], ["y", "z"], kernel_shape=[2, 2])], [], [], [negative()])


def sparse() -> Any:
    values = numpy_helper.from_array(np.ones(3, np.float32), "w")
    tensor = SparseTensorProto(values=values, indices=numpy_helper.from_array(np.arange(3)), dims=[-8])
    node = helper.make_node("Abs", ["w"], ["y"])
    return model([node], [], [info("y", None)], [], sparse_initializer=[tensor])


def constant() -> Any:
    node = helper.make_node("Constant", [], ["w"], value=negative())
    return model([node, helper.make_node("Abs", ["w"], ["y"])], [], [info("y", None)], [])


def in_a_branch() -> Any:
    node = helper.make_node("Identity", ["w"], ["z"])
    body = helper.make_graph([node], "b", [], [info("z", None)], [negative()])
    choice = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    return model([choice], [info("c", [], TensorProto.BOOL)], [info("y", None)], [])


NEGATIVE = {
    "dense": dense, "texts": lambda: dense(STRING), "pooled": pooled, "sparse": sparse, "constant": constant,
    "in a branch": in_a_branch,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"runtime": "onnxruntime"}], ids=["pytorch", "onnxruntime"])
@pytest.mark.parametrize("kind", NEGATIVE)
def test_a_size_below_zero_is_refused(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(NEGATIVE[kind]().SerializeToString())
    words = [f"--{name}={value}" for name, value in options.items()]
    out = tmp_path / "report.json"
    code = main(["analyze", str(path), *words, "-o", str(out)])
    assert code == 2
    assert not out.exists()


def test_an_open_size_may_be_written_as_a_negative_one() -> None:
    """Some exporters do."""
    node = helper.make_node("Relu", ["x"], ["y"])
    made = model([node], [info("x", [-1, 4])], [info("y", [-1, 4])], [])
    assert staticmem.analyze(made, batch=256).peak.live_bytes == 3 * 256 * 16


@pytest.mark.parametrize("words", [[], ["--batch", "4"], ["--runtime", "onnxruntime"]])
def test_two_inputs_of_one_name(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], [info("x", ["N", 2]), info("x", [])], [info("y", None)], [])
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    assert main(["analyze", str(path), *words]) == 2
    assert "are called 'x' [SM157]" in capsys.readouterr().err


def test_texts_have_no_loss() -> None:
    """A tensor of texts has no bytes here, so the loss of the step before was all that was alive."""
    texts = TensorProto(name="t", data_type=STRING, dims=[0])
    node = helper.make_node("StringNormalizer", ["t"], ["y"])
    made = model([node], [], [info("y", [0], STRING)], [texts])
    assert staticmem.analyze(made).peak.live_bytes == 0
    with pytest.raises(StaticmemError, match="no tensor output"):
        staticmem.analyze(made, optimizer="adam")


def test_a_split_into_any_number_of_parts() -> None:
    nodes = [helper.make_node("SplitToSequence", ["x"], ["s"]), helper.make_node("SequenceLength", ["s"], ["n"])]
    made = model(nodes, [info("x", [1 << 62])], [info("n", [], TensorProto.INT64)], [])
    with pytest.raises(StaticmemError, match="too large"):
        staticmem.analyze(made)


@pytest.mark.parametrize("op", ["Where", "Max", "Add", "Gather"])
def test_contents_are_not_made_large(op: str) -> None:
    """Three vectors of 4,096, each along an axis of its own, are 2^36 elements."""
    vectors = [np.ones((1,) * axis + (4096,) + (1,) * (2 - axis), np.int64) for axis in range(3)]
    if op == "Gather":
        vectors = [np.ones((1, 4096), np.int64), np.zeros((4096, 1), np.int64)]
    elif op == "Add":
        vectors = vectors[:2]
    with pytest.raises(ValueError, match="too large"):
        EVALUATE[op](Node(op, "", "", (), ("y",), {}), vectors)


@pytest.mark.parametrize("words", [[], ["--runtime", "onnxruntime"]])
def test_a_vector_that_doubles_sixty_times(words: list[str], tmp_path: Path) -> None:
    nodes = [helper.make_node("Shape", ["x"], ["s0"])]
    nodes += [helper.make_node("Concat", [f"s{i}", f"s{i}"], [f"s{i + 1}"], axis=0) for i in range(60)]
    path = tmp_path / "m.onnx"
    made = model(nodes, [info("x", [2, 3])], [info("s60", None, TensorProto.INT64)], [])
    path.write_bytes(made.SerializeToString())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["analyze", str(path), *words]) in (0, 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 20)


# -- a loop over the batch ---------------------------------------------------------------------------------------------


def scan_of(width: int, path: Path) -> str:
    """Running sums over the samples of a batch: each sample is an op of the step."""
    nodes = [helper.make_node("Add", ["s", "e"], ["so"]), helper.make_node("Identity", ["so"], ["eo"])]
    row = [info(name, [width]) for name in ("s", "e", "so", "eo")]
    body = helper.make_graph(nodes, "b", row[:2], row[2:])
    node = helper.make_node("Scan", ["z", "x"], ["last", "y"], body=body, num_scan_inputs=1)
    zero = TensorProto(name="z", data_type=FLOAT, dims=[width])
    made = model([node], [info("x", ["batch", width])], [info("last", [width]), info("y", ["batch", width])], [zero])
    path.write_bytes(made.SerializeToString())
    return str(path)


@pytest.fixture
def scan(tmp_path: Path) -> str:
    return scan_of(64, tmp_path / "scan.onnx")


def test_the_page_of_a_loop_over_the_batch(scan: str, tmp_path: Path) -> None:
    """It has no closed form, which small batches show."""
    start = time.perf_counter()
    assert main(["analyze", scan, "-o", str(tmp_path / "page.html")]) == 0
    assert time.perf_counter() - start < 30


def test_the_largest_batch_of_a_loop_over_it(scan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sample more is an op more, so no structure says what millions of them take."""
    assert main(["analyze", scan, "--max-batch", "--gpu", "8GiB"]) == 2
    assert "Each sample adds ops to its step" in capsys.readouterr().err


def test_sizing_of_a_loop_over_the_batch(scan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", scan, "--gpu", "l4", "-f", "json"]) == 0
    sizing = json.loads(capsys.readouterr().out)
    assert any("was not tried" in note["text"] for note in sizing["assumptions"])


def test_a_loop_over_the_batch_that_fills_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of 64 MiB: the input, a row of each turn, and all of them joined twice are four for each sample."""
    path = scan_of(1 << 24, tmp_path / "scan.onnx")
    assert main(["analyze", path, "--max-batch", "--gpu", "8GiB", "-f", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["max_batch"]
    assert 8 * 1024 // (4 * 64) - 8 < found["batch"] <= 8 * 1024 // (4 * 64)
    assert found["device_bytes"] <= 8 << 30 < found["next_device_bytes"]


def test_no_operator_makes_a_tensor_of_a_negative_size(tmp_path: Path) -> None:
    weights = [numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in
               (("x", (4, 8, 1)), ("w", (2, 32, 1)), ("r", (2, 32, 8)))]  # fmt: skip
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y", "h", "c"], direction="bidirectional", hidden_size=-2)
    outputs = [info("y", [4, 2, 8, 8]), info("h", [2, 8, 8]), info("c", [2, 8, 8])]
    path = tmp_path / "m.onnx"
    path.write_bytes(model([node], [], outputs, weights).SerializeToString())
    with pytest.raises(StaticmemError, match=r"a tensor would have the sizes \[.*-2.*\]") as error:
        staticmem.analyze(str(path), mode="infer")
    assert error.value.code == "SM118"


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("attribute", ["strides", "dilations"])
def test_convolutions_have_positive_strides(op: str, attribute: str, tmp_path: Path) -> None:
    weights = [numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in
               (("x", (3, 3, 8)), ("w", (3, 3, 3)))]  # fmt: skip
    node = helper.make_node(op, ["x", "w"], ["y"], kernel_shape=[3], **{attribute: [0]})
    path = tmp_path / "m.onnx"
    path.write_bytes(model([node], [], [info("y", [3, 3, 6])], weights).SerializeToString())
    with pytest.raises(StaticmemError) as error:
        staticmem.analyze(str(path), mode="infer", gpu="l4")
    assert error.value.code in ("SM118", "SM157", "SM159")  # onnx 1.17 divides by zero
