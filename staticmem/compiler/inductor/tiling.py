"""How a kernel cuts the elements that it goes through: in one dimension, or in two where it turns something around.

Source: `torch/_inductor/codegen/simd.py` of PyTorch 2.15 (`candidate_tilings`, `select_tiling_with_memory`,
`SIMDKernel.is_compatible`, and what `SIMDScheduling.can_fuse` asks of them), `codegen/simd_kernel_features.py`
(`get_reduction_hint`), `tiling_utils.py` (`_analyze_memory_coalescing`) and `choices.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from staticmem.compiler.inductor.buffers import SPLIT_SCAN
from staticmem.compiler.inductor.reductions import PROCESSORS
from staticmem.compiler.inductor.schedule import Access, Schedule, SNode
from staticmem.eager.strides import numel

# should_use_persistent_reduction: elements of a row, or of a column, that a kernel holds at once
ROW_AT_ONCE, COLUMN_AT_ONCE = 1024, 64
# tiling_scores_suggest_inner_reduction: how much more is dense along rows than along columns; the same of short rows
DENSER, DENSER_IF_SHORT, SHORT = 32, 16, 512


def tiling(*nodes: SNode) -> tuple[int, ...]:
    """Sizes of the dimensions in which a kernel of these nodes, which compute element by element, is cut."""
    count = nodes[0].group[0]
    best: list[tuple[int, tuple[int, ...]]] = [(0, (count,))]
    seen: set[int] = set()
    for node in nodes:
        ranges = node.ranges[0]
        if len(ranges) <= 1:
            continue
        written = node.writes.items()
        for number, access in [*_flat(node.reads.items()), *written]:
            strides = access[4] if access[0] == "indirect" else access[0]
            if number in seen or not isinstance(strides, tuple):
                continue
            candidate = _candidate(ranges, strides, number in node.writes)
            if candidate is not None:
                seen.add(number)
                best.append(candidate)
    every = [ranges for node in nodes for ranges in node.ranges]
    for _, cut in sorted(best, key=lambda pair: -pair[0]):
        if len(cut) == 1 or all(splits_into(ranges, cut[0]) for ranges in every):
            return cut
    return (count,)


def _flat(reads: Iterable[tuple[int, Iterable[Access]]]) -> list[tuple[int, Access]]:
    return [(number, access) for number, accesses in reads for access in accesses]


def _candidate(ranges: Sequence[int], strides: Sequence[int], written: bool) -> tuple[int, tuple[int, int]] | None:
    """A cut behind the dimension that is dense in memory, unless it is the last, with its score."""
    if 1 not in strides:
        return None
    full = (*strides, *(0,) * (len(ranges) - len(strides)))
    split = full.index(1) + 1
    if split >= len(ranges) or not any(full[split:]):
        return None
    outer, inner = numel(ranges[:split]), numel(ranges[split:])
    score = numel([size for size, stride in zip(ranges, full, strict=False) if stride])
    if written:
        score *= 2
    for size in (outer, inner):
        if size >= 32 and size % 32 == 0:
            score *= 2
    return (score, (outer, inner)) if score >= numel(ranges) else None


def compatible(one: SNode, other: SNode) -> bool:
    """`SIMDScheduling.can_fuse`: the loops of one fit those of the other."""
    if one.reduction and other.reduction and is_split_scan(one) != is_split_scan(other):
        return False
    if one.reduction and other.reduction:
        return one.group == other.group
    if not one.reduction and not other.reduction:
        if one.group != other.group:
            return False
        cuts = tiling(one), tiling(other)
        if len(cuts[0]) == 1 and len(cuts[1]) == 1:
            return True
        both = tiling(one, other)
        if len(cuts[0]) > 1:
            return cuts[0] == both and len(cuts[1]) in (1, len(both)) and (len(cuts[1]) == 1 or cuts[1] == both)
        return cuts[1] == both
    simple, reduction = (other, one) if one.reduction else (one, other)
    outer, inner = reduction.group
    if simple.group[0] == outer * inner:
        fits = all(splits_into(ranges, outer) for ranges in simple.ranges)
        return fits and tiling(simple) in ((outer * inner,), (outer, inner))
    return simple.group[0] == outer


def is_split_scan(node: SNode) -> bool:
    return any(op.loops is not None and op.loops.reduction == SPLIT_SCAN for op in node.ops)


def splits_into(sizes: Sequence[int], outer: int) -> bool:
    """`SIMDKernel.is_compatible`: the first loops make up `outer`, perhaps with a part of one."""
    left = outer
    for size in sizes:
        if left == 1:
            return True
        if left % size == 0:
            left //= size
        else:
            return size % left == 0
    return left == 1


# ---- does a kernel hold a whole row


def holds_rows(node: SNode, schedule: Schedule, local: Collection[int]) -> bool:
    """A reduction has a row at once, and needs no second loop over it. `local`: what only this kernel reads."""
    outer, inner = node.group
    if inner <= COLUMN_AT_ONCE or inner > ROW_AT_ONCE:
        return inner <= COLUMN_AT_ONCE
    singles = [schedule.single[op.number] for op in node.ops]
    along = {_along_rows(single) for single in singles if single.reduction}
    whole = {n for one in singles if one.group == (outer * inner, 1) for n in (*one.reads, *one.writes)}
    accesses = [*_flat(node.reads.items()), *node.writes.items()]
    ends = [access[0][-1:] for number, access in accesses if number in whole and isinstance(access[0], tuple)]
    if along == {True} and all(end in ((), (1,)) for end in ends):  # `stride1_for_last_dim`
        return True
    if along == {False}:
        return False
    rows = columns = 0
    for number, access in accesses:
        strides = access[4] if access[0] == "indirect" else access[0]
        if number in local or not isinstance(strides, tuple) or 1 not in strides:
            continue
        sizes = access[3] if access[0] == "indirect" else access[1]
        buffer, dense = schedule.buffers[number], strides.index(1)
        elements = numel([size for size, stride in zip(sizes, strides, strict=True) if stride])
        score = min(elements, numel(buffer.shape)) * buffer.dtype.itemsize * (1 + (number in node.writes))
        if numel(sizes[: dense + 1]) > outer:
            rows += score
        else:
            columns += score
    return rows >= (DENSER_IF_SHORT if inner <= SHORT else DENSER) * max(columns, 1)


def _along_rows(single: SNode) -> bool | None:
    """What lies next to one another is summed (`num_splits`); None where the size alone decides."""
    outer, inner = single.group
    if outer == 1:
        return True
    if inner <= 32 or outer >= PROCESSORS * 2 * 32:
        return None
    votes = []
    for _, access in _flat(single.reads.items()):
        if isinstance(access[0], tuple) and all(access[0]) and numel(access[1]) == outer * inner:
            strides, sizes, _ = access
            votes.append(1 in strides and numel(sizes[: strides.index(1) + 1]) > outer)
    return 2 * sum(votes) > len(votes)
