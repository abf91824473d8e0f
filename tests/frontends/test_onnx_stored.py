"""Results that the exporter's optimiser stored: they are no parameters, and eager makes them in each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_models import bound, fx, model, node, value, weight

from staticmem.ir.graph import Graph, Op, Ref
from staticmem.passes.restoring.fx_text import before

CALL = "%y : [num_users=1] = call_function[target=torch.ops.aten.{}](args = ({}), kwargs = {{}})"


def added(tmp_path: Path, stored: Any, *lost: str, name: str = "add", target: str = "add.Tensor") -> Graph:
    """`x + stored` in the module `attn`, whose signature also has tensors that the file has in no form."""
    text = CALL.format(target, f"%x, %{stored.name}")
    nodes = [fx(node("Add", ["x", stored.name], ["y"]), text, ["", "attn", name], ["", "Attention", "aten"])]
    proto = model(nodes, [value("x", ["batch", 4, 8, 8])], ["y"], [stored, weight("w", 2)])
    sign(proto, "p_w: PARAMETER target='w'", *lost)
    return bound(proto, tmp_path, batch=3)


def sign(proto: Any, *lines: str) -> None:
    entry = proto.graph.metadata_props.add()
    entry.key = "pkg.torch.export.ExportedProgram.graph_signature"
    entry.value = "# inputs\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "lost", "targets", "parameters", "buffers"),
    [
        ("cos", (), ["empty"], {}, {}),
        ("arange_1", (), ["empty"], {}, {}),
        ("slice_1", ("b_t: BUFFER target='attn.table'",), [], {}, {"attn.table": (8, 8)}),
        ("unsqueeze_3", ("p_t: PARAMETER target='attn.table'",), [], {"attn.table": (8, 8)}, {}),
        ("select", ("p_t: PARAMETER target='attn.parts.first'",), [], {"attn.parts.first": (8, 8)}, {}),
        ("masked_fill", ("p_t: PARAMETER target='attn.mask_of'",), ["clone"], {"attn.mask_of": (8, 8)}, {}),
        # of an embedding whose size nothing tells: what is computed of it requires a gradient
        ("permute_2", ("p_t: PARAMETER target='attn.of.weight'",), ["repeat"], {"attn.of.weight": (1, 1)}, {}),
        ("cat_3", ("p_t: PARAMETER target='other.weight'",), ["empty"], {}, {}),
    ],
)  # fmt: skip
def test_what_a_stored_result_is(
    tmp_path: Path, name: str, lost: Sequence[str], targets: list[str], parameters: dict[str, Any], buffers: Any
) -> None:
    graph = added(tmp_path, weight(name, 8, 8), *lost)
    assert [op.base.removeprefix("aten::") for op in graph.ops] == [*targets, "add"]
    assert {p.fqn: p.value.shape for p in graph.parameters if p.fqn != "w"} == parameters
    assert {p.fqn: p.value.shape for p in graph.buffers} == buffers


def test_a_stored_expansion_repeats_one_tensor(tmp_path: Path) -> None:
    array = np.tile(np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8), (1, 4, 1, 1))
    stored = onnx.numpy_helper.from_array(array, "expand_2")
    graph = added(tmp_path, stored, "b_t: BUFFER target='attn.table'")
    assert [op.base for op in graph.ops] == ["aten::expand", "aten::add"]
    assert graph.ops[0].args[1] == (1, 4, 8, 8)
    assert [p.value.shape for p in graph.buffers] == [(1, 1, 8, 8)]


def test_one_index_is_stored_with_an_axis_more(tmp_path: Path) -> None:
    stored = onnx.numpy_helper.from_array(np.zeros((5, 5, 1), np.int64), "val_7")
    text = CALL.format("index.Tensor", "%x, [%b_positions]")
    nodes = [fx(node("GatherND", ["x", "val_7"], ["y"]), text, ["", "index"], ["", "aten"])]
    proto = model(nodes, [value("x", ["batch", 4])], ["y"], [stored])
    sign(proto, "b_positions: BUFFER target='positions' persistent=True")
    graph = bound(proto, tmp_path, batch=9)
    assert [(p.fqn, p.value.shape) for p in graph.buffers] == [("positions", (5, 5))]
    assert "val_7" not in graph.constant_values


def test_the_weight_of_bilinear_is_stored_permuted(tmp_path: Path) -> None:
    text = CALL.format("bilinear.default", "%a, %b, %p_weight")
    nodes = [
        fx(node("Reshape", ["val_9", "sizes"], ["flat"]), text, ["", "bilinear"], ["", "aten"]),
        fx(node("MatMul", ["a", "flat"], ["y"]), text, ["", "bilinear"], ["", "aten"]),
    ]
    sizes = onnx.numpy_helper.from_array(np.array([6, 600]), "sizes")
    inputs = [value("a", ["batch", 6]), value("b", ["batch", 20])]
    proto = model(nodes, inputs, ["y"], [weight("val_9", 6, 30, 20), sizes])
    sign(proto, "p_weight: PARAMETER target='weight'")
    graph = bound(proto, tmp_path, batch=2)
    assert [(p.fqn, p.value.shape) for p in graph.parameters] == [("weight", (30, 6, 20))]
    assert [op.base for op in graph.ops] == ["aten::bilinear"]


def test_a_call_that_was_merged_with_an_equal_one_runs(tmp_path: Path) -> None:
    """`a(norm(x)) + b(norm(x))`, where both norms have their first weights."""
    linear = (
        "%{} : [num_users=1] = call_function[target=torch.ops.aten.linear.default](args = (%{}, %p_{}), kwargs = {{}})"
    )
    norm = (
        "%{} : [num_users=1] = call_function[target=torch.ops.aten.layer_norm.default](args = (%x, [8]), kwargs = {{}})"
    )
    nodes = [
        fx(
            node("LayerNormalization", ["x", "ones"], ["layer_norm"]), norm.format("layer_norm"), ["", "norm"], ["", ""]
        ),
        fx(node("Gemm", ["layer_norm", "a"], ["linear"], transB=1), linear.format("linear", "layer_norm", "a")),
        fx(node("Gemm", ["layer_norm", "b"], ["linear_1"], transB=1), linear.format("linear_1", "layer_norm_1", "b")),
        fx(node("Add", ["linear", "linear_1"], ["y"]), CALL.format("add.Tensor", "%linear, %linear_1")),
    ]
    tensors = [weight("a", 8, 8), weight("b", 8, 8), weight("ones", 8)]
    proto = model(nodes, [value("x", ["batch", 8])], ["y"], tensors)
    sign(proto, "p_a: PARAMETER target='a'", "p_b: PARAMETER target='b'")
    graph = bound(proto, tmp_path, batch=2)
    assert sum(op.base == "aten::layer_norm" for op in graph.ops) == 2


def test_a_cat_of_one_tensor_copies_it(tmp_path: Path) -> None:
    """`relu(torch.cat(features, 1))` where the list has one tensor: the exporter leaves the copy out."""
    relu = "%{} : [num_users=1] = call_function[target=torch.ops.aten.relu.default](args = (%{},), kwargs = {{}})"
    nodes = [
        fx(node("Relu", ["x"], ["relu"]), relu.format("relu", "x"), ["", "a", "relu"], ["", "A", "aten"]),
        fx(node("Relu", ["relu"], ["relu_1"]), relu.format("relu_1", "cat"), ["", "a", "relu"], ["", "A", "aten"]),
    ]
    proto = model(nodes, [value("x", ["batch", 8])], ["relu_1"], [weight("w", 2)])
    sign(proto, "p_w: PARAMETER target='w'")
    graph = bound(proto, tmp_path, batch=2)
    assert [op.base for op in graph.ops] == ["aten::relu", "aten::cat", "aten::relu"]


def test_a_view_of_a_repeated_tensor_copied_it(tmp_path: Path) -> None:
    """`repeat(x, "b d -> (b s) d", s=4).view(...)`: the file has one Reshape, whose text names the view before it."""
    shape = onnx.numpy_helper.from_array(np.array([-1, 4, 2, 4]), "shape")
    sizes = onnx.numpy_helper.from_array(np.array([1, 4, 1]), "sizes")
    call = "%{} : [num_users=1] = call_function[target=torch.ops.aten.{}.default](args = (%{}, [{}]), kwargs = {{}})"
    expand, view = (
        call.format("expand", "expand", "x", "-1, 4, -1"),
        call.format("view_1", "view", "view", "3, 4, 2, 4"),
    )
    nodes = [
        fx(node("Expand", ["x", "sizes"], ["expand"]), expand, ["", "expand"], ["", "aten"]),
        fx(node("Reshape", ["expand", "shape"], ["view_1"]), view, ["", "view"], ["", "aten"]),
    ]
    proto = model(nodes, [value("x", ["batch", 1, 8])], ["view_1"], [shape, sizes])
    sign(proto, "p_w: PARAMETER target='w'")
    graph = bound(proto, tmp_path, batch=3)
    assert [op.base for op in graph.ops] == ["aten::expand", "aten::contiguous", "aten::view"]


def test_a_weight_is_made_after_what_its_layer_reads() -> None:
    ops = [
        Op("a", "aten::relu", (Ref("x"),), {}, ("a",)),
        Op("n", "aten::norm", (Ref("v"),), {}, ("n",)),
        Op("w", "aten::mul.Tensor", (Ref("n"), Ref("g")), {}, ("w",)),
    ]
    assert before(ops, "w") == 1
    assert before(ops, "other") == 3


def test_a_detach_that_the_file_leaves_out_stops_gradients(tmp_path: Path) -> None:
    """`x - y.detach()`: the exporter writes no node for it."""
    relu = "%relu : [num_users=1] = call_function[target=torch.ops.aten.relu.default](args = (%x,), kwargs = {})"
    nodes = [
        fx(node("Relu", ["x"], ["relu"]), relu, ["", "relu"], ["", "aten"]),
        fx(node("Sub", ["x", "relu"], ["y"]), CALL.format("sub.Tensor", "%x, %detach_2"), ["", "sub"], ["", "aten"]),
    ]
    proto = model(nodes, [value("x", ["batch", 8])], ["y"], [weight("w", 2)])
    sign(proto, "p_w: PARAMETER target='w'")
    graph = bound(proto, tmp_path, batch=2)
    assert [op.base for op in graph.ops] == ["aten::relu", "aten::detach", "aten::sub"]


def test_two_indexings_of_one_tensor_share_nodes(tmp_path: Path) -> None:
    """`x[:, a] + x[:, b]`: the second reads the transposed tensor of the first, and its text a slice that is gone."""
    text = CALL.format("index.Tensor", "%slice_1, [None, %b_a]")
    first = text.replace("%y ", "%index ")
    second = text.replace("%y ", "%index_1 ").replace("slice_1", "slice_2").replace("b_a", "b_b")
    nodes = [
        fx(node("Relu", ["x"], ["relu"]), CALL.replace("%y ", "%relu ").format("relu.default", "%x,")),
        fx(node("Transpose", ["relu"], ["t"], perm=[1, 0]), first, ["", "index"], ["", "aten"]),
        fx(node("GatherND", ["t", "val_1"], ["g"]), first, ["", "index"], ["", "aten"]),
        fx(node("Transpose", ["g"], ["index"], perm=[1, 0]), first, ["", "index"], ["", "aten"]),
        fx(node("GatherND", ["t", "val_2"], ["h"]), second, ["", "index"], ["", "aten"]),
        fx(node("Transpose", ["h"], ["index_1"], perm=[1, 0]), second, ["", "index"], ["", "aten"]),
        fx(node("Add", ["index", "index_1"], ["y"]), CALL.format("add.Tensor", "%index, %index_1")),
    ]
    stored = [onnx.numpy_helper.from_array(np.zeros((5, 1), np.int64), f"val_{k}") for k in (1, 2)]
    proto = model(nodes, [value("x", ["batch", 8])], ["y"], stored)
    sign(proto, "b_a: BUFFER target='a' persistent=True", "b_b: BUFFER target='b' persistent=True")
    graph = bound(proto, tmp_path, batch=2)
    assert [op.base for op in graph.ops] == ["aten::relu", "aten::index", "aten::index", "aten::add"]
    assert [p.fqn for p in graph.buffers] == ["a", "b"]


def test_slices_of_one_buffer_and_what_is_computed_of_them(tmp_path: Path) -> None:
    """`(x - g[:, :-1]) / (g[:, 1:] - g[:, :-1])` in a module with a table `g` and a parameter."""
    scopes = (["", "attn", "op"], ["", "Attention", "aten"])
    nodes = [
        fx(node("Sub", ["x", "slice_1"], ["a"]), CALL.format("sub.Tensor", "%x, %slice_1"), *scopes),
        fx(node("Add", ["x", "slice_2"], ["b"]), CALL.format("add.Tensor", "%x, %slice_2"), *scopes),
        fx(node("Div", ["a", "sub_1"], ["y"]), CALL.format("div.Tensor", "%a, %sub_1"), *scopes),
    ]
    tensors = [weight("slice_1", 4, 7), weight("slice_2", 4, 1), weight("sub_1", 4, 7), weight("w", 2)]
    proto = model(nodes, [value("x", ["batch", 4, 7])], ["y", "b"], tensors)
    sign(proto, "p_w: PARAMETER target='w'", "p_s: PARAMETER target='attn.scale'", "b_g: BUFFER target='attn.g'")
    graph = bound(proto, tmp_path, batch=3)
    assert [op.base for op in graph.ops if op.args[0] == Ref("attn.g")] == ["aten::as_strided"] * 2
    assert [op.base for op in graph.ops if "sub_1" in op.outputs] == ["aten::empty"]
    assert [(p.fqn, p.value.shape) for p in graph.buffers] == [("attn.g", (4, 7))]
    assert "attn.scale" not in {p.fqn for p in graph.parameters}


def test_a_large_result_within_a_call_is_no_parameter(tmp_path: Path) -> None:
    """The zeros that `index_add` adds to, which the exporter's decomposition has under a generated name."""
    text = CALL.format("index_put.default", "%zeros, [%i], %x, True")
    nodes = [fx(node("ScatterND", ["val_5", "i", "x"], ["y"], reduction="add"), text, ["", "put"], ["", "aten"])]
    inputs = [value("x", ["batch", 8]), value("i", ["batch", 1], onnx.TensorProto.INT64)]
    proto = model(nodes, inputs, ["y"], [weight("val_5", 200, 8), weight("w", 2)])
    sign(proto, "p_w: PARAMETER target='w'")
    graph = bound(proto, tmp_path, batch=3)
    assert "val_5" not in {p.fqn for p in graph.parameters}
    assert [op.args[0] for op in graph.ops if op.outputs == ("val_5",)] == [(200, 8)]


def test_a_parameter_that_is_repeated_for_each_sample(tmp_path: Path) -> None:
    """`norm(self.latents.expand(b, -1, -1))`, and a linear layer of it whose weight is stored turned."""
    norm = CALL.replace("%y", "%norm").format("layer_norm.default", "%expand, [80], %p_norm_weight, %p_norm_bias")
    linear = CALL.format("linear.default", "%expand, %p_lin_weight")
    nodes = [
        fx(node("LayerNormalization", ["expand", "n.weight", "n.bias"], ["norm"]), norm, ["", "n", ""], ["", "", ""]),
        fx(node("MatMul", ["expand", "val_1"], ["y"]), linear, ["", "lin", "linear"], ["", "", "aten"]),
    ]
    tensors = [weight("expand", 5, 60, 80), weight("val_1", 80, 3), weight("n.weight", 80), weight("n.bias", 80)]
    proto = model(nodes, [value("x", [5, 8])], ["norm", "y"], tensors)
    owned = {"norm_weight": "n.weight", "norm_bias": "n.bias", "lin_weight": "lin.weight", "latents": "latents"}
    sign(proto, *(f"p_{name}: PARAMETER target='{target}'" for name, target in owned.items()))
    graph = bound(proto, tmp_path)
    shapes = {p.fqn: p.value.shape for p in graph.parameters}
    assert shapes == {"n.weight": (80,), "n.bias": (80,), "lin.weight": (3, 80), "latents": (1, 60, 80)}
    assert [op.args[1] for op in graph.ops if op.base == "aten::expand"] == [(5, 60, 80)]
