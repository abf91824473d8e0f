"""Steps of graphs, of which the last few are kept: a study, both ends of its band, and what it is compared with."""

from __future__ import annotations

from staticmem.engine.step import StepResult, run_step
from staticmem.frontends.recent import MOST_OPS, Recent
from staticmem.ir.graph import Graph
from staticmem.ir.model_file import ModelFile
from staticmem.liveness import Lifetimes
from staticmem.scenario.step import Scenario

STEPS = 4  # kept at a time: a scenario with both ends of its band, and the scenario that it is compared with

Step = tuple[StepResult, Lifetimes]
kept_steps: Recent[tuple[Graph, Step]] = Recent(STEPS)  # by identity of the graph, which is kept too, and scenario


OF_SIZES = ("SM118", "SM156")  # errors of sizes that do not fit
JUDGED = (*OF_SIZES, "SM119", "SM122")  # errors of graphs that do not evaluate: they say something of the file


def step_of(model: ModelFile, graph: Graph, scenario: Scenario, policy: str = "expected") -> Step:
    """The step of a graph of `model`, and when its buffers live; `policy` as in `run_step`.

    The search for a card asks about one step many times: cards, settings of the allocator and versions of cuDNN change
    what a replay does, never the step; versions of PyTorch change it where `version.STEP_CHANGED` says so. A step is
    kept only while its graph is (`frontends.recent`), so that it does not hold a graph that nothing else needs. Kept
    steps are never changed
    (`tests/studies/test_study_steps.py`).
    """
    key = (id(graph), scenario, policy)
    kept = kept_steps.get(key)
    if kept is not None:
        return kept[1]
    result = run_step(graph, scenario, policy)
    step = result, Lifetimes(result.trace)
    if model.graphs is not None and len(graph.ops) <= MOST_OPS:
        kept_steps.put(key, (graph, step))
    return step
