"""What a process asks of an allocator: a sequence of allocations and releases."""

from __future__ import annotations

from typing import NamedTuple

RELEASE = -1  # `nbytes` of a release
EMPTY_CACHE = -2  # `nbytes` of a call that gives cached memory back to the driver: `torch.cuda.empty_cache()`


class Event(NamedTuple):
    """An allocation of `nbytes` under a new `id` on a stream, or (nbytes is RELEASE) the release of that id, or (nbytes
    is EMPTY_CACHE, whatever the id) cached memory going back.

    An id is used once. Streams are small integers; 0 is the default stream.
    """

    id: int
    nbytes: int
    stream: int = 0


def alloc(id: int, nbytes: int, stream: int = 0) -> Event:
    return Event(id, nbytes, stream)


def free(id: int) -> Event:
    return Event(id, RELEASE)
