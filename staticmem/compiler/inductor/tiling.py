"""How a kernel cuts the elements that it goes through: in one dimension, or in two where it turns something around.

Source: `torch/_inductor/codegen/simd.py` of PyTorch 2.15 (`candidate_tilings`, `select_tiling_with_memory`,
`SIMDKernel.is_compatible`, and what `SIMDScheduling.can_fuse` asks of them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from staticmem.compiler.inductor.buffers import SPLIT_SCAN
from staticmem.compiler.inductor.schedule import SNode
from staticmem.eager.strides import numel


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


def _flat(reads: Iterable[tuple[int, Iterable[tuple[object, ...]]]]) -> list[tuple[int, tuple[object, ...]]]:
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
