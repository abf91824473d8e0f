"""Large tensors in Constant nodes: what the code made of no input, or the weights of converters that store them so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_models import bound, ints, model, node, value, weight

from staticmem.ir.graph import Graph


def constant(name: str, *shape: int, dtype: Any = np.float32) -> Any:
    """A Constant node whose contents the reader drops: it keeps 4,096 bytes."""
    return node("Constant", [], [name], value=onnx.numpy_helper.from_array(np.ones(shape, dtype), name))


def traced(tmp_path: Path, weights: bool = True, producer: str = "pytorch") -> Graph:
    """`((x @ fc + positions) * table) @ kernel`, where only `fc` is a parameter; without `weights` it is a constant."""
    nodes = [
        constant("/Constant_output_0", 100, 64),
        constant("/Constant_1_output_0", 64, 32),
        constant("/Constant_2_output_0", 100, 64, dtype=np.int64),
        *([] if weights else [constant("fc.weight", 48, 64)]),
        node("MatMul", ["x", "fc.weight"], ["h"]),
        node("Add", ["h", "/Constant_output_0"], ["p"]),
        node("Cast", ["/Constant_2_output_0"], ["c"], to=1),
        node("Mul", ["p", "c"], ["q"]),
        node("MatMul", ["q", "/Constant_1_output_0"], ["y"]),
    ]
    tensors = [weight("fc.weight", 48, 64)] if weights else []
    return bound(model(nodes, [value("x", [4, 100, 48])], ["y"], tensors, producer), tmp_path)


def test_constants_of_a_trace_are_not_trained(tmp_path: Path) -> None:
    graph = traced(tmp_path)
    assert [p.fqn for p in graph.parameters if p.trainable] == ["fc.weight"]
    assert {p.fqn: p.value.shape for p in graph.buffers} == {
        "/Constant_output_0": (100, 64), "/Constant_1_output_0": (64, 32), "/Constant_2_output_0": (100, 64),
    }  # fmt: skip
    assert not any(p.trainable for p in graph.buffers)
    assert [note.count for note in graph.notes if note.code == "SM335"] == [2]  # integers are never trained


@pytest.mark.parametrize(("weights", "producer"), [(False, "pytorch"), (True, "PaddlePaddle")])
def test_constants_may_be_the_weights(tmp_path: Path, weights: bool, producer: str) -> None:
    """Of a module that torch.jit.freeze took, and of other converters."""
    graph = traced(tmp_path, weights, producer)
    trained = {p.fqn for p in graph.parameters if p.trainable}
    assert trained == {"/Constant_output_0", "/Constant_1_output_0", "fc.weight"}
    assert "SM335" not in [note.code for note in graph.notes]


@pytest.mark.parametrize("read", [False, True])
def test_what_a_trace_writes_into_is_made_in_each_step(tmp_path: Path, read: bool) -> None:
    """`out = x.new_zeros(4, 100, 48); out[1] = x[1]`: a constant of the trace, whose shape the exporter takes."""
    nodes = [
        constant("/Constant_output_0", 4, 100, 48),
        node("MatMul", ["x", "fc.weight"], ["h"]),
        node("Shape", ["/Constant_output_0"], ["s"]),
        node("Gather", ["h", "one"], ["part"], axis=0),
        node("ScatterND", ["/Constant_output_0", "rows", "part"], ["y"]),
        *([node("Add", ["/Constant_output_0", "h"], ["z"])] if read else []),
    ]
    tensors = [weight("fc.weight", 48, 48), ints("one", 1), ints("rows", 1)]
    tensors[2].dims[:] = [1, 1]
    outputs = ["y", "z"] if read else ["y"]
    graph = bound(model(nodes, [value("x", [4, 100, 48])], outputs, tensors), tmp_path)
    made = [op.args[0] for op in graph.ops if op.target == "aten::zeros"]
    assert made == ([] if read else [(4, 100, 48)])
    assert [p.fqn for p in graph.buffers] == (["/Constant_output_0"] if read else [])


@pytest.mark.parametrize("producer", ["pytorch", "PaddlePaddle"])
def test_a_first_state_of_a_cell_is_made_in_each_step(tmp_path: Path, producer: str) -> None:
    """`nn.RNNCell(48, 64, bias=False)` from zeros, as the TorchScript exporter writes it."""
    nodes = [
        node("Transpose", ["cell.weight_ih"], ["a"], name="/cell/Transpose", perm=[1, 0]),
        node("MatMul", ["x", "a"], ["i"], name="/cell/MatMul"),
        constant("/cell/Constant_output_0", 100, 64),
        node("Transpose", ["cell.weight_hh"], ["b"], name="/cell/Transpose_1", perm=[1, 0]),
        node("MatMul", ["/cell/Constant_output_0", "b"], ["h"], name="/cell/MatMul_1"),
        node("Add", ["h", "i"], ["s"], name="/cell/Add"),
        node("Tanh", ["s"], ["y"], name="/cell/Tanh"),
    ]
    tensors = [weight("cell.weight_ih", 64, 48), weight("cell.weight_hh", 64, 64)]
    graph = bound(model(nodes, [value("x", [100, 48])], ["y"], tensors, producer), tmp_path)
    targets = [op.target for op in graph.ops]
    if producer == "pytorch":
        assert targets == ["aten::zeros", "aten::rnn_tanh_cell"]
        assert graph.ops[0].args == ((100, 64),)
        assert not graph.buffers
    else:  # the constant may be a weight
        assert "aten::zeros" not in targets
        assert "/cell/Constant_output_0" in [p.fqn for p in graph.parameters]


@pytest.mark.parametrize("read", [False, True])
def test_constants_that_are_asked_for_their_sizes_are_no_memory(tmp_path: Path, read: bool) -> None:
    """`out[:, 2] = y` where `out` is a constant: the shape that `y` is expanded to is that of a part of it."""
    nodes = [
        constant("/Constant_output_0", 100, 48),
        node("MatMul", ["x", "fc.weight"], ["h"]),
        node("Shape", ["/Constant_output_0"], ["s"]),
        node("Expand", ["h", "s"], ["e"]),
        node("Add", ["e", "/Constant_output_0" if read else "h"], ["y"]),
    ]
    graph = bound(model(nodes, [value("x", [100, 48])], ["y"], [weight("fc.weight", 48, 48)]), tmp_path)
    assert [p.fqn for p in graph.buffers] == (["/Constant_output_0"] if read else [])
    assert [note.count for note in graph.notes if note.code == "SM335"] == ([1] if read else [])


@pytest.mark.parametrize(("name", "trained"), [("attn.mask", False), ("attn.bias_mask", False), ("attn.scale", True)])
def test_the_names_of_masks_are_those_of_buffers(tmp_path: Path, name: str, trained: bool) -> None:
    """The TorchScript exporter writes buffers as it writes parameters."""
    proto = model([node("Add", ["x", name], ["y"])], [value("x", [4, 8, 8])], ["y"], [weight(name, 8, 8)])
    graph = bound(proto, tmp_path)
    assert [p.fqn for p in graph.parameters] == ([name] if trained else [])
    assert [p.fqn for p in graph.buffers] == ([] if trained else [name])
    assert [note.count for note in graph.notes if note.code == "SM335"] == ([] if trained else [1])
