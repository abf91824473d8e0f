"""The step as data of a page: every buffer with its life, kernels, modules, and who holds what at the peak."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from staticmem.ir.graph import Graph
from staticmem.liveness import Lifetimes
from staticmem.liveness.why import module_of, short
from staticmem.report.html.pack import Words, block
from staticmem.report.html.page import cut, visible
from staticmem.report.model import CATEGORIES

UNIT = 512  # bytes: sizes are multiples of it


@dataclass(frozen=True, slots=True)
class Span:
    """A phase over the ticks [start, end)."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step in columns; `born[i]` to `shape[i]` are of buffer i, in order of allocation.

    Time is ticks: one allocation or one release each. A buffer lives over [born, died); died is `ticks` where it
    outlives the step. `size` is in units of 512 bytes. `kernel` is an index of `kernel_name` and `kernel_phase`;
    `category` one of `categories`; `name`, `module`, `dtype`, `shape` and `kernel_name` are indices of `words`.
    """

    ticks: int
    peak_tick: int
    phases: tuple[Span, ...]
    categories: tuple[str, ...]
    words: tuple[str, ...]
    born: tuple[int, ...]
    died: tuple[int, ...]
    size: tuple[int, ...]
    category: tuple[int, ...]
    kernel: tuple[int, ...]
    name: tuple[int, ...]
    module: tuple[int, ...]
    dtype: tuple[int, ...]
    shape: tuple[int, ...]
    kernel_name: tuple[int, ...]
    kernel_module: tuple[int, ...]

    def packed(self) -> str:
        """The columns for a page (see `pack.block`)."""
        life = [died - born for born, died in zip(self.born, self.died, strict=True)]
        return block(
            {
                "born": ("delta", self.born),
                "life": ("plain", life),
                "size": ("plain", self.size),
                "category": ("plain", self.category),
                "kernel": ("delta", self.kernel),
                "name": ("delta", self.name),
                "module": ("delta", self.module),
                "dtype": ("plain", self.dtype),
                "shape": ("delta", self.shape),
                "kernel_name": ("plain", self.kernel_name),
                "kernel_module": ("delta", self.kernel_module),
            },
            {"words": self.words},
        )


def timeline(graph: Graph, lifetimes: Lifetimes) -> Timeline:
    """The timeline of a step over the graph that it ran."""
    trace, words = lifetimes.trace, Words()
    buffers, kernels = trace.buffers, trace.kernels
    categories = Words(CATEGORIES)
    starts = [*trace.phases, ("", lifetimes.ticks)]
    modules = [words(_module(graph, kernel.op)) for kernel in trace.kernels]
    return Timeline(
        ticks=lifetimes.ticks,
        peak_tick=lifetimes.peak_tick,
        phases=tuple(Span(name, start, end) for (name, start), (_, end) in pairwise(starts)),
        born=tuple(lifetimes.born),
        died=tuple(lifetimes.died),
        size=tuple(size // UNIT for size in lifetimes.sizes),
        category=tuple(categories(buffer.category) for buffer in buffers),
        kernel=tuple(max(buffer.kernel, 0) for buffer in buffers),
        name=tuple(words(buffer.name or f"({short(trace.kernels[buffer.kernel].name)})") for buffer in buffers),
        module=tuple(words(module_of(graph, b.category, b.name, kernels[b.kernel].op)) for b in buffers),
        dtype=tuple(words(buffer.dtype.name) for buffer in buffers),
        shape=tuple(words(", ".join(map(str, buffer.shape))) for buffer in buffers),
        kernel_name=tuple(words(short(kernel.name)) for kernel in trace.kernels),
        kernel_module=tuple(modules),
        words=tuple(visible(cut(word)) for word in words.listed()),
        categories=tuple(categories.listed()),
    )


def _module(graph: Graph, op: int) -> str:
    if not 0 <= op < len(graph.ops):
        return ""
    modules = graph.ops[op].modules
    return modules[-1].path if modules else ""
