"""What kernels of the ONNX Runtime pack and take, worked out by hand from its source, and what is said where that is
not known. tests/ort/test_validation_exactness.py measures the same on small graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime_graphs import Net, image

from staticmem.ort.memory.build import build
from staticmem.ort.memory.half import cast_around
from staticmem.ort.memory.inference import carried_over
from staticmem.ort.memory.kernel import float_pack, integer_pack
from staticmem.ort.memory.kernel_memory import unknown_kernels, weight_bytes
from staticmem.ort.memory.plan import execution_order
from staticmem.ort.memory.session import SessionPrediction, predict_session
from staticmem.ort.options import SessionOptions

FLOAT, HALF, UINT8 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8
MIB = 1 << 20


def bytes_of(net: Net, shape: tuple[int, ...], dtype: Any, value: int = 1) -> str:
    name = f"w{len(net.weights)}"
    net.weights.append(numpy_helper.from_array(np.full(shape, value, dtype), name))
    return name


def recurrent(kind: str, gates: int, features: int, hidden: int, directions: int = 1) -> Any:
    net = Net()
    rows = gates * hidden
    weights = net.weight(directions, rows, features), net.weight(directions, rows, hidden)
    direction = "bidirectional" if directions == 2 else "forward"
    y = net.op(kind, "x", *weights, outputs=2, hidden_size=hidden, direction=direction)
    return net.model([image(4, 2, features)], [(y, FLOAT, 4)])


def predicted(model: Any, shapes: dict[str, tuple[int, ...]], **options: Any) -> SessionPrediction:
    given = {"graph_optimization_level": "disable", "processor": "avx512", **options}
    return predict_session(model, shapes, {}, SessionOptions(**given))


def test_packed_sizes() -> None:
    assert float_pack(10, 8) == 16 * 8 * 4  # columns in sixteens
    assert integer_pack(10, 45, 4) == 16 * 4 + 16 * 48  # and the sums of columns
    assert integer_pack(64, 45, 2) == 64 * 4 + 64 * 46
    assert integer_pack(64, 45, 0) == 0


@pytest.mark.parametrize(
    ("kind", "gates", "directions", "packed"),
    [
        ("LSTM", 4, 1, (512 + 1024) * 4096 * 4),
        ("LSTM", 4, 2, 2 * (512 + 1024) * 4096 * 4),
        ("GRU", 3, 1, (512 + 1024) * 3072 * 4),
        ("RNN", 1, 1, 0),
    ],
)
def test_packed_recurrent_weights(kind: str, gates: int, directions: int, packed: int) -> None:
    found = weight_bytes(build(recurrent(kind, gates, 512, 1024, directions)))
    assert (found.packed, found.packed_least, found.packed_most) == (packed, packed, packed)


def test_an_lstm_of_24_mib() -> None:
    found = predicted(recurrent("LSTM", 4, 512, 1024), {"x": (4, 2, 512)})
    assert found.weights.packed == 24 * MIB
    assert found.held >= 25 * MIB
    assert found.exact
    # states of a step and of both results, products of all steps, lengths: uni_directional_lstm.cc
    state = 2 * 1024
    assert found.workspace == 4 * (1024 * 2 + 3 * state + 4 * state * 4) + 4 * state + 4 * 2


def products(rows: int, columns: int, left: Any = np.uint8) -> Any:
    net = Net()
    zero = bytes_of(net, (), left, 0)
    a = net.op("QuantizeLinear", "x", net.scalar(0.1, np.float32), zero)
    y = net.op("MatMulInteger", a, bytes_of(net, (rows, columns), np.int8))
    return net.model([image(3, rows)], [(net.op("Cast", y, to=FLOAT), FLOAT, 2)])


def test_packed_integer_products() -> None:
    found = weight_bytes(build(products(1024, 1024)))
    assert (found.packed_least, found.packed, found.packed_most) == (1024 * 4 + MIB,) * 3


@pytest.mark.parametrize("left", [np.uint8, np.int8])
def test_rows_that_the_cpu_pads(left: Any) -> None:
    """45 rows are 48 in fours and 64 on AMX; signed products are packed by few CPUs."""
    model = products(45, 64, left)
    found = weight_bytes(build(model))
    packed = 64 * 4 + 64 * 48 if left is np.uint8 else 0
    assert (found.packed, found.packed_most) == (packed, 64 * 4 + 64 * 64)
    shapes: dict[str, tuple[int, ...]] = {"x": (3, 45)}
    unknown, known = predicted(model, shapes, processor="unknown"), predicted(model, shapes)
    assert known.exact
    assert not unknown.exact
    assert {note.code for note in unknown.notes} == {"SM531"}
    assert unknown.requested_band == (known.requested, known.requested + found.packed_most - packed)
    assert unknown.held_band == (known.held, known.held + found.packed_most - packed)


def convolution(channels: int, filters: int, groups: int = 1, zero: int = 0) -> Any:
    net = Net()
    step, point = net.scalar(0.1, np.float32), bytes_of(net, (), np.uint8, 3)
    x = net.op("QuantizeLinear", "x", step, point)
    weight = bytes_of(net, (filters, channels // groups, 3, 3), np.int8)
    y = net.op("QLinearConv", x, step, point, weight, step, bytes_of(net, (), np.int8, zero), step, point, group=groups)
    return net.model([image(1, channels, 8, 8)], [(net.op("DequantizeLinear", y, step, point), FLOAT, 4)])


@pytest.mark.parametrize(
    ("model", "kept", "temporary"),
    [
        (convolution(16, 20), 32 * 16 * 9, None),  # symmetric weights: filters in sixteens
        (convolution(16, 20, zero=1), 32 * 4 + 32 * 144, 20 * 144),
        (convolution(3, 20), 32 * 4 + 32 * 28, 20 * 27),  # channels are no multiple of four
        (convolution(16, 16, groups=16), 16 * 9, None),
        (convolution(20, 20, groups=20), 20 * 9, None),  # reordered
    ],
)
def test_packed_integer_convolutions(model: Any, kept: int, temporary: int | None) -> None:
    found = weight_bytes(build(model), processor="avx512")
    assert found.packed == kept
    assert [size for _, sizes in found.within for size in sizes] == ([temporary] if temporary else [])


def test_a_kernel_that_nobody_tried_is_not_exact() -> None:
    net = Net()
    x = net.op("Einsum", "x", "x", equation="ij,kj->ik")
    found = predicted(net.model([image(8, 16)], [(x, FLOAT, 2)]), {"x": (8, 16)})
    assert not found.exact
    assert [(note.code, note.kind) for note in found.notes] == [("SM530", "warning")]
    assert found.requested_band[1] is None
    assert found.requested_band[0] <= found.requested


def test_operators_of_other_domains_are_not_known() -> None:
    net = Net()
    net.nodes.append(helper.make_node("Relu", ["x"], ["v"], domain="somebody"))
    model = net.model([image(8, 16)], [("v", FLOAT, 2)])
    model.opset_import.append(helper.make_opsetid("somebody", 1))
    assert unknown_kernels(build(model)) == ["somebody.Relu"]


def test_where_takes_what_the_condition_and_each_side_need() -> None:
    net = Net()
    condition = net.op("Greater", "x", net.scalar(0.0, np.float32))
    y = net.op("Where", condition, "y", net.scalar(0.0, np.float32))
    inputs = [image(8, 1), image(8, 16, name="y")]
    found = predicted(net.model(inputs, [(y, FLOAT, 2)]), {"x": (8, 1), "y": (8, 16)})
    assert found.workspace == 4 * 8 * 16 + 4 * 8


def test_convolutions_of_several_images_use_every_thread() -> None:
    """Each thread has images or groups of its own (MlasConvPrepare), however small they are."""
    net = Net()
    x = net.op("Conv", "x", net.weight(4, 2, 3, 3), group=2)
    model = net.model([image("n", 4, 12, 12)], [(x, FLOAT, 4)])
    for images, threads, taken in ((1, 8, 2), (3, 8, 6), (3, 4, 4)):
        found = predict_session(model, {"x": (images, 4, 12, 12)}, {}, SessionOptions(intra_op_num_threads=threads))
        assert found.workspace == taken * 64 * 1024


def half_net(kind: str) -> Any:
    net = Net()
    x = helper.make_tensor_value_info("x", HALF, [8, 16])
    y = net.op(kind, net.op("Transpose", "x", perm=[1, 0]))
    return net.model([x], [(net.op("Sigmoid", y), HALF, 2)])


def test_casts_around_kernels_without_half_precision() -> None:
    """Transpose has such a kernel, Relu and Sigmoid have none; the casts between them go again."""
    graph = build(cast_around(half_net("Relu")))
    nodes = [graph.nodes[position] for position in execution_order(graph.nodes)]
    assert [node.op for node in nodes] == ["Transpose", "Cast", "Relu", "Sigmoid", "Cast", "Identity"]
    assert [node.index for node in nodes] == [0, 4, 1, 2, 7, 3]
    assert [graph.planned(node.outputs[0]).dtype.bits for node in nodes] == [16, 32, 32, 32, 16, 16]  # type: ignore[union-attr]
    assert predicted(half_net("Relu"), {"x": (8, 16)}).exact


def test_a_native_kernel_between_others_runs_on_floats() -> None:
    net = Net()
    x = helper.make_tensor_value_info("x", HALF, [8, 16])
    y = net.op("Relu", net.op("Transpose", net.op("Exp", "x"), perm=[1, 0]))
    graph = build(cast_around(net.model([x], [(y, HALF, 2)])))
    assert [graph.nodes[i].op for i in execution_order(graph.nodes)] == "Cast Exp Transpose Relu Cast Identity".split()


def test_half_precision_that_is_written_out_is_not_exact() -> None:
    """Softmax is defined by other operators; the runtime takes those where it has no kernel."""
    found = predicted(half_net("Softmax"), {"x": (8, 16)})
    assert not found.exact
    assert [note.code for note in found.notes] == ["SM529"]
    assert found.requested_band[1] is None


def test_a_model_without_half_precision_stays_itself() -> None:
    model = recurrent("LSTM", 4, 8, 8)
    assert cast_around(model) is model


def test_copies_of_dequantize_linear_are_not_exact() -> None:
    """Each reader gets one of its own, at every level: only the saved graph has them."""
    net = Net()
    step, zero = net.scalar(0.1, np.float32), bytes_of(net, (), np.uint8, 3)
    x = net.op("DequantizeLinear", net.op("QuantizeLinear", "x", step, zero), step, zero)
    once = net.op("Exp", x)
    assert predicted(net.model([image(8, 16)], [(once, FLOAT, 2)]), {"x": (8, 16)}).exact
    net.nodes = [node for node in net.nodes if node.op_type != "Identity"]
    twice = predicted(net.model([image(8, 16)], [(net.op("Mul", once, net.op("Neg", x)), FLOAT, 2)]), {"x": (8, 16)})
    assert not twice.exact
    assert [note.code for note in twice.notes] == ["SM532"]


def test_depthwise_convolutions_that_double_the_channels_take_nothing() -> None:
    net = Net()
    x = net.op("Conv", "x", net.weight(16, 1, 7, 7), group=8, strides=[2, 2], pads=[3, 3, 3, 3])
    assert predicted(net.model([image(1, 8, 32, 32)], [(x, FLOAT, 4)]), {"x": (1, 8, 32, 32)}).workspace == 0
    x = net.op("Conv", "x", net.weight(16, 1, 5, 5), group=8, strides=[2, 2], pads=[2, 2, 2, 2])
    assert predicted(net.model([image(1, 8, 32, 32)], [(x, FLOAT, 4)]), {"x": (1, 8, 32, 32)}).workspace == 64 * 1024


def test_weights_of_a_branch_and_around_it_are_packed() -> None:
    net, inner = Net(), Net()
    outside = net.weight(32, 48)
    inner.nodes = [helper.make_node("MatMul", ["x", outside], ["b"], name="product")]
    body = helper.make_graph(inner.nodes, "body", [], [helper.make_tensor_value_info("b", FLOAT, [4, 48])])
    net.nodes.append(helper.make_node("If", [net.scalar(True, np.bool_)], ["v"], then_branch=body, else_branch=body))
    model = net.model([image(4, 32)], [("v", FLOAT, 2)])
    found = weight_bytes(build(model))
    assert (found.packed, found.doubled) == (32 * 48 * 4, 0)  # the same weights: one copy


def test_equal_weights_of_two_branches_may_be_one_copy() -> None:
    """The runtime keeps one of equal contents, which are not read: the session is not exact."""
    net = Net()
    bodies = []
    for prefix in "ab":
        inner = Net()
        inner.nodes = [helper.make_node("MatMul", ["x", inner.weight(32, 48)], [f"{prefix}_y"])]
        result = helper.make_tensor_value_info(f"{prefix}_y", FLOAT, [4, 48])
        bodies.append(helper.make_graph(inner.nodes, prefix, [], [result], inner.weights))
    condition = net.scalar(True, np.bool_)
    net.weights[-1].name = "condition"
    net.nodes.append(helper.make_node("If", ["condition"], ["v"], then_branch=bodies[0], else_branch=bodies[1]))
    assert condition == "w0"
    found = predicted(net.model([image(4, 32)], [("v", FLOAT, 2)]), {"x": (4, 32)})
    assert (found.weights.packed, found.weights.doubled) == (2 * 32 * 48 * 4, 32 * 48 * 4)
    assert not found.exact
    assert [note.code for note in found.notes] == ["SM533"]
    assert found.requested_band[0] <= found.requested - 32 * 48 * 4


def test_initializers_that_a_caller_may_replace_are_not_packed() -> None:
    net = Net()
    y = net.op("MatMul", "x", net.weight(32, 48))
    model = net.model([image(4, 32), image(32, 48, name="w0")], [(y, FLOAT, 2)])
    assert weight_bytes(build(model)).packed == 0
    model.ir_version = 3
    assert weight_bytes(build(model)).packed == 32 * 48 * 4


def test_negative_sizes_are_open() -> None:
    """Two of them equal nothing (NodeArg of core/graph/graph.cc): no buffer is reused."""
    net = Net()
    y = net.op("Relu", net.op("Exp", "x"))
    graph = build(net.model([image(-1, 16)], [(y, FLOAT, 2)]))
    assert [graph.planned(name).dims for name in ("x", "v0", "v1")] == [(None, 16)] * 3  # type: ignore[union-attr]


def test_shapes_of_the_file_reach_the_saved_graph() -> None:
    """An exporter's names for open sizes are symbols; the runtime knows them and does not save them."""
    net = Net()
    y = net.op("Resize", "x", "", net.scalar([1, 1, 2, 2], np.float32), mode="nearest")
    z = net.op("Relu", net.op("Exp", y))
    model = net.model([image("n", 4, 8, 8)], [(z, FLOAT, 4)])
    for name in ("v0", "v1", "v2"):
        model.graph.value_info.append(image("unk__0", 4, 16, 16, name=name))
    saved = type(model)()
    saved.CopyFrom(model)
    del saved.graph.value_info[:]
    assert build(saved, True).planned("v1").dims == (None, 4, 16, 16)  # type: ignore[union-attr]
    graph = build(carried_over(model, saved), True)
    assert graph.planned("v1") == graph.planned("v2")
    assert graph.planned("v1").dims == ("file:unk__0", 4, 16, 16)  # type: ignore[union-attr]
