"""Who keeps autograd's graph alive in a step: a run that notes which nodes tensors and other nodes refer to.

The trace of a step has the owners of every buffer. It does not have what owners refer to besides: a variable keeps the
node that computed its tensor (`grad_fn`), that node keeps the next ones (`next_edges`), and a checkpoint's node keeps
what the checkpoint has saved. `watched_step` runs the step again and notes these references; nothing else pays for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Node, Owner, Tensor
from staticmem.eager.trace import OPEN
from staticmem.engine.step import StepResult, run_step
from staticmem.ir.graph import Graph
from staticmem.ir.record import record
from staticmem.scenario.step import Scenario

OwnerKey = tuple[Reason, str, int]  # of an owner: `Hold.kind`, `Hold.who` and `Hold.op`


@record(frozen=True)
class AutogradNode:
    """A node of autograd's graph, recorded at the tick `start`.

    `next` are the numbers of the nodes that it keeps, `holds` the indices of the holds of what it has saved, and
    `owners` those of what a checkpoint, or the copy on the CPU, keeps for it.
    """

    name: str
    op: int
    start: int
    next: tuple[int, ...]
    holds: range
    owners: tuple[OwnerKey, ...]


class Keepers:
    """The nodes of a step, and which of them each hold of the trace keeps with its tensor."""

    def __init__(self, nodes: Sequence[AutogradNode], kept: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """`kept` has for the index of a hold, in order of time, (tick, number of the node of its tensor from then)."""
        self.nodes, self._kept = nodes, kept

    def kept_by(self, hold: int, start: int, end: int) -> Iterator[int]:
        """The numbers of the nodes that the tensor of a hold had in [start, end)."""
        changes = self._kept.get(hold, ())
        for place, (tick, number) in enumerate(changes):
            until = changes[place + 1][0] if place + 1 < len(changes) else OPEN
            if tick < end and until > start:
                yield number


class WatchedEager(Eager):
    """An execution that notes what tensors and nodes refer to. Each call runs its rule, as records have no nodes."""

    repeats_calls = False

    def __init__(self, training: bool = True) -> None:
        super().__init__(training)
        self.tensors: dict[int, Tensor] = {}  # by the index of the hold
        self.history: dict[Tensor, list[tuple[int, Node]]] = {}  # (tick, node from then on)
        self.nodes: dict[Node, tuple[int, list[Node]]] = {}  # the tick at which it was recorded, and the next nodes

    def take(self, tensor: Tensor, kind: Reason, who: str, op: int = -1) -> int:
        hold = super().take(tensor, kind, who, op)
        self.tensors[hold] = tensor
        if tensor.grad_fn is not None and tensor not in self.history:  # a copy of a tensor, with its node
            self._note(tensor, tensor.grad_fn)
        return hold

    def set_grad_fn(self, tensor: Tensor, node: Node, number: int) -> None:
        super().set_grad_fn(tensor, node, number)
        self._note(tensor, node)

    def _note(self, tensor: Tensor, node: Node) -> None:
        """The tensor refers to a node from now on. Its edges do not change until it has run."""
        self.history.setdefault(tensor, []).append((self.trace.ticks, node))
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node not in self.nodes:
                following = [edge[0] for edge in node.edges if edge is not None and edge[0].leaf is None]
                self.nodes[node] = self.trace.ticks, following
                waiting += following

    def keepers(self) -> Keepers:
        """What was noted, once the step is over."""
        numbers = {node: number for number, node in enumerate(self.nodes)}
        nodes = []
        for node, (start, following) in self.nodes.items():
            owners = () if node.packed is None else tuple({_make_key(owner): None for owner in node.packed.owners()})
            next_numbers = tuple({numbers[other]: None for other in following})
            nodes.append(AutogradNode(node.name, node.op, start, next_numbers, self._find_saved_holds(node), owners))
        kept = {
            hold: [(tick, numbers[node]) for tick, node in self.history[tensor]]
            for hold, tensor in self.tensors.items()
            if tensor in self.history
        }
        return Keepers(nodes, kept)

    def _find_saved_holds(self, node: Node) -> range:
        """The holds of what a node has saved: one after the other, from its first on, at one tick."""
        holds = self.trace.holds
        first = end = node.hold
        while (
            end < len(holds)
            and holds.kinds[end] is Reason.SAVED
            and holds.whos[end] == node.name
            and holds.starts[end] == holds.starts[first]
        ):
            end += 1
        return range(first, end)


def _make_key(owner: Owner) -> OwnerKey:
    return owner.kind, owner.who, owner.op


def watched_step(graph: Graph, scenario: Scenario, policy: str = "expected") -> tuple[StepResult, Keepers]:
    """The step of a graph, whose trace is that of `run_step`, and who keeps autograd's graph in it.

    Raises:
        StaticmemError: as `run_step`.
    """
    machines: list[WatchedEager] = []

    def make(training: bool) -> Eager:
        machines.append(WatchedEager(training))
        return machines[-1]

    result = run_step(graph, scenario, policy, machine=make)
    return result, machines[-1].keepers()
