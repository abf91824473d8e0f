"""com.microsoft's operators and those of opset 23: the calls they stand for, and sizes of what follows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, defs, helper
from onnx_models import model, node, scalar, targets, value, weight

import staticmem
from staticmem.eager.reasons import Reason
from staticmem.engine.interpreter import Interpreter
from staticmem.frontends.onnx import open_onnx
from staticmem.ir.graph import Graph
from staticmem.ir.model_file import resolve
from staticmem.passes.pipeline import bind

MS = "com.microsoft"
X = value("x", [2, 6, 32])
WIDE = [weight("w", 32, 96), weight("b", 96)]
HEADS: dict[str, Any] = {"num_heads": 4}


def bound(proto: Any, folder: Path) -> Graph:
    proto.opset_import.append(helper.make_opsetid(MS, 1))
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    opened = open_onnx(str(path))
    return bind(opened, resolve(opened))


def shapes(graph: Graph, training: bool = False) -> list[tuple[int, ...]]:
    """What the engine makes of the graph's outputs; nothing in it may be unknown."""
    from staticmem.eager.context import Eager
    from staticmem.eager.tensor import Owner

    e = Eager(training=training)
    e.trace.begin("setup")
    interpreter = Interpreter(e, graph)
    owned = [(p.value, True) for p in graph.parameters] + [(p.value, False) for p in graph.buffers]
    for given, trained in [*owned, *((v, False) for v in (*graph.inputs, *graph.constant_values.values()))]:
        tensor = e.empty(given.shape or (), given.dtype)
        tensor.requires_grad = training and trained and given.dtype.is_differentiable
        e.hold(tensor, Owner(Reason.MODEL, given.name))
        interpreter.define(given.name, tensor)
    e.trace.begin("forward")
    outputs = interpreter.forward()
    assert not interpreter.coverage.unknown
    return [t.shape for t in outputs]


def ms(op: str, inputs: list[str], outputs: list[str], **attrs: Any) -> Any:
    return node(op, inputs, outputs, domain=MS, **attrs)


QKV = [value(n, [2, 6, 32]) for n in "qkv"]
CASES: dict[str, tuple[list[Any], list[Any], list[Any], str, tuple[int, ...]]] = {
    "Gelu": ([ms("Gelu", ["x"], ["y"])], [X], [], "aten::gelu", (2, 6, 32)),
    "FastGelu": ([ms("FastGelu", ["x", "b"], ["y"])], [X], [weight("b", 32)], "aten::gelu", (2, 6, 32)),
    "BiasGelu": ([ms("BiasGelu", ["x", "b"], ["y"])], [X], [weight("b", 32)], "aten::gelu", (2, 6, 32)),
    "BiasSoftmax": (
        [ms("BiasSoftmax", ["x", "b"], ["y"], axis=2, is_inner_broadcast=0)], [X], [weight("b", 1, 6, 32)],
        "aten::softmax.int", (2, 6, 32),
    ),
    "SkipLayerNormalization": (
        [ms("SkipLayerNormalization", ["x", "x", "g", "b"], ["y"])],
        [X],
        [weight("g", 32), weight("b", 32)],
        "aten::layer_norm",
        (2, 6, 32),
    ),
    "SimplifiedLayerNormalization": (
        [node("SimplifiedLayerNormalization", ["x", "g"], ["y"], axis=-1)],
        [X],
        [weight("g", 32)],
        "aten::rms_norm",
        (2, 6, 32),
    ),
    "Attention": ([ms("Attention", ["x", "w", "b"], ["y"], **HEADS)], [X], WIDE, "aten::linear", (2, 6, 32)),
    "MultiHeadAttention": (
        [ms("MultiHeadAttention", ["q", "k", "v", "b"], ["y"], **HEADS)], QKV, [weight("b", 96)], "aten::add.Tensor",
        (2, 6, 32),
    ),
    "GroupQueryAttention": (
        [ms("GroupQueryAttention", ["q", "k", "v", "", "", "n", "n"], ["y", "pk", "pv"], kv_num_heads=2, **HEADS)],
        [QKV[0], value("k", [2, 6, 16]), value("v", [2, 6, 16]), value("n", [2], TensorProto.INT32)],
        [],
        "aten::scaled_dot_product_attention",
        (2, 6, 32),
    ),
    "RotaryEmbedding": (
        [ms("RotaryEmbedding", ["h", "p", "cos", "sin"], ["y"])],
        [value("h", [2, 4, 6, 8]), value("p", [2, 6], TensorProto.INT64)],
        [weight("cos", 64, 4), weight("sin", 64, 4)],
        "aten::embedding",
        (2, 4, 6, 8),
    ),
    "EmbedLayerNormalization": (
        [ms("EmbedLayerNormalization", ["i", "s", "we", "pe", "se", "g", "b"], ["y", "m"])],
        [value("i", [2, 6], TensorProto.INT32), value("s", [2, 6], TensorProto.INT32)],
        [weight("we", 50, 32), weight("pe", 16, 32), weight("se", 2, 32), weight("g", 32), weight("b", 32)],
        "aten::layer_norm",
        (2, 6, 32),
    ),
    "MatMulNBits": (
        [ms("MatMulNBits", ["x", "packed", "s"], ["y"], K=32, N=48, bits=4, block_size=32)],
        [X],
        [weight("packed", 48, 1, 16, dtype=TensorProto.UINT8), weight("s", 48)],
        "com.microsoft::MatMulNBits",
        (2, 6, 48),
    ),
    "FusedMatMul": (
        [ms("FusedMatMul", ["q", "k"], ["y"], transB=1, alpha=0.5)], QKV[:2], [], "aten::matmul", (2, 6, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [False, True])
def test_operator(case: str, training: bool, tmp_path: Path) -> None:
    nodes, inputs, tensors, target, shape = CASES[case]
    after = node("Relu", ["y"], ["z"])  # sizes go on after it
    graph = bound(model([*nodes, after], inputs, ["z"], tensors), tmp_path)
    assert target in targets(graph)
    assert shapes(graph, training) == [shape]


def test_the_fused_attention_has_four_tensors_of_the_projection(tmp_path: Path) -> None:
    """Its calls are those of a module: linear, split, three views as heads, attention, and back."""
    graph = bound(model([ms("Attention", ["x", "w", "b"], ["y"], **HEADS)], [X], ["y"], WIDE), tmp_path)
    assert [t.removeprefix("aten::") for t in targets(graph)] == [
        "linear", "split_with_sizes", *["view", "transpose.int"] * 3, "scaled_dot_product_attention", "transpose.int",
        "reshape",
    ]  # fmt: skip
    assert {p.value.name: p.value.shape for p in graph.parameters} == {"w": (96, 32), "b": (96,)}


def test_a_cache_makes_keys_and_values_longer(tmp_path: Path) -> None:
    inputs = [value("q", [2, 4, 6, 8]), *(value(n, [2, 2, 6, 8]) for n in "kv")]
    inputs += [value(n, [2, 2, 10, 8]) for n in ("pk", "pv")]
    made = node("Attention", ["q", "k", "v", "", "pk", "pv"], ["y", "nk", "nv"])
    graph = bound(model([made], inputs, ["y", "nk"], opset=23), tmp_path)
    assert shapes(graph) == [(2, 4, 6, 8), (2, 2, 16, 8)]


@pytest.mark.skipif(defs.onnx_opset_version() < 23, reason="this onnx does not infer the shapes of opset 23")
def test_opset_23(tmp_path: Path) -> None:
    tensors = [weight("g", 8), weight("cos", 2, 6, 4), weight("sin", 2, 6, 4)]
    nodes = [
        node("RMSNormalization", ["q", "g"], ["n"]),
        node("RotaryEmbedding", ["n", "cos", "sin"], ["r"]),
        node("Attention", ["r", "r", "n"], ["y"], is_causal=1),
    ]
    graph = bound(model(nodes, [value("q", [2, 4, 6, 8])], ["y"], tensors, opset=23), tmp_path)
    found = targets(graph)
    assert found[0] == "aten::rms_norm"
    assert found[-1] == "aten::scaled_dot_product_attention"
    assert graph.ops[-1].args[5] is True
    assert shapes(graph, training=True) == [(2, 4, 6, 8)]


def test_quantize_and_dequantize_keep_one_byte_an_element(tmp_path: Path) -> None:
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("DequantizeLinear", ["w8", "s", "zw"], ["w"]),
        node("MatMul", ["d", "w"], ["y"]),
    ]
    tensors = [scalar("s", 0.1), weight("z", dtype=TensorProto.UINT8), weight("zw", dtype=TensorProto.INT8)]
    graph = bound(model(nodes, [X], ["y"], [*tensors, weight("w8", 32, 16, dtype=TensorProto.INT8)]), tmp_path)
    assert graph.values["q"].dtype.name == "uint8"
    assert shapes(graph) == [(2, 6, 16)]
    assert sum(t.startswith("quantized_decomposed") for t in targets(graph)) == 3


def test_local_response_norm_is_what_pytorch_composes(tmp_path: Path) -> None:
    graph = bound(model([node("LRN", ["i"], ["y"], size=5)], [value("i", [2, 8, 4, 4])], ["y"]), tmp_path)
    assert [t.split("::")[1] for t in targets(graph)] == [
        "mul.Tensor", "unsqueeze", "pad", "avg_pool3d", "squeeze.dim", "mul.Tensor", "add.Tensor",
        "pow.Tensor_Scalar", "div.Tensor",
    ]  # fmt: skip
    assert shapes(graph, training=True) == [(2, 8, 4, 4)]


def test_positions_of_what_is_not_zero_are_at_most_all(tmp_path: Path) -> None:
    graph = bound(model([node("NonZero", ["i"], ["y"])], [value("i", [3, 4])], ["y"]), tmp_path)
    assert shapes(graph) == [(2, 12)]
    assert [note.kind for note in graph.notes if note.code == "SM267"] == ["assumption"]


def test_an_operator_that_nobody_knows_is_unknown_and_sized(tmp_path: Path) -> None:
    graph = bound(model([ms("NewThing", ["x"], ["y"])], [X], ["y"]), tmp_path)
    assert targets(graph) == ["com.microsoft::NewThing"]
    assert any(note.code == "SM257" for note in graph.notes)


def test_a_mask_of_fewer_keys_is_padded(tmp_path: Path) -> None:
    """Opset 24: the mask covers 4 of 6 keys, of which the other two are padding."""
    inputs = [value("q", [2, 3, 4, 8]), *(value(n, [2, 3, 6, 8]) for n in "kv"), value("m", [2, 3, 4, 4])]
    inputs.append(value("n", [2], TensorProto.INT64))
    made = node("Attention", ["q", "k", "v", "m", "", "", "n"], ["y"])
    graph = bound(model([made], inputs, ["y"], opset=24), tmp_path)
    assert targets(graph) == ["aten::constant_pad_nd", "aten::scaled_dot_product_attention"]
    assert shapes(graph) == [(2, 3, 4, 8)]


def test_ops_that_a_guessed_size_does_not_fit_are_guessed_too(tmp_path: Path) -> None:
    """The sizes of a tensor are data: its rank is guessed, and the axes of what reads it need not be there."""
    nodes = [
        node("ConstantOfShape", ["n"], ["zeros"]),
        node("Transpose", ["zeros"], ["turned"], perm=[2, 0, 1]),
        node("Add", ["turned", "b"], ["y"]),
    ]
    path = tmp_path / "model.onnx"
    proto = model(nodes, [value("n", [3], TensorProto.INT64)], ["y"], [weight("b", 2, 3, 4)])
    path.write_bytes(proto.SerializeToString())
    for words in ({}, {"optimizer": "sgd"}, {"amp": "bf16", "optimizer": "sgd"}):
        report = staticmem.analyze(str(path), **words)  # type: ignore[arg-type]
        assert "aten::permute" in [op.op for op in report.coverage.unknown]
