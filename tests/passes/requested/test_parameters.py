"""Which parameters get a gradient is read off the graph; only where ops pass nothing on does backward have to tell."""

from __future__ import annotations

import pytest
from small_graphs import Builder

from staticmem.eager.tensor import Tensor
from staticmem.engine import step
from staticmem.engine.step import StepResult, run_step
from staticmem.ir.graph import Graph, Ref
from staticmem.passes.requested.parameters import values_of_loss
from staticmem.scenario.step import Scenario


def two_branches(*between: str) -> Graph:
    """`x * a` is the output; `x * b` is one too, or joins the first through the ops `between`."""
    b = Builder(x=(4, 8))
    first = b.call("mul.Tensor", Ref("x"), b.parameter("a", 8))
    second = b.call("mul.Tensor", Ref("x"), b.parameter("b", 8))
    for target in between:
        second = b.call(target, second)
    return b.graph(b.call("add.Tensor", first, second) if between else first, second)


def runs(graph: Graph, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> tuple[StepResult, int]:
    """The step, and how many times it was run."""
    count = 0

    class Counted(step.StepRun):
        def _place_model(self) -> list[Tensor]:
            nonlocal count
            count += 1
            return super()._place_model()

    monkeypatch.setattr(step, "StepRun", Counted)
    result = run_step(graph, scenario)
    return result, count


def states(result: StepResult) -> set[str]:
    return {buffer.name for buffer in result.trace.buffers if buffer.category in ("optimizer_state", "gradient")}


@pytest.mark.parametrize(
    "scenario", [Scenario(mode="train", optimizer="adam"), Scenario(mode="train", optimizer="sgd", set_to_none=False)]
)
def test_a_branch_that_the_loss_does_not_depend_on_is_told_without_a_run(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = two_branches()
    assert not {"b"} & values_of_loss(graph, graph.outputs[:1])
    result, count = runs(graph, scenario, monkeypatch)
    assert (result.trained, count) == (1, 1)
    assert states(result)
    assert not any(name.startswith("b.") for name in states(result))


@pytest.mark.parametrize(
    "scenario", [Scenario(mode="train", optimizer="adam"), Scenario(mode="train", optimizer="sgd", set_to_none=False)]
)
def test_an_op_that_passes_no_gradient_on_is_told_by_backward(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = two_branches("detach")
    assert {"a", "b"} <= values_of_loss(graph, graph.outputs[:1])
    result, count = runs(graph, scenario, monkeypatch)
    assert (result.trained, count) == (1, 2)
    assert states(result)
    assert not any(name.startswith("b.") for name in states(result))


def test_what_is_written_in_place_may_be_seen_through_a_view() -> None:
    b = Builder(x=(4, 8))
    canvas = b.call("mul.Tensor", Ref("x"), 2.0)
    b.call("copy_", b.call("select.int", canvas, 0, 0), b.parameter("w", 8))
    graph = b.graph(canvas)
    assert "w" in values_of_loss(graph, graph.outputs[:1])
