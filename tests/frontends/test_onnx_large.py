"""Large ONNX graphs: their nodes go when they are bound and are read again when they are needed again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from staticmem.errors import ModelFileError
from staticmem.frontends import open_model, recent
from staticmem.frontends.onnx import model as onnx_model
from staticmem.ir.model_file import resolve
from staticmem.passes.pipeline import bind


def chain(path: Path, count: int, output: str = "y") -> None:
    names = ["x", *(f"v{i}" for i in range(count - 1)), output]
    nodes = [helper.make_node("Relu", [a], [b], f"relu{i}") for i, (a, b) in enumerate(pairwise(names))]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    y = helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", 8])
    graph = helper.make_graph(nodes, "chain", [x], [y])
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def test_nodes_go_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chain.onnx"
    chain(path, 12)
    kept = open_model(str(path))
    expected = [bind(kept, resolve(kept, batch=b)).values["v3"].shape for b in (2, 5)]
    monkeypatch.setattr(onnx_model, "LARGE", 10)
    monkeypatch.setattr(recent, "MOST_OPS", 10)
    recent.models.clear()
    model = open_model(str(path))
    assert isinstance(model, onnx_model.OnnxModel)
    found = []
    for batch in (2, 5):
        graph = bind(model, resolve(model, batch=batch))
        assert len(graph.ops) == 12
        found.append(graph.values["v3"].shape)
        assert model.nodes == ()
    assert found == expected == [(2, 8), (5, 8)]


def test_a_file_that_changed_is_not_mixed_with_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chain.onnx"
    chain(path, 12)
    monkeypatch.setattr(onnx_model, "LARGE", 10)
    monkeypatch.setattr(recent, "MOST_OPS", 10)
    model = open_model(str(path))
    bind(model, resolve(model, batch=2))
    chain(path, 12, output="z")
    with pytest.raises(ModelFileError, match="changed while it was analysed"):
        bind(model, resolve(model, batch=2))
