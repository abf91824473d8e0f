"""What a process asks of the allocator, call by call, and what each of its allocations is.

Kernels ask for workspaces beside their results: `WorkspaceModel` is the contract with whoever knows the hardware.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import NamedTuple, Protocol, overload

from staticmem.ir.record import record

STEPS = 3  # of a process: reserved memory may peak in any of the first three (`from_trace`)
RELEASE = -1  # `nbytes` of a release
GRAPH_POOL = -1  # the stream of an `Event` in the private pool of CUDA graphs
EMPTY_CACHE = -2  # `nbytes` of a call that gives cached memory back to the driver: `torch.cuda.empty_cache()`


class Event(NamedTuple):
    """An allocation of `nbytes` under a new `id` on a stream, or (nbytes is RELEASE) the release of that id, or (nbytes
    is EMPTY_CACHE, whatever the id) cached memory going back.

    An id is used once. Streams are small integers; 0 is the default stream, GRAPH_POOL the pool of CUDA graphs.
    """

    id: int
    nbytes: int
    stream: int = 0


class Fallbacks(NamedTuple):
    """Smaller sizes to try, one after another, where a request does not fit; 0: do without.

    `plan` names requests that are served alike: what one of them took is what the next of them asks for. None: each is
    on its own.
    """

    sizes: tuple[int, ...]
    plan: Hashable = None


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
    ids without bytes that stand for the cache being emptied. `private` are ids in the pool of CUDA graphs, `streams`
    has the stream of those that another one than the default stream allocates. `whole`: no step repeats the one before.
    """

    calls: tuple[int, ...]
    sizes: tuple[int, ...]
    origins: Origins
    marks: tuple[Mark, ...]
    scales: tuple[bool, ...]
    fallbacks: Mapping[int, Fallbacks]
    bounds: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    empties: tuple[int, ...] = ()
    strays: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    private: frozenset[int] = frozenset()
    streams: Mapping[int, int] = field(default_factory=dict)
    whole: bool = False

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
        events = [Event(call, sizes[call]) if call >= 0 else Event(~call, RELEASE) for call in self.calls]
        if streams := self.streams:
            events = [
                e if e.nbytes == RELEASE or e.id not in streams else e._replace(stream=streams[e.id]) for e in events
            ]
        if self.private:
            events = [
                e if e.nbytes == RELEASE or e.id not in self.private else e._replace(stream=GRAPH_POOL) for e in events
            ]
        return tuple(events)

    def bound(self, most: bool) -> list[int]:
        """`sizes` with every workspace at its most, or at its least."""
        sizes = list(self.sizes)
        for id, band in (*self.bounds.items(), *self.strays.items()):
            sizes[id] = band[most]
        return sizes

    def whats_of_setup(self) -> Iterator[tuple[int, str]]:
        """The ids of what is allocated before the first step and is no buffer, each with its word."""
        end = self.origins.starts[1] if len(self.origins.starts) > 1 else len(self.sizes)
        return ((id, what) for id, what in self.origins.whats.items() if id < end)

    def mark_at(self, event: int) -> Mark:
        """The phase that an event belongs to."""
        at = bisect_left(self.marks, event + 1, key=lambda mark: mark.event)
        return self.marks[max(at - 1, 0)]

    def spans(self) -> Iterator[tuple[Mark, int]]:
        """Each phase with the index of the event behind its last one."""
        ends = [*(mark.event for mark in self.marks[1:]), len(self.calls)]
        return zip(self.marks, ends, strict=True)


# -- workspaces of kernels ---------------------------------------------------------------------------------------------

FIRST, LAST = -2, -1  # values of `Workspace.after`


@record(frozen=True, slots=True)
class Workspace:
    """Bytes that a kernel takes from the caching allocator beside its results.

    `after` says when: behind the kernel's own allocation of this number (0 for its first result), LAST for behind all
    of them, FIRST for before any. It is released before the kernel's next allocation, so that two workspaces never
    coexist; with `held` it is released at the end of the kernel.

    `keep` names one that stays: it is allocated when the name first occurs in the process and never released (the
    workspace of a cuBLAS handle). `fallbacks` are smaller sizes to try where it does not fit, 0 for none at all
    (the next plans of a convolution), and `plan` names kernels that keep to what one of them took. `what` is for
    people. `bounds` are the least and the most bytes where `nbytes` is not certain; `nbytes` may be 0 then. `strays`
    are wider ones, for what lies outside of `bounds` now and then.

    `once` names one that is taken when the name first occurs and never again; behind it cached memory goes back to the
    driver (the search of `cudnn.benchmark`).
    """

    nbytes: int
    after: int = LAST
    held: bool = False
    keep: str | None = None
    fallbacks: tuple[int, ...] = ()
    what: str = "workspace"
    bounds: tuple[int, int] | None = None
    once: str | None = None
    strays: tuple[int, int] | None = None
    plan: Hashable = None


class WorkspaceModel(Protocol):
    """Knows the workspaces of the kernels of one trace."""

    def taken(self) -> Iterable[tuple[int, Sequence[Workspace]]]:
        """The kernels that take workspaces, as indices into `Trace.kernels` from the first to the last, each with its
        own in the order in which it takes them."""
        ...
