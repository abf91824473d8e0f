"""Calls that the TorchScript exporter writes as several nodes: with a bias that is computed, statistics that PyTorch
does not keep, a product that is scaled by one, and an assignment to a part of a parameter's copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx_models import bound, ints, model, node, scalar, targets, value, weight

from staticmem.ir.graph import Graph, Ref

PADS = (0, 1, 0, 0, 0, 0)
PRODUCT = [
    node("Transpose", ["attn.qkv.weight"], ["t"], perm=[1, 0], name="/attn/qkv/Transpose"),
    node("MatMul", ["x", "t"], ["m"], name="/attn/qkv/MatMul"),
]


def run(tmp_path: Path, nodes: list[object], tensors: list[object], shape: tuple[int, ...] = (2, 6, 8)) -> Graph:
    last = nodes[-1].output[0]  # type: ignore[attr-defined]
    return bound(model(nodes, [value("x", list(shape))], [last], tensors), tmp_path)


def test_a_bias_that_is_joined(tmp_path: Path) -> None:
    """BEiT: query and value have a bias, the key has zeros."""
    nodes = [
        node("Concat", ["attn.q_bias", "attn.k_bias", "attn.v_bias"], ["b"], axis=0, name="/attn/Concat"),
        *PRODUCT,
        node("Add", ["b", "m"], ["y"], name="/attn/qkv/Add"),
    ]
    biases = [weight(f"attn.{k}_bias", 4) for k in "qkv"]
    graph = run(tmp_path, nodes, [*biases, weight("attn.qkv.weight", 12, 8)])
    assert targets(graph) == ["aten::cat", "aten::linear"]
    assert graph.ops[1].args == (Ref("x"), Ref("attn.qkv.weight"), Ref("b"))


def test_a_vector_that_the_code_adds(tmp_path: Path) -> None:
    """`linear(x) + f(v)`: the product comes first."""
    nodes = [node("Neg", ["v"], ["b"], name="/Neg"), *PRODUCT, node("Add", ["m", "b"], ["y"], name="/Add")]
    graph = run(tmp_path, nodes, [weight("v", 12), weight("attn.qkv.weight", 12, 8)])
    assert [op.base for op in graph.ops] == ["aten::neg", "aten::linear", "aten::add"]


def test_a_linear_layer_over_a_table(tmp_path: Path) -> None:
    """Swin v2: an MLP of the coordinates, which are a buffer."""
    nodes = [
        node("Transpose", ["mlp.0.weight"], ["t"], perm=[1, 0], name="/mlp/mlp.0/Transpose"),
        node("MatMul", ["coords_table", "t"], ["m"], name="/mlp/mlp.0/MatMul"),
        node("Add", ["mlp.0.bias", "m"], ["b"], name="/mlp/mlp.0/Add"),
        node("Add", ["x", "b"], ["y"], name="/Add"),
    ]
    tensors = [weight("coords_table", 2, 6, 2), weight("mlp.0.weight", 8, 2), weight("mlp.0.bias", 8)]
    graph = run(tmp_path, nodes, tensors)
    assert [op.base for op in graph.ops] == ["aten::linear", "aten::add"]


def test_assignment_to_a_part_of_a_parameters_copy(tmp_path: Path) -> None:
    """`b = bias.clone(); b[4:8].zero_()`, of which the clone leaves no node."""
    rows = onnx.numpy_helper.from_array(np.arange(4, 8).reshape(4, 1), "rows")
    zeros = onnx.numpy_helper.from_array(np.zeros(4, np.float32), "zeros")
    nodes = [
        node("Constant", [], ["i"], value=rows, name="/attn/Constant"),
        node("Constant", [], ["z"], value=zeros, name="/attn/Constant_1"),
        node("ScatterND", ["attn.qkv.bias", "i", "z"], ["b"], name="/attn/ScatterND"),
        *PRODUCT,
        node("Add", ["b", "m"], ["y"], name="/attn/qkv/Add"),
    ]
    graph = run(tmp_path, nodes, [weight("attn.qkv.bias", 12), weight("attn.qkv.weight", 12, 8)])
    assert [op.base for op in graph.ops] == ["aten::clone", "aten::slice", "aten::fill_", "aten::linear"]
    clone, part, fill, linear = graph.ops
    assert clone.args == (Ref("attn.qkv.bias"),)
    assert part.args[1:] == (0, 4, 8)
    assert fill.args[0] == Ref(part.outputs[0])
    assert linear.args[2] == Ref(clone.outputs[0])


def test_statistics_that_are_not_kept(tmp_path: Path) -> None:
    """Weight standardisation is batch norm of the weight without running statistics."""
    ones = onnx.numpy_helper.from_array(np.ones(6, np.float32), "ones")
    none = onnx.numpy_helper.from_array(np.zeros(6, np.float32), "none")
    nodes = [
        node("Constant", [], ["/conv/w"], value=ones, name="/conv/Constant"),
        node("Constant", [], ["/conv/b"], value=none, name="/conv/Constant_1"),
        node("Transpose", ["x"], ["t"], perm=[0, 2, 1], name="/conv/Transpose"),
        node("ReduceMean", ["t"], ["mean"], axes=[0, 1], keepdims=0, name="/conv/ReduceMean"),
        node("ReduceMean", ["t"], ["kept"], axes=[0, 1], keepdims=1, name="/conv/ReduceMean_1"),
        node("Sub", ["t", "kept"], ["d"], name="/conv/Sub"),
        node("Mul", ["d", "d"], ["s"], name="/conv/Mul"),
        node("ReduceMean", ["s"], ["var"], axes=[0, 1], keepdims=0, name="/conv/ReduceMean_2"),
        node("BatchNormalization", ["x", "/conv/w", "/conv/b", "mean", "var"], ["y"], training_mode=1, name="/conv/BN"),
    ]
    graph = run(tmp_path, nodes, [])
    assert targets(graph) == ["aten::batch_norm"]
    assert graph.ops[0].args[:6] == (Ref("x"), None, None, None, None, True)


def test_statistics_that_are_kept(tmp_path: Path) -> None:
    keys = ("weight", "bias", "running_mean", "running_var")
    nodes = [node("BatchNormalization", ["x", *(f"bn.{k}" for k in keys)], ["y"], training_mode=1, name="/bn/BN")]
    graph = run(tmp_path, nodes, [weight(f"bn.{k}", 6) for k in keys])
    assert graph.ops[0].args[:6] == (Ref("x"), *(Ref(f"bn.{k}") for k in keys), True)


def test_addcmul(tmp_path: Path) -> None:
    nodes = [
        node("Mul", ["x", "scale"], ["a"], name="/grn/Mul"),
        node("Mul", ["a", "one"], ["b"], name="/grn/Mul_1"),
        node("Add", ["shift", "b"], ["y"], name="/grn/Add"),
    ]
    tensors = [weight("scale", 8), weight("shift", 8)]
    graph = run(tmp_path, nodes, [*tensors, scalar("one", 1.0)])
    assert [(op.target, op.args) for op in graph.ops] == [("aten::addcmul", (Ref("shift"), Ref("x"), Ref("scale")))]
    graph = run(tmp_path, nodes, [*tensors, scalar("one", 0.5)])
    assert [op.base for op in graph.ops] == ["aten::mul", "aten::mul", "aten::add"], "this may be what the code says"


def test_assignment_to_slices(tmp_path: Path) -> None:
    """`y[:, 1:, :] = x`: an index tensor of every element, which eager does not make."""
    tensors = [scalar("zero", 0), scalar("one", 1), *(scalar(f"n{i}", n) for i, n in enumerate((2, 6, 8)))]
    tensors += [ints("last", -1), ints("grid", 2, 6, 8), ints("to0", -1, 1, 1), ints("to1", -1, 1), ints("pads", *PADS)]
    nodes = [node("Pad", ["x", "pads"], ["y"], name="/Pad")]
    for axis in range(3):
        nodes.append(node("Range", ["zero", f"n{axis}", "one"], [f"r{axis}"], name=f"/Range_{axis}"))
        lifted = f"r{axis}"
        if axis < 2:
            lifted = f"l{axis}"
            nodes.append(node("Reshape", [f"r{axis}", f"to{axis}"], [lifted], name=f"/Reshape_{axis}"))
        nodes += [
            node("Expand", [lifted, "grid"], [f"e{axis}"], name=f"/Expand_{axis}"),
            node("Unsqueeze", [f"e{axis}", "last"], [f"u{axis}"], name=f"/Unsqueeze_{axis}"),
        ]
    nodes += [
        node("Concat", ["u0", "u1", "u2"], ["i"], axis=-1, name="/Concat"),
        node("ScatterND", ["y", "i", "x"], ["z"], name="/ScatterND"),
    ]
    graph = run(tmp_path, nodes, tensors)
    assert [op.base for op in graph.ops] == ["aten::pad", "aten::slice", "aten::copy_"]
    assert graph.ops[1].args == (Ref("y"), 1, 1, 7)
    assert graph.outputs == ("y",)


def test_indices_of_an_assignment_with_steps(tmp_path: Path) -> None:
    """Rows that do not follow each other are written by index."""
    rows = onnx.numpy_helper.from_array(np.array([[0], [2]]), "rows")
    nodes = [node("ScatterND", ["table", "rows", "x"], ["y"], name="/ScatterND")]
    graph = run(tmp_path, nodes, [weight("table", 4, 8), rows], (2, 8))
    assert [op.base for op in graph.ops] == ["aten::clone", "aten::index_put_"]
