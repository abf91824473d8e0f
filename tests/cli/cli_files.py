"""Files that a user may give by mistake, and tiny models, made on the spot."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

ROOT = Path(__file__).parents[2]
SEED = ROOT / "models" / "seed.pt2"


def _save(path: Path, nodes: list[Any], shape: list[int | str], output: list[int | str] | None) -> Path:
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)],
        [helper.make_tensor("w", TensorProto.FLOAT, [6, 6], [0.0] * 36)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("custom", 1)])
    onnx.save(model, path)
    return path


def open_sequence(path: Path) -> Path:
    """Two open dimensions: `n` on axis 0 and `seq` on axis 1."""
    return _save(path, [helper.make_node("MatMul", ["x", "w"], ["y"], "mm")], ["n", "seq", 6], ["n", "seq", 6])


def unknown_op(path: Path) -> Path:
    """An op of a domain that nobody knows."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "mm"),
        helper.make_node("Frobnicate", ["h"], ["y"], "frob", domain="custom"),
    ]
    return _save(path, nodes, ["n", 6], ["n", 6])


def baked_batch(path: Path) -> Path:
    """A reshape that repeats the batch of the export, 2."""
    constant = helper.make_tensor("shape", TensorProto.INT64, [2], [2, 6])
    nodes = [
        helper.make_node("Constant", [], ["s"], "c", value=constant),
        helper.make_node("Reshape", ["x", "s"], ["r"], "the_reshape"),
        helper.make_node("MatMul", ["r", "w"], ["y"], "mm"),
    ]
    return _save(path, nodes, ["n", 2, 3], [2, 6])


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """`models/seed.pt2` with a change to its JSON."""
    with zipfile.ZipFile(SEED) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("model.json"):
                document = json.loads(data)
                change(document)
                data = json.dumps(document).encode()
            target.writestr(name, data)
    return path
