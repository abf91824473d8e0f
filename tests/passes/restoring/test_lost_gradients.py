"""What training can save where a file has no gradient."""

from __future__ import annotations

from dataclasses import replace

from small_graphs import Builder

from staticmem.engine.step import run_step
from staticmem.ir.dtypes import float32
from staticmem.ir.graph import Edit, Frame, Graph, Note, Parameter, Ref
from staticmem.liveness import Lifetimes
from staticmem.passes.restoring.custom_functions import ends_of_functions, has_functions, steps_of, with_least_gradients
from staticmem.scenario.step import Scenario

X, W = Ref("x"), Ref("w")

TRAIN = Scenario(mode="train")


def trained(graph: Graph) -> Graph:
    """With `w` as a parameter."""
    x, w = graph.inputs
    return replace(graph, inputs=(x,), parameters=(Parameter(w, "w"),))


def spikes(cls: str = "net.Spike") -> Graph:
    b = Builder(x=(64, 64), w=(64, 64))
    current = b.call("mm", X, W, name="current")
    above = b.call("gt.Scalar", current, 0, name="above")
    spike = b.call("to.dtype", above, float32, name="spike")
    graph = trained(b.graph(b.call("mm", spike, W, name="out")))
    return replace(graph, ops=tuple(replace(op, modules=(Frame("", cls),)) for op in graph.ops))


def peak(graph: Graph) -> int:
    scenario = Scenario(mode="train", optimizer="sgd", loss="mean")
    return Lifetimes(run_step(graph, scenario).trace).peak_bytes


def test_a_comparison_may_be_a_function_with_a_backward_of_its_own() -> None:
    graph = spikes()
    assert has_functions(graph)
    step = steps_of(graph)[2]
    assert (step.result, step.inputs, step.between) == ("spike", ("current",), ("above", "spike"))
    ends = ends_of_functions(graph, TRAIN)
    assert ends is not None
    least, most = ends
    assert least.ops == graph.ops
    assert most.ops[3].args == (Ref("spike"), (Ref("current"),), (Ref("current"), Ref("above"), Ref("spike")), 3)
    assert most.ops[4].args[0] == Ref("spike::function")
    assert peak(least) < peak(most)


def test_published_code_and_masks_of_inputs_are_as_they_are_written() -> None:
    assert not has_functions(spikes("transformers.models.vits.Vits"))
    b = Builder(x=(64, 64), w=(64, 64))
    mask = b.call("to.dtype", b.call("gt.Scalar", X, 0), float32)
    assert not has_functions(trained(b.graph(b.call("mm", mask, W, name="out"))))


def test_a_region_that_is_taken_for_no_grad_may_have_gradients() -> None:
    b = Builder(x=(64, 64), w=(64, 64))
    hidden = b.call("relu", b.call("mm", X, W))
    graph = trained(b.graph(b.call("mm", hidden, W, name="out")))
    first, second, third = graph.ops
    graph = replace(graph, ops=(replace(first, grad=False), replace(second, grad=False), third))
    assert ends_of_functions(graph, TRAIN) is None  # the file says so itself
    graph = graph.with_edit(Edit("regions without grad", 3, 3, 2, (Note("assumption", "SM262", "", 2),)))
    ends = ends_of_functions(graph, TRAIN)
    assert ends is not None
    assert [op.grad for op in ends[0].ops] == [False, False, True]
    assert [(op.grad, op.amp) for op in ends[1].ops] == [(True, False), (True, False), (True, True)]
    assert peak(ends[0]) < peak(ends[1])


def estimator(last: str = "+") -> Graph:
    b = Builder(x=(64, 64))
    z = b.call("mm", X, b.parameter("net.weight", 64, 64), name="z")
    z = b.call("mul.Tensor", z, b.parameter("net.beta", 64, 64), name="scaled")
    difference = b.call("sub.Tensor", b.call("relu", z, name="q"), z, name="difference")
    operands = (z, difference) if last == "+" else (X, difference)
    return replace(b.graph(b.call("add.Tensor", *operands, name="out")), format="onnx")


def test_files_without_detach_may_have_less_gradients() -> None:
    graph = estimator()
    least = with_least_gradients(graph)
    assert least is not None
    assert [op.name for op in least.ops if not op.grad] == ["difference"]
    assert [p.fqn for p in least.parameters if not p.trainable] == ["net.beta"]
    assert with_least_gradients(replace(graph, format="pt2")) is None
    other = with_least_gradients(estimator("another operand"))
    assert other is not None
    assert all(op.grad for op in other.ops)
