"""Models that the runtime can load, and inputs that it can take."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnxruntime_graphs import GRAPHS, Net, image

from staticmem.ort.validation.model import RandomInput, plan_inputs, prepare


def test_indices_stay_in_their_table() -> None:
    graph = GRAPHS["embedding"]().graph
    assert plan_inputs(graph, {"ids": (2, 16)}) == [RandomInput("ids", "int64", (2, 16), 100)]
    assert plan_inputs(GRAPHS["loop"]().graph, {"x": (8, 16)}) == [RandomInput("x", "float32", (8, 16), 2)]


def test_missing_weights_are_filled_beside_nothing(tmp_path: Path) -> None:
    net = Net()
    model = net.model([image(4, 512)], [(net.op("MatMul", "x", net.weight(512, 512)), TensorProto.FLOAT, 2)])
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "gone.bin"), ("length", str(512 * 512 * 4))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    path = home / "model.onnx"
    path.write_bytes(model.SerializeToString())
    found = prepare(str(path), str(folder))
    assert (found.filled, found.nbytes) == (1, 512 * 512 * 4)
    assert os.listdir(home) == ["model.onnx"]
    filled = onnx.load(found.path)
    values = numpy_helper.to_array(filled.graph.initializer[0])
    assert values.shape == (512, 512)
    assert 0.01 < float(np.abs(values).mean()) < 0.03


def test_complete_models_are_run_where_they_are(tmp_path: Path) -> None:
    path = str(tmp_path / "net.onnx")
    onnx.save(GRAPHS["conv_net"](), path)
    assert prepare(path, str(tmp_path)).path == path
