"""The allocation plan of the ONNX Runtime: order, in-place, reuse and release on graphs of a few nodes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnxruntime_graphs import Net, image

from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ort.memory.build import build, unsafe
from staticmem.ort.memory.kernel_memory import weight_bytes
from staticmem.ort.memory.plan import ALLOCATE, OUTPUT, REUSE, Plan, Planner, execution_order
from staticmem.ort.memory.session import predict_session
from staticmem.ort.options import SessionOptions


def planned(net: Net, result: str, shape: tuple[int | str, ...] = (4, 64), reuse: bool = True) -> Plan:
    graph = build(net.model([image(*shape)], [(result, TensorProto.FLOAT, len(shape))]))
    return Planner(graph, execution_order(graph.nodes), reuse=reuse).run()


def test_input_of_the_graph_is_never_overwritten() -> None:
    net = Net()
    first = net.op("Relu", "x")
    second = net.op("Relu", first)
    plan = planned(net, second)
    assert plan.kind[first] == ALLOCATE
    assert plan.root[second] == first


def test_result_of_the_graph_has_a_buffer_of_its_own() -> None:
    net = Net()
    first = net.op("Relu", "x")
    plan = planned(net, first)
    assert plan.kind["y0"] == OUTPUT


def test_inplace_only_at_the_last_use() -> None:
    net = Net()
    first = net.op("Exp", "x")
    second = net.op("Relu", first)
    third = net.op("Add", first, second)
    plan = planned(net, third)
    assert plan.kind[second] == ALLOCATE


def test_freed_buffer_serves_a_value_of_the_same_size() -> None:
    net = Net()
    values = [net.op("Exp", "x")]
    for _ in range(3):
        values.append(net.op("Exp", values[-1]))
    assert [planned(net, values[-1]).kind[v] for v in values] == [ALLOCATE, ALLOCATE, REUSE, REUSE]
    assert [planned(net, "v3", reuse=False).kind[v] for v in values] == [ALLOCATE] * 4


def test_buffer_is_given_back_after_its_last_borrower() -> None:
    net = Net()
    a = net.op("Exp", "x")
    b = net.op("Exp", a)
    c = net.op("Exp", b)  # in the buffer of a
    plan = planned(net, c)
    assert plan.root[c] == a
    assert plan.release == [[], [], [b], [a]]


def test_open_sizes_of_one_symbol_are_equal_and_unknown_ones_are_not() -> None:
    net = Net()
    a = net.op("Exp", net.op("Exp", net.op("Exp", "x")))
    assert planned(net, a, ("batch", 64)).kind[a] == REUSE
    net = Net()
    flat = net.op("Reshape", "x", net.op("Concat", net.op("Shape", "x"), axis=0))
    values = [net.op("Exp", flat)]
    values += [net.op("Exp", values[-1])]
    values += [net.op("Exp", values[-1])]
    assert planned(net, values[-1], ("batch", "length")).kind[values[-1]] == ALLOCATE


def test_order_visits_the_latest_input_first() -> None:
    net = Net()
    left, right = net.op("Exp", "x"), net.op("Neg", "x")
    total = net.op("Add", left, right)
    graph = build(net.model([image(4, 4)], [(total, TensorProto.FLOAT, 2)]))
    assert [graph.nodes[i].op for i in execution_order(graph.nodes)] == ["Neg", "Exp", "Add", "Identity"]


def test_cast_like_is_a_cast_behind_all_nodes() -> None:
    net = Net()
    cast = net.op("CastLike", "x", net.scalar(1, np.int64))
    model = net.model([image(4)], [(net.op("Abs", cast), TensorProto.INT64, 1)])
    assert next((n.op, n.index, n.label) for n in build(model).nodes) == ("Cast", 3, "Cast_3")


def test_casts_there_and_back_are_taken_out() -> None:
    net = Net()
    there = net.op("Cast", net.op("Exp", "x"), to=TensorProto.DOUBLE)
    back = net.op("Cast", there, to=TensorProto.FLOAT)
    model = net.model([image(4)], [(net.op("Abs", back), TensorProto.FLOAT, 1)])
    assert [n.op for n in build(model).nodes] == ["Exp", "Abs", "Identity"]
    assert [n.op for n in build(model, executed=True).nodes] == ["Exp", "Cast", "Cast", "Abs", "Identity"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [("float32", "float64", False), ("float64", "float32", True), ("float32", "int64", True),
     ("int64", "float32", True),
     ("int32", "float64", False), ("int32", "uint32", True), ("uint8", "int8", True), ("uint8", "int16", False),
     ("bool", "float32", False), ("float16", "bfloat16", True), ("string", "float32", True)],
)  # fmt: skip
def test_casts_that_may_lose(old: str, new: str, expected: bool) -> None:
    assert unsafe(dtypes.ALL[old], dtypes.ALL[new]) is expected


def test_packed_weights() -> None:
    """A [32, 20] float32 matrix is packed in columns of 16: 32 * 32 * 4 bytes; the bias of 20 * 4 < 128 is copied."""
    net = Net()
    product = net.op("Add", net.op("MatMul", "x", net.weight(32, 20)), net.weight(20))
    found = weight_bytes(build(net.model([image(4, 32)], [(product, TensorProto.FLOAT, 2)])))
    assert (found.packed, found.arena, found.outside) == (4096, 80, 32 * 20 * 4)


def test_prediction_counts_by_hand() -> None:
    """Two values of 1024 bytes live at once; the pattern's block of run 2 has the same two."""
    net = Net()
    last = net.op("Exp", net.op("Exp", net.op("Exp", "x")))
    model = net.model([image(4, 64)], [(last, TensorProto.FLOAT, 2)])
    found = predict_session(model, {"x": (4, 64)}, options=SessionOptions(graph_optimization_level="disable"))
    assert (found.tensors, found.block, found.requested) == (2048, 2048, 3072)
    assert found.exact
    assert found.inputs == 1024


def test_assumptions_are_said() -> None:
    net = Net()
    model = net.model([image(4, 64)], [(net.op("Exp", "x"), TensorProto.FLOAT, 2)])
    codes = {n.code for n in predict_session(model, {"x": (4, 64)}).notes}
    assert codes == {"SM520"}
    options = SessionOptions(provider="cuda", cudnn_conv_algo_search="HEURISTIC")
    found = predict_session(model, {"x": (4, 64)}, options=options)
    assert {n.code for n in found.notes} == {"SM520", "SM525", "SM526"}
    assert not found.exact


def test_sizes_that_depend_on_data_are_not_exact() -> None:
    net = Net()
    found = net.op("NonZero", "x")
    model = net.model([image(4, 64)], [(found, TensorProto.INT64, 2)])
    prediction = predict_session(model, {"x": (4, 64)}, options=SessionOptions(graph_optimization_level="disable"))
    assert not prediction.exact
    assert "SM522" in {n.code for n in prediction.notes}


def test_bad_options() -> None:
    with pytest.raises(UsageError, match="unknown provider"):
        SessionOptions(provider="tpu")
    with pytest.raises(UsageError, match="unknown cudnn-conv-algo-search"):
        SessionOptions(cudnn_conv_algo_search="FAST")
    net = Net()
    model = net.model([image(512, 1024)], [(net.op("Exp", "x"), TensorProto.FLOAT, 2)])
    with pytest.raises(UsageError) as caught:
        predict_session(model, {"x": (512, 1024)}, options=SessionOptions(provider="cuda", gpu_mem_limit=1 << 20))
    assert caught.value.code == "SM508"


def test_bodies_know_the_outer_values() -> None:
    body = helper.make_graph(
        [helper.make_node("Exp", ["v0"], ["t"], name="t")], "yes", [], [helper.make_tensor_value_info("t", 1, [4])]
    )
    net = Net()
    outer = net.op("Relu", "x")
    chosen = net.op("If", net.scalar(True, np.bool_), then_branch=body, else_branch=body)
    graph = build(net.model([image(4)], [(chosen, TensorProto.FLOAT, 1)]))
    branch = next(n for n in graph.nodes if n.op == "If")
    assert branch.implicit == (outer,)
    assert branch.bodies["then_branch"].outer == (outer,)
