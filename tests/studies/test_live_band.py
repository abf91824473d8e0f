"""The band of the live peak where a file has ops without a rule."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import staticmem
from staticmem.studies import Request, Study

MODELS = Path(__file__).parents[2] / "models"

ROWS, COLUMNS = 64, 1024
RESULT = ROWS * COLUMNS * 4  # bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two products with an op of somebody's own between them."""
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [COLUMNS, COLUMNS], [0.5] * COLUMNS**2)
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["a"]),
        helper.make_node("Mystery", ["a"], ["b"], domain="mine"),
        helper.make_node("MatMul", ["b", "weight"], ["y"]),
    ]
    shape = [ROWS, COLUMNS]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xyb"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:2], [weight], value_info=values[2:])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    path = tmp_path / "mystery.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets), path)
    return path


def test_an_unknown_op_may_take_as_much_as_its_result_twice_over(model: Path) -> None:
    peak = staticmem.analyze(model, mode="infer").peak
    assert peak.bands["live"].low == peak.live_bytes
    assert peak.bands["live"].high == peak.live_bytes + 2 * RESULT


def test_in_training_it_may_save_less_than_it_reads_and_makes(model: Path) -> None:
    peak = staticmem.analyze(model, mode="train", optimizer="sgd", loss="mean").peak
    assert peak.bands["live"].low <= peak.live_bytes - RESULT
    assert peak.bands["live"].high >= peak.live_bytes + 2 * RESULT


def test_the_band_of_a_compiled_step_has_other_kernels() -> None:
    """None fused, and none that writes over what dies: the peak is one end or between."""
    study = Study.open(MODELS / "mobilenet_v2.pt2", Request(batch=16, optimizer="sgd", compile=True))
    live = study.lifetimes.peak_bytes
    low, high = study.live_band or (live, live)
    assert low <= live <= high
    assert low < high
