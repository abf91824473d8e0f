"""The steps that ran last in this process, with their lifetimes.

Who looks for a card asks about one step many times: cards, settings of the allocator and versions of PyTorch and cuDNN
change what a replay does, never the step. Only steps of graphs that are kept themselves are (`frontends.recent`), so
nothing is held for long that nobody else holds. What is kept is never changed (`tests/studies/test_steps.py`).
"""

from __future__ import annotations

from functools import cached_property

from staticmem.engine.step import StepResult, run_step
from staticmem.frontends.recent import MOST_OPS, Recent
from staticmem.ir.graph import Graph
from staticmem.ir.model_file import ModelFile
from staticmem.liveness import Lifetimes, liveness
from staticmem.scenario.step import Scenario

STEPS = 4  # a scenario with both ends of its band, and the scenario that it is compared with


class Step:
    """A step of a graph. `lifetimes` are worked out when they are first asked for."""

    def __init__(self, graph: Graph, scenario: Scenario, policy: str) -> None:
        self.graph = graph  # as long as it lives, no other graph has its identity
        self.result: StepResult = run_step(graph, scenario, policy)

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """When each buffer lives."""
        return liveness(self.result.trace)


known: Recent[Step] = Recent(STEPS)


def step_of(model: ModelFile, graph: Graph, scenario: Scenario, policy: str = "expected") -> Step:
    """The step of a graph of `model`; `policy` as in `run_step`."""
    if getattr(model, "graphs", None) is None or len(graph.ops) > MOST_OPS:
        return Step(graph, scenario, policy)
    key = (id(graph), scenario, policy)
    step = known.get(key)
    if step is None:
        step = Step(graph, scenario, policy)
        known.put(key, step)
    return step


__all__ = ["Step", "known", "step_of"]
