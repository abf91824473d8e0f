"""The code that Inductor writes around its kernels: which buffer is allocated when, taken over, freed, or pooled.

Source: `torch/_inductor/codegen/wrapper.py` (`AllocateLine.plan`, `FreeIfNotReusedLine.plan`, `memory_plan_reuse`,
`EfficientPeakEstimate`) and `torch/_inductor/scheduler.py` (`decide_inplace_update`, `free_buffers`) of PyTorch 2.15.

What the workspaces of extern kernels follow from: the convolutions of a plan, with their layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from staticmem.compiler.inductor import tiling
from staticmem.compiler.inductor.buffers import SPLIT_SCAN, Buffer, Operation, Value
from staticmem.compiler.inductor.fusion import by_stride
from staticmem.compiler.inductor.order import Sizes
from staticmem.compiler.inductor.schedule import Access, Schedule, SNode
from staticmem.compiler.plan import Output, Plan, PlannedBuffer, Step
from staticmem.eager.strides import Form, channels_last_strides, form_of, is_channels_last_contiguous
from staticmem.eager.trace import Convolution
from staticmem.ir.dtypes import DType
from staticmem.ir.record import record
from staticmem.tracing.nodes import Node

SHRINKS_TO = 0.95  # can_match_buffer_size: a buffer that is taken over in place is used to 95 % at least


@record(frozen=True, slots=True)
class Line:
    """A line of the code.

    Attributes:
        kind: "allocate", "take" (`buffer` gets the memory of `old`), "part" (it is written into a part of `old`),
            "free", or "call".
        node: position of the node that it belongs to.
    """

    kind: str
    node: int
    buffer: Buffer | None = None
    old: Buffer | None = None

    @property
    def about(self) -> Buffer:
        assert self.buffer is not None
        return self.buffer


class Wrapper:
    """Writes the lines of one graph, and makes the plan of them."""

    def __init__(
        self, schedule: Schedule, nodes: Sequence[SNode], freeable: Collection[int], takes_over: bool = True
    ) -> None:
        self.schedule, self.nodes = schedule, nodes
        self.removed = set(schedule.dead)
        self.allocated: set[int] = set()
        self.freed: set[int] = set()
        self.completed: set[int] = set()
        self.lines: list[Line] = []
        self.freeable = freeable
        self.waiting: list[int] = []  # to be freed at the next kernel
        self.takes_over = takes_over  # results write over what dies in their kernel
        self.group = {op.number: at for at, node in enumerate(nodes) for op in node.ops}

    # ---- lines

    def write(self) -> None:
        """`Scheduler.codegen`."""
        for at, (node, last) in enumerate(zip(self.nodes, self._last_uses(), strict=True)):
            self.waiting.extend(last)
            if node.nop:
                self._allocate_outputs(node, at, {})
            else:
                taken = self._choose_inplace_updates(node, at) if node.real and self.takes_over else {}
                if len(node.ops) > 1:
                    self._remove_local(node, taken)
                self._allocate_outputs(node, at, taken)
                self.lines.append(Line("call", at))
                self._free(at)
            self.completed.update(op.number for op in node.ops)
        self._free(len(self.nodes) - 1)

    def _last_uses(self) -> list[list[int]]:
        """Buffers and inputs that each node is the last to use (`compute_last_usage`)."""
        schedule = self.schedule
        future = set(schedule.returned)
        uses: list[list[int]] = []
        for node in reversed(self.nodes):
            used = [*node.reads, *(buffer.number for buffer in node.outputs)]
            every: set[int] = set()
            while used:
                number = used.pop()
                if number in every:
                    continue
                every.add(number)
                buffer = schedule.buffers[number]
                if buffer.into is not None:
                    used.append(buffer.into.number)
            last = {schedule.real.get(number, number) for number in every} - future
            future |= last
            uses.append(sorted(last))
        uses.reverse()
        return uses

    def _allocate_outputs(self, node: SNode, at: int, taken: dict[int, int]) -> None:
        for buffer in node.outputs:
            number = buffer.number
            if number in taken:
                old = self.schedule.buffers[taken[number]]
                self._allocate(old, at)
                self.freed.add(old.number)
                self.allocated.add(number)
                self.lines.append(Line("take", at, buffer, old))
            else:
                self._allocate(buffer, at)

    def _allocate(self, buffer: Buffer, at: int) -> None:
        """`codegen_allocation`."""
        if buffer.number < 0 or buffer.number in self.removed or buffer.number in self.allocated:
            return
        self.allocated.add(buffer.number)
        if buffer.fresh or buffer.mutates is not None or buffer.without_tensor:
            return
        if buffer.into is not None:
            self._allocate(buffer.into, at)
            self.lines.append(Line("part", at, buffer, buffer.into))
            return
        self.lines.append(Line("allocate", at, buffer))

    def _free(self, at: int) -> None:
        """`free_buffers`, by name."""
        schedule = self.schedule
        for number in sorted(set(self.waiting), key=self._name):
            if number in self.removed or number in self.freed:
                continue
            buffer = schedule.buffers[number]
            if number < 0:
                self.lines.append(Line("free", at, buffer))
                self.freed.add(number)
                continue
            if any(user.node is None for user in schedule.readers(number)):
                continue
            self.freed.add(number)
            self.lines.append(Line("free", at, buffer))
        self.waiting.clear()

    def _name(self, number: int) -> str:
        return f"buf{number}" if number >= 0 else f"primals_{-number}"

    # ---- in place

    def _choose_inplace_updates(self, node: SNode, at: int) -> dict[int, int]:
        """Which outputs of a kernel take the memory of a buffer that dies in it (`decide_inplace_update`)."""
        schedule = self.schedule
        taken: dict[int, int] = {}
        used: set[int] = set()
        for op in node.ops:
            out = op.output
            if out.fresh or out.mutates is not None or out.into is not None or out.number in self.removed:
                continue
            for number in schedule.single[op.number].reads:
                buffer = schedule.buffers[number]
                if number < 0 and number not in schedule.donated:
                    continue
                if number in self.removed or number in self.freed or number in used or buffer.without_tensor:
                    continue
                if buffer.into is not None:
                    continue
                if number in schedule.real or (buffer.operation is not None and buffer.operation.nop):
                    continue
                if self._only_reader(number, op, at) and matches(buffer, out):
                    taken[out.number] = number
                    used.add(number)
                    break
        return taken

    def _remove_local(self, node: SNode, taken: dict[int, int]) -> None:
        """Buffers that only this kernel reads are never made (`remove_kernel_local_buffers`); of those that take over
        one another, all or none."""
        inside = {op.number for op in node.ops}
        overwritten = set(self.schedule.real.values())
        local = {
            buffer.number
            for buffer in node.outputs
            if buffer.number not in self.schedule.real
            and buffer.number not in overwritten
            and all(
                user.node is not None and (user.weak or user.node.ops[0].number in inside)
                for user in self.schedule.readers(buffer.number)
            )
        }
        local -= self._kept_between_loops(node, local)
        chains: dict[int, list[int]] = {}
        for new, old in taken.items():
            chain = chains.pop(old, [old])
            chain.append(new)
            chains[new] = chain
        for chain in chains.values():
            if not all(number in local for number in chain):
                local.difference_update(chain)
        for number in local:
            taken.pop(number, None)
        self.removed |= local

    def _kept_between_loops(self, node: SNode, local: Collection[int]) -> set[int]:
        """Values that a kernel computes in one loop over a row and reads in a later one (`must_keep_buffers`): it goes
        over a row that is too long to be held at once again behind each reduction."""
        outer, inner = node.group
        if not node.reduction or tiling.holds_rows(node, self.schedule, local):
            return set()
        loops = self._loops_over_rows(node)
        writers = {op.output.number: loop for op, loop in zip(node.ops, loops, strict=True)}
        kept = {
            number
            for op, loop in zip(node.ops, loops, strict=True)
            for number in self.schedule.single[op.number].reads
            if writers.get(number, loop) < loop
        }
        whole = {op.output.number for op in node.ops if self.schedule.single[op.number].group == (outer * inner, 1)}
        return kept & whole

    def _loops_over_rows(self, node: SNode) -> list[int]:
        """In which loop over a row each operation is (`generate_node_schedule`): one ends where a reduction of it is
        needed, or what has one element a row is computed; what shares no buffer with the rest of a loop leaves it."""
        loops: list[int] = []
        loop = reduced = 0
        apart: int | None = None  # the first operation of those that may leave the loop
        used: set[int] = set()
        for at, op in enumerate(node.ops):
            single = self.schedule.single[op.number]
            between = single.group == (node.group[0], 1)
            if between or reduced & single.ancestors:
                if apart is not None:
                    loop += 1
                    loops[apart:] = [loop] * (at - apart)
                loop, reduced, apart, used = loop + 1, 0, None, set()
            loops.append(loop)
            if between:
                continue
            if not used or used & single.reads.keys():
                apart = None
            elif apart is None:
                apart = at
            used.update(single.reads)
            if single.reduction and op.loops is not None and op.loops.reduction not in (SPLIT_SCAN, "scan"):
                reduced |= single.own
            else:
                used.add(op.output.number)
        return loops

    def _only_reader(self, number: int, op: Operation, at: int) -> bool:
        """This operation is the last reader, reads where it writes, and so do all others in its kernel."""
        mine = None
        accesses: set[Access] = set()
        single = self.schedule.single[op.number]
        for user in self.schedule.readers(number):
            if user.node is None:
                return False
            other = user.node.ops[0].number
            if self.group.get(other) == at:
                accesses.update(user.node.reads.get(number, ()))
                if number in user.node.writes:
                    accesses.add(user.node.writes[number])
            if other in self.completed or (other != op.number and user.node.own & single.ancestors):
                continue
            if other != op.number:
                return False
            mine = user
        buffer = self.schedule.buffers[number]
        writer = buffer.operation
        if writer is not None and self.group.get(writer.number) == at:
            accesses |= set(self.schedule.single[writer.number].writes.values())
        # loops of one kernel are in one order by now
        return mine is not None and mine.in_place and len({by_stride(access) for access in accesses}) <= 1

    # ---- the pool

    def settle(self) -> list[Line]:
        """Decides which allocation takes a buffer that is free (`memory_plan_reuse`)."""
        lines = self.lines
        while lines and lines[-1].kind != "call" and lines[-1].about.number not in self.schedule.returned:
            lines.pop()
        peak, alive = Sizes(self.schedule, self.nodes, self.freeable).timeline(range(len(self.nodes)))
        pool: dict[tuple[DType, int], list[int]] = {}  # places of lines that free
        settled: list[Line | None] = []
        for line in lines:
            buffer = line.buffer
            if line.kind == "allocate" and buffer is not None:
                stack = pool.get((buffer.dtype, buffer.allocated))
                freed = settled[stack[-1]] if stack else None
                if stack and freed is not None:
                    first, last = freed.node + 1, line.node - 1
                    size = buffer.allocated * buffer.dtype.itemsize
                    between = alive[first : last + 1]
                    if not between or size + max(between) <= peak:
                        alive[first : last + 1] = [bytes_ + size for bytes_ in between]
                        settled[stack.pop()] = None
                        settled.append(Line("take", line.node, buffer, freed.buffer))
                        continue
            elif line.kind == "free" and buffer is not None and pooled(buffer):
                pool.setdefault((buffer.dtype, buffer.allocated), []).append(len(settled))
            settled.append(line)
        return [line for line in settled if line is not None]


def pooled(buffer: Buffer) -> bool:
    """What `FreeIfNotReusedLine.plan` keeps for others: no input, no part of another, no tuple."""
    return buffer.number >= 0 and buffer.into is None and not buffer.without_tensor


def matches(old: Buffer, new: Buffer) -> bool:
    """`can_match_buffer_size`."""
    if old.dtype is not new.dtype:
        return False
    one, other = old.allocated, new.allocated
    return other <= one and SHRINKS_TO * one <= other


class Planner:
    """Makes the plan of the lines."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper, self.low = wrapper, wrapper.schedule.low
        self.storage = {buffer.number: at for at, buffer in enumerate(self.low.inputs)}
        self.buffers: list[PlannedBuffer] = []
        self.steps: list[Step] = []
        self.allocates: list[int] = []
        self.frees: list[int] = []
        self.node: SNode | None = None
        self.tuples: dict[int, list[int]] = {}  # results that nobody reads live as long as the tuple

    def plan(self, notes: tuple[tuple[str, str], ...]) -> Plan:
        for line in self.wrapper.settle():
            if line.kind == "call":
                self.flush()
                self.call(self.wrapper.nodes[line.node])
                continue
            buffer = line.about
            if line.kind == "free":
                if buffer.without_tensor:
                    self.frees.extend(self.tuples.pop(buffer.number, ()))
                elif buffer.into is None:
                    self.frees.append(self.storage[buffer.number])
                continue
            self.flush()
            if line.kind == "allocate":
                self.allocate(buffer)
            else:
                assert line.old is not None
                self.storage[buffer.number] = self.storage[line.old.number]
        self.flush()
        outputs = tuple(self.output(value) for value in self.low.outputs)
        self.let_go({output.storage for output in outputs if output is not None})
        return Plan(len(self.low.inputs), tuple(self.buffers), tuple(self.steps), outputs, notes)

    def allocate(self, buffer: Buffer) -> None:
        self.storage[buffer.number] = number = len(self.low.inputs) + len(self.buffers)
        self.buffers.append(PlannedBuffer(buffer.form, buffer.op, buffer.what, buffer.recomputed))
        self.allocates.append(number)

    def call(self, node: SNode) -> None:
        """What an extern kernel allocates itself."""
        self.node = node
        for op in node.ops:
            out = op.output
            if out.without_tensor:
                for part in self.wrapper.schedule.parts.get(op.number, ()):
                    self.allocate(part)
                    if part.number in self.wrapper.removed:
                        self.tuples.setdefault(out.number, []).append(self.storage[part.number])
            elif out.fresh and op.part_of is None:
                self.allocate(out)

    def flush(self) -> None:
        node = self.node
        if node is not None:
            results = [self.buffers[number - len(self.low.inputs)].form for number in self.allocates]
            reads = kernel_reads(node.ops[0].call, results)
            self.steps.append(Step(kernel_of(node), node.ops[0].op, tuple(self.allocates), tuple(self.frees), reads))
            self.allocates.clear()
            self.frees.clear()
            self.node = None

    def output(self, value: Value | None) -> Output | None:
        if value is None or value.buffer is None:
            return None
        placed = value.strides()
        strides = placed[0] if placed else value.buffer.strides
        return Output(self.storage[value.buffer.number], form_of(value.shape, strides, value.dtype))

    def let_go(self, kept: set[int]) -> None:
        """What is left goes when the code returns."""
        gone = {number for step in self.steps for number in step.frees}
        rest = [number for number in dict.fromkeys(self.storage.values()) if number not in kept and number not in gone]
        if self.steps and rest:
            last = self.steps[-1]
            self.steps[-1] = replace(last, frees=(*last.frees, *rest))


def kernel_of(node: SNode) -> str:
    if node.extern:
        return node.ops[0].kernel or node.ops[0].what
    return "triton: " + " ".join(dict.fromkeys(op.what.split("::")[-1].split(".")[0] for op in node.ops))


_FORWARD, _BACKWARD = "aten::convolution", "aten::convolution_backward"


def kernel_reads(call: Node | None, results: Sequence[Form]) -> tuple[Convolution, ...]:
    """The convolution that an extern kernel runs, where it runs one and allocates what is `made`.

    Inductor brings the operands of a convolution into the layout of its results (`require_channels_last` of
    torch/_inductor/kernel/conv.py).
    """
    return (
        (_convolution(call, results),) if results and call is not None and call.target in (_FORWARD, _BACKWARD) else ()
    )


def _convolution(node: Node, results: Sequence[Form]) -> Convolution:
    last = any(len(f.shape) == 4 and is_channels_last_contiguous(f.shape, f.strides) for f in results)
    if node.target == _FORWARD:
        (x, weight), result, gradients = [arg.tensor for arg in node.args[:2]], node.tensor, None
        numbers = node.args[3:]
    else:
        result, x, weight = [arg.tensor for arg in node.args[:3]]
        numbers, mask = node.args[4:], node.args[10]
        gradients = (bool(mask[0]), bool(mask[1]))
    if last:
        x, weight, result = _make_channels_last(x), _make_channels_last(weight), _make_channels_last(result)
    stride, padding, dilation, transposed, _, groups = numbers[:6]
    return Convolution(x, weight, result, tuple(stride), tuple(padding), tuple(dilation), groups, transposed, gradients)


def _make_channels_last(form: Form) -> Form:
    if len(form.shape) != 4:
        return form
    return form_of(form.shape, channels_last_strides(form.shape), form.dtype)
