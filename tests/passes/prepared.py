"""Steps and graphs as a study has them: after the passes that depend on the scenario."""

from __future__ import annotations

from staticmem.engine import step
from staticmem.engine.step import StepResult
from staticmem.ir.graph import Graph
from staticmem.passes.pipeline import IN_PLACE, STEP, Asked, for_step, run
from staticmem.scenario.step import Scenario


def run_step(graph: Graph, scenario: Scenario, policy: str = "expected") -> StepResult:
    """The step over the graph that the passes prepare for it."""
    return step.run_step(for_step(graph, scenario), scenario, policy)


def clean(graph: Graph, training: bool = True) -> Graph:
    """The graph without what only an export has."""
    return run(STEP[2:7], graph, Asked(training))


def in_place(graph: Graph, policy: str = "auto") -> Graph:
    """The graph with the activations in place that the policy takes to be."""
    return run(IN_PLACE, graph, Asked(inplace=policy))


def only(name: str, graph: Graph, asked: Asked) -> Graph:
    """The graph after one pass of this name."""
    return run([one for one in STEP if one.name == name], graph, asked)


__all__ = ["clean", "in_place", "only", "run_step"]
