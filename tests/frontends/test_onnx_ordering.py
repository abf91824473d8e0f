"""Files whose nodes are not sorted, as the ONNX Runtime's converter to half precision writes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import bound, fx, ints, model, node, targets, value, weight

import staticmem
from staticmem.errors import ModelFileError
from staticmem.frontends.onnx import open_onnx
from staticmem.frontends.onnx.decode import decode
from staticmem.frontends.onnx.model import OnnxModel
from staticmem.frontends.onnx.ordering import put_in_order
from staticmem.ir.model_file import resolve


def test_makers_move_in_front_of_readers_and_the_rest_stays(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["c"], ["r"]),
        node("Sigmoid", ["x"], ["s"]),
        node("Add", ["r", "s"], ["y"]),
        node("Cast", ["x"], ["c"], to=TensorProto.FLOAT),
    ]
    proto = model(nodes, [value("x", [2, 3])], ["y"])
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(proto)
    graph = bound(proto, tmp_path)
    assert [op.outputs[0] for op in graph.ops] == ["c", "r", "s", "y"]
    report = staticmem.analyze(str(tmp_path / "model.onnx"))
    assert [note.code for note in report.warnings if note.code == "SM274"] == ["SM274"]


def test_bodies_are_sorted_and_wait_for_what_they_take_from_outside(tmp_path: Path) -> None:
    inner = [node("Relu", ["h"], ["b"]), node("Neg", ["late"], ["h"])]
    body = helper.make_graph(inner, "body", [], [helper.make_empty_tensor_value_info("b")])
    nodes = [node("If", ["flag"], ["z"], then_branch=body, else_branch=body), node("Exp", ["x"], ["late"])]
    proto = model(nodes, [value("x", [2, 3])], ["z"], [weight("flag", dtype=TensorProto.BOOL)])
    assert targets(bound(proto, tmp_path)) == ["aten::exp", "aten::neg", "aten::relu"]


def test_sorted_files_have_no_warning(tmp_path: Path) -> None:
    proto = model([node("Relu", ["x"], ["r"]), node("Neg", ["r"], ["y"])], [value("x", [2])], ["y"])
    assert not put_in_order(proto.graph)
    bound(proto, tmp_path)
    assert not staticmem.analyze(str(tmp_path / "model.onnx")).warnings


def test_nodes_that_read_each_other_have_no_order(tmp_path: Path) -> None:
    proto = model([node("Relu", ["b"], ["a"]), node("Neg", ["a"], ["b"])], [value("x", [2])], ["b"])
    with pytest.raises(ModelFileError) as error:
        bound(proto, tmp_path)
    assert error.value.code == "SM154"


def chain() -> onnx.ModelProto:
    """No two nodes of it may change places."""
    nodes = [
        node("Conv", ["x", "c.weight"], ["h"], kernel_shape=[3, 3], pads=[1] * 4),
        node("Relu", ["h"], ["a"]),
        node("MaxPool", ["a"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "fc.weight"], ["g"], transB=1),
        node("Softmax", ["g"], ["y"], axis=-1),
    ]
    tensors = [weight("c.weight", 4, 3, 3, 3), weight("fc.weight", 10, 64)]
    return model(nodes, [value("x", [2, 3, 8, 8])], ["y"], tensors)


def branches() -> onnx.ModelProto:
    """Attention and a gate: branches that may run in several orders."""
    nodes = [node("MatMul", ["x", f"{name}.weight"], [name]) for name in "qkvg"]
    nodes += [
        node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], ["scores"]),
        node("Softmax", ["scores"], ["shares"], axis=-1),
        node("MatMul", ["shares", "v"], ["mixed"]),
        node("Sigmoid", ["g"], ["gate"]),
        node("Mul", ["mixed", "gate"], ["y"]),
    ]
    return model(nodes, [value("x", [2, 6, 16])], ["y"], [weight(f"{name}.weight", 16, 16) for name in "qkvg"])


@pytest.mark.parametrize("optimizer", [None, "adam"])
@pytest.mark.parametrize("make", [chain, branches])
def test_nodes_in_any_order_are_answered(
    make: Callable[[], onnx.ModelProto], optimizer: str | None, tmp_path: Path
) -> None:
    """The order of a file is the program's: the figure of branches may depend on it, that of a chain may not."""

    def live(proto: onnx.ModelProto, name: str) -> int:
        path = tmp_path / name
        path.write_bytes(proto.SerializeToString())
        return staticmem.analyze(path, optimizer=optimizer).peak.live_bytes

    proto = make()
    expected = live(proto, "m.onnx")
    for seed in range(8):
        nodes = list(proto.graph.node)
        random.Random(seed).shuffle(nodes)
        other = onnx.ModelProto()
        other.CopyFrom(proto)
        del other.graph.node[:]
        other.graph.node.extend(nodes)
        figure = live(other, f"{seed}.onnx")
        assert figure == expected if make is chain else figure > 0


def exported() -> onnx.ModelProto:
    """`relu(a(x)) - sigmoid(b(x)) * c(x)`, numbered as by the TorchScript exporter; `act` has no numbers."""
    nodes = [
        node("MatMul", ["x", "a.weight"], ["a"], name="/MatMul"),
        node("Neg", ["a"], ["n"], name="/act/Neg"),
        node("Relu", ["n"], ["r"], name="/act/Relu"),
        node("MatMul", ["x", "b.weight"], ["b"], name="/MatMul_1"),
        node("Sigmoid", ["b"], ["s"], name="/Sigmoid"),
        node("MatMul", ["x", "c.weight"], ["c"], name="/MatMul_2"),
        node("Mul", ["s", "c"], ["m"], name="/Mul"),
        node("Sub", ["r", "m"], ["y"], name="/Sub"),
    ]
    proto = model(nodes, [value("x", [8, 64])], ["y"], [weight(f"{name}.weight", 64, 64) for name in "abc"])
    proto.producer_name = "pytorch"
    return proto


def in_order(proto: onnx.ModelProto, order: Sequence[int]) -> onnx.ModelProto:
    other = onnx.ModelProto()
    other.CopyFrom(proto)
    del other.graph.node[:]
    other.graph.node.extend([proto.graph.node[index] for index in order])
    return other


@pytest.mark.parametrize(
    "order",
    [
        (3, 4, 5, 6, 0, 1, 2, 7),  # numbers of MatMul fall
        (0, 1, 3, 2, 4, 5, 6, 7),  # a call of `act` is torn
        (7, 6, 5, 4, 3, 2, 1, 0),  # not sorted at all
    ],
)
def test_numbers_of_the_exporter_tell_the_order_of_the_code(order: Sequence[int], tmp_path: Path) -> None:
    proto = exported()
    expected = [op.outputs[0] for op in bound(proto, tmp_path).ops]
    assert [op.outputs[0] for op in bound(in_order(proto, order), tmp_path).ops] == expected
    report = staticmem.analyze(str(tmp_path / "model.onnx"))
    assert [note.code for note in report.warnings if note.code == "SM274"] == ["SM274"]


def test_numbered_files_of_other_tools_keep_their_order(tmp_path: Path) -> None:
    proto = in_order(exported(), (3, 4, 5, 6, 0, 1, 2, 7))
    proto.producer_name = "tf2onnx"
    assert next(op.outputs[0] for op in bound(proto, tmp_path).ops) == "b"


def test_an_export_keeps_its_order(tmp_path: Path) -> None:
    bound(exported(), tmp_path)
    assert "SM274" not in {note.code for note in staticmem.analyze(str(tmp_path / "model.onnx")).warnings}


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5, 6, 7, 8), (6, 7, 0, 1, 2, 3, 4, 5, 8)])
def test_sizes_that_the_graph_computes_are_known_in_any_order(order: Sequence[int], tmp_path: Path) -> None:
    """onnx's inference passes on no result of a Div, so sizes are evaluated node by node, in the order of the file."""
    nodes = [
        node("MatMul", ["x", "a.weight"], ["a"], name="/MatMul"),
        node("Shape", ["a"], ["s"], name="/Shape"),
        node("Gather", ["s", "last"], ["n"], name="/Gather", axis=0),
        node("Div", ["n", "parts"], ["t"], name="/Div"),
        node("Slice", ["a", "starts", "t", "axes"], ["e"], name="/Slice"),
        node("MatMul", ["e", "c.weight"], ["c"], name="/MatMul_1"),
        node("MatMul", ["x", "b.weight"], ["b"], name="/MatMul_2"),
        node("Relu", ["b"], ["r"], name="/Relu"),
        node("Sub", ["c", "r"], ["y"], name="/Sub"),
    ]
    tensors = [weight("a.weight", 64, 64), weight("b.weight", 64, 32), weight("c.weight", 32, 32)]
    tensors += [ints("last", 1), ints("parts", 2), ints("starts", 0), ints("axes", 1)]
    proto = model(nodes, [value("x", [8, 64])], ["y"], tensors)
    proto.producer_name = "pytorch"
    values = bound(in_order(proto, order), tmp_path).values
    assert [values[name].shape for name in ("e", "c", "y")] == [(8, 32)] * 3


def decoded(proto: onnx.ModelProto, folder: Path) -> list[str]:
    """The nodes of a file as passes get them, by their names."""
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    opened = open_onnx(str(path))
    assert isinstance(opened, OnnxModel)
    return [each.name for each in decode(opened, resolve(opened)).net.nodes]


def test_lists_of_the_dynamo_exporter_stay_and_are_put_back(tmp_path: Path) -> None:
    """`chunk` is a list in its files, which nothing unrolls."""
    nodes = [
        node("Relu", ["x"], ["a"], name="node_relu"),
        node("SplitToSequence", ["a", "half"], ["l"], name="node_split", axis=1),
        node("SequenceAt", ["l", "zero"], ["p"], name="node_getitem"),
        node("SequenceAt", ["l", "one"], ["q"], name="node_getitem_1"),
        node("Relu", ["q"], ["s"], name="node_relu_1"),
        node("Mul", ["p", "s"], ["y"], name="node_mul"),
    ]
    scalars = [onnx.numpy_helper.from_array(np.array(number), name) for name, number in (("zero", 0), ("one", 1))]
    for each in nodes:
        fx(each, "%relu : [num_users=1] = call_function[target=torch.ops.aten.relu.default](args = (%x,), kwargs = {})")
    proto = model(nodes, [value("x", [2, 8])], ["y"], [ints("half", 4), *scalars])
    proto.producer_name = "pytorch"
    expected = [each.name for each in nodes]
    assert decoded(proto, tmp_path) == expected
    assert decoded(in_order(proto, (0, 1, 3, 4, 2, 5)), tmp_path) == expected


def test_constants_tell_the_order_of_their_readers(tmp_path: Path) -> None:
    """`a = -x + 1`, then `b = exp(x) - 2`: no number of theirs tells which was first, but that of the constants."""
    nodes = [
        node("Neg", ["x"], ["n"], name="/Neg"),
        node("Constant", [], ["c1"], name="/Constant_1", value_floats=[1.0]),
        node("Add", ["n", "c1"], ["a"], name="/Add"),
        node("Exp", ["x"], ["e"], name="/Exp"),
        node("Constant", [], ["c2"], name="/Constant_2", value_floats=[2.0]),
        node("Sub", ["e", "c2"], ["b"], name="/Sub"),
        node("Relu", ["b"], ["r"], name="/Relu"),
        node("Relu", ["a"], ["s"], name="/Relu_1"),
        node("Mul", ["r", "s"], ["y"], name="/Mul"),
    ]
    proto = in_order(model(nodes, [value("x", [2])], ["y"]), (3, 4, 5, 0, 1, 2, 7, 6, 8))
    names = decoded(proto, tmp_path)
    assert names.index("/Add") < names.index("/Sub") < names.index("/Relu") < names.index("/Relu_1")
