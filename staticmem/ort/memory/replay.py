"""Runs of a session, replayed on the arena: what each node finds there when it ends.

Source: onnxruntime/core/framework/execution_frame.cc (AllocateMLValueTensorSelfOwnBuffer, TraceAllocate, the block of
the memory pattern), session_state.cc (ResolveMemoryPatternFlag), core/providers/cpu/controlflow/{if,loop,scan_9}.cc and
scan_utils.cc (SetupInputs, AllocateOutput, LoopStateVariable, IterateSequence, TransposeOutput).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from staticmem.ir import dtypes
from staticmem.ir.graph import Value
from staticmem.ort.memory.arena import Arena, Chunk, PatternPlanner
from staticmem.ort.memory.graph import ExecGraph, ExecNode
from staticmem.ort.memory.plan import ALLOCATE, OUTPUT, Plan, Planner, execution_order
from staticmem.ort.memory.sizes import BodyRun, RunSizes

BLOCK_ALIGNMENT = 256  # kAllocAlignment of core/framework/allocator.h: values in the block of a memory pattern
STRING = 32  # bytes of a std::string in libstdc++; longer texts lie elsewhere on the heap

Workspace = Callable[[ExecNode, ExecGraph, RunSizes], Sequence[int]]  # bytes that a kernel takes and gives back


@dataclass(frozen=True, slots=True)
class NodeRow:
    """The arena when a node has ended, before its inputs are given back. Bytes, initializers not counted."""

    run: int
    name: str
    op: str
    requested: int
    in_use: int
    held: int
    workspace: int = 0


@dataclass(slots=True)
class Replayed:
    """What the runs left behind. `tensors` is the largest sum of buffers alive at a node, `peak` that of each run."""

    rows: list[NodeRow] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    block: int = 0
    unknown: dict[str, None] = field(default_factory=dict)
    unmodelled: dict[str, None] = field(default_factory=dict)
    unranked: dict[str, None] = field(default_factory=dict)  # outer values that leave the pattern of a body open


def value_bytes(value: Value | None) -> int | None:
    """Bytes of a tensor in the runtime's memory, None where its sizes are not known."""
    if value is None or value.shape is None or min(value.shape, default=0) < 0:  # sizes that damaged attributes give
        return None
    if value.dtype is dtypes.string:
        return value.numel * STRING
    return value.dtype.nbytes(value.numel)


class Session:
    """Plans of a graph and its bodies, and runs of them.

    Args:
        graph: the executed graph.
        arena: its memory; the weights have theirs already.
        pattern: `enable_mem_pattern`.
        reuse: `enable_mem_reuse`.
        in_file_order: the graph was saved by the runtime: its nodes are in execution order.
        workspace: bytes that a kernel takes for itself.
    """

    def __init__(
        self,
        graph: ExecGraph,
        arena: Arena,
        pattern: bool = True,
        reuse: bool = True,
        in_file_order: bool = False,
        workspace: Workspace | None = None,
    ) -> None:
        self.graph, self.arena, self.pattern, self.reuse = graph, arena, pattern, reuse
        self.in_file_order, self.workspace = in_file_order, workspace
        self.result = Replayed()
        self._plans: dict[int, Plan] = {}
        self._patterns: dict[tuple[int, object], PatternPlanner] = {}
        self._run = 0
        self._before = arena.requested, arena.in_use

    def plan(self, graph: ExecGraph, loop_body: bool = False) -> Plan:
        """The allocation plan of a graph or body."""
        if id(graph) not in self._plans:
            order = range(len(graph.nodes)) if self.in_file_order else execution_order(graph.nodes)
            self._plans[id(graph)] = Planner(graph, list(order), self.reuse, loop_body).run()
        return self._plans[id(graph)]

    def run(self, sizes: RunSizes) -> None:
        """One run. Its results are given back before the next one, as by a caller that copies them."""
        self._run += 1
        before = len(self.result.rows)
        frame = _Frame(self, self.graph, sizes, None, {})
        for chunk in frame.run():
            self.arena.free(chunk)
        rows = self.result.rows[before:]
        self.result.peak.append(max((row.requested for row in rows), default=0))
        self.result.held.append(self.arena.held)

    def record(self, node: ExecNode, workspace: int) -> None:
        """The state of the arena when a node has ended."""
        arena = self.arena
        requested, in_use = arena.requested - self._before[0], arena.in_use - self._before[1]
        self.result.rows.append(NodeRow(self._run, node.label, node.op, requested, in_use, arena.held, workspace))


class _Frame:
    """One execution of a graph or a body. `given` are results that the caller places: a chunk, or a function that
    allocates when the result is made."""

    def __init__(
        self,
        session: Session,
        graph: ExecGraph,
        sizes: RunSizes,
        parent: ExecNode | None,
        given: Mapping[str, Callable[[], None]],
    ) -> None:
        self.session, self.graph, self.sizes, self.given = session, graph, sizes, given
        self.plan = session.plan(graph, parent is not None and parent.op == "Loop")
        self.chunks: dict[str, Chunk | None] = {}
        self.sequences: dict[str, list[Chunk | None]] = {}
        self.tracer: PatternPlanner | None = None
        self.pattern: PatternPlanner | None = None
        self.block: Chunk | None = None
        if session.pattern and parent is not None:
            session.result.unranked.update(dict.fromkeys(n for n in graph.outer if not self._ranked(n)))
        if session.pattern and all(self._ranked(name) for name in (*self.graph.inputs, *self.graph.outer)):
            key = (id(graph), tuple(sizes.shape(name) for name in (*graph.inputs, *graph.outer)))
            self.pattern = session._patterns.get(key)
            if self.pattern is None:
                self.tracer = session._patterns[key] = PatternPlanner()
            else:
                self.block = session.arena.allocate(self.pattern.peak)
                if parent is None:
                    session.result.block = self.pattern.peak

    def _ranked(self, name: str) -> bool:
        kind = self.graph.planned(name)
        return kind is not None and kind.tensor and kind.dims is not None

    def run(self) -> list[Chunk | None]:
        """Executes the nodes; gives the chunks of the results, which the caller frees."""
        session, arena = self.session, self.session.arena
        for step, position in enumerate(self.plan.order):
            node = self.graph.nodes[position]
            workspace = 0
            if node.bodies:
                workspace = self._control(node)
            else:
                for name in node.outputs:
                    if name:
                        self.make(name)
                if session.workspace is not None:
                    wanted = session.workspace(node, self.graph, self.sizes)
                    workspace = sum(wanted)
                    for chunk in [arena.allocate(size) for size in wanted]:
                        arena.free(chunk)
            session.record(node, workspace)
            for root in self.plan.release[step]:
                self._release(root)
        results = [self.chunks.pop(name, None) for name in self.graph.outputs]
        for chunk in (*self.chunks.values(), *(c for chunks in self.sequences.values() for c in chunks)):
            arena.free(chunk)
        arena.free(self.block)
        return results

    def make(self, name: str) -> None:
        """Allocates the buffer of a result that has one of its own."""
        kind = self.plan.kind.get(name)
        if kind not in (ALLOCATE, OUTPUT) or name in self.chunks or name in self.sequences:
            return
        given = self.given.get(name)
        if given is not None:
            given()
            return
        planned = self.graph.planned(name)
        size = value_bytes(self.sizes.values.get(name))
        elements = self.sizes.sequences.get(name)
        if elements is not None:  # each element is a tensor of its own
            arena = self.session.arena
            self.sequences[name] = [arena.allocate(value_bytes(element) or 0) for element in elements]
            return
        if planned is not None and not planned.tensor:
            self.session.result.unmodelled[name] = None
            return
        if size is None:
            self.session.result.unknown[name] = None
            return
        if kind == ALLOCATE:
            aligned = -(-size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
            if self.pattern is not None and name in self.pattern.offsets:
                self.chunks[name] = None
                return
            if self.tracer is not None and (planned is None or planned.dtype is not dtypes.string):
                self.tracer.allocate(name, aligned)
        self.chunks[name] = self.session.arena.allocate(size)

    def _release(self, root: str) -> None:
        self.session.arena.free(self.chunks.pop(root, None))
        for chunk in self.sequences.pop(root, ()):
            self.session.arena.free(chunk)
        if self.tracer is not None:
            self.tracer.free(root)

    def _control(self, node: ExecNode) -> int:
        """Runs the bodies; gives what the node took beside values."""
        runs = self.sizes.bodies.get(node.outputs[0], [])
        if node.op == "If" and runs:
            self._if(node, node.bodies[runs[0].body], runs[0].sizes)
        elif node.op == "Loop":
            self._loop(node)
        elif node.op == "Scan" and node.outputs[0] in self.sizes.lengths:
            return self._scan(node, runs, self.sizes.lengths[node.outputs[0]])
        else:
            self.session.result.unmodelled[f"{node.op} {node.name}"] = None
            for name in node.outputs:
                if name:
                    self.make(name)
        return 0

    def _if(self, node: ExecNode, body: ExecGraph, sizes: RunSizes) -> None:
        """A branch writes into the results of the If node: at once where their sizes are fixed, else when made."""
        given: dict[str, Callable[[], None]] = {}
        for mine, theirs in zip(node.outputs, body.outputs, strict=False):
            if not mine:
                continue
            kind = body.planned(theirs)
            if kind is not None and kind.fixed:
                self.make(mine)
            given[theirs] = self._maker(mine)
        self._run_body(node, body, sizes, given)

    def _loop(self, node: ExecNode) -> None:
        """Every iteration has results of its own; the last ones are copied, those of scans are joined."""
        arena = self.session.arena
        body = node.bodies["body"]
        runs = self.sizes.bodies.get(node.outputs[0], [])
        state = len(node.inputs) - 2
        counter, condition = arena.allocate(8), arena.allocate(1)
        carried: list[Chunk | None] = []
        kept: list[Chunk | None] = []
        plan = self.session.plan(body, True)
        for run in runs:
            results = _Frame(self.session, body, run.sizes, node, {}).run()
            old = dict(zip(body.inputs[1:], (condition, *carried), strict=False))
            state_results = body.outputs[: 1 + state]
            # a result that is an input handed on keeps that input's memory
            new = [old.get(plan.root.get(n, n), c) for n, c in zip(state_results, results, strict=False)]
            for chunk in old.values():
                if not any(chunk is other for other in new):
                    arena.free(chunk)
            condition, carried = new[0], new[1:]
            kept.extend(results[1 + state :])
        for name in node.outputs:
            if name:
                self.make(name)
        for chunk in (*carried, *kept, condition, counter):
            arena.free(chunk)

    def _scan(self, node: ExecNode, runs: Sequence[BodyRun], length: int) -> int:
        """A Scan of opset 9 or later, of `length` turns; gives the bytes that it took for itself.

        Results are made before the first turn where the file says how large they are, else in it; each turn writes a
        slice of them. A state has up to two buffers beside its result.
        """
        arena, body = self.session.arena, node.bodies["body"]
        states = len(node.inputs) - node.number("num_scan_inputs")
        input_axes = node.numbers("scan_input_axes", (0,) * (len(node.inputs) - states))
        output_axes = node.numbers("scan_output_axes", (0,) * max(len(node.outputs) - states, 0))
        scanned = zip(node.inputs[states:], input_axes, strict=False)
        taken: list[Chunk | None] = [arena.allocate(self._size(name)) for name, axis in scanned if axis]
        given: dict[str, Callable[[], None]] = dict.fromkeys(body.outputs[:states], _nothing)
        for name in node.outputs[:states]:
            self.make(name)
        transposed: list[str] = []
        for mine, theirs, axis in zip(node.outputs[states:], body.outputs[states:], output_axes, strict=False):
            if axis:
                transposed.append(mine)
            place = self._once(mine, taken) if axis else self._maker(mine)
            given[theirs] = place
            kind = body.planned(theirs)
            if kind is not None and kind.fixed:
                place()
        for name in node.inputs[:states]:
            taken.extend(arena.allocate(self._size(name)) for _ in range(min(max(length - 1, 0), 2)))
        for run in runs:
            self._run_body(node, body, run.sizes, given)
        for name in transposed:
            self.make(name)
        workspace = sum(chunk.requested for chunk in taken if chunk is not None)
        for chunk in taken:
            arena.free(chunk)
        return workspace

    def _run_body(
        self, node: ExecNode, body: ExecGraph, sizes: RunSizes, given: Mapping[str, Callable[[], None]]
    ) -> None:
        """One execution of a body all of whose results are `given`."""
        for chunk in _Frame(self.session, body, sizes, node, given).run():
            self.session.arena.free(chunk)

    def _size(self, name: str) -> int:
        """Bytes of a value, 0 where they are not known."""
        return value_bytes(self.sizes.values.get(name)) or 0

    def _maker(self, name: str) -> Callable[[], None]:
        return lambda: self.make(name)

    def _once(self, name: str, taken: list[Chunk | None]) -> Callable[[], None]:
        """Takes memory for a result that is transposed at the end, the first time it is called."""
        done: list[bool] = []

        def place() -> None:
            if not done:
                done.append(True)
                taken.append(self.session.arena.allocate(self._size(name)))

        return place


def _nothing() -> None:
    """The result has its place already."""
