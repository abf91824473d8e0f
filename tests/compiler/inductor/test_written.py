"""Graphs of networks written by hand, as real Inductor compiled them: calls and loads of each lowering, and the peaks.

`tests/data/inductor/written.json.gz` says which PyTorch, card and settings.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from planned import plan
from test_recorded import graph_of, peak, rounded

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.inductor import schedule_of
from staticmem.compiler.inductor.lowering import Lowered, Lowering
from staticmem.compiler.plan import Plan
from staticmem.tracing.nodes import PLACEHOLDER, Node

DATA = Path(__file__).parents[2] / "data" / "inductor" / "written.json.gz"


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(DATA.read_bytes()))["graphs"]
    return found


NAMES = sorted(recorded())
# of linear attention the recorded peak has a temporary tensor of a fallback
NETWORKS = sorted({name.split(":")[0] for name in NAMES} - {"linear attention"})


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_loads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide what is realized: more than 30 calls, or more than four loads that are reused."""
    row = recorded()[name]
    graph = graph_of(row["graph"])
    seen: dict[str, list[int]] = {}
    after = Lowering._after

    def watched(self: Lowering, node: Node, result: Lowered) -> Lowered:
        loops = getattr(result, "loops", None)
        if loops is not None:
            seen[node.name] = [loops.op_count, len(loops.reads)]
        return after(self, node, result)

    monkeypatch.setattr(Lowering, "_after", watched)
    backward = name.endswith("backward")
    schedule_of(graph, backward=backward, visible=None if backward else row["visible"])
    compared = {name: calls for name, calls in row["calls"].items() if name in seen}
    assert len(compared) > 0.8 * len(row["calls"])
    assert {name: seen[name] for name in compared if seen[name] != compared[name]} == {}


def compiled(name: str) -> tuple[NodeGraph, Plan, NodeGraph, Plan, dict[int, int]]:
    """Both graphs and plans, and what the backward lets go of: the bytes of its inputs, by their place."""
    row = recorded()[f"{name}: forward"]
    first = graph_of(row["graph"])
    forward = plan(first, visible=row["visible"])
    kept = forward.outputs[row["visible"] :]
    returned = {output.storage for output in forward.outputs[: row["visible"]] if output is not None}
    nodes = first.outputs[row["visible"] :]
    second = graph_of(recorded()[f"{name}: backward"]["graph"])
    inputs = second.placeholders
    made, own, owned = [], [], {}
    for at, (output, node) in enumerate(zip(kept, nodes, strict=True)):
        assert output is not None
        assert node is not None
        if node.target != PLACEHOLDER:
            made.append(inputs[at])
        if output.storage >= forward.inputs and output.storage not in returned:
            own.append(inputs[at])
            if output.storage not in [kept[other].storage for other in range(at)]:  # type: ignore[union-attr]
                owned[at] = rounded(forward.buffers[output.storage - forward.inputs].form)
    owned.update({at: rounded(inputs[at].tensor) for at in range(len(kept), len(inputs))})
    forms = {inputs[at]: output.form for at, output in enumerate(kept) if output is not None}
    backward = plan(second, backward=True, forms=forms, freeable=made, donated=[node for node in own if node in made])
    return first, forward, second, backward, owned


@pytest.mark.parametrize("name", NETWORKS)
def test_peaks(name: str) -> None:
    _, forward, _, backward, owned = compiled(name)
    assert peak(forward, {}) == recorded()[f"{name}: forward"]["peak"]
    assert peak(backward, owned) == recorded()[f"{name}: backward"]["peak"]
