"""Plans of other kernels, which begin at the schedule of the expected ones."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from staticmem.compiler.plan import Kernels
from staticmem.compiler.region import Graphs
from staticmem.engine.compiled_step import CompiledRegions
from staticmem.scenario.request import Request
from staticmem.studies import Study

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_what_was_planned_before_changes_nothing(mode: str) -> None:
    study = Study.open(str(ROOT / "models" / "resnet18.pt2"), Request(batch=2, mode=mode, compile=True))
    kept = [kept for kept in study.result.graph.derived.values() if isinstance(kept, CompiledRegions)]
    ((stretch,),) = (region.calls for region in kept[-1].regions)
    graphs = stretch.call.graphs
    assert isinstance(graphs, Graphs)
    made = {kernels: graphs.plans(kernels) for kernels in get_args(Kernels)}
    assert made["expected"] == (stretch.call.forward, stretch.call.backward)
    assert made["apart"][0] != made["expected"][0]
    for kernels, plans in made.items():
        alone = Graphs(graphs.joint, stretch.call.outputs, graphs.dynamic, graphs.once, graphs.budget)
        assert alone.plans(kernels) == plans
