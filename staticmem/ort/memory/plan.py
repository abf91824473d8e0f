"""The execution order of a graph and its allocation plan: which results get a buffer of their own, and when buffers
are free.

Source: onnxruntime/core/graph/graph_viewer.cc (default order) and graph.cc (Graph::ReverseDFSFrom: a depth-first walk
from the last nodes to the first ones that lists a node when all it depends on is listed);
onnxruntime/core/framework/allocation_planner.cc (ComputeReuseCount, FindReusableInput, FindReusableTensor,
ComputeSingleStreamReusePlan, GenerateDeallocationPlan).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from staticmem.ort.memory.graph import ExecGraph, ExecNode, PlannedType, same_size


def execution_order(nodes: Sequence[ExecNode]) -> list[int]:
    """Positions in `nodes` in the order of execution, for a graph that no optimizer touched.

    A graph that the runtime saved after optimizing it (`optimized_model_filepath`) is in that order already.
    """
    producers = {name: position for position, node in enumerate(nodes) for name in node.outputs if name}
    sources: list[list[int]] = []
    read: set[int] = set()
    for node in nodes:
        positions = {producers[name] for name in (*node.inputs, *node.implicit) if name in producers}
        sources.append(sorted(positions, key=lambda position: nodes[position].index))
        read |= positions
    stack = [(position, False) for position in range(len(nodes)) if position not in read]
    visited: set[int] = set()
    order: list[int] = []
    while stack:
        position, leaving = stack.pop()
        if leaving:
            order.append(position)
            continue
        if position in visited:
            continue
        visited.add(position)
        stack.append((position, True))
        stack.extend((source, False) for source in sources[position] if source not in visited)
    return order


# Which kernels share or may reuse the buffer of an input: pairs of (input, output), by domain and op, as the kernels'
# registrations have them. Source: KernelDefBuilder calls of onnxruntime/core/providers/cpu, onnxruntime/contrib_ops/cpu
# and, for CUDA, onnxruntime/core/providers/cuda; the CPU's were also measured op by op on onnxruntime 1.31
# (tests/ort/test_validation_kernels.py). That CUDA's are the same is read from the source alone.
Pairs = tuple[tuple[int, int], ...]
_ALIASES = "Flatten Identity Reshape Squeeze Unsqueeze Optional OptionalGetElement"
_IN_PLACE = """Relu Sigmoid Tanh Elu LeakyRelu Selu Softplus Softsign HardSigmoid ThresholdedRelu Celu Clip Softmax
    LogSoftmax Cast Scatter ScatterElements Shrink Trilu"""

# `Alias`: the result is the input's buffer
ALIAS: Mapping[tuple[str, str], Pairs] = {
    **{("", op): ((0, 0),) for op in _ALIASES.split()},
    ("", "BatchNormalization"): ((3, 1), (4, 2)),  # running statistics of training mode
}
# `MayInplace`: it may be, where nothing else needs the input any more
MAY_INPLACE: Mapping[tuple[str, str], Pairs] = {
    **{("", op): ((0, 0),) for op in _IN_PLACE.split()},
    ("com.microsoft", "FusedConv"): ((3, 0),),
    ("com.microsoft.nchwc", "Conv"): ((3, 0),),
}


# AllocKind of the runtime
ALLOCATE = "allocate"
OUTPUT = "output"  # a result of the graph: never in another buffer
REUSE = "reuse"
EXISTING = "existing"  # inputs, outer values, initializers


@dataclass(slots=True)
class Plan:
    """`order` are positions of nodes; `kind` and `root` say for each value where it lives; `release[i]` are the
    buffers that are given back after the i-th executed node."""

    order: list[int]
    kind: dict[str, str] = field(default_factory=dict)
    root: dict[str, str] = field(default_factory=dict)
    release: list[list[str]] = field(default_factory=list)


class Planner:
    """Plans one graph; bodies have plans of their own.

    Args:
        graph: the executed graph.
        order: positions of its nodes in execution order.
        reuse: `enable_mem_reuse`: whether a freed buffer serves a later value.
        loop_body: whether the graph is the body of a Loop, where Identity of an input makes no copy.
    """

    def __init__(self, graph: ExecGraph, order: Sequence[int], reuse: bool = True, loop_body: bool = False) -> None:
        self.graph, self.reuse, self.loop_body = graph, reuse, loop_body
        self.plan = Plan(list(order))
        self.uses: Counter[str] = Counter()
        self.free: list[str] = []  # the most recently freed last
        self.existing = {*graph.inputs, *graph.outer, *graph.initializers}

    def run(self) -> Plan:
        """The plan of the whole graph."""
        graph, plan = self.graph, self.plan
        self._count_uses()
        for name in self.existing:
            plan.kind[name], plan.root[name] = EXISTING, name
        results = set(graph.outputs)
        for position in plan.order:
            node = graph.nodes[position]
            for number, name in enumerate(node.outputs):
                if name:
                    self._place(node, number, name, results)
            for name in (*node.inputs, *node.implicit):
                if name:
                    self._used(name)
            for name in node.outputs:  # what nobody reads is kept to the end and serves nobody: tried on 1.31
                if name:
                    self.uses[plan.root[name]] -= 1
        self._deallocation()
        return plan

    def _count_uses(self) -> None:
        uses = self.uses
        uses.update(self.existing)
        for position in self.plan.order:
            node = self.graph.nodes[position]
            uses.update(n for n in (*node.inputs, *node.implicit, *node.outputs) if n)
        uses.update(self.graph.outputs)

    def _place(self, node: ExecNode, number: int, name: str, results: set[str]) -> None:
        plan = self.plan
        kind = self.graph.planned(name)
        if name in results:
            plan.kind[name], plan.root[name] = OUTPUT, name
            if self.loop_body and node.op == "Identity" and not node.domain:
                source = node.inputs[0]
                if plan.kind.get(source) == EXISTING and source != next(iter(self.graph.inputs), None):
                    self._share(source, name)
            return
        reused = self._choose_input(node, number, kind)
        if reused is None and kind is not None and kind.tensor and self.reuse:
            reused = self._freed(kind)
        if reused is not None:
            self._share(reused, name)
        else:
            plan.kind[name], plan.root[name] = ALLOCATE, name

    def _share(self, source: str, name: str) -> None:
        root = self.plan.root[source]
        self.plan.kind[name], self.plan.root[name] = REUSE, root
        self.uses[root] += self.uses[name]

    def _choose_input(self, node: ExecNode, number: int, kind: PlannedType | None) -> str | None:
        """The input whose buffer the result takes."""
        key = (node.domain, node.op)
        for source, target in ALIAS.get(key, ()):
            if target == number and source < len(node.inputs) and node.inputs[source]:
                return node.inputs[source]
        for source, target in MAY_INPLACE.get(key, ()):
            if target != number or source >= len(node.inputs) or not node.inputs[source]:
                continue
            name = node.inputs[source]
            if self.uses[self.plan.root[name]] == 1 and same_size(self.graph.planned(name), kind):
                return name
        return None

    def _freed(self, kind: PlannedType) -> str | None:
        """The most recently freed buffer of the same size; scalars are never matched."""
        if not kind.dims:
            return None
        for index in range(len(self.free) - 1, -1, -1):
            if same_size(self.graph.planned(self.free[index]), kind):
                return self.free.pop(index)
        return None

    def _used(self, name: str) -> None:
        root = self.plan.root.get(name)
        if root is None:
            return
        self.uses[root] -= 1
        if self.uses[root] == 0:
            self.free.append(root)

    def _deallocation(self) -> None:
        """A buffer is given back after the last node that reads it, under whatever name."""
        plan = self.plan
        last: dict[str, int] = {}
        for step, position in enumerate(plan.order):
            node = self.graph.nodes[position]
            for name in (*node.inputs, *node.implicit):
                root = plan.root.get(name)
                if root is not None and plan.kind.get(root) == ALLOCATE:
                    last[root] = step
        plan.release = [[] for _ in plan.order]
        for root, step in last.items():
            plan.release[step].append(root)
