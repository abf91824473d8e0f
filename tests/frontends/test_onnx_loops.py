"""Loop, Scan and sequences: their bodies and elements stand in the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper
from onnx_models import bound, ints, model, node, scalar, targets, value, weight

import staticmem
from staticmem.frontends.onnx import loops
from staticmem.ir.graph import Graph

X = value("x", [4, 8])


def body(nodes: list[Any], inputs: list[Any], outputs: list[str]) -> Any:
    return helper.make_graph(nodes, "body", inputs, [helper.make_empty_tensor_value_info(o) for o in outputs])


def loop(count: str = "m") -> Any:
    """h = x; repeat: h = relu(h @ w); s.append(h)."""
    inputs = [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("h", [4, 8])]
    nodes = [
        node("Identity", ["c"], ["c2"]),
        node("MatMul", ["h", "w"], ["a"]),
        node("Relu", ["a"], ["h2"]),
        node("Identity", ["h2"], ["s"]),
    ]
    inner = body(nodes, inputs, ["c2", "h2", "s"])
    return node("Loop", [count, "", "x"], ["last", "all"], body=inner)


def shape(graph: Graph, name: str) -> Any:
    return graph.values[name].shape


def test_a_loop_of_known_count_makes_tensors_every_turn(tmp_path: Path) -> None:
    made = model([loop(), node("Relu", ["all"], ["y"])], [X], ["y"], [ints("m", 3), weight("w", 8, 8)])
    graph = bound(made, tmp_path)
    found = targets(graph)
    assert found.count("aten::matmul") == 3
    assert found.count("aten::cat") == 1
    assert shape(graph, "y") == (3, 4, 8)
    assert not [n for n in graph.notes if n.code == "SM266"]


def test_the_weight_is_one_parameter_however_many_turns(tmp_path: Path) -> None:
    made = model([loop(), node("Relu", ["last"], ["y"])], [X], ["y"], [ints("m", 3), weight("w", 8, 8)])
    path = tmp_path / "loop.onnx"
    path.write_bytes(made.SerializeToString())
    report = staticmem.analyze(str(path), optimizer="sgd", loss="mean")
    assert report.parameters.count == 64
    assert report.coverage.ops.unknown == 0


def test_a_count_that_is_data_is_one_turn_and_a_warning(tmp_path: Path) -> None:
    made = model([loop("n"), node("Relu", ["last"], ["y"])], [X, value("n", [], TensorProto.INT64)], ["y"],
                 [weight("w", 8, 8)])  # fmt: skip
    graph = bound(made, tmp_path)
    assert targets(graph).count("aten::matmul") == 1
    assert [n.kind for n in graph.notes if n.code == "SM266"] == ["warning"]


def test_a_count_out_of_proportion_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MAX_NODES", 100)
    made = model([loop(), node("Relu", ["last"], ["y"])], [X], ["y"], [ints("m", 10**12), weight("w", 8, 8)])
    graph = bound(made, tmp_path)
    assert targets(graph).count("aten::matmul") == 1
    assert ["too many nodes" in n.text for n in graph.notes if n.code == "SM266"] == [True]


def test_a_loop_that_leads_to_no_output_has_no_turns(tmp_path: Path) -> None:
    made = model([loop(), node("Relu", ["all"], ["z"]), node("Relu", ["x"], ["y"])], [X], ["y"], [ints("m", 150_000)])
    made.graph.initializer.append(weight("w", 8, 8))
    graph = bound(made, tmp_path)
    assert targets(graph) == ["aten::relu"]
    assert not [n for n in graph.notes if n.code == "SM266"]


def test_a_scan_has_a_turn_for_each_entry(tmp_path: Path) -> None:
    inputs = [value("h", [8]), value("e", [8])]
    nodes = [node("Add", ["h", "e"], ["h2"]), node("Tanh", ["h2"], ["s"])]
    scan = node("Scan", ["start", "x"], ["last", "all"], body=body(nodes, inputs, ["h2", "s"]), num_scan_inputs=1)
    graph = bound(model([scan, node("Relu", ["all"], ["y"])], [X, value("start", [8])], ["y"]), tmp_path)
    found = targets(graph)
    assert found.count("aten::select.int") == found.count("aten::tanh") == 4
    assert shape(graph, "y") == (4, 8)


def test_an_if_in_a_loop_reads_this_turns_values(tmp_path: Path) -> None:
    """The nested body's outer names are those of its turn."""
    yes = body([node("Relu", ["h"], ["t"])], [], ["t"])
    no = body([node("Neg", ["h"], ["f"])], [], ["f"])
    inputs = [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("h", [4, 8])]
    nodes = [node("Identity", ["c"], ["c2"]), node("If", ["yes"], ["h2"], then_branch=yes, else_branch=no)]
    outer = node("Loop", ["m", "", "x"], ["last"], body=body(nodes, inputs, ["c2", "h2"]))
    made = model([outer, node("Neg", ["last"], ["y"])], [X], ["y"], [ints("m", 2), scalar("yes", True)])
    assert targets(bound(made, tmp_path)) == ["aten::relu", "aten::relu", "aten::neg"]


def test_lists_are_no_ops(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Neg", ["x"], ["b"]),
        node("SequenceConstruct", ["a"], ["s0"]),
        node("SequenceInsert", ["s0", "b"], ["s1"]),
        node("SequenceInsert", ["s1", "x", "zero"], ["s2"]),
        node("SequenceErase", ["s2", "last"], ["s3"]),
        node("SequenceAt", ["s3", "last"], ["c"]),
        node("ConcatFromSequence", ["s2"], ["d"], axis=0, new_axis=1),
        node("MatMul", ["d", "w"], ["e"]),
        node("Add", ["e", "c"], ["y"]),
    ]
    tensors = [scalar("zero", 0), scalar("last", -1), weight("w", 8, 8)]
    graph = bound(model(nodes, [X], ["y"], tensors), tmp_path)
    assert shape(graph, "d") == (3, 4, 8)
    assert not [t for t in targets(graph) if not t.startswith("aten::")]
    assert graph.ops[-1].args[1].name == "a"  # type: ignore[union-attr]


@pytest.mark.parametrize(("keepdims", "expected"), [(1, (1, 8)), (0, (8,))])
def test_a_split_into_a_list(tmp_path: Path, keepdims: int, expected: tuple[int, ...]) -> None:
    nodes = [
        node("SplitToSequence", ["x"], ["s"], axis=0, keepdims=keepdims),
        node("SequenceErase", ["s", "zero"], ["rest"]),
        node("SequenceAt", ["rest", "zero"], ["a"]),
        node("Relu", ["a"], ["y"]),
    ]
    graph = bound(model(nodes, [X], ["y"], [scalar("zero", 0)]), tmp_path)
    assert shape(graph, "y") == expected


def test_a_list_that_is_handed_on_whole_stays(tmp_path: Path) -> None:
    nodes = [
        node("SequenceConstruct", ["x"], ["s"]),
        node("Mystery", ["s"], ["m"], domain="elsewhere"),
        node("Relu", ["x"], ["y"]),
        node("Add", ["y", "m"], ["z"]),
    ]
    graph = bound(model(nodes, [X], ["z"]), tmp_path)
    assert "elsewhere::Mystery" in targets(graph)
