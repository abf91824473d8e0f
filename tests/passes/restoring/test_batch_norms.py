"""`--unfold-batchnorm`: what a fold took away comes back."""

from __future__ import annotations

from prepared import only

from staticmem.ir.dtypes import float32
from staticmem.ir.graph import Graph, Op, Parameter, Ref, Value
from staticmem.scenario.step import Scenario


def unfold_batch_norms(graph: Graph) -> Graph:
    return only("unfolded batch norms", graph, Scenario(unfold_batchnorm=True))


def _parameter(name: str, *shape: int) -> Parameter:
    return Parameter(Value(name, float32, shape), name)


def _graph(outputs: tuple[str, ...]) -> Graph:
    ops = (
        Op("c1", "aten::conv2d", (Ref("x"), Ref("a.weight"), Ref("a.bias"), (1, 1), (1, 1)), {}, ("y",)),
        Op("r", "aten::relu", (Ref("y"),), {}, ("z",)),
        Op("c2", "aten::conv2d", (Ref("z"), Ref("b.weight"), Ref("b.bias")), {}, ("w",)),
    )
    parameters = (
        _parameter("a.weight", 8, 3, 3, 3), _parameter("a.bias", 8),
        _parameter("b.weight", 4, 8, 1, 1), _parameter("b.bias", 4),
    )  # fmt: skip
    return Graph("g", "onnx", "", (Value("x", float32, (2, 3, 6, 6)),), parameters, (), ops, outputs)


def test_norm_replaces_the_bias() -> None:
    graph = unfold_batch_norms(_graph(("w",)))
    assert [op.base for op in graph.ops] == ["aten::conv2d", "aten::batch_norm", "aten::relu", "aten::conv2d"]
    conv, norm = graph.ops[:2]
    assert conv.args[2] is None
    assert norm.outputs == ("y",)
    assert norm.args[0] == Ref(conv.outputs[0])
    assert [p.fqn for p in graph.parameters] == [
        "a.weight", "b.weight", "b.bias", "a.unfolded_norm.weight", "a.unfolded_norm.bias",
    ]  # fmt: skip
    assert [p.value.shape for p in graph.buffers] == [(8,), (8,), ()]


def test_the_last_convolution_keeps_its_bias() -> None:
    assert "b.bias" in {p.fqn for p in unfold_batch_norms(_graph(("w",))).parameters}


def test_it_is_said_with_a_count() -> None:
    (note,) = unfold_batch_norms(_graph(("w",))).notes
    assert note.code == "SM324"
    assert note.count == 1


def test_nothing_to_unfold_is_the_same_graph() -> None:
    graph = _graph(("y", "w"))
    assert unfold_batch_norms(graph) is graph
