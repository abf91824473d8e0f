"""The functions of `intervals` over all buffers, or all holds, in NumPy: for large traces.

Small traces do without, as the import of NumPy takes longer than loops over a step of thousands of ops.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from staticmem.eager.trace import Buffers, Holds

if TYPE_CHECKING:
    import numpy as np


def releases(holds: Holds, buffers: Buffers, forever: int) -> array[int]:
    """The tick at which each buffer's last hold ends, or the buffer itself where it has none; `forever` at most."""
    import numpy as np

    last = np.full(len(buffers), -1, dtype=np.int64)
    np.maximum.at(last, _of(holds.buffers), _of(holds.ends).astype(np.int64))
    released = np.where(last < 0, _of(buffers.died), last)
    return _array("I", np.minimum(released, forever).astype(np.uint32))


def levels(sizes: Iterable[int], born: array[int], died: array[int], ticks: int) -> array[int]:
    """Bytes alive after each tick."""
    import numpy as np

    nbytes = np.fromiter(sizes, dtype=np.int64, count=len(born))
    delta = np.zeros(max(ticks, 1), dtype=np.int64)
    np.add.at(delta, _of(born), nbytes)
    ends = _of(died) < ticks
    np.subtract.at(delta, _of(died)[ends], nbytes[ends])
    return _array("q", np.cumsum(delta))


def alive(born: array[int], died: array[int], tick: int) -> list[int]:
    """The indices of the intervals [born, died) that contain `tick`."""
    import numpy as np

    indices: list[int] = np.flatnonzero((_of(born) <= tick) & (_of(died) > tick)).tolist()
    return indices


def _of(column: array[int]) -> np.ndarray:
    """A column as an array over the same memory; the column must not change any more."""
    import numpy as np

    return np.frombuffer(column, dtype=np.dtype(column.typecode))


def _array(code: str, values: np.ndarray) -> array[int]:
    column = array(code)
    column.frombytes(values.tobytes())
    return column


__all__ = ["alive", "levels", "releases"]
