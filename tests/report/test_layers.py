"""The layer table adds up, for files with and without modules."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from staticmem.cli.main import main
from staticmem.engine.shapes import value_infos
from staticmem.report.layers import NAMES, LayerTable, layer_table
from staticmem.studies import Request, Study

MODELS = Path(__file__).resolve().parents[2] / "models"
FILES = ("resnet18.pt2", "resnet18.onnx", "mobilenet_v2.pt2", "seed.onnx")


def table_of(name: str, request: Request) -> tuple[Study, LayerTable]:
    study = Study.open(MODELS / name, request)
    graph = study.result.graph
    values = value_infos(graph, study.scenario.training)
    return study, layer_table(name, graph, study.lifetimes, values, study.scenario.mode)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_rows_add_up(name: str, optimizer: str | None) -> None:
    study, table = table_of(name, Request(batch=2, optimizer=optimizer))
    report = study.report
    root = table.layers[0]
    assert root.path == ""
    for figure in NAMES:
        assert getattr(root.total, figure) == sum(getattr(layer.own, figure) for layer in table.layers)
    for layer in table.layers:
        children = [
            c for c in table.layers if c.depth == layer.depth + 1 and c.path.startswith(layer.path and f"{layer.path}.")
        ]
        for figure in NAMES:
            total = getattr(layer.own, figure) + sum(getattr(c.total, figure) for c in children)
            assert getattr(layer.total, figure) == total, (layer.path, figure)
    assert root.total.peak_bytes == report.peak.live_bytes == table.peak_bytes
    assert root.total.parameters == report.parameters.count
    assert root.total.parameter_bytes == report.parameters.bytes
    by_module = {row.module: row.bytes for row in report.peak.by_module}
    assert by_module == {layer.path: layer.own.peak_bytes for layer in table.layers if layer.own.peak_bytes}


def test_saved_is_what_the_forward_leaves() -> None:
    study, table = table_of("resnet18.pt2", Request(batch=2, optimizer="adam", outputs="dropped"))
    total = table.layers[0].total
    assert 0 < total.saved_bytes <= total.activation_bytes
    kept = study.report.phases.forward_end_activation_bytes
    assert kept - total.saved_bytes <= 2 * 512  # the losses of this step and of the one before, which variables hold
    _, table = table_of("resnet18.pt2", Request(batch=2))
    assert table.layers[0].total.saved_bytes == 0


def test_shapes_by_derivation() -> None:
    _, table = table_of("resnet18.pt2", Request(batch=4, optimizer="adam"))
    layers = {layer.path: layer for layer in table.layers}
    assert layers["conv1"].inputs == ((4, 3, 224, 224),)
    assert layers["conv1"].outputs == ((4, 64, 112, 112),)
    assert layers["conv1"].own.macs == 4 * 64 * 112 * 112 * 3 * 7 * 7
    assert layers["layer2.0"].inputs == ((4, 64, 56, 56),)
    assert layers["layer2.0"].outputs == ((4, 128, 28, 28),)
    relu = layers["layer1.0.relu"]
    assert relu.calls == 2
    assert relu.own.activation_bytes == 0  # in place
    assert relu.own.read_bytes == relu.own.write_bytes == 2 * 4 * 64 * 56 * 56 * 4


def test_a_file_without_modules_has_a_row_for_each_op(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])
    w = helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "product"), helper.make_node("Relu", ["h"], ["y"], "=act")]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x, w], [y])), path)
    study = Study.open(path, Request())
    table = layer_table("m", study.result.graph, study.lifetimes, value_infos(study.result.graph, False), "infer")
    assert table.by == "op"
    assert sum(layer.own.macs for layer in table.layers) == 2 * 4 * 3
    assert {shape for layer in table.layers[1:] for shape in layer.outputs} == {(2, 3)}


def layers(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["layers", str(MODELS / "resnet18.pt2"), "--batch", "2", "--optimizer", "adam", *words]) == 0
    return capsys.readouterr().out


def test_formats_agree(capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(layers(capsys, "-f", "json"))
    rows = list(csv.DictReader(io.StringIO(layers(capsys, "-f", "csv"))))
    assert [row["path"] for row in rows] == [layer["path"] for layer in made["layers"]]
    for row, layer in zip(rows, made["layers"], strict=True):
        assert {name: int(row[name]) for name in NAMES} == layer["own"]
        assert {name: int(row[f"total_{name}"]) for name in NAMES} == layer["total"]


def test_depth_and_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = layers(capsys, "--depth", "1")
    rows = [line.split()[0] for line in text.splitlines()[3:] if line and not line.startswith("-")]
    assert rows[:5] == ["conv1", "bn1", "relu", "maxpool", "layer1"]
    assert "layer1.0" not in text
    total = next(line for line in text.splitlines() if line.startswith("total"))
    assert "11,689,512" in total
    assert "100.0%" in total
    assert "layer1" not in layers(capsys, "-q")
