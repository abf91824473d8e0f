"""Who keeps memory alive at a moment of a step: what is read off the graph of its liveness (`liveness.graph`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from staticmem.errors import StaticmemError, UsageError, closest
from staticmem.liveness.graph import ROOT, figures, freed_without, retaining, step_graph
from staticmem.liveness.intervals import PEAK, WHOLE, Lifetimes
from staticmem.liveness.keepers import Keepers, watched_step
from staticmem.report.model import ModuleBytes, NoteInfo, OwnerBytes, Report
from staticmem.report.verdict import plural
from staticmem.report.why import SCHEMA, Chain, KeptTensor, Why
from staticmem.studies.let_go import worth_letting_go
from staticmem.studies.study import Study

if TYPE_CHECKING:
    import networkx as nx

BACKWARD_GRAPH = "backward graph"
MOST_MODULES = 30  # for each of which the owners of a graph are counted once
MOST_TENSORS = 5  # that `why` explains, of those that a name stands for


class WatchedStudy:
    """A study whose step has been run again to see who keeps autograd's graph.

    Of a rank it is not known: its trace is made from that of one device.
    """

    def __init__(self, study: Study) -> None:
        self.study = study
        self.lifetimes: Lifetimes = study.lifetimes
        self.keepers: Keepers | None = None
        if not study.request.communicators:
            result, self.keepers = watched_step(study.graph, study.scenario)
            self.lifetimes = Lifetimes(result.trace)

    def graph(self, at: int | str = WHOLE) -> nx.DiGraph:
        """The graph of the whole step, or of a moment, as `liveness.graph.step_graph`."""
        return step_graph(self.study.result.graph, self.lifetimes, self.keepers, at)


def with_owners(study: Study, report: Report) -> Report:
    """The report with who holds what is alive at the peak, and what the code could let go of."""
    graph, notes = WatchedStudy(study).graph(PEAK), report.notes
    if study.graph.recorded is None:
        text = "which variables the code could let go of is known from a recording of it: staticmem export"
        notes = (*notes, NoteInfo("SM288", text, 1))
    rows = worth_letting_go(study)
    return replace(report, owners=owners_of(graph), modules=modules_of(graph), let_go=rows, notes=notes)


def owners_of(graph: nx.DiGraph) -> tuple[OwnerBytes, ...]:
    """The parts of the program that hold what is alive at the moment of a graph, the largest first."""
    parts, kept = _parts(graph), retaining(graph)
    rows: dict[tuple[str, ...], dict[str, dict[str, int]]] = {}
    for node, data in graph.nodes(data=True):
        if data["kind"] != "storage":
            continue
        holders = [a for a, _, kind in graph.in_edges(node, data="kind") if kind == "holds"]
        named = tuple(sorted({parts[holder] for holder in holders}))
        of_graph = (graph.nodes[holder]["module"] for holder in holders if graph.nodes[holder]["kind"] == "autograd")
        module = next(of_graph, data["module"])
        by_category = rows.setdefault(named, {}).setdefault(module, {})
        by_category[data["category"]] = by_category.get(data["category"], 0) + data["bytes"]
    rows_of_owners = []
    for named, modules in rows.items():
        by_module = [ModuleBytes(module, sum(parts.values()), parts) for module, parts in modules.items()]
        by_module.sort(key=lambda row: (-row.bytes, row.module))
        nbytes = retained = sum(row.bytes for row in by_module)
        if len(named) == 1:
            retained = freed_without(graph, [node for node, part in parts.items() if part == named[0]], kept)
        kept_by = _keepers_of_backward(graph, parts) if named == (BACKWARD_GRAPH,) else ()
        rows_of_owners.append(OwnerBytes(" and ".join(named), kept_by, nbytes, retained, tuple(by_module)))
    return tuple(sorted(rows_of_owners, key=lambda row: (-row.bytes, row.owner)))


def _parts(graph: nx.DiGraph) -> dict[str, str]:
    """The part of the program that each node belongs to which holds or keeps something."""
    parts: dict[str, str] = {}
    waiting = [(node, "") for node in graph.successors(ROOT)]
    waiting += [(node, BACKWARD_GRAPH) for node, kind in graph.nodes(data="kind") if kind == "autograd"]
    while waiting:
        node, part = waiting.pop()
        data = graph.nodes[node]
        if data["kind"] == "storage" or node in parts:
            continue
        part = BACKWARD_GRAPH if data["kind"] == "autograd" else part or _find_name(graph, node)
        parts[node] = part
        waiting += [(other, part) for _, other, kind in graph.out_edges(node, data="kind") if kind == "keeps"]
    return parts


def _find_name(graph: nx.DiGraph, node: str) -> str:
    data = graph.nodes[node]
    return f"running kernel {data['name']}" if data["kind"] == "kernel" else str(data["name"])


def _keepers_of_backward(graph: nx.DiGraph, parts: Mapping[str, str]) -> tuple[str, ...]:
    """The parts of the program that refer to the backward graph."""
    keeping = {
        parts[a]
        for a, b, kind in graph.edges(data="kind")
        if kind == "keeps" and a in parts and graph.nodes[b]["kind"] == "autograd"
    }
    return tuple(sorted(keeping - {BACKWARD_GRAPH}))


def modules_of(graph: nx.DiGraph) -> tuple[OwnerBytes, ...]:
    """What the owners of the modules hold that hold most, at the moment of a graph; those that retain most first."""
    owners = {
        node: data["module"]
        for node, data in graph.nodes(data=True)
        if data["kind"] in ("owner", "autograd") and data["module"]
    }
    alone: dict[str, int] = {}
    for node, data in graph.nodes(data=True):
        if data["kind"] == "storage":
            holders = [owners.get(a, "") for a, _, kind in graph.in_edges(node, data="kind") if kind == "holds"]
            shared = zip(*[path.split(".") for path in holders], strict=False)
            for module in _prefixes([names[0] for names in takewhile(lambda names: len({*names}) == 1, shared)]):
                alone[module] = alone.get(module, 0) + data["bytes"]
    kept = retaining(graph)
    held = []
    for module in sorted(alone, key=lambda module: (-alone[module], module))[:MOST_MODULES]:
        gone = [node for node, path in owners.items() if f"{path}.".startswith(f"{module}.")]
        held.append(OwnerBytes(module, (), alone[module], freed_without(graph, gone, kept), ()))
    return tuple(sorted(held, key=lambda row: (-row.retained_bytes, row.owner)))


def _prefixes(names: Sequence[str]) -> Iterator[str]:
    """The modules around the one whose path has these names, and itself."""
    return (".".join(names[: end + 1]) for end in range(len(names)) if names[end])


# -- why -------------------------------------------------------------------------------------------------------------


def why(study: Study, name: str, at: int | str = PEAK) -> Why:
    """Why a tensor, or the tensors of a module, are alive at a moment: the shortest chain of owners for each holder.

    Raises:
        UsageError: no tensor and no module of that name is alive then (SM292), or the step has no such moment (SM291).
    """
    watched = WatchedStudy(study)
    tick = watched.lifetimes.tick_of(at)
    graph = watched.graph(tick)
    named = _storages(graph, name)
    if not named:
        raise _nothing_alive(graph, name, at)
    largest = sorted(named, key=lambda node: (-graph.nodes[node]["bytes"], int(node.split()[1])))
    tensors = tuple(_kept_tensor(graph, node) for node in largest[:MOST_TENSORS])
    phase = next(name for name, start in reversed(watched.lifetimes.trace.phases) if start <= tick)
    nbytes = sum(graph.nodes[node]["bytes"] for node in named)
    return Why(SCHEMA, study.model.path, name, str(at), phase, nbytes, len(named), tensors)


def _storages(graph: nx.DiGraph, name: str) -> list[str]:
    """The storages that a name stands for: tensors of that name, else those of a module and of the modules within."""
    storages = [(node, data) for node, data in graph.nodes(data=True) if data["kind"] == "storage"]
    tensors = [node for node, data in storages if name in (data["name"], f"{data['module']}.{data['name']}")]
    within = f"{name}."
    if tensors:
        return tensors
    of_module = {node for node, data in graph.nodes(data=True) if f"{data.get('module')}.".startswith(within)}
    saved = {b for a, b, kind in graph.edges(data="kind") if kind == "holds" and a in of_module}
    return [node for node, _ in storages if node in of_module or node in saved]


def _nothing_alive(graph: nx.DiGraph, name: str, at: int | str) -> UsageError:
    alive = {str(data[key]) for _, data in graph.nodes(data=True) if data["kind"] == "storage" for key in _NAMES}
    what = f"no tensor and no module '{name}' is alive at {'the peak' if at == PEAK else at}"
    why_not = "A tensor is alive from the call that makes it until the last of its owners lets go."
    hint = closest(name, alive - {""})
    return UsageError(what, why_not, hint or "staticmem analyze --explain-peak lists what is alive.", "SM292")


_NAMES = ("name", "module")


def _kept_tensor(graph: nx.DiGraph, node: str) -> KeptTensor:
    data = graph.nodes[node]
    shape = tuple(int(size) for size in data["shape"].strip("[]").split(", ") if size)
    chains = tuple(_chains(graph, node))
    return KeptTensor(data["name"], data["module"], data["dtype"], shape, data["category"], data["bytes"], chains)


def _chains(graph: nx.DiGraph, storage: str) -> Iterator[Chain]:
    """The shortest chain of owners for each that holds a storage, short chains first."""
    import networkx as nx

    kept = retaining(graph)
    before = nx.single_source_shortest_path(kept, ROOT)
    for holder in sorted(kept.predecessors(storage), key=lambda node: (len(before[node]), node)):
        yield Chain(tuple(_links(graph, before[holder][1:])))


def _links(graph: nx.DiGraph, path: Sequence[str]) -> Iterator[str]:
    """The owners of a path in words; nodes of the backward graph between its first and last are counted."""
    inner = [node for node in path if graph.nodes[node]["kind"] == "autograd"]
    for node in path:
        data = graph.nodes[node]
        if node in inner[1:-1]:
            if node == inner[1]:
                yield plural(len(inner) - 2, "node") + " of the backward graph"
            continue
        where = f" of {data['op']}" if data.get("op") else ""
        yield f"{_find_name(graph, node)}{where}"


def check_liveness(study: Study) -> int:
    """Computes the figures of a step from its graph as well; returns the number of nodes that it has.

    Raises:
        StaticmemError: they differ from those of the report (SM190).
    """
    watched = WatchedStudy(study)
    graph, trace, lifetimes = watched.graph(), watched.lifetimes.trace, study.lifetimes
    from_graph = figures(graph, trace.phases, lifetimes.ticks)
    expected = (
        lifetimes.peak_bytes,
        lifetimes.by_category(lifetimes.peak_tick),
        {name: phase.nbytes for name, phase in lifetimes.phases.items()},
    )
    if (from_graph.peak, from_graph.by_category, from_graph.phases) != expected:
        what = f"the graph of the step has a peak of {from_graph.peak:,} bytes, and the report {lifetimes.peak_bytes:,}"
        hint = "Report it with the file, or with the output of `staticmem trace`."
        raise StaticmemError(what, "Both are computed from the same owners: one is wrong.", hint, "SM190")
    return len(graph)
