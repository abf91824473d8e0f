"""Sizes that are inferred node by node are those of onnx's inference of the whole graph, with its gaps filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from staticmem.frontends import open_model
from staticmem.frontends.onnx import isolation, repeated, shapes
from staticmem.frontends.onnx.fold import Folder
from staticmem.frontends.onnx.model import OnnxModel
from staticmem.frontends.onnx.repeated import Repeated
from staticmem.ir import dtypes
from staticmem.ir.graph import Value
from staticmem.ir.model_file import Binding, resolve
from staticmem.ir.onnx_graph import Net, Node, Subgraph

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture
def every_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small graphs too, all of whose nodes differ."""
    monkeypatch.setattr(repeated, "SHARE", 1)
    monkeypatch.setattr(shapes, "REPEATING", 0)


def whole(model: OnnxModel, binding: Binding) -> tuple[dict[str, Value], dict[str, np.ndarray]]:
    """What inference of the whole graph and filling its gaps give."""
    assert model.body is not None
    consts = dict(model.weights.contents)
    values, _ = shapes.infer_body(model.body, binding.shapes)
    Folder(Net(model.nodes, (), (), values, consts, frozenset()), model.body).run()
    return values, consts


def by_node(model: OnnxModel, binding: Binding) -> tuple[dict[str, Value], dict[str, np.ndarray]]:
    assert model.body is not None
    consts = dict(model.weights.contents)
    return shapes.infer_body(model.body, binding.shapes, model.nodes, consts)[0], consts


@pytest.mark.usefixtures("every_graph")
@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.glob("*.onnx")))
def test_real_exports(name: str) -> None:
    model = open_model(str(MODELS / name))
    assert isinstance(model, OnnxModel)
    dims = {"height": 96, "width": 64} if name.endswith("_hw.onnx") else {}
    binding = resolve(model, batch=3, dims=dims)
    (values, consts), (expected, known) = by_node(model, binding), whole(model, binding)
    assert values == expected
    assert consts.keys() == known.keys()
    assert all(np.array_equal(consts[key], known[key]) for key in known)


def model_of(tmp_path: Path, nodes: list[onnx.NodeProto], *weights: onnx.TensorProto) -> OnnxModel:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, 6])
    graph = helper.make_graph(nodes, "g", [x], [helper.make_empty_tensor_value_info("y")], list(weights))
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    model = open_model(str(path))
    assert isinstance(model, OnnxModel)
    return model


def ints(name: str, *numbers: int) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.array(numbers, dtype=np.int64), name)


@pytest.mark.usefixtures("every_graph")
def test_like_nodes_that_read_other_contents_are_told_apart(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["a"]),
        helper.make_node("Reshape", ["x", "tall"], ["b"]),
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "first"], ["count"], axis=0),
        helper.make_node("Concat", ["count", "rest"], ["wanted"], axis=0),  # [batch, -1], worked out on the way
        helper.make_node("Reshape", ["x", "wanted"], ["y"]),
    ]
    model = model_of(tmp_path, nodes, ints("flat", -1), ints("tall", -1, 2), ints("first", 0), ints("rest", -1))
    values, consts = by_node(model, resolve(model, batch=5))
    assert {name: values[name].shape for name in "aby"} == {"a": (120,), "b": (60, 2), "y": (5, 24)}
    assert consts["wanted"].tolist() == [5, -1]


def node(op: str, inputs: str, outputs: str, **attrs: object) -> Node:
    return Node(op, "", f"/{outputs}", tuple(inputs.split()), tuple(outputs.split()), attrs)  # type: ignore[arg-type]


class Versions:
    opset_import = (helper.make_opsetid("", 18),)


def run(*nodes: Node) -> dict[str, Value] | None:
    values = {"x": Value("x", dtypes.float32, (2, 3)), "i": Value("i", dtypes.int64, (2,))}
    return values if Repeated(Versions, nodes, values, {}).run() else None


def test_a_node_is_inferred_once_for_all_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    infer = isolation.infer_node

    def count(node: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(node.op_type)
        return infer(node, *args, **kwargs)

    monkeypatch.setattr(isolation, "infer_node", count)
    none: dict[str, Any] = {}
    axis: dict[str, Any] = {"axis": 1}
    nodes = [Node("Relu", "", f"/{n}", (f"v{n - 1}" if n else "x",), (f"v{n}",), none) for n in range(40)]
    nodes += [Node("Softmax", "", f"/s{n}", ("v1",), (f"s{n}",), axis) for n in range(40)]
    found = run(*nodes)
    assert found is not None
    assert asked == ["Relu", "Softmax"]
    assert {found[f"{kind}{n}"].shape for kind in "vs" for n in range(40)} == {(2, 3)}


@pytest.mark.usefixtures("every_graph")
@pytest.mark.parametrize(
    "nodes",
    [
        [node("Relu", "nobody", "y")],
        [node("NonZero", "x", "y")],  # sizes that are in the data
        [node("Reshape", "x i", "y")],  # contents that are not known
        [node("Unheard", "x", "y")],
        [node("If", "x", "y", then_branch=Subgraph((), (), ()))],
        [node("Scan", "x", "y", bodies=(Subgraph((), (), ()),))],
        [node("MatMul", "x x", "y")],  # [2, 3] @ [2, 3]
    ],
)
def test_what_is_left_to_inference_of_the_whole_graph(nodes: list[Node]) -> None:
    assert run(*nodes) is None


def test_too_many_different_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node("Relu", "", str(n), ("x",), (f"y{n}",), {}) for n in range(2 * repeated.SHARE)]  # attributes apart
    assert run(*nodes) is None
    monkeypatch.setattr(repeated, "SHARE", 1)
    assert run(*nodes) is not None
