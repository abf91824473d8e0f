"""What a process asks of the allocator, call by call, and what each of its allocations is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import NamedTuple, overload

from staticmem.allocators.events import EMPTY_CACHE, RELEASE, Event
from staticmem.ir.record import record


class Origin(NamedTuple):
    """What an allocation is: a buffer of the trace (-1: a workspace, named by `what`), in a step (0: before them)."""

    buffer: int
    step: int
    kernel: int
    what: str = ""


class Origins(Sequence[Origin]):
    """The origin of each allocation. As columns, because few of them are ever looked at.

    `starts[step]` is the first id of that step; `whats` has a word where there is one.
    """

    def __init__(
        self, buffers: Sequence[int], kernels: Sequence[int], starts: Sequence[int], whats: Mapping[int, str]
    ) -> None:
        self.buffers, self.kernels, self.starts, self.whats = buffers, kernels, starts, whats

    def __len__(self) -> int:
        return len(self.buffers)

    @overload
    def __getitem__(self, index: int) -> Origin: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Origin]: ...

    def __getitem__(self, index: int | slice) -> Origin | Sequence[Origin]:
        if isinstance(index, slice):
            return [self[id] for id in range(*index.indices(len(self)))]
        id = range(len(self))[index]
        step = bisect_right(self.starts, id) - 1
        return Origin(self.buffers[id], step, self.kernels[id], self.whats.get(id, ""))


class Mark(NamedTuple):
    """Events from index `event` on belong to this phase of this step; step 0 is what comes before the first."""

    step: int
    phase: str
    event: int


@record(frozen=True)
class Process:
    """What a process asks of the allocator: `calls` has the id of each allocation and `~id` of each release in order.

    `sizes[id]` are bytes, `origins[id]` says what it is, and `marks` where phases begin. `scales[id]` is True for what
    grows with the batch: all but the model, what has the shape of a parameter (copies, gradients, optimizer state) and
    workspaces that are kept. `fallbacks` are for `simulate`. `bounds` has the least and the most bytes of the
    workspaces that are known as a band, `strays` the wider bounds of those that may lie outside of it. `empties` are
    ids without bytes that stand for the cache being emptied.
    """

    calls: tuple[int, ...]
    sizes: tuple[int, ...]
    origins: Origins
    marks: tuple[Mark, ...]
    scales: tuple[bool, ...]
    fallbacks: Mapping[int, tuple[int, ...]]
    bounds: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    empties: tuple[int, ...] = ()
    strays: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The calls as events, for `simulate`."""
        return self.served(self.sizes)

    def served(self, sizes: Sequence[int]) -> tuple[Event, ...]:
        """The same with other sizes."""
        if self.empties:
            sizes = list(sizes)
            for id in self.empties:
                sizes[id] = EMPTY_CACHE
        return tuple([Event(call, sizes[call]) if call >= 0 else Event(~call, RELEASE) for call in self.calls])

    def bound(self, most: bool) -> list[int]:
        """`sizes` with every workspace at its most, or at its least."""
        sizes = list(self.sizes)
        for id, band in (*self.bounds.items(), *self.strays.items()):
            sizes[id] = band[most]
        return sizes

    def mark_at(self, event: int) -> Mark:
        """The phase that an event belongs to."""
        at = bisect_left(self.marks, event + 1, key=lambda mark: mark.event)
        return self.marks[max(at - 1, 0)]

    def spans(self) -> Iterator[tuple[Mark, int]]:
        """Each phase with the index of the event behind its last one."""
        ends = [*(mark.event for mark in self.marks[1:]), len(self.calls)]
        return zip(self.marks, ends, strict=True)
