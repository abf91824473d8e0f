"""Steps and graphs as a study has them: after the passes that depend on the scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from staticmem.engine import step
from staticmem.engine.step import StepResult
from staticmem.ir.graph import Graph, Op, Value
from staticmem.ir.onnx_graph import Net, Node
from staticmem.passes.pipeline import FX_TEXTS, IN_PLACE, STEP, Pass, Preparation, for_step, run
from staticmem.scenario.step import Scenario


def prepared(graph: Graph, scenario: Scenario) -> Graph:
    """The graph after passes, with nothing in place that it does not say itself."""
    return for_step(graph, replace(scenario, inplace_activations="none"))


def run_step(graph: Graph, scenario: Scenario, policy: str = "expected") -> StepResult:
    """The step over the graph that the passes prepare for it."""
    return step.run_step(prepared(graph, scenario), scenario, policy)


EXPORTED_ONLY = (
    "unfolded batch norms",
    "batch norms in training",
    "custom functions",
    "tied parameters",
    "attention masks",
)


def clean(graph: Graph, training: bool = True) -> Graph:
    """The graph without what only an export has."""
    return run(
        [one for one in STEP if one.name in EXPORTED_ONLY],
        graph,
        Preparation(Scenario(mode="train" if training else "infer")),
    )


def in_place(graph: Graph, policy: str = "auto") -> Graph:
    """The graph with the activations in place that the policy takes to be."""
    return run(IN_PLACE, graph, Preparation(Scenario(inplace_activations=policy)))


TAKEN_APART = ("exponential noise", "losses", "recurrent cells", "statistics")


def restored(
    ops: Sequence[Op],
    outputs: Sequence[str],
    names: Sequence[str] = TAKEN_APART,
    passes: Sequence[Pass] = FX_TEXTS,
    values: Mapping[str, Value] | None = None,
    consts: Mapping[str, Any] | None = None,
    constants: Mapping[str, Value] | None = None,
) -> Graph:
    """The graph of these ops after passes over a file from ONNX. `constants`: what Constant nodes of a trace make."""
    made = dict(constants or {})
    nodes = [Node("Constant", "", name, (), (name,)) for name in made]
    net = Net(
        nodes, (), tuple(outputs), {**(values or {}), **made}, dict(consts or {}), frozenset(), producer="pytorch"
    )
    graph = Graph("g", "onnx", "test", (), (), (), tuple(ops), tuple(outputs), net.values)
    return run([one for one in passes if one.name in names], graph, SimpleNamespace(net=net))


def only(name: str, graph: Graph, scenario: Scenario) -> Graph:
    """The graph after one pass of this name."""
    return run([one for one in STEP if one.name == name], graph, Preparation(scenario))


__all__ = ["clean", "in_place", "only", "prepared", "restored", "run_step"]
