"""The bound of the forward: no step that the file leaves open has more, and none is run where the bound tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from staticmem.engine.step import StepResult, run_step
from staticmem.ir.graph import Graph
from staticmem.scenario.request import Request
from staticmem.scenario.step import Scenario
from staticmem.studies import steps as module
from staticmem.studies.steps import step_of
from staticmem.studies.study import Study
from staticmem.studies.unsaid_training import ForwardBound, held_by_most, held_in_calls

MODELS = Path(__file__).parents[2] / "models"
FILES = ("resnet18.onnx", "mobilenet_v2.onnx", "resnet18.pt2", "seed.onnx")


def study_of(name: str, **options: object) -> Study:
    return Study.open(str(MODELS / name), Request(mode="train", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("options", [{"batch": 4}, {"batch": 2, "amp": "bf16", "accumulate": 2}])
def test_no_end_of_the_band_has_more_in_the_forward(name: str, options: dict[str, object]) -> None:
    study = study_of(name, **options)
    graph = study.graph
    ends = study.band.ends_of_inplace or (graph, graph)
    forward = ForwardBound(graph, study.result.trace, study.lifetimes)
    pairs = enumerate(zip(*(end.ops for end in ends), strict=True))
    open_ops = [index for index, (most, least) in pairs if most.target != least.target]
    bound = forward.most(open_ops, held_by_most(graph))
    looser = forward.most(open_ops, held_in_calls(graph))
    assert bound is not None
    assert looser is not None
    assert looser >= bound
    for end in {id(end): end for end in (graph, *ends)}.values():
        for policy in ("expected", "last-use", "most"):
            _, lifetimes = step_of(study.model, end, study.scenario, policy)
            assert lifetimes.phases["forward"].nbytes <= bound


@pytest.mark.parametrize("name", ["resnet50.onnx", "mobilenet_v2.onnx"])
def test_a_peak_that_nothing_open_moves_takes_one_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def counted(graph: Graph, scenario: Scenario, policy: str) -> StepResult:
        runs.append(policy)
        return run_step(graph, scenario, policy)

    monkeypatch.setattr(module, "run_step", counted)
    study = study_of(name, batch=8, optimizer="adam", freeze="none", checkpoint="none")
    module.kept_steps.clear()
    assert study.live_band is None
    assert runs == ["expected"]


def test_what_is_held_through_the_forward_is_in_the_bound() -> None:
    """Without anything known of what variables hold, it is all that the forward allocates."""
    study = study_of("resnet18.onnx", batch=2)
    trace, lifetimes = study.result.trace, study.lifetimes
    forward = ForwardBound(study.graph, trace, lifetimes)
    start, end = dict(trace.phases)["forward"], trace.marks["forward_end"]
    of_values = set(forward.values.values())
    total = lifetimes.level_before(start) + sum(
        lifetimes.sizes[i] for i in of_values if start <= lifetimes.born[i] < end
    )
    bound = forward.most([], lambda names: {})
    assert bound is not None
    assert bound >= total


def test_an_op_that_saves_less_in_place_has_no_bound() -> None:
    study = study_of("resnet18.onnx", batch=2)
    graph = study.graph
    index = next(index for index, op in enumerate(graph.ops) if op.base.startswith("aten::relu"))
    ops = list(graph.ops)
    ops[index] = ops[index].changed(target="aten::elu_.default")
    forward = ForwardBound(graph.with_targets(tuple(ops)), study.result.trace, study.lifetimes)
    assert not forward.stays_below(study.lifetimes.peak_bytes * 10, [index], lambda names: {})
