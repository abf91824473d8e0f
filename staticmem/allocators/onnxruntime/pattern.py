"""The memory pattern: one block for all intermediate values of a run, planned from the run before.

Source: onnxruntime/core/framework/mem_pattern_planner.h (best fit into gaps by offset).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Block:
    name: str
    offset: int
    size: int


class PatternPlanner:
    """Traces the allocations of a run. `peak` is the size of the block, in bytes."""

    def __init__(self) -> None:
        self._live: list[_Block] = []  # by offset
        self.peak = 0
        self.offsets: dict[str, int] = {}

    def allocate(self, name: str, size: int) -> None:
        """Places a value of `size` bytes (aligned already) into the gap that fits best, else behind the last one."""
        if size <= 0:
            return
        at, position, waste, current = 0, len(self._live), -1, 0
        if self._live:
            at = self._live[-1].offset + self._live[-1].size
        for index, block in enumerate(self._live):
            gap = block.offset - current
            if gap >= size and (waste < 0 or gap - size < waste):
                at, position, waste = current, index, gap - size
            current = block.offset + block.size
        tail = self.peak - current
        if tail >= size and (waste < 0 or tail - size < waste):
            at, position = current, len(self._live)
        self._live.insert(position, _Block(name, at, size))
        self.offsets[name] = at
        self.peak = max(self.peak, at + size)

    def free(self, name: str) -> None:
        """Forgets a value; its place is a gap from now on."""
        for index, block in enumerate(self._live):
            if block.name == name:
                del self._live[index]
                return
