"""Binding: symbols, folding of size computations, branches, other sizes than a static export has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import bound, ints, model, node, scalar, targets, value, weight

from staticmem.errors import DimensionError
from staticmem.frontends.onnx import open_onnx
from staticmem.ir.graph import Ref


def test_named_and_unnamed_dimensions_are_symbols(tmp_path: Path) -> None:
    proto = model([node("Relu", ["x"], ["y"])], [value("x", ["batch", 3, None, 8])], ["y"])
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    opened = open_onnx(str(tmp_path / "m.onnx"))
    assert opened.inputs[0].shape == ("batch", 3, "x[2]", 8)
    assert set(opened.symbols) == {"batch", "x[2]"}
    graph = bound(proto, tmp_path, batch=2, **{"x[2]": 5})
    assert graph.inputs[0].shape == (2, 3, 5, 8)


def test_shape_chains_become_integers(tmp_path: Path) -> None:
    """x.view(b, h * w // 2, -1) as exporters write it, through operators that onnx does not propagate."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["b"]),
        node("Gather", ["s", "one"], ["h"]),
        node("Div", ["h", "two"], ["half"]),
        node("Mod", ["h", "two"], ["rest"]),
        node("Add", ["half", "rest"], ["n"]),
        node("Unsqueeze", ["b", "axis"], ["b1"]),
        node("Unsqueeze", ["n", "axis"], ["n1"]),
        node("Concat", ["b1", "n1", "minus"], ["size"], axis=0),
        node("Reshape", ["x", "size"], ["y"]),
        node("Relu", ["y"], ["z"]),
    ]
    tensors = [scalar("zero", 0), scalar("one", 1), scalar("two", 2), ints("axis", 0), ints("minus", -1)]
    graph = bound(model(nodes, [value("x", ["n", "h", 6])], ["z"], tensors), tmp_path, batch=4, h=10)
    assert targets(graph) == ["aten::reshape", "aten::relu"]
    assert graph.ops[0].args == (Ref("x"), (4, 5, 12))
    assert graph.values["z"].shape == (4, 5, 12)


def test_a_known_condition_takes_its_branch(tmp_path: Path) -> None:
    def branch(name: str, op: str) -> onnx.GraphProto:
        out = helper.make_empty_tensor_value_info(f"{name}_out")
        return helper.make_graph([node(op, ["x"], [f"{name}_out"])], name, [], [out])

    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["b"]),
        node("Equal", ["b", "one"], ["single"]),
        node("If", ["single"], ["y"], then_branch=branch("yes", "Relu"), else_branch=branch("no", "Tanh")),
        node("Sigmoid", ["y"], ["z"]),
    ]
    proto = model(nodes, [value("x", ["n", 3])], ["z"], [scalar("zero", 0), scalar("one", 1)])
    assert targets(bound(proto, tmp_path, batch=1)) == ["aten::relu", "aten::sigmoid"]
    graph = bound(proto, tmp_path, batch=2)
    assert targets(graph) == ["aten::tanh", "aten::sigmoid"]
    assert graph.values["z"].shape == (2, 3)


def test_an_unknown_condition_takes_the_larger_branch(tmp_path: Path) -> None:
    small = helper.make_graph([node("Relu", ["x"], ["a"])], "s", [], [helper.make_empty_tensor_value_info("a")])
    large = helper.make_graph(
        [node("Exp", ["x"], ["b0"]), node("Tanh", ["b0"], ["b"])], "l", [], [helper.make_empty_tensor_value_info("b")]
    )
    nodes = [node("If", ["flag"], ["y"], then_branch=small, else_branch=large)]
    inputs = [value("x", [2, 3]), value("flag", [], onnx.TensorProto.BOOL)]
    graph = bound(model(nodes, inputs, ["y"]), tmp_path)
    assert targets(graph) == ["aten::exp", "aten::tanh"]
    assert [n.code for n in graph.notes] == ["SM256"]


@pytest.mark.parametrize("how", ["initializers", "constants", "outside"])
def test_the_weights_of_both_branches_are_parameters(how: str, tmp_path: Path) -> None:
    """The module has both, whichever of them a step takes."""
    tensors = []

    def branch(name: str, width: int) -> onnx.GraphProto:
        owned = [
            onnx.numpy_helper.from_array(np.ones(shape, np.float32), f"{name}{leaf}")
            for leaf, shape in (("up", (8, width)), ("down", (width, 8)))
        ]
        nodes = [
            node("MatMul", ["x", f"{name}up"], [f"{name}h"]),
            node("MatMul", [f"{name}h", f"{name}down"], [f"{name}y"]),
        ]
        if how == "outside":
            tensors.extend(owned)
        if how == "constants":
            nodes = [*(node("Constant", [], [tensor.name], value=tensor) for tensor in owned), *nodes]
        result = helper.make_empty_tensor_value_info(f"{name}y")
        return helper.make_graph(nodes, name, [], [result], owned if how == "initializers" else [])

    nodes = [node("If", ["flag"], ["y"], then_branch=branch("a", 64), else_branch=branch("b", 16))]
    inputs = [value("x", [2, 8]), value("flag", [], onnx.TensorProto.BOOL)]
    graph = bound(model(nodes, inputs, ["y"], tensors), tmp_path)
    assert sum(p.value.numel for p in graph.parameters) == 2 * 8 * (64 + 16)
    assert len(graph.ops) == 2  # of one branch


def test_a_wide_branch_is_larger_than_one_of_more_nodes(tmp_path: Path) -> None:
    """What counts is memory: one result of 200 elements is more than three of six."""
    wide = helper.make_graph([node("Tile", ["x", "times"], ["a"])], "w", [], [helper.make_empty_tensor_value_info("a")])
    chain = [node("Exp", ["x"], ["b0"]), node("Tanh", ["b0"], ["b1"]), node("Relu", ["b1"], ["b"])]
    deep = helper.make_graph(chain, "d", [], [helper.make_empty_tensor_value_info("b")])
    wide.initializer.append(ints("times", 10, 10))
    nodes = [node("If", ["flag"], ["y"], then_branch=deep, else_branch=wide)]
    inputs = [value("x", [2, 3]), value("flag", [], onnx.TensorProto.BOOL)]
    graph = bound(model(nodes, inputs, ["y"]), tmp_path)
    assert [op.base for op in graph.ops] == ["aten::repeat"]
    assert graph.values["y"].shape == (20, 30)


def static(batch: int, classes: int = 10) -> onnx.ModelProto:
    """A convolution, a baked flatten and a linear layer."""
    nodes = [
        node("Conv", ["x", "c.weight"], ["h"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Reshape", ["h", "size"], ["f"]),
        node("Gemm", ["f", "l.weight", "l.bias"], ["y"], transB=1),
    ]
    tensors = [
        weight("c.weight", 8, 3, 3, 3),
        ints("size", batch, 8 * 16),
        weight("l.weight", classes, 8 * 16),
        weight("l.bias", classes),
    ]
    return model(nodes, [value("x", [batch, 3, 4, 4])], ["y"], tensors)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_baked_batch_follows(tmp_path: Path, batch: int) -> None:
    graph = bound(static(batch), tmp_path, batch=6)
    again = bound(static(6), tmp_path)
    assert [(op.target, op.args) for op in graph.ops] == [(op.target, op.args) for op in again.ops]
    assert graph.values["y"].shape == (6, 10)
    assert [n.code for n in graph.notes if n.code == "SM258"] == ["SM258"]


def test_sequence_first_attention_follows_from_a_batch_of_one(tmp_path: Path) -> None:
    """[time, batch, features] -> [time, batch * heads, head] -> back, where a batch of 1 says little."""

    def proto(batch: int) -> onnx.ModelProto:
        nodes = [
            node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
            node("Reshape", ["t", "heads"], ["h"]),
            node("Transpose", ["h"], ["u"], perm=[1, 0, 2]),
            node("Reshape", ["u", "split"], ["q"]),
            node("Transpose", ["q"], ["v"], perm=[2, 0, 1, 3]),
            node("Reshape", ["v", "flat"], ["f"]),
            node("Gemm", ["f", "w"], ["g"], transB=1),
            node("Reshape", ["g", "back"], ["r"]),
            node("Transpose", ["r"], ["s"], perm=[1, 0, 2]),
            node("Add", ["x", "s"], ["y"]),
        ]
        tensors = [
            ints("heads", 12, batch * 4, 8), ints("split", batch, 4, 12, 8), ints("flat", 12 * batch, 32),
            ints("back", 12, batch, 32), weight("w", 32, 32),
        ]  # fmt: skip
        return model(nodes, [value("x", [batch, 12, 32])], ["y"], tensors)

    expected = bound(proto(8), tmp_path)
    for batch in (1, 4):
        graph = bound(proto(batch), tmp_path, batch=8)
        assert [op.args for op in graph.ops] == [op.args for op in expected.ops]


def test_what_cannot_follow_names_the_node(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "pos"], ["y"], name="positions")]
    proto = model(nodes, [value("x", [2, 16, 8])], ["y"], [weight("pos", 1, 16, 8)])
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(DimensionError, match=r"x\[1\] contradicts node Add 'positions'"):
        bound(proto, tmp_path, **{"x[1]": 20})


def test_tensors_of_a_graph_are_sorted(tmp_path: Path) -> None:
    """Parameters, statistics, constants; num_batches_tracked is added; a tied weight is one parameter."""
    nodes = [
        node("Conv", ["x", "c.weight"], ["h"]),
        node("BatchNormalization", ["h", "b.weight", "b.bias", "b.running_mean", "b.running_var"], ["n"]),
        node("Mul", ["n", "half"], ["m"]),
        node("Identity", ["c.weight"], ["copy"]),
        node("Conv", ["m", "copy"], ["y"]),
    ]
    tensors = [
        weight("c.weight", 3, 3, 1, 1),
        *(weight(f"b.{n}", 3) for n in ("weight", "bias", "running_mean", "running_var")),
        scalar("half", 0.5),
    ]  # fmt: skip
    graph = bound(model(nodes, [value("x", ["n", 3, 4, 4])], ["y"], tensors), tmp_path, batch=2)
    assert [p.fqn for p in graph.parameters] == ["c.weight", "b.weight", "b.bias"]
    assert [p.fqn for p in graph.buffers] == ["b.running_mean", "b.running_var", "b.num_batches_tracked"]
    assert graph.buffers[-1].value.dtype.name == "int64"
    assert graph.ops[2].args[1] == 0.5
    assert graph.ops[3].args[1] == Ref("c.weight")
    assert not graph.inplace_known


def test_weights_as_inputs_and_as_nodes(tmp_path: Path) -> None:
    """keep_initializers_as_inputs without contents, and weights that ConstantOfShape makes."""
    nodes = [
        node("ConstantOfShape", ["size"], ["w2"], value=helper.make_tensor("v", 1, [1], [0.1])),
        node("Gemm", ["x", "fc.weight", "fc.bias"], ["h"], transB=1),
        node("Gemm", ["h", "w2"], ["y"], transB=1),
    ]
    inputs = [value("x", ["n", 8]), value("fc.weight", [4, 8]), value("fc.bias", [4])]
    graph = bound(model(nodes, inputs, ["y"], [ints("size", 2, 4)]), tmp_path, batch=3)
    assert [v.name for v in graph.inputs] == ["x"]
    assert {p.fqn: p.value.shape for p in graph.parameters} == {"fc.weight": (4, 8), "fc.bias": (4,), "w2": (2, 4)}
    assert targets(graph) == ["aten::linear", "aten::linear"]


def test_folded_constants_stay_tensors_where_ops_read_them(tmp_path: Path) -> None:
    table = onnx.numpy_helper.from_array(np.arange(6, dtype=np.int64), "steps")
    nodes = [node("Range", ["zero", "six", "one"], ["r"]), node("Mul", ["x", "r"], ["y"])]
    inputs = [value("x", ["n", 6], onnx.TensorProto.INT64)]
    tensors = [scalar("zero", 0), scalar("six", 6), scalar("one", 1), table]
    graph = bound(model(nodes, inputs, ["y"], tensors), tmp_path, batch=2)
    assert targets(graph) == ["aten::arange.start_step", "aten::mul.Tensor"]
