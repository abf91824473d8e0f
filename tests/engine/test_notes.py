"""What the file or the loss leaves out is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prepared import run_step
from small_graphs import Builder

from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Parameter, Ref, Value
from staticmem.scenario.step import Scenario

SAID = ("SM331", "SM332", "SM333", "SM341")


def codes(graph: Graph, loss: str = "mean") -> list[str]:
    scenario = Scenario(mode="train", optimizer="sgd", loss=loss)
    return [note.code for note in run_step(graph, scenario).notes if note.code in SAID]


def parameter(name: str, *shape: int) -> Parameter:
    return Parameter(Value(name, dtypes.float32, shape), name)


def two_outputs(first: str = "relu") -> Graph:
    b = Builder(x=(4, 8))
    hidden = b.call("mul", Ref("x"), Ref("w"))
    one, two = b.call(first, hidden), b.call("tanh", hidden)
    graph: Graph = b.graph(one)
    return replace(graph, parameters=(parameter("w", 8),), outputs=(one.name, two.name))


def test_a_loss_of_one_of_two_outputs_is_said() -> None:
    assert codes(two_outputs()) == ["SM331"]
    (note,) = [n for n in run_step(two_outputs(), Scenario(mode="train", loss="mean")).notes if n.code == "SM331"]
    assert "[4, 8]" in note.text


def test_a_first_output_that_is_the_loss_is_not() -> None:
    assert codes(two_outputs("sum")) == []
    assert codes(two_outputs(), loss="none") == []


def test_one_output_and_inference_are_not() -> None:
    graph = two_outputs()
    assert codes(replace(graph, outputs=graph.outputs[:1])) == []
    assert [n.code for n in run_step(graph, Scenario()).notes if n.code in SAID] == []


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_parameters_that_nothing_reads_are_said(mode: str) -> None:
    graph = two_outputs()
    graph = replace(graph, parameters=(*graph.parameters, parameter("head.weight", 3, 3)), outputs=graph.outputs[:1])
    notes = [n for n in run_step(graph, Scenario(mode=mode, loss="mean")).notes if n.code in SAID]
    assert [n.code for n in notes] == ["SM332"]
    assert "head.weight" in notes[0].text
    assert ("gradient" in notes[0].text) is (mode == "train")


def test_names_that_no_layer_has_may_be_buffers() -> None:
    graph = two_outputs()
    named = (parameter("w", 8), parameter("fc.weight", 8), parameter("pe.pe", 8), parameter("onnx::MatMul_7", 8))
    graph = replace(graph, parameters=named, outputs=graph.outputs[:1], format="onnx")
    (note,) = [n for n in run_step(graph, Scenario(mode="train", loss="mean")).notes if n.code == "SM333"]
    assert "w, pe.pe. " in note.text
    assert note.count == 2
    frozen = run_step(graph, Scenario(mode="train", loss="mean", freeze="^(w|pe)")).notes
    assert "SM333" not in [n.code for n in frozen]


def test_an_onnx_file_does_not_say_what_is_frozen() -> None:
    graph = two_outputs()
    graph = replace(graph, outputs=graph.outputs[:1])
    for format, freeze, said in (("onnx", None, True), ("onnx", "w", False), ("pt2", None, False)):
        notes = run_step(replace(graph, format=format), Scenario(mode="train", loss="mean", freeze=freeze)).notes
        assert ("SM334" in [n.code for n in notes]) is said


@pytest.mark.parametrize(("cls", "no_grad"), [("", True), ("m.Block", False)])
def test_where_gradients_stop_is_not_in_the_file(cls: str, no_grad: bool) -> None:
    """The dynamo exporter, which writes classes, keeps regions of no_grad in lines."""
    graph = two_outputs()
    ops = tuple(replace(op, modules=(Frame("block", cls),)) for op in graph.ops)
    graph = replace(graph, ops=ops, outputs=graph.outputs[:1], format="onnx")
    (note,) = [n for n in run_step(graph, Scenario(mode="train", loss="mean")).notes if n.code == "SM334"]
    assert "detach()" in note.text
    assert ("no_grad()" in note.text) is no_grad


@pytest.mark.parametrize("cls", ["activation.MultiheadAttention", "transformer.TransformerEncoderLayer"])
def test_a_path_that_only_evaluation_has_is_said(cls: str) -> None:
    graph = two_outputs()
    frame = Frame("encoder", f"torch.nn.modules.{cls}")
    graph = replace(graph, ops=tuple(replace(op, modules=(frame,)) for op in graph.ops), outputs=graph.outputs[:1])
    said = [n.count for n in run_step(graph, Scenario()).notes if n.code == "SM342"]
    assert said == [1]
    assert "SM342" not in [n.code for n in run_step(graph, Scenario(mode="train", loss="mean")).notes]
