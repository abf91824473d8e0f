"""Processes that ask for the same calls in the same order, and differ in sizes alone.

A step is the same on two cards, and so are the workspaces that its kernels take, but for their bytes. With another
batch sizes alone differ, where the step has one structure (`studies.between`); then both traces have the same columns
of buffers. Following a trace call by call is the most of the work, and is done for the first of such processes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from staticmem.allocators.from_trace import EMPTY, Builder, grows, of_its_size, spaces_of
from staticmem.allocators.process import STEPS, Fallbacks, Process, Workspace, WorkspaceModel
from staticmem.eager.trace import Trace

KEPT = 32  # patterns, each with a process: 2 MiB for a step of a thousand ops


class Patterns:
    """The last patterns of calls."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Builder, Process]] = {}

    def process(self, trace: Trace, workspaces: WorkspaceModel) -> Process:
        """The process of a trace, as `process_of_trace` makes it."""
        spaces = spaces_of(workspaces)
        key = _key(trace, spaces)
        if key in self._kept:
            builder, process = self._kept[key]
            if all(of_its_size(trace, buffer, others) == gone for buffer, others, gone in builder.by_size):
                return _with_sizes(process, builder, trace, spaces)
        builder = Builder(trace, workspaces)
        process = builder.run(STEPS)
        while len(self._kept) >= KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = builder, process
        return process


def _key(trace: Trace, spaces: Sequence[tuple[int, Workspace]]) -> Hashable:
    """What decides the calls, but for sizes. Parts of the trace are the same where they are the same objects: a pattern
    holds its trace, so that nothing else has their places in memory."""
    buffers = trace.buffers
    columns = buffers.born, buffers.died, buffers.kernels, buffers.categories, buffers.names
    parts = tuple(map(id, (*columns, trace.kernels, trace.phases, trace.replaced_by, trace.cuda_graphs)))
    return parts, tuple([(kernel, s.after, s.held, s.keep, s.once, s.what) for kernel, s in spaces])


def _with_sizes(process: Process, builder: Builder, trace: Trace, spaces: Sequence[tuple[int, Workspace]]) -> Process:
    """The process with the sizes of another trace and of other workspaces."""
    count, sources = len(trace.buffers), builder.sources
    # a source ~n is the n-th place from the end
    sizes = [*trace.buffers.nbytes, 0, *(space.nbytes for _, space in reversed(spaces))]
    model = [buffer.id for buffer in builder.model]
    scales = [*grows(trace, model), False, *(space.keep is None for _, space in reversed(spaces))]
    if process.empties:
        sources = [count if source == EMPTY else source for source in sources]
    taken = [(id, spaces[~source][1]) for id, source in enumerate(builder.sources) if EMPTY < source < 0]
    return replace(
        process,
        sizes=tuple([sizes[source] for source in sources]),
        scales=tuple([scales[source] for source in sources]),
        fallbacks={id: Fallbacks(space.fallbacks, space.plan) for id, space in taken if space.fallbacks},
        bounds={id: space.bounds for id, space in taken if space.bounds is not None},
        strays={id: space.strays for id, space in taken if space.strays is not None},
    )
