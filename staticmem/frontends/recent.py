"""What was read and bound last in this process: notebooks, loops over scenarios, `diff` and `check` ask about the same
files again and again.

A model is found by its path and by the SHA-256 of the bytes that its reader reads, so a file that changed is read
again. Where the file system says that nothing was written since (`files.stamp`), not even those are read. Weights
beside the file or in it are not read and change nothing. The key has the path because messages and the report name it.
Models and graphs are values that nothing changes after they were made (`tests/frontends/test_recent.py` holds that), so
that threads may share them; two that ask for the same at once both make it, and one stays.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from staticmem import files

if TYPE_CHECKING:
    from staticmem.ir.graph import Graph
    from staticmem.ir.model_file import Binding, ModelFile

MODELS = 4  # files that are kept
GRAPHS = 4  # bindings that are kept of each: a sweep runs three batches of each optimizer in turn, and batch 1
LARGEST = 2 << 20  # bytes of a graph without weights; JSON of that size takes some 20 MiB when it is read
MOST_OPS = 5_000  # of a model and of a graph that are kept; a bound graph takes some 2 KiB for each

Kept = TypeVar("Kept")


class Recent(Generic[Kept]):
    """The last few values by key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Kept | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: Hashable, value: Kept) -> None:
        """Keeps a value in place of the one that was not asked for the longest."""
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


models: Recent[ModelFile] = Recent(MODELS)
_stamps: Recent[tuple[files.Stamp, Hashable]] = Recent(MODELS)  # by path, with the key of its model


def unchanged(path: str) -> ModelFile | None:
    """The model of a file that nobody has written to since it was read; None where that is not certain."""
    stamped = _stamps.get(path)
    return models.get(stamped[1]) if stamped is not None and stamped[0] == files.stamp(path) else None


def note(path: str, stamp: files.Stamp | None, key: Hashable) -> None:
    """Takes note of what was read, after the stamp was taken: the model with this key."""
    if stamp is not None:
        _stamps.put(path, (stamp, key))


def digest(data: bytes) -> bytes:
    """What a model is known by, beside its path."""
    return hashlib.sha256(data).digest()


class Graphs:
    """Graphs that a model was bound to."""

    def __init__(self) -> None:
        self._recent: Recent[Graph] = Recent(GRAPHS)

    def of(self, binding: Binding, make: Callable[[], Graph]) -> Graph:
        """The graph at these sizes; `make` is asked where it is not kept."""
        key = (tuple(binding.symbols.items()), tuple(binding.shapes.items()), binding.rebound, binding.without)
        graph = self._recent.get(key)
        if graph is None:
            graph = make()
            if len(graph.ops) <= MOST_OPS:
                self._recent.put(key, graph)
        return graph
