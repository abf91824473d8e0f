"""A step as a NetworkX graph: who allocated each buffer, who reads it, who holds it, and who keeps the owner.

Nodes have a `kind`:

- `storage`: bytes on the device (`bytes`, rounded up to 512), with `dtype`, `shape`, `category`, `name`, `module`,
  `phase`, `birth` and `death` in ticks
- `kernel`: a call that allocates, with `name`, `phase` and the `op` of the graph that it ran for
- `owner`: who holds storages: a variable, the frame of a module, `.grad`, the optimizer, autocast's cache, the loop
- `autograd`: a node of autograd's graph, which holds what it has saved
- `root`: the process

So have edges: a kernel `allocates` and `reads` storages, an owner `holds` them, and `keeps` is between owners:
an autograd node is kept by the next one, the last by the variable of the loss; a module's frame by its caller's.

`step_graph` is of the whole step or cut to one moment. Of a moment, `dominators` says what each owner holds alone and
what would be freed with it: a storage is freed when nothing reaches it from the process any more, so what an owner
dominates is what goes with it. `docs/adr/0004` has why intervals do not come from this graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from staticmem.eager.reasons import Reason
from staticmem.eager.trace import Hold
from staticmem.errors import UsageError
from staticmem.ir.graph import Graph
from staticmem.ir.record import record
from staticmem.liveness.intervals import WHOLE, Lifetimes
from staticmem.liveness.keepers import Keepers, OwnerKey
from staticmem.liveness.why import module_of, module_of_op, op_place, short

if TYPE_CHECKING:
    import networkx as nx

ROOT = "process"
RETAINING = ("holds", "keeps")  # kinds of edges through which a storage stays alive
MOST_NODES = 2_000_000  # of a graph: NetworkX takes about 0.5 KiB for a node or an edge (docs/adr/0004)

_BATCH = "batch"
_OF_LOOP = ("loss", "outputs", _BATCH)  # variables of the loop around the model


@record(frozen=True)
class Dominated:
    """What one node of a step's graph keeps alive at a moment, in bytes.

    `alone` are the storages that nothing else holds, and `retained` those that would be freed with it: these, and those
    of the owners that it alone keeps. `parent` is its immediate dominator.
    """

    parent: str
    alone: int
    retained: int


def step_graph(graph: Graph, lifetimes: Lifetimes, keepers: Keepers | None = None, at: int | str = WHOLE) -> nx.DiGraph:
    """The step as a `networkx.DiGraph`; of its attributes see the head of this module.

    Args:
        graph: the graph that the step has run.
        lifetimes: of its buffers.
        keepers: of `watched_step`; without it, nodes of autograd are not known and what they save is held by owners.
        at: a moment: a tick, "peak", or the name of a phase, which stands for its peak; "whole": the whole step.

    Raises:
        UsageError: there is no such phase or tick (SM291), or the whole step has too many nodes (SM293).
    """
    tick = None if at == WHOLE else lifetimes.tick_of(at)
    trace = lifetimes.trace
    if tick is None and len(trace.buffers) + len(trace.kernels) + len(trace.holds) > MOST_NODES:
        what = f"the graph of this step would have more than {MOST_NODES:,} nodes and edges"
        raise UsageError(what, "The whole step is in it.", "Cut it to a moment: at='peak', or --at peak.", "SM293")
    return _Builder(graph, lifetimes, keepers, tick).build()


class _Builder:
    """Builds the graph of a step, or of one tick of it."""

    def __init__(self, graph: Graph, lifetimes: Lifetimes, keepers: Keepers | None, tick: int | None) -> None:
        import networkx as nx

        self.ops, self.lifetimes, self.tick = graph, lifetimes, tick
        self.trace = lifetimes.trace
        self.keepers = keepers or Keepers((), {})
        moment = WHOLE if tick is None else tick
        self.result = nx.DiGraph(model=graph.name, moment=moment, ticks=lifetimes.ticks)
        self.owners: dict[OwnerKey, str] = {}  # those that have a node, by their keys
        self.saved_by = {hold: number for number, node in enumerate(self.keepers.nodes) for hold in node.holds}

    def build(self) -> nx.DiGraph:
        self.result.add_node(ROOT, kind="root", name=ROOT)
        ids: Iterable[int] = range(len(self.trace.buffers))
        if self.tick is not None:
            ids = self.lifetimes.alive_ids(self.tick)
        present = list(ids)
        self._add_storages(present)
        self._add_autograd()
        self._add_holds()
        self._keep_temporaries(present)
        self._add_keepers()
        self._add_reads()
        return self.result

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _add_storages(self, ids: Sequence[int]) -> None:
        buffers, kernels = self.trace.buffers, self.trace.kernels
        died, sizes = self.lifetimes.died, self.lifetimes.sizes
        for buffer in buffers.pick(ids):
            kernel = kernels[buffer.kernel]
            self.result.add_node(
                _storage(buffer.id),
                kind="storage",
                name=buffer.name or short(kernel.name),
                bytes=sizes[buffer.id],
                dtype=str(buffer.dtype),
                shape=str(list(buffer.shape)),
                category=buffer.category,
                module=module_of(self.ops, buffer.category, buffer.name, kernel.op),
                phase=kernel.phase,
                birth=buffer.born,
                death=died[buffer.id],
            )
            made_by = self._kernel(buffer.kernel)
            self.result.add_edge(made_by, _storage(buffer.id), kind="allocates", start=buffer.born, end=buffer.born + 1)

    def _kernel(self, index: int) -> str:
        name = f"kernel {index}"
        if name not in self.result:
            kernel = self.trace.kernels[index]
            place = op_place(self.ops, kernel.op)
            module = module_of_op(self.ops, kernel.op)
            self.result.add_node(
                name, kind="kernel", name=short(kernel.name), phase=kernel.phase, op=place, module=module
            )
        return name

    def _add_autograd(self) -> None:
        """The nodes of autograd that something refers to. One that has run keeps the next ones still: a variable of the
        loss has all of the graph until it is assigned anew."""
        nodes = self.keepers.nodes
        numbers = range(len(nodes)) if self.tick is None else self._find_nodes(self.tick)
        for number in numbers:
            node = nodes[number]
            place, module = op_place(self.ops, node.op), module_of_op(self.ops, node.op)
            self.result.add_node(_autograd(number), kind="autograd", name=node.name, op=place, module=module)

    def _find_nodes(self, tick: int) -> list[int]:
        """The numbers of the nodes that tensors lead to at a moment, and of those that have saved something."""
        nodes = self.keepers.nodes
        held = [index for index, _ in self._open_holds()]
        waiting = [number for index in held for number in self.keepers.kept_by(index, tick, tick + 1)]
        waiting += [self.saved_by[index] for index in held if index in self.saved_by]
        reached = dict.fromkeys(waiting)
        while waiting:
            for number in nodes[waiting.pop()].next:
                if number not in reached:
                    reached[number] = None
                    waiting.append(number)
        return sorted(reached)

    def _owner(self, key: OwnerKey) -> str:
        name = self.owners.get(key)
        if name is None:
            reason, who, op = key
            name = self.owners[key] = " ".join(["owner", reason.value, who, *([str(op)] if op >= 0 else [])])
            module = who if reason is Reason.FRAME else module_of_op(self.ops, op)
            label = who if who in _OF_LOOP else reason.label.format(who=who or "the model")
            place = op_place(self.ops, op)
            self.result.add_node(name, kind="owner", reason=reason.value, name=label, op=place, module=module)
        return name

    # -- edges ---------------------------------------------------------------------------------------------------

    def _open_holds(self) -> Iterator[tuple[int, Hold]]:
        """The holds of the moment, or of the whole step, with their indices."""
        holds, tick = self.trace.holds, self.tick
        if tick is None:
            yield from enumerate(holds)
            return
        for index, (start, end) in enumerate(zip(holds.starts, holds.ends, strict=True)):
            if start <= tick < end:
                yield index, holds[index]

    def _add_holds(self) -> None:
        for index, hold in self._open_holds():
            saving = self.saved_by.get(index)
            owner = self._owner(self._key(hold)) if saving is None else _autograd(saving)
            end = self.lifetimes.ticks if hold.end is None else hold.end
            self._connect(owner, _storage(hold.buffer), "holds", hold.start, end)
            span = (hold.start, end) if self.tick is None else (self.tick, self.tick + 1)
            for number in self.keepers.kept_by(index, *span):  # nodes that the tensor had while it was held
                if _autograd(number) in self.result:
                    self._connect(owner, _autograd(number), "keeps", hold.start, end)

    def _key(self, hold: Hold) -> OwnerKey:
        """The owner of a hold; the model's trace has the inputs, which a variable of the loop has."""
        if hold.kind is Reason.MODEL and self.trace.buffers.categories[hold.buffer] == "input":
            return hold.kind, _BATCH, -1
        return hold.kind, hold.who, hold.op

    def _connect(self, source: str, target: str, kind: str, start: int, end: int) -> None:
        edge = self.result.get_edge_data(source, target)
        if edge is not None:
            start, end = min(start, edge["start"]), max(end, edge["end"])
        self.result.add_edge(source, target, kind=kind, start=start, end=end)

    def _keep_temporaries(self, ids: Sequence[int]) -> None:
        """What no owner has, the running kernel has."""
        buffers, died = self.trace.buffers, self.lifetimes.died
        held = {target for _, target, kind in self.result.edges(data="kind") if kind == "holds"}
        for id in ids:
            if _storage(id) not in held:
                kernel = self._kernel(buffers.kernels[id])
                self._connect(kernel, _storage(id), "holds", buffers.born[id], died[id])
                self._connect(ROOT, kernel, "keeps", buffers.born[id], died[id])

    def _add_keepers(self) -> None:
        """What keeps nodes and owners. Who is kept by nobody else is kept by the process."""
        for number, node in enumerate(self.keepers.nodes):
            if _autograd(number) not in self.result:
                continue
            for other in node.next:
                if _autograd(other) in self.result:
                    self._connect(_autograd(number), _autograd(other), "keeps", node.start, self._end)
            for key in node.owners:
                if key in self.owners:
                    self._connect(_autograd(number), self.owners[key], "keeps", node.start, self._end)
        kept = {target for _, target, kind in self.result.edges(data="kind") if kind == "keeps"}
        loose = [name for name, kind in self.result.nodes(data="kind") if kind == "autograd" and name not in kept]
        keys = [key for key, name in self.owners.items() if name not in kept]
        for key in keys:
            self._connect(self._find_keeper(key), self.owners[key], "keeps", 0, self._end)
        for name in loose:
            self._connect(ROOT, name, "keeps", 0, self._end)

    @property
    def _end(self) -> int:
        return self.lifetimes.ticks

    def _find_keeper(self, key: OwnerKey) -> str:
        """The owner that keeps another: the caller of a module's frame, the loss what autograd's graph has, or the part
        of the program that it belongs to."""
        reason, who, _ = key
        if reason is Reason.FRAME and who:
            path = who
            while path:
                path = path.rpartition(".")[0]
                caller = self.owners.get((Reason.FRAME, path, -1))
                if caller is not None:
                    return caller
        if reason is Reason.AUTOGRAD:
            loss = self.owners.get((Reason.VALUE, _OF_LOOP[0], -1))
            return loss or ROOT
        if not reason.part or who in _OF_LOOP:
            return ROOT
        name = f"owners {reason.part}"
        if name not in self.result:
            self.result.add_node(name, kind="owner", reason=reason.value, name=reason.part, op="", module="")
            self._connect(ROOT, name, "keeps", 0, self._end)
        return name

    def _add_reads(self) -> None:
        """What kernels read: those of an op its operands, those of its backward what the op has saved and gradients."""
        names = {node for node, kind in self.result.nodes(data="kind") if kind == "kernel"}
        by_value, by_op = self._readable()
        kernels = self.trace.kernels
        for name in names:
            index = int(name.split()[1])
            kernel = kernels[index]
            if not 0 <= kernel.op < len(self.ops.ops):
                continue
            if kernel.phase == "backward":
                read = by_op.get(kernel.op, ())
            else:
                read = [id for operand in self.ops.ops[kernel.op].refs() for id in by_value.get(operand, ())]
            for id in dict.fromkeys(read):
                is_there = _storage(id) in self.result and self.trace.buffers.kernels[id] < index
                if is_there and not self.result.has_edge(name, _storage(id)):
                    born = self.trace.buffers.born[id]
                    self._connect(name, _storage(id), "reads", born, self.lifetimes.died[id])

    def _readable(self) -> tuple[Mapping[str, Sequence[int]], Mapping[int, Sequence[int]]]:
        """The storages of each value, and those that wait for the backward of each op."""
        by_value: dict[str, list[int]] = {}
        by_op: dict[int, list[int]] = {}
        places = {p.fqn: p.value.name for p in (*self.ops.parameters, *self.ops.buffers)}
        buffers = self.trace.buffers
        for id, (category, name) in enumerate(zip(buffers.categories, buffers.names, strict=True)):
            if category in ("parameter", "buffer", "input"):
                by_value.setdefault(places.get(name, name), []).append(id)
        for _, hold in self._open_holds():
            if hold.kind is Reason.VALUE:
                by_value.setdefault(hold.who, []).append(hold.buffer)
            elif hold.kind in (Reason.SAVED, Reason.RECOMPUTED, Reason.GRADIENT) and hold.op >= 0:
                by_op.setdefault(hold.op, []).append(hold.buffer)
        return by_value, by_op


def _storage(id: int) -> str:
    return f"storage {id}"


def _autograd(number: int) -> str:
    return f"autograd {number}"


# -- what a graph says ------------------------------------------------------------------------------------------------


def retaining(graph: nx.DiGraph) -> nx.DiGraph:
    """The part of a moment's graph through which storages stay alive."""
    import networkx as nx

    kept = nx.DiGraph()
    kept.add_node(ROOT)
    kept.add_edges_from((a, b) for a, b, kind in graph.edges(data="kind") if kind in RETAINING)
    return kept


def dominators(graph: nx.DiGraph) -> dict[str, Dominated]:
    """What each node keeps alive, of the graph of one moment: those that hold something, the process first."""
    import networkx as nx

    parents = nx.immediate_dominators(retaining(graph), ROOT)
    parents.pop(ROOT, None)  # itself, or None since NetworkX 3.6
    children: dict[str, list[str]] = {}
    for node, parent in parents.items():
        children.setdefault(parent, []).append(node)
    order = [ROOT]
    for node in order:
        order += children.get(node, ())
    alone, retained = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    for node in reversed(order):
        if graph.nodes[node]["kind"] == "storage":
            retained[node] = graph.nodes[node]["bytes"]
        if node != ROOT:
            parent = parents[node]
            retained[parent] += retained[node]
            if graph.nodes[node]["kind"] == "storage":
                alone[parent] += retained[node]
    return {
        node: Dominated(parents.get(node, ""), alone[node], retained[node])
        for node in order
        if graph.nodes[node]["kind"] != "storage"
    }


def freed_without(graph: nx.DiGraph, gone: Collection[str], kept: nx.DiGraph | None = None) -> int:
    """Bytes of the storages that nothing reaches any more when some nodes of a moment's graph let go. `kept` is
    `retaining(graph)`, for several questions to one graph."""
    kept = retaining(graph) if kept is None else kept
    reached, waiting = {ROOT, *gone}, [ROOT]
    while waiting:
        for node in kept.successors(waiting.pop()):
            if node not in reached:
                reached.add(node)
                waiting.append(node)
    storages = graph.nodes(data=True)
    return sum(data["bytes"] for node, data in storages if data["kind"] == "storage" and node not in reached)


@record(frozen=True)
class Figures:
    """Figures of a step as its graph has them, in bytes rounded up to 512: what `Lifetimes` computes from arrays."""

    parameters: int
    peak: int
    by_category: Mapping[str, int]
    phases: Mapping[str, int]
    at_end: Mapping[str, int]


def figures(graph: nx.DiGraph, phases: Sequence[tuple[str, int]], ticks: int) -> Figures:
    """The figures of the graph of a whole step: a storage lives from the edge that allocates it to the last `end` of an
    edge that holds it. `phases` and `ticks` are those of the trace."""
    lives = []
    for node, data in graph.nodes(data=True):
        if data["kind"] == "storage":
            edges = [edge for _, _, edge in graph.in_edges(node, data=True)]
            birth = data["birth"]
            death = max(edge["end"] for edge in edges if edge["kind"] == "holds")
            lives.append((birth, death, data["bytes"], data["category"]))
    change = [0] * (ticks + 1)
    for birth, death, nbytes, _ in lives:
        change[birth] += nbytes
        change[death] -= nbytes
    live = list(accumulate(change))[:-1]
    peak = max(live, default=0)
    tops = {}
    for (name, start), (_, end) in pairwise([*phases, ("", ticks)]):
        tops[name] = max([*live[start:end], live[start - 1] if start else 0])
    at_peak = _sum_by_category(lives, live.index(peak) if live else 0)
    at_end = _sum_by_category(lives, ticks - 1)
    return Figures(at_end.get("parameter", 0), peak, at_peak, tops, at_end)


def _sum_by_category(lives: Iterable[tuple[int, int, int, str]], tick: int) -> dict[str, int]:
    total: dict[str, int] = {}
    for birth, death, nbytes, category in lives:
        if birth <= tick < death:
            total[category] = total.get(category, 0) + nbytes
    return total


def folded(graph: nx.DiGraph) -> nx.DiGraph:
    """A graph in which the storages of one module and category are one node, with the sum of their bytes, and so are
    the kernels of a phase and a module, and the autograd nodes and the owners of a module."""
    import networkx as nx

    names = {node: _folded_name(node, data) for node, data in graph.nodes(data=True)}
    result = nx.DiGraph(**graph.graph)
    for node, data in graph.nodes(data=True):
        name = names[node]
        if name == node:
            result.add_node(name, **data)
            continue
        if name not in result:
            kept = {key: data[key] for key in ("kind", "module", "category", "phase", "reason") if key in data}
            result.add_node(name, **kept, name=name, count=0)
        result.nodes[name]["count"] += 1
        if "bytes" in data:
            result.nodes[name]["bytes"] = result.nodes[name].get("bytes", 0) + data["bytes"]
    for a, b, data in graph.edges(data=True):
        source, target = names[a], names[b]
        if source != target:
            result.add_edge(source, target, kind=data["kind"])
    return result


def _folded_name(node: str, data: Mapping[str, Any]) -> str:
    place = f" of {data['module']}" if data.get("module") else ""
    if data["kind"] == "storage":
        return f"{data['category']}{place}"
    if data["kind"] == "kernel":
        return f"{data['phase']} kernels{place}"
    if data["kind"] == "autograd":
        return f"backward graph{place}"
    return f"{data['reason']}{place}" if node.startswith("owner ") and data["name"] not in _OF_LOOP else node
