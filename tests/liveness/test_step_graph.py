"""The graph of a step: the same figures as from arrays, and what an owner dominates is what goes with it."""

from __future__ import annotations

import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_intervals import traces

import staticmem
from staticmem.cli.main import main
from staticmem.eager.trace import Trace
from staticmem.errors import StaticmemError, UsageError
from staticmem.ir.graph import Graph
from staticmem.liveness import Lifetimes
from staticmem.liveness.graph import ROOT, dominators, figures, folded, freed_without, retaining, step_graph
from staticmem.liveness.keepers import watched_step
from staticmem.report.formats import Formats
from staticmem.report.text import PLAIN
from staticmem.scenario.request import Request
from staticmem.studies import Study
from staticmem.studies.owners import BACKWARD_GRAPH, WatchedStudy, modules_of, owners_of, why

ROOT_FOLDER = Path(__file__).parents[2]
MODELS = ROOT_FOLDER / "models"
GRAPHS = ROOT_FOLDER / "tests" / "data" / "graphs"
PATHS = (
    *sorted(MODELS.glob("*.pt2")),
    *sorted(MODELS.glob("*.onnx")),
    GRAPHS / "mlp_blocks.pt2",
    GRAPHS / "bert-base.pt2",
)
SCENARIOS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "infer": {"mode": "infer"},
    "amp": {"optimizer": "sgd", "momentum": 0.9, "amp": "bf16"},
    "accumulate": {"optimizer": "adamw", "accumulate": 2},
    "compile": {"optimizer": "adam", "compile": ("all",)},
    "offload": {"optimizer": "adam", "offload_activations": "pinned"},
}
LARGEST = 10  # owners of each moment that are removed


def sizes(path: Path) -> dict[str, Any]:
    return {"resolution": (224, 224)} if "_hw" in path.name else {}


@cache
def watched(path: Path, scenario: str) -> WatchedStudy:
    return WatchedStudy(Study.open(str(path), Request(batch=2, **sizes(path), **SCENARIOS[scenario])))


SEEN = ("seed.pt2", "resnet18.pt2", "resnet18.onnx", "mlp_blocks.pt2")  # always; the others with --exhaustive
each = pytest.mark.parametrize(
    ("path", "scenario"),
    [
        pytest.param(path, name, id=f"{path.name}-{name}", marks=[] if path.name in SEEN else pytest.mark.exhaustive)
        for path in PATHS
        for name in SCENARIOS
    ],
)


def check_figures(graph: nx.DiGraph, trace: Trace) -> None:
    lifetimes = Lifetimes(trace)
    found = figures(graph, trace.phases, trace.ticks)
    assert found.peak == lifetimes.peak_bytes
    assert found.by_category == lifetimes.by_category(lifetimes.peak_tick)
    assert found.phases == {name: phase.nbytes for name, phase in lifetimes.phases.items()}
    assert found.at_end == lifetimes.by_category(trace.ticks - 1)


@each
def test_graph_and_arrays_agree(path: Path, scenario: str) -> None:
    """A step that is watched has the trace of one that is not, and the graph of it the same figures."""
    step = watched(path, scenario)
    trace, usual = step.lifetimes.trace, step.study.result.trace
    assert (trace.ticks, trace.buffers, trace.holds) == (usual.ticks, usual.buffers, usual.holds)
    check_figures(step.graph(), step.lifetimes.trace)


@each
def test_what_an_owner_retains_is_freed_without_it(path: Path, scenario: str) -> None:
    step = watched(path, scenario)
    moments: list[int | str] = ["peak", *step.lifetimes.phases, step.lifetimes.ticks // 3]
    for at in moments:
        graph = step.graph(at)
        found = dominators(graph)
        live = step.lifetimes.live[step.lifetimes.tick_of(at)]
        assert found[ROOT].retained == live
        owners = [node for node in found if node != ROOT]
        kept = retaining(graph)
        for node in sorted(owners, key=lambda node: -found[node].retained)[:LARGEST]:
            assert freed_without(graph, [node], kept) == found[node].retained
        rows = owners_of(graph)
        assert sum(row.bytes for row in rows) == live
        assert all(sum(module.bytes for module in row.by_module) == row.bytes for row in rows)
        for module in modules_of(graph)[:LARGEST]:
            within = [n for n, d in graph.nodes(data=True) if is_within(d, module.owner)]
            assert freed_without(graph, within) == module.retained_bytes


def is_within(data: dict[str, Any], module: str) -> bool:
    return data["kind"] in ("owner", "autograd") and f"{data['module']}.".startswith(f"{module}.")


@given(traces())
def test_random_traces(trace: Trace) -> None:
    lifetimes = Lifetimes(trace)
    if not trace.ticks:
        return
    graph = Graph("empty", "pt2", "", (), (), (), (), ())
    check_figures(step_graph(graph, lifetimes), trace)
    for tick in range(0, trace.ticks, 5):
        at = step_graph(graph, lifetimes, at=tick)
        found = dominators(at)
        assert found[ROOT].retained == lifetimes.live[tick]
        assert all(freed_without(at, [node]) == row.retained for node, row in found.items() if node != ROOT)


@st.composite
def owners(draw: st.DrawFn) -> nx.DiGraph:
    """A graph of a moment: owners that keep later ones and hold storages."""
    graph = nx.DiGraph()
    graph.add_node(ROOT, kind="root")
    names = [ROOT, *(f"autograd {number}" for number in range(draw(st.integers(1, 8))))]
    for place, name in enumerate(names[1:], 1):
        graph.add_node(name, kind="autograd")
        for keeper in draw(st.sets(st.sampled_from(names[:place]), min_size=1, max_size=3)):
            graph.add_edge(keeper, name, kind="keeps")
    for number in range(draw(st.integers(0, 8))):
        graph.add_node(f"storage {number}", kind="storage", bytes=512 * draw(st.integers(0, 9)))
        for holder in draw(st.sets(st.sampled_from(names[1:]), min_size=1, max_size=3)):
            graph.add_edge(holder, f"storage {number}", kind="holds")
    return graph


@given(owners())
def test_random_owners(graph: nx.DiGraph) -> None:
    found = dominators(graph)
    for node, row in found.items():
        if node != ROOT:
            assert freed_without(graph, [node]) == row.retained
    assert sum(row.alone for row in found.values()) == found[ROOT].retained


def test_the_loss_keeps_the_backward_graph() -> None:
    """With outputs that the loop drops, the variable of the loss is all that keeps what the forward has saved."""
    request = Request(batch=2, optimizer="sgd", outputs="dropped")
    step = WatchedStudy(Study.open(str(GRAPHS / "mlp_blocks.pt2"), request))
    graph = step.graph(step.lifetimes.trace.marks["forward_end"])
    rows = {row.owner: row for row in owners_of(graph)}
    assert rows[BACKWARD_GRAPH].kept_by == ("loss",)
    assert rows["loss"].retained_bytes >= rows[BACKWARD_GRAPH].bytes > 0
    nodes = [data for _, data in graph.nodes(data=True) if data["kind"] == "autograd"]
    assert len(nodes) == len(step.keepers.nodes if step.keepers else ())


def test_a_checkpoint_is_kept_by_its_nodes() -> None:
    """What a checkpoint saves is freed with the backward graph, whose nodes run it again."""
    request = Request(batch=2, optimizer="sgd", checkpoint=("Block",))
    step = WatchedStudy(Study.open(str(GRAPHS / "mlp_blocks.pt2"), request))
    graph = step.graph(step.lifetimes.trace.marks["forward_end"])
    saved = [b for a, b, kind in graph.edges(data="kind") if kind == "holds" and a.startswith("owner checkpoint")]
    assert saved
    backward = [node for node, data in graph.nodes(data=True) if data["kind"] == "autograd"]
    checkpoints = [node for node in graph if node.startswith("owner checkpoint")]
    assert all(any(a in backward for a, _ in graph.in_edges(node)) for node in checkpoints)


def test_kernels_read_what_their_op_reads() -> None:
    graph = watched(MODELS / "seed.pt2", "adam").graph()
    kinds = {kind for _, _, kind in graph.edges(data="kind")}
    assert kinds == {"allocates", "reads", "holds", "keeps"}
    for kernel, storage, kind in graph.edges(data="kind"):
        if kind == "reads":
            assert graph.nodes[kernel]["kind"] == "kernel"
            allocator = next(a for a, _, k in graph.in_edges(storage, data="kind") if k == "allocates")
            assert int(allocator.split()[1]) < int(kernel.split()[1])


def test_a_rank_has_owners_without_nodes() -> None:
    request = Request(batch=2, optimizer="adam", parallel="fsdp", devices=2)
    step = WatchedStudy(Study.open(str(GRAPHS / "mlp_blocks.pt2"), request))
    graph = step.graph("peak")
    assert "autograd" not in dict(graph.nodes(data="kind")).values()
    assert dominators(graph)[ROOT].retained == step.study.lifetimes.peak_bytes


def test_moments_that_there_are_not() -> None:
    step = watched(MODELS / "seed.pt2", "infer")
    for at in ("optimizer", "nonsense", -1, step.lifetimes.ticks, True):
        with pytest.raises(UsageError) as caught:
            step.graph(at)
        assert caught.value.code == "SM291"


def test_a_graph_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staticmem.liveness.graph.MOST_NODES", 100)
    step = watched(MODELS / "seed.pt2", "adam")
    with pytest.raises(UsageError) as caught:
        step.graph()
    assert caught.value.code == "SM293"
    assert len(step.graph("peak")) > 10


def test_folding_loses_no_bytes() -> None:
    graph = watched(MODELS / "resnet18.pt2", "adam").graph("peak")
    small = folded(graph)
    assert len(small) < len(graph) / 3
    assert sum(nbytes for _, nbytes in small.nodes(data="bytes", default=0)) == sum(
        nbytes for _, nbytes in graph.nodes(data="bytes", default=0)
    )


@pytest.mark.parametrize("fold", [False, True])
def test_other_tools_read_what_is_written(fold: bool) -> None:
    graph = watched(MODELS / "seed.pt2", "adam").graph("peak")
    graph = folded(graph) if fold else graph
    formats = Formats("graph")
    rendered: dict[str, Any] = {name: formats[name].render(graph, PLAIN) for name in formats}
    for read in (nx.read_graphml(io.BytesIO(rendered["graphml"])), nx.read_gexf(io.BytesIO(rendered["gexf"]))):
        assert set(read) == set(graph)
        assert set(read.edges) == set(graph.edges)
    data = json.loads(rendered["json"])
    assert {node["id"] for node in data["nodes"]} == set(graph)
    assert {(link["source"], link["target"]) for link in data["links"]} == set(graph.edges)
    dot = rendered["dot"]
    assert dot.count(" -> ") == graph.number_of_edges()
    assert "digraph" in dot
    assert f"{len(graph):,} nodes" in rendered["table"]


def test_names_of_a_file_do_not_break_what_is_written() -> None:
    """Characters that XML cannot hold, and quotes and backslashes in the language of Graphviz."""
    graph = nx.DiGraph(moment="peak", model='a"\x1b')
    graph.add_node(ROOT, kind="root", name=ROOT)
    graph.add_node('storage "0\\', kind="storage", name='x\x00\n"; evil -> y; "\\', bytes=512)
    graph.add_edge(ROOT, 'storage "0\\', kind="holds", start=0, end=1)
    formats = Formats("graph")
    rendered: dict[str, Any] = {name: formats[name].render(graph, PLAIN) for name in formats}
    assert len(nx.read_graphml(io.BytesIO(rendered["graphml"]))) == 2
    assert len(nx.read_gexf(io.BytesIO(rendered["gexf"]))) == 2
    assert {node["id"] for node in json.loads(rendered["json"])["nodes"]} == set(graph)
    strings = re.sub(r'"(?:[^"\\]|\\.)*"', "S", rendered["dot"])
    assert "evil" not in strings
    assert strings.count("\n") == rendered["dot"].count("\n")


def test_chains_of_owners() -> None:
    study = Study.open(str(MODELS / "resnet18.pt2"), Request(batch=2, optimizer="sgd", amp="bf16"))
    found = why(study, "layer1.0.conv1", "backward")
    assert found.phase == "backward"
    assert found.count == len(found.tensors) + max(found.count - 5, 0)
    chains = [chain.links for tensor in found.tensors for chain in tensor.chains]
    assert any("nodes of the backward graph" in link for links in chains for link in links)
    assert ("parameters and buffers",) in chains
    with pytest.raises(UsageError) as caught:
        why(study, "layer1.0.conv11", "backward")
    assert caught.value.code == "SM292"
    assert "layer1.0.conv1" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        why(study, "nothing like it", "backward")
    assert "--explain-peak lists what is alive" in str(caught.value)  # and not all names that there are


def test_in_python() -> None:
    report = staticmem.analyze(str(MODELS / "seed.pt2"), batch=2, optimizer="adam", explain_peak=True)
    assert sum(row.bytes for row in report.owners) == report.peak.live_bytes
    graph = report.liveness_graph("peak")
    assert isinstance(graph, nx.DiGraph)
    assert dominators(graph)[ROOT].retained == report.peak.live_bytes
    assert staticmem.analyze(str(MODELS / "seed.pt2")).owners == ()


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    step = [str(MODELS / "seed.pt2"), "--batch", "2", "--optimizer", "adam", "--no-config"]
    assert main(["analyze", *step, "--explain-peak"]) == 0
    assert "Who holds what is alive at the peak" in capsys.readouterr().out
    assert main(["analyze", *step, "--check-liveness", "-q"]) == 0
    assert "has the same figures" in capsys.readouterr().err
    assert main(["why", step[0], "0", *step[1:]]) in (0, 2)
    capsys.readouterr()
    out = tmp_path / "step.graphml"
    assert main(["graph", *step, "--at", "whole", "-o", str(out)]) == 0
    assert len(nx.read_graphml(out)) > 100


def test_figures_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from staticmem.studies import owners as studied

    study = Study.open(str(MODELS / "seed.pt2"), Request(optimizer="adam"))
    assert studied.check_liveness(study) > 0
    monkeypatch.setattr(studied, "figures", lambda *_: figures(nx.DiGraph(), [("forward", 0)], 1))
    with pytest.raises(StaticmemError):
        studied.check_liveness(study)


def test_watching_leaves_records_of_calls_alone() -> None:
    """What a watched run does is not repeated by others, and it repeats nothing."""
    study = Study.open(str(MODELS / "seed.pt2"), Request(batch=4, optimizer="adam"))
    _, keepers = watched_step(study.graph, study.scenario)
    assert {type(node).__name__ for node in keepers.nodes} == {"AutogradNode"}
    assert sum(len(node.holds) for node in keepers.nodes) > 0
