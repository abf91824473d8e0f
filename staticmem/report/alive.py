"""The tensors alive at the peak, each made when it is asked for: a large graph has millions, a reader wants the top."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from staticmem.eager.trace import Hold
from staticmem.ir.graph import Graph
from staticmem.liveness import Lifetimes
from staticmem.liveness.why import module_of, reasons, short
from staticmem.report.model import CATEGORIES, TensorEntry

FEW = 64  # entries for which who holds them is looked up by themselves, and not for all at once


class Alive(Sequence[TensorEntry]):
    """Everything alive at the peak, largest first; equal sizes in order of allocation. As good as a tuple of it."""

    def __init__(self, graph: Graph, lifetimes: Lifetimes) -> None:
        self.graph, self.lifetimes = graph, lifetimes
        sizes = lifetimes.sizes
        ids = [id for id in lifetimes.alive_ids(lifetimes.peak_tick) if sizes[id]]
        ids.sort(key=sizes.__getitem__, reverse=True)  # a stable sort: ids go up among equals
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> TensorEntry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TensorEntry, ...]: ...
    def __getitem__(self, index: int | slice) -> TensorEntry | tuple[TensorEntry, ...]:
        if isinstance(index, slice):
            return self._entries(self.ids[index])
        return self._entries([self.ids[index]])[0]

    def __iter__(self) -> Iterator[TensorEntry]:
        return iter(self._entries(self.ids))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)  # a copy, or another process, has the entries without the step

    def by_module(self) -> tuple[Mapping[str, int], Mapping[str, Mapping[str, int]]]:
        """Bytes of each category, and of each category in each module; in order of the largest tensors."""
        trace, sizes, graph = self.lifetimes.trace, self.lifetimes.sizes, self.graph
        buffers, ops = trace.buffers, trace.kernels.ops
        categories, names, kernels = buffers.categories, buffers.names, buffers.kernels
        every = dict.fromkeys(CATEGORIES, 0)
        modules: dict[str, dict[str, int]] = {}
        for id in self.ids:
            category, size = categories[id], sizes[id]
            module = module_of(graph, category, names[id], ops[kernels[id]])
            found = modules.get(module)
            if found is None:
                found = modules[module] = {}
            found[category] = found.get(category, 0) + size
            every[category] = every.get(category, 0) + size
        return every, modules

    def _entries(self, ids: Sequence[int]) -> tuple[TensorEntry, ...]:
        if len(ids) > FEW or "_holds" in self.__dict__:
            holds: Mapping[int, Sequence[Hold]] = self._holds
        else:
            holds = self.lifetimes.holds(self.lifetimes.peak_tick, ids)
        return tuple(self._made(ids, holds))

    @cached_property
    def _holds(self) -> Mapping[int, Sequence[Hold]]:
        return self.lifetimes.holds(self.lifetimes.peak_tick)

    def _made(self, ids: Iterable[int], holds: Mapping[int, Sequence[Hold]]) -> Iterable[TensorEntry]:
        trace, graph = self.lifetimes.trace, self.graph
        for id, buffer in zip(ids, trace.buffers.pick(ids), strict=True):
            kernel = trace.kernels.pick((buffer.kernel,))[0]
            op = short(kernel.name)
            yield TensorEntry(
                name=buffer.name or f"({op})",
                module=module_of(graph, buffer.category, buffer.name, kernel.op),
                op=op,
                shape=buffer.shape,
                dtype=buffer.dtype.name,
                bytes=buffer.size,
                category=buffer.category,
                why=reasons(graph, kernel, buffer, holds.get(id, ())),
            )
