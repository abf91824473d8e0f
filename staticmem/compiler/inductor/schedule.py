"""What waits for what: scheduler nodes, their accesses, and the order in which Inductor first has them.

Source: `torch/_inductor/scheduler.py` of PyTorch 2.15 (`compute_dependencies`, `topological_sort_schedule`,
`dead_node_elimination`, `SchedulerNode._compute_attrs`) and `torch/_inductor/ir.py` (`simplify_and_reorder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from staticmem.compiler.inductor import expressions, layout
from staticmem.compiler.inductor.buffers import Buffer, Loops, Operation, Read
from staticmem.compiler.inductor.indexing import without_added_ones
from staticmem.compiler.inductor.lowering import Lowering
from staticmem.eager.strides import Shape, numel

# an access: strides over the loops, their sizes and an offset; where the index is not linear "indirect", views, the
# order of the loops, their sizes, hints at strides, which loops are in it (None: values pick); or another token
Access = tuple[Any, ...]
STAR: Access = ("whole",)  # StarDep: all of it
PICKED = ("pick", "gather", "window")  # steps of views whose index does not follow from the loops alone


class SNode:
    """A node of the scheduler: operations that are one kernel.

    Attributes:
        ops: in order.
        outputs: buffers that they write.
        reads: the accesses to each buffer that is read, by its number; writes of earlier members do not count.
        writes: the access to each buffer that is written.
        waits: numbers of buffers that have to be written before.
        weak: the same for the order alone, with the buffer that this node writes anew.
        group: elements of the result, and of the reduction.
        ranges: sizes of the loops of each operation.
        first, last: lowest and highest position in the first order.
        own, ancestors: positions of its operations, and of those that it needs, as bits.
    """

    __slots__ = (
        "ancestors", "extern", "first", "group", "last", "nop", "ops", "outputs", "own", "ranges", "reads", "reduction",
        "waits", "weak", "writes",
    )  # fmt: skip

    def __init__(self, op: Operation) -> None:
        self.ops: tuple[Operation, ...] = (op,)
        self.outputs: list[Buffer] = [op.output]
        self.reads: dict[int, dict[Access, None]] = {}  # an order that no hash decides
        self.writes: dict[int, Access] = {}
        self.waits: dict[int, None] = {}
        self.weak: dict[int, int] = {}
        self.nop, self.extern = op.nop, op.loops is None and not op.nop
        self.reduction = bool(op.loops and op.loops.reduction)
        self.group: tuple[int, int] = (0, 0)
        self.ranges: tuple[tuple[int, ...], ...] = ()
        self.first = self.last = self.own = self.ancestors = 0

    @property
    def real(self) -> bool:
        """A kernel of ours."""
        return not self.nop and not self.extern

    def __repr__(self) -> str:
        return "+".join(f"op{op.number}" for op in self.ops)


class User:
    """One reader of a buffer (`NodeUser`); `node` None is the output of the graph."""

    __slots__ = ("in_place", "node", "weak")

    def __init__(self, node: SNode | None, in_place: bool = False, weak: bool = False) -> None:
        self.node, self.in_place, self.weak = node, in_place, weak


class Schedule:
    """The nodes of a graph before fusion.

    Attributes:
        nodes: in the first order, dead ones left out.
        users: who reads each buffer.
        real: of a buffer that is another name after a write, the buffer that is written (`mutation_real_name`).
        dead: numbers of buffers that nobody reads.
        returned: numbers of buffers, or of inputs, that the graph returns.
        writer: the node of each buffer.
    """

    def __init__(self, low: Lowering, donated: Iterable[Buffer] = ()) -> None:
        self.low = low
        self.donated = {buffer.number: buffer for buffer in donated}
        self.buffers = {buffer.number: buffer for buffer in low.buffers}
        self.buffers.update({buffer.number: buffer for buffer in low.inputs})
        self.sizes: dict[tuple[int, Access], int] = {}
        self.real: dict[int, int] = {}
        self.returned: set[int] = set()
        for value in low.outputs:
            if value is not None and value.buffer is not None:
                self.returned.add(value.buffer.number)
        nodes = [SNode(op) for op in low.operations]
        for node in nodes:
            accesses(node)
        self.users: dict[int, dict[int | None, User]] = {}
        self._depend(nodes)
        nodes = topological(nodes)
        self.dead: set[int] = set()
        self.nodes = self._alive(nodes)
        for at, node in enumerate(self.nodes):
            node.first = node.last = at
        self.single = {node.ops[0].number: node for node in nodes}
        self.parts: dict[int, list[Buffer]] = {}
        for op in low.operations:
            if op.part_of is not None:
                self.parts.setdefault(op.part_of.number, []).append(op.output)
        self._ancestors()
        self.writer = {buffer.number: node for node in self.nodes for buffer in node.outputs}

    def _depend(self, nodes: Sequence[SNode]) -> None:
        """`compute_dependencies`: readers of a buffer, writes into it, and who has to wait for whom."""
        shared: dict[int, dict[int | None, User]] = {}
        for node in nodes:  # parts of a concatenation have its readers too
            out = node.outputs[0]
            if out.into is not None:
                group = shared.setdefault(out.into.number, {})
                shared[out.number] = group
        renames: dict[int, int] = {}

        def rename(number: int) -> int:
            while number in renames:
                number = renames[number]
            return number

        def users(number: int) -> dict[int | None, User]:
            return shared.setdefault(number, {})

        def add(number: int, user: User) -> None:
            user_of = users(rename(number))
            key = None if user.node is None else user.node.ops[0].number
            old = user_of.get(key)
            if old is None:
                user_of[key] = user
            else:  # NodeUser.merge
                old.in_place, old.weak = old.in_place and user.in_place, old.weak and user.weak

        for node in nodes:
            out = node.outputs[0]
            if out.mutates is not None:
                target = rename(out.mutates.number)
                for user in list(users(target).values()):
                    if user.node is None or user.node is node:
                        continue
                    for other in user.node.outputs:
                        number = rename(other.number)
                        node.weak[number] = out.number
                        add(number, User(node, weak=True))
                add(target, User(node))
                node.waits[target] = None
            renamed: dict[int, dict[Access, None]] = {}
            for number, accesses in node.reads.items():
                current = rename(number)
                in_place = all(can_in_place(node, access) for access in accesses)
                add(number, User(node, in_place))
                node.waits[current] = None
                renamed[current] = accesses
            node.reads = renamed
            node.waits.pop(out.number, None)
            node.weak.pop(out.number, None)
            if out.mutates is not None:
                target = out.mutates.number
                renames[rename(target)] = out.number
                self.real[out.number] = self.real.get(target, target)
        for number in self.returned:
            add(number, User(None))
        for target in set(self.real.values()):
            if target < 0:
                add(target, User(None))
        for number in (*self.buffers, *shared):
            self.users[number] = users(number)

    def _alive(self, nodes: Sequence[SNode]) -> list[SNode]:
        """`dead_node_elimination`."""
        removed: set[int] = set()
        kept = []
        for node in reversed(nodes):
            op = node.ops[0]
            needed = op.side_effects
            for buffer in node.outputs:
                if all(
                    user.node is not None and (user.weak or user.node.ops[0].number in removed)
                    for user in self.users[buffer.number].values()
                ):
                    self.dead.add(buffer.number)
                else:
                    needed = True
            if needed:
                kept.append(node)
            else:
                removed.add(op.number)
        for user_of in self.users.values():
            for key in [key for key in user_of if key in removed]:
                del user_of[key]
        kept.reverse()
        return kept

    def _ancestors(self) -> None:
        """`compute_ancestors`."""
        needs_of: dict[int, int] = {}
        for at, node in enumerate(self.nodes):
            needs = 0
            for number in (*node.waits, *node.weak):
                needs |= needs_of.get(number, 0)
            node.own, node.ancestors = 1 << at, needs
            for buffer in node.outputs:
                needs_of[buffer.number] = needs | node.own

    def bytes_of(self, number: int, access: Access) -> int:
        """`get_dep_size_hint`: elements that the loops of an access reach, those that are the same counted again."""
        key = (number, access)
        nbytes = self.sizes.get(key)
        if nbytes is None:
            buffer = self.buffers[number]
            sizes, used = buffer.shape, (True,) * len(buffer.shape)
            if isinstance(access[0], tuple):
                sizes, used = access[1], access[0]
            elif access[0] == "indirect" and None not in access[5]:
                sizes, used = access[3], access[5]
            count = numel([size for size, moves in zip(sizes, used, strict=True) if moves])
            nbytes = self.sizes[key] = count * buffer.dtype.itemsize
        return nbytes

    def readers(self, number: int) -> Iterator[User]:
        return iter(self.users.get(number, {}).values())


def can_in_place(node: SNode, access: Access) -> bool:
    """`SchedulerNode.can_inplace`: it is read where it is written."""
    if not node.real or len(node.writes) != 1:
        return False
    out = node.outputs[0]
    return out.into is None and access is not STAR and access == next(iter(node.writes.values()))


def accesses(node: SNode) -> None:
    """Fills in what a node reads and writes, over its loops in the order that Inductor gives them."""
    op = node.ops[0]
    loops, out = op.loops, op.output
    if loops is None or op.nop:
        for buffer in op.reads:
            node.reads.setdefault(buffer.number, {})[STAR] = None
        node.writes[out.number] = STAR
        return
    outer = [dim for dim in range(len(loops.loops)) if dim not in loops.inner]
    node.group = (numel([loops.loops[dim] for dim in outer]), numel([loops.loops[dim] for dim in loops.inner]))
    written = out.place()
    order = loop_order(loops, outer, written[0] if loops.linear else None, loops.reads)
    sizes = tuple(loops.loops[dim] for dim in order)
    node.ranges = (sizes,)
    for read in loops.reads:
        placed, hints = read.strides(), tuple([read.hints()[dim] for dim in order])
        expression = expressions.index_of(read.buffer.shape, read.buffer.place(), read.views, order)
        access: Access
        if expression is not None:
            access = over_loops(expression, sizes, hints)
        elif placed is None:
            picked = any(step[0] in PICKED for step in read.views)
            used = tuple([None if picked else read.dependence()[dim] for dim in order])
            access = ("indirect", *without_added_ones(read.buffer.shape, read.views, order), sizes, hints, used)
        else:
            access = linear(tuple(placed[0][dim] for dim in order), sizes, placed[1])
        node.reads.setdefault(read.buffer.number, {})[access] = None
    if not loops.linear:
        node.writes[out.number] = ("scatter", op.number)
        return
    strides, offset = written
    kept = [dim for dim in order if dim < len(loops.shape)]
    node.writes[out.number] = linear(tuple(strides[d] for d in kept), tuple(loops.loops[d] for d in kept), offset)


def over_loops(expression: expressions.Expression, sizes: Shape, hints: tuple[int, ...]) -> Access:
    """The access that an index expression is: strides where nothing is divided."""
    terms, offset = expression
    if any(atom[0] != "loop" for atom, _ in terms):
        numbers, used = tuple(range(len(sizes))), expressions.loops_of(expression)
        return ("indirect", expression, numbers, sizes, hints, tuple([number in used for number in numbers]))
    strides = [0] * len(sizes)
    for (_, number), stride in terms:
        strides[number] = stride
    return linear(tuple(strides), sizes, offset)


def linear(strides: tuple[int, ...], sizes: tuple[int, ...], offset: int) -> Access:
    """Loops behind the last that matters are left out (`drop_unused_symbols`)."""
    count = len(strides)
    while count and strides[count - 1] == 0:
        count -= 1
    return strides[:count], sizes[:count], offset


def loop_order(
    loops: Loops, outer: Sequence[int], written: Sequence[int] | None, reads: Sequence[Read]
) -> tuple[int, ...]:
    """Loops from the outermost, those of size 1 left out; loops of a reduction come last. Each load counts, those of
    one element too (`get_read_exprs`)."""
    order: list[int] = []
    for part in (outer, loops.inner):
        dims = [dim for dim in part if loops.loops[dim] != 1]
        rows = []
        if written is not None:
            rows.append([written[dim] if dim < len(written) else 0 for dim in dims])
        rows += [[read.hints()[dim] for dim in dims] for read in reads]
        if rows and dims:
            times = [1] * (written is not None) + [read.times for read in reads]
            picked = layout.pick_loop_order(rows, [loops.loops[dim] for dim in dims], times)
            order += [dims[at] for at in reversed(picked)]
        else:
            order += dims
    return tuple(order)


def topological(nodes: Sequence[SNode]) -> list[SNode]:
    """Depth first in the order given; of what a node waits for, by name (`topological_sort_schedule`)."""
    writer = {buffer.number: node for node in nodes for buffer in node.outputs}
    seen: set[int] = set()
    result: list[SNode] = []
    for root in nodes:
        if id(root) in seen:
            continue
        seen.add(id(root))
        stack = [(root, iter(_waits(root, writer)))]
        while stack:
            node, waits = stack[-1]
            for wanted in waits:
                if id(wanted) not in seen:
                    seen.add(id(wanted))
                    stack.append((wanted, iter(_waits(wanted, writer))))
                    break
            else:
                stack.pop()
                result.append(node)
    return result


def _waits(node: SNode, writer: dict[int, SNode]) -> list[SNode]:
    numbers = {*node.waits, *node.weak}
    return [writer[n] for n in sorted((n for n in numbers if n in writer), key=str) if writer[n] is not node]
