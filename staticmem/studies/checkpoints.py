"""The best set of checkpoints under a memory budget: the least that has to run again.

The blocks are the repeated modules of the model (`blocks`). Greedy, with every answer from a full analysis: blocks in
the order of the bytes that they keep for backward to the operations that they would run again; the shortest beginning
of that order that stays within the budget, by bisection; then each of its blocks is taken out again, the most expensive
first, where the step stays within the budget without it. It is not proven to be the least, and says so in its note.
Where even all blocks are not enough, groups of 2, 3, ... that share a checkpoint are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from staticmem.passes.checkpoint_regions import regions_of
from staticmem.report.sweep import LeverRow
from staticmem.studies.blocks import blocks_to_choose
from staticmem.studies.compute import Counter

if TYPE_CHECKING:
    from staticmem.studies.levers import Bench

MOST_RUNS = 64  # analyses of one search


@dataclass(frozen=True)
class _Block:
    path: str
    kept: int
    operations: int

    @property
    def worth(self) -> float:
        return self.kept / max(self.operations, 1)


def best_set(bench: Bench, budget: int) -> LeverRow | None:
    """The row of the best set that was found; None where there are no blocks, no set is needed, or none is enough."""
    request = bench.study.request
    if bench.bytes_of(bench.base) <= budget or request.checkpoint or request.checkpoint_segments:
        return None
    blocks = sorted(_blocks(bench), key=lambda b: (-b.worth, b.path))
    if not blocks:
        return None
    end = bench.runs + MOST_RUNS
    chosen = _beginning(bench, blocks, budget)
    if chosen is None:
        return _groups(bench, budget)
    for block in sorted(chosen, key=lambda b: -b.operations):
        if bench.runs >= end:
            break
        fewer = [b for b in chosen if b is not block]
        if fewer and _need(bench, fewer) <= budget:
            chosen = fewer
    return _row(bench, tuple(b.path for b in chosen), 1, len(blocks))


def _blocks(bench: Bench) -> list[_Block]:
    """Blocks with the activations that they keep at the end of the forward, and the operations of theirs."""
    from dataclasses import replace

    one = bench.study.ask(bench.request({}))
    graph, lifetimes, trace = one.result.graph, one.lifetimes, one.result.trace
    counter = Counter(graph, training=True)
    end = trace.marks["forward_end"] - 1
    kept_by_op: dict[int, int] = {}
    for buffer in lifetimes.alive(end):
        if buffer.category == "activation":
            op = trace.kernels[buffer.kernel].op
            kept_by_op[op] = kept_by_op.get(op, 0) + buffer.size
    found = []
    blocks = blocks_to_choose(graph)
    for path in blocks.paths if blocks is not None else ():
        regions = regions_of(graph, replace(one.scenario, checkpoint=(path,)))
        kept = sum(size for op, size in kept_by_op.items() if any(r.start <= op < r.end for r in regions))
        found.append(_Block(path, kept, sum(counter.between(r.start, r.end) for r in regions)))
    return found


def _beginning(bench: Bench, blocks: list[_Block], budget: int) -> list[_Block] | None:
    """The shortest beginning within the budget, by bisection; None where all of them are not."""
    low, high = 0, len(blocks)
    if _need(bench, blocks) > budget:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _need(bench, blocks[:middle]) <= budget:
            high = middle
        else:
            low = middle
    return blocks[:high]


def _need(bench: Bench, blocks: list[_Block]) -> int:
    row = _row(bench, tuple(b.path for b in blocks), 1, len(blocks))
    return bench.bytes_of(row)


def _groups(bench: Bench, budget: int) -> LeverRow | None:
    """All blocks, several to a checkpoint: less is kept, and more is alive while a group runs again."""
    blocks = blocks_to_choose(bench.study.result.graph)
    assert blocks is not None
    for every in range(2, min(blocks.row, 9)):
        row = _row(bench, (blocks.selector,), every, len(blocks.paths))
        if bench.bytes_of(row) <= budget:
            return row
    return None


def _row(bench: Bench, selectors: tuple[str, ...], every: int, count: int) -> LeverRow:
    from staticmem.report.sweep import SAME
    from staticmem.studies.levers import Lever

    words = {"checkpoint": selectors, "checkpoint_every": every}
    what = f"{len(selectors)} of {count} blocks" if every == 1 else f"all blocks, {every} together"
    note = "the least compute within the budget that a greedy search found; every set was analysed in full"
    return bench.try_out(Lever(f"checkpoint {what}, for the budget", words, SAME, note))
