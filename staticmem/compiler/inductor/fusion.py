"""Which operations become one kernel.

Source: `torch/_inductor/scheduler.py` (`fuse_nodes_once`, `get_possible_fusions`, `_can_fuse`, `can_fuse_vertical`,
`score_fusion_memory`, `can_fusion_increase_peak_memory`), `torch/_inductor/choices.py` (`can_fuse`, `score_fusion`) and
`torch/_inductor/codegen/simd.py` (`can_fuse`) of PyTorch 2.15.

Left out: templates of autotuned products, nested reductions, and reductions of mixed orders (of 5 Mi
elements and more). They change which kernels there are more than what is in memory. Loops that are cut as those of a
reduction stay so: PyTorch takes that back where its estimate of the traffic, by the bandwidth of the card, gets worse
(`_reindexing_regresses_memory_coalescing`; it did in none of 622 cases in 18 steps of 9 networks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import mul

from staticmem.compiler.inductor.expressions import constant, loop, loops_of, remainder, simplify, total
from staticmem.compiler.inductor.schedule import STAR, Access, Schedule, SNode, linear, over_loops, topological
from staticmem.compiler.inductor.tiling import compatible, splits_into
from staticmem.eager.strides import Shape, numel

ROUNDS = 10  # fuse_nodes
NODES_AT_MOST = 64  # config.max_fusion_size
PAIRS = 64  # config.max_fusion_buffer_group_pairwise_attempts
DISTANCE = 64  # are_long_distant_nodes
SHARED_AT_LEAST = 10  # config.score_fusion_memory_threshold, in bytes
OVERHEAD = 32  # can_fusion_increase_peak_memory: "quite arbitrary"


class Fusion:
    """Fuses the nodes of a schedule.

    Attributes:
        group: the node that each operation is in now, by its position.
        across: for each position, what is fused with operations on both sides of it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.position = {node.ops[0].number: at for at, node in enumerate(schedule.nodes)}
        self.nodes = [merge(node) for node in schedule.nodes]  # their loops change
        self.group: list[SNode] = list(self.nodes)
        self.across = [0] * (len(schedule.nodes) + 1)
        self.keys: dict[int, tuple[object, int] | None] = {}

    def run(self) -> list[SNode]:
        nodes = self.nodes
        for _ in range(ROUNDS):
            fused = self.once(nodes, reorder=False)
            if len(fused) == len(nodes) or len(fused) == 1:
                nodes = fused
                break
            nodes = fused
        return self.once(nodes, reorder=True)

    def once(self, nodes: list[SNode], *, reorder: bool) -> list[SNode]:
        pairs = self.candidates(nodes, reorder)
        alive = dict.fromkeys(nodes)
        for one, other in pairs:
            first, second = self.now(one), self.now(other)
            if first is second or not self.can_fuse(first, second, reorder) or self.makes_cycle(first, second):
                continue
            node = merge(first, second)
            for at in bits(node.own):
                self.group[at] = node
            for low in range(node.first + 1, node.last + 1):
                self.across[low] |= node.own
            del alive[first], alive[second]
            alive[node] = None
        return topological(sorted(alive, key=lambda node: node.first))

    def now(self, node: SNode) -> SNode:
        return self.group[self.position[node.ops[0].number]]

    def candidates(self, nodes: Sequence[SNode], reorder: bool) -> list[tuple[SNode, SNode]]:
        """Pairs that share a buffer and may be fused, best first (`get_possible_fusions`)."""
        by_buffer: dict[int, list[SNode]] = {}
        for node in nodes:
            if node.real:
                for number in {*node.reads, *node.writes}:
                    by_buffer.setdefault(number, []).append(node)
        pairs: dict[tuple[int, int], tuple[SNode, SNode]] = {}
        seen: set[tuple[int, int]] = set()
        for group in by_buffer.values():
            for at, one in enumerate(group):
                for other in group[at + 1 : at + 1 + PAIRS]:
                    key = (id(one), id(other))
                    if key in seen:
                        continue
                    seen.add(key)
                    if self.can_fuse(one, other, reorder):
                        pairs[key] = (one, other)
        return sorted(pairs.values(), key=lambda pair: self.priority(*pair), reverse=True)

    def priority(self, one: SNode, other: SNode) -> tuple[int, int, int, int]:
        """`score_fusion`: kinds that are alike, then shared bytes, then nearness."""
        shared = self.shared(one, other)
        near = -max(abs(one.first - other.last), abs(other.first - one.last))
        return 1 + (shared > 0), int(one.reduction == other.reduction and shared > 0), shared, near

    # ---- may they be fused

    def can_fuse(self, one: SNode, other: SNode, reorder: bool) -> bool:
        """`_can_fuse`, with `other` behind `one`. Where yes, loops that were put in another order for it stay so."""
        if one is other or not one.real or not other.real or other.own & one.ancestors:
            return False
        if len(one.ops) + len(other.ops) > NODES_AT_MOST:
            return False
        shared = self.shared(one, other)
        first, second = one, other
        if shared < SHARED_AT_LEAST:
            first, second, shared = self.aligned(one, other, shared, reorder)
        if not shared or self.raises_peak(one, other, self.shared(first, second)):
            return False
        if one.own & other.ancestors:
            fits = self.vertical(first, second) and compatible(first, second)
            again = None if fits else recut(first, second)
            if again is not None:
                first, second = again
                fits = self.vertical(first, second) and compatible(first, second)
        else:
            far = max(abs(one.first - other.last), abs(other.first - one.last)) > DISTANCE
            fits = shared >= SHARED_AT_LEAST and not far and compatible(first, second)
        if fits:
            for node, reordered_node in ((one, first), (other, second)):
                node.reads, node.writes, node.ranges = (
                    reordered_node.reads,
                    reordered_node.writes,
                    reordered_node.ranges,
                )
        return fits

    def shared(self, one: SNode, other: SNode) -> int:
        """Bytes that both touch at the same index (`score_fusion_memory`)."""
        few, many = (one, other) if len(one.reads) <= len(other.reads) else (other, one)
        total = 0
        for number in {*few.reads, *few.writes}:
            if number in many.reads or number in many.writes:
                common = touched(few, number) & touched(many, number)
                total += sum(self.schedule.bytes_of(number, access) for access in common)
        return total

    def aligned(self, one: SNode, other: SNode, shared: int, reorder: bool) -> tuple[SNode, SNode, int]:
        """Both, where they share little: one of them with its loops in another order, and what they share then."""
        if reorder:
            in_order = self.in_one_order(one, other)
            again = recut(one, other) if in_order is None else None
            if again is not None:
                in_order = self.in_one_order(*again) or (*again, self.shared(*again))
            if in_order is not None:
                one, other, shared = in_order
        if shared < SHARED_AT_LEAST:
            turned = self.inverted(one, other)
            if turned is not None:
                number, reads = next(iter(turned.reads.items()))
                return one, turned, self.schedule.bytes_of(number, next(iter(reads)))
        return one, other, shared

    def inverted(self, one: SNode, other: SNode) -> SNode | None:
        """A copy in another order of what `one` writes, which goes through it in the order of `one` and writes here and
        there instead (`shared_data_after_inverting_indexing`)."""
        if len(other.ops) != 1 or other.reduction or len(other.reads) != 1 or other.weak:
            return None
        (number, reads), (target, written) = next(iter(other.reads.items())), next(iter(other.writes.items()))
        source = one.writes.get(number)
        buffer = self.schedule.buffers[number]
        loops = other.ops[0].loops
        if source is None or len(reads) != 1 or loops is None:
            return None
        if written in reads:  # one index expression where two are asked for
            return None
        if not isinstance(source[0], tuple) or not isinstance(written[0], tuple):
            return None
        flat = merged(source)
        size = numel(buffer.shape)
        if flat != ((1,), (size,), 0) or merged(written) != flat:
            return None
        if any(step[0] not in ("reshape", "permute") for step in loops.reads[0].views):
            return None
        inverse = merge(other)
        inverse.reads, inverse.writes = {number: {flat: None}}, {target: ("inverted", target)}
        inverse.ranges = ((size,),)
        return inverse

    def in_one_order(self, one: SNode, other: SNode) -> tuple[SNode, SNode, int] | None:
        """One of them with its loops in the order of the other's (`_try_reorder_loops_for_candidates`)."""
        best: tuple[bool, int, int, Access, Access] | None = None
        for number in {*one.reads, *one.writes} & {*other.reads, *other.writes}:
            mine, theirs = access_to(one, number), access_to(other, number)
            written = number in one.writes or number in other.writes
            if by_stride(mine) == by_stride(theirs) and isinstance(mine[0], tuple):
                size = numel([size for stride, size in zip(mine[0], mine[1], strict=True) if stride])
                if best is None or (written, size) > best[:2]:
                    best = (written, size, number, mine, theirs)
            elif written and not may_be_turned(*((mine, theirs) if number in one.writes else (theirs, mine))):
                return None
        if best is None:
            return None
        _, _, number, mine, theirs = best
        if len(mine[1]) != len(theirs[1]):
            return (one, other, self.schedule.bytes_of(number, mine)) if merged(mine) == merged(theirs) else None
        if not one.reduction:
            moved = reordered(one, mine, theirs)
            return None if moved is None else (moved, other, self.shared(moved, other))
        if not other.reduction:
            moved = reordered(other, theirs, mine)
            return None if moved is None else (one, moved, self.shared(one, moved))
        return None

    def raises_peak(self, one: SNode, other: SNode, shared: int) -> bool:
        """`can_fusion_increase_peak_memory`: both would free a buffer that the other could take. `shared`: bytes at the
        same index, which is less than what loops that are one in memory share."""
        mine = self.single_reads(one)
        if not mine:
            return False
        common = mine & self.single_reads(other)
        return sum(size for _, size in common) > OVERHEAD * shared

    def single_reads(self, node: SNode) -> set[tuple[object, int]]:
        keys = set()
        for number in node.reads:
            if number not in self.keys:
                buffer = self.schedule.buffers[number]
                alone = number >= 0 and len(self.schedule.users[number]) == 1 and not buffer.without_tensor
                self.keys[number] = (buffer.dtype, buffer.allocated) if alone else None
            key = self.keys[number]
            if key is not None:
                keys.add(key)
        return keys

    def vertical(self, one: SNode, other: SNode) -> bool:
        """`can_fuse_vertical`: all that `other` reads of `one` is where `one` writes it."""
        left: set[int] = set()
        for number in other.waits:
            written = one.writes.get(number)
            reads = other.reads.get(number) or (STAR,)
            if written is None or not all(reads_what_is_written(read, written) for read in reads):
                left.add(number)
        for number, mutating in other.weak.items():
            if number not in other.waits and not (number in one.writes and self.writes_in_place(one, other, mutating)):
                left.add(number)
        if any(number in one.writes for number in left):
            return False
        writers = self.schedule.writer
        for number in left:
            writer = writers.get(number)
            if writer is not None and self.now(writer).ancestors & one.own:
                return False
        return True

    def writes_in_place(self, one: SNode, other: SNode, mutating: int) -> bool:
        """`fusable_weak_dep`: the old value is read where the new one is written."""
        written = other.writes.get(mutating)
        if written is None or not isinstance(written[0], tuple):
            return False
        real = self.schedule.real[mutating]
        reads = {
            access
            for number, accesses in one.reads.items()
            if self.schedule.real.get(number, number) == real
            for access in accesses
        }
        return reads <= {written}

    def makes_cycle(self, one: SNode, other: SNode) -> bool:
        """A path from one to the other through other fusions (`will_fusion_create_cycle`)."""
        names = one.own | other.own
        ancestors = (one.ancestors | other.ancestors) & ~names
        low = min(one.first, other.first)
        visited: set[int] = set()
        stack = [ancestors]
        while stack:
            mask = stack.pop()
            # what lies before both nodes leads to them only through a fusion that reaches beyond
            for at in bits(mask >> low << low | mask & self.across[low]):
                node = self.group[at]
                if len(node.ops) == 1 or id(node) in visited:
                    continue
                visited.add(id(node))
                if not node.own & ~ancestors:
                    continue
                if node.ancestors & names:
                    return True
                stack.append(node.ancestors & ~ancestors)
        return False


def reordered(node: SNode, mine: Access, theirs: Access) -> SNode | None:
    """The node with its loops in the order in which `mine` has the strides of `theirs` (`decide_loop_order_to_match`);
    None where strides do not tell loops apart."""
    ranges = node.ranges[0]
    count = len(ranges)
    strides, wanted = mine[0], theirs[0]
    if len(set(strides)) != len(strides) or sorted(strides) != sorted(wanted) or count != len(strides):
        return None
    if 0 in strides:
        return None
    if any(other != ranges for other in node.ranges):
        return None
    order = [strides.index(stride) for stride in wanted]

    def moved(access: Access) -> Access:
        if access[0] == "indirect":
            return ("indirect", access[1], *(tuple([part[at] for at in order]) for part in access[2:]))
        if not isinstance(access[0], tuple):
            return access
        full = (*access[0], *(0,) * (count - len(access[0])))
        return linear(tuple(full[at] for at in order), tuple(ranges[at] for at in order), access[2])

    return changed(node, moved, [tuple(sizes[at] for at in order) for sizes in node.ranges])


def changed(node: SNode, change: Callable[[Access], Access], ranges: Iterable[Shape]) -> SNode:
    """A copy that goes through its loops in another way."""
    copied = merge(node)
    copied.reads = {number: {change(access): None for access in accesses} for number, accesses in node.reads.items()}
    copied.writes = {number: change(access) for number, access in node.writes.items()}
    copied.ranges = tuple(ranges)
    return copied


def recut(one: SNode, other: SNode) -> tuple[SNode, SNode] | None:
    """Both, where one is a reduction, with the loops of the other cut as those of the reduction
    (`_try_reindex_pointwise_for_reduction`)."""
    if one.reduction == other.reduction:
        return None
    simple, wanted = (other, one.group) if one.reduction else (one, other.group)
    if simple.group[0] != numel(wanted) or all(ranges == wanted for ranges in simple.ranges):
        return None
    if not all(splits_into(ranges, wanted[0]) for ranges in simple.ranges):
        return None
    cut = changed(simple, lambda access: over_two(access, wanted), [wanted] * len(simple.ranges))
    pair = (one, cut) if one.reduction else (cut, other)
    common = {*one.reads, *one.writes} & {*other.reads, *other.writes}
    return pair if any(alike(*(access_to(node, number) for node in pair)) for number in common) else None


def alike(one: Access, other: Access) -> bool:
    """`deps_match_normalized`."""
    if one == other or not isinstance(one[0], tuple) or not isinstance(other[0], tuple):
        return one == other
    return by_stride(one) == by_stride(other) if len(one[1]) == len(other[1]) else merged(one) == merged(other)


@lru_cache(1 << 14)
def over_two(access: Access, wanted: tuple[int, int]) -> Access:
    """The access over two loops that go through the same elements (`reindex_iter_loops`)."""
    if access[0] != "indirect" and not isinstance(access[0], tuple):
        return access
    strides, sizes = (access[4], access[3]) if access[0] == "indirect" else access[:2]
    left = [numel(wanted) // numel(sizes[: at + 1]) for at in range(len(sizes))]
    steps = [[step // below % size for below, size in zip(left, sizes, strict=True)] for step in (wanted[1], 1)]
    hints = tuple([sum(map(mul, strides, step)) for step in steps])
    flat = total([(wanted[1], loop(0)), (1, loop(1))])
    indices = [remainder(flat, below, size) for below, size in zip(left, sizes, strict=True)]
    if access[0] == "indirect":
        moving = loops_of(total([(int(bool(moves)), index) for moves, index in zip(access[5], indices, strict=True)]))
        used = (None, None) if None in access[5] else (0 in moving, 1 in moving)
        return ("indirect", access[1:4], (0, 1), wanted, hints, used)
    expression = total([(1, constant(access[2])), *zip(strides, indices, strict=True)])
    return over_loops(simplify(expression, wanted), wanted, hints)


def access_to(node: SNode, number: int) -> Access:
    """Where it is written, else its last read."""
    access = node.writes.get(number)
    return access if access is not None else next(reversed(node.reads[number]))


def may_be_turned(written: Access, read: Access) -> bool:
    """The sizes of what is written are among those that are read: loops in another order may fit."""
    if not isinstance(written[0], tuple) or not (isinstance(read[0], tuple) or read[0] == "indirect"):
        return True
    sizes = merged(read)[1] if isinstance(read[0], tuple) else read[3]
    return all(size in sizes for size in merged(written)[1])


def touched(node: SNode, number: int) -> set[Access]:
    accesses = set(node.reads.get(number, ()))
    written = node.writes.get(number)
    return accesses if written is None else accesses | {written}


def bits(mask: int) -> list[int]:
    positions = []
    while mask:
        low = mask & -mask
        positions.append(low.bit_length() - 1)
        mask ^= low
    return positions


def merge(one: SNode, other: SNode | None = None) -> SNode:
    """`FusedSchedulerNode`, or a copy."""
    node = SNode.__new__(SNode)
    if other is None:
        for name in SNode.__slots__:
            setattr(node, name, getattr(one, name))
        return node
    node.ops = (*one.ops, *other.ops)
    node.outputs = [*one.outputs, *other.outputs]
    node.writes = {**one.writes, **other.writes}
    node.reads = {number: dict(accesses) for number, accesses in one.reads.items()}
    for number, accesses in other.reads.items():
        node.reads.setdefault(number, {}).update(accesses)
    for number, written in node.writes.items():
        left = node.reads.get(number)
        if left is not None:
            left.pop(written, None)
            if not left:
                del node.reads[number]
    node.waits = {n: None for n in (*one.waits, *other.waits) if n not in node.writes}
    node.weak = {n: m for n, m in (*one.weak.items(), *other.weak.items()) if n not in node.writes}
    node.nop = node.extern = False
    node.reduction = one.reduction or other.reduction
    node.group = one.group if one.reduction or not other.reduction else other.group
    node.first, node.last = min(one.first, other.first), max(one.last, other.last)
    node.own = one.own | other.own
    node.ancestors = (one.ancestors | other.ancestors) & ~node.own
    node.ranges = (*one.ranges, *other.ranges)
    return node


def reads_what_is_written(read: Access, written: Access) -> bool:
    """`fusable_read_and_write`: the same index, over the same loops or more."""
    if not isinstance(read[0], tuple) or not isinstance(written[0], tuple):
        return False
    return read == written or (len(read[1]) != len(written[1]) and merged(read) == merged(written))


@lru_cache(1 << 14)
def merged(access: Access) -> Access:
    """Loops that are one in memory made one (`MemoryDep.normalize`)."""
    strides, sizes, offset = access[:3]
    rows: list[list[int]] = []
    for stride, size in zip(strides, sizes, strict=True):
        if rows and rows[-1][0] == stride * size:
            rows[-1] = [stride, rows[-1][1] * size]
        else:
            rows.append([stride, size])
    return tuple(row[0] for row in rows), tuple(row[1] for row in rows), offset


@lru_cache(1 << 14)
def by_stride(access: Access) -> Access:
    """The same whatever the order of loops (`normalize_with_stride_order`)."""
    if not isinstance(access[0], tuple):
        return access
    strides, sizes, offset = access
    pairs = sorted(zip(strides, sizes, strict=True), key=lambda pair: -pair[0])
    return merged((tuple(p[0] for p in pairs), tuple(p[1] for p in pairs), offset))
