"""Processes that ask for the same calls in the same order, and differ in sizes alone.

A step is the same on two cards, and so are the workspaces that its kernels take, but for their bytes. With another
batch sizes alone differ, where the step has one structure (`studies.between`); then both traces have the same columns
of buffers. Following a trace call by call is the most of the work, and is done for the first of such processes. Where
kernels take the same workspaces on two cards, as matrix products do on most architectures, the process is one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace

from staticmem.allocators.from_trace import EMPTY, Builder, grows, of_its_size, spaces_of
from staticmem.allocators.process import STEPS, Fallbacks, Process, Workspace, WorkspaceModel
from staticmem.eager.trace import Trace

CALLS = 1 << 20  # of all patterns that are kept: with its process some 100 bytes for each
ALIKE = 8  # processes of a pattern that are kept, of cards that take other workspaces and of other batches

_Spaces = Sequence[tuple[int, Workspace]]


class _Pattern:
    """A process, what made it, and the last ones of the same pattern with what they were asked for."""

    def __init__(self, trace: Trace, spaces: _Spaces, builder: Builder, process: Process) -> None:
        self.first, self.sources, self.by_size = process, builder.sources, builder.by_size
        self.model = [buffer.id for buffer in builder.model]
        self.processes: deque[tuple[Trace, _Spaces, Process]] = deque([(trace, spaces, process)], ALIKE)

    def process(self, trace: Trace, spaces: _Spaces) -> Process | None:
        """The process with the sizes of a trace and of workspaces; None where they decide other calls."""
        for same, others, process in self.processes:
            if same is trace and others == spaces:
                return process
        if any(of_its_size(trace, buffer, others) != gone for buffer, others, gone in self.by_size):
            return None
        process = self._replace_sizes(trace, spaces)
        self.processes.append((trace, spaces, process))
        return process

    def _replace_sizes(self, trace: Trace, spaces: _Spaces) -> Process:
        count, sources = len(trace.buffers), self.sources
        loading = trace.loading.values()
        # a source ~n is the n-th place from the end
        sizes = [*trace.buffers.nbytes, 0, *loading, *(space.nbytes for _, space in reversed(spaces))]
        of_spaces = [space.keep is None for _, space in reversed(spaces)]
        scales = [*grows(trace, self.model), False, *(False for _ in loading), *of_spaces]
        if self.first.empties:
            sources = [count if source == EMPTY else source for source in sources]
        taken = [(id, spaces[~source][1]) for id, source in enumerate(self.sources) if EMPTY < source < 0]
        return replace(
            self.first,
            sizes=tuple([sizes[source] for source in sources]),
            scales=tuple([scales[source] for source in sources]),
            fallbacks={id: Fallbacks(space.fallbacks, space.plan) for id, space in taken if space.fallbacks},
            bounds={id: space.bounds for id, space in taken if space.bounds is not None},
            strays={id: space.strays for id, space in taken if space.strays is not None},
        )


class Patterns:
    """The last patterns of calls."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Pattern] = {}

    def process(self, trace: Trace, workspaces: WorkspaceModel) -> Process:
        """The process of a trace, as `process_of_trace` makes it."""
        spaces = spaces_of(workspaces)
        key = _key(trace, spaces)
        process = self._kept[key].process(trace, spaces) if key in self._kept else None
        if process is None:
            builder = Builder(trace, workspaces)
            process = builder.run(STEPS)
            self._kept.pop(key, None)
            self._keep(key, _Pattern(trace, spaces, builder, process))
        return process

    def _keep(self, key: Hashable, pattern: _Pattern) -> None:
        calls = len(pattern.first.calls) + sum(len(kept.first.calls) for kept in self._kept.values())
        while self._kept and calls > CALLS:
            calls -= len(self._kept.pop(next(iter(self._kept))).first.calls)
        if calls <= CALLS:
            self._kept[key] = pattern


def _key(trace: Trace, spaces: _Spaces) -> Hashable:
    """What decides the calls, but for sizes. Parts of the trace are the same where they are the same objects: a pattern
    holds its trace, so that nothing else has their places in memory."""
    buffers = trace.buffers
    columns = buffers.born, buffers.died, buffers.kernels, buffers.categories, buffers.names
    parts = tuple(map(id, (*columns, trace.kernels, trace.phases, trace.replaced_by, trace.cuda_graphs, trace.streams)))
    of_spaces = tuple([(kernel, s.after, s.held, s.keep, s.once, s.what) for kernel, s in spaces])
    return parts, tuple(trace.loading), of_spaces
