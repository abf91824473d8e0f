"""Learned positions: a table with a row for each, which an embedding reads at 0, 1, 2, ...; a longer sequence fails.

PyTorch raises an error on a CPU, and a device-side assert on a GPU ("index out of bounds",
aten/src/ATen/native/cuda/Indexing.cu). An export has no condition of it, because indices are data. Which ones they
are shows where the graph makes them: `arange`, or `cumsum` of a mask of ones, with views, casts and numbers added.
"""

from __future__ import annotations

from collections.abc import Mapping

from staticmem.errors import DimensionError
from staticmem.ir.graph import Graph, Op, Ref
from staticmem.ir.record import record
from staticmem.ops.registry import Kind, kinds_of

_SAME_NUMBERS: tuple[Kind, ...] = ("cast", "copy", "expanded", "permuted", "reshaped")


@record(frozen=True, slots=True)
class PositionTable:
    """A table of `rows` that is read up to row `last`, which counts from 0."""

    name: str
    rows: int
    last: int

    @property
    def excess(self) -> int:
        """Rows that it lacks; 0 or less where it has them all."""
        return self.last + 1 - self.rows


class PositionError(DimensionError):
    """A sequence is longer than a table of positions. `excess`: by how many tokens."""

    excess: int = 0


def check_positions(graph: Graph, more: int = 0) -> None:
    """`more`: tokens that follow those of the graph.

    Raises:
        PositionError: a table of positions has fewer rows than there are tokens.
    """
    tables = [table for table in _tables(graph, more) if table.excess > 0]
    if not tables:
        return
    table = max(tables, key=lambda table: table.excess)
    error = PositionError(
        f"the sequence is longer than '{table.name}', a table of {table.rows:,} positions",
        f"Its row {table.last:,} is read, of rows that count from 0: PyTorch ends such a step with an index error.",
        f"Give {table.excess:,} token{'s' * (table.excess > 1)} fewer, or export the model with more positions.",
        code="SM137",
    )
    error.excess = table.excess
    raise error


def _tables(graph: Graph, more: int) -> list[PositionTable]:
    if "aten::embedding" not in graph.bases:
        return []
    makers = {name: op for op in graph.ops for name in op.outputs}
    weights = {p.value.name: p for p in graph.parameters}
    tables = []
    for op in graph.ops:
        if op.base != "aten::embedding" or len(op.args) < 2:
            continue
        weight, indices = op.args[:2]
        table = weights.get(weight.name) if isinstance(weight, Ref) else None
        last = _last(indices, makers)
        if table is not None and table.value.shape and last is not None:
            tables.append(PositionTable(table.fqn, table.value.shape[0], last + more))
    return tables


def _last(value: object, makers: Mapping[str, Op]) -> int | None:
    """The largest number of a value that counts up from 0 or another number; None of any other value."""
    added = 0
    for _ in range(32):  # more ops than code has between the two; a damaged file may have them in a circle
        op = makers.get(value.name) if isinstance(value, Ref) else None
        if op is None or not op.args:
            return None
        args = op.args
        if op.base == "aten::arange":
            start, end, *step = args if len(args) > 1 else (0, *args)
            if isinstance(start, int) and isinstance(end, int) and end > start and step in ([], [1]):
                return end - 1 + added
            return None
        if op.base == "aten::cumsum":
            ones = makers.get(args[0].name) if isinstance(args[0], Ref) else None
            sizes = ones.args[0] if ones is not None and ones.base == "aten::ones" and ones.args else None
            axis = args[1] if len(args) > 1 else None
            if not isinstance(sizes, tuple) or not isinstance(axis, int) or not -len(sizes) <= axis < len(sizes):
                return None
            size = sizes[axis]
            return size + added if isinstance(size, int) else None
        if op.base in ("aten::add", "aten::sub") and len(args) == 2 and isinstance(args[1], int) and not op.kwargs:
            added += args[1] if op.base == "aten::add" else -args[1]
        elif op.base == "aten::mul" and len(args) == 2 and isinstance(args[1], Ref):
            ones = makers.get(args[1].name)
            if ones is None or ones.base != "aten::ones":
                return None
        elif op.base == "aten::slice":
            if len(args) > 2 and (args[2] not in (0, None) or (len(args) > 3 and args[3] not in (None, 2**63 - 1))):
                return None
        elif op.base != "aten::repeat" and kinds_of(op.base).isdisjoint(_SAME_NUMBERS):
            return None
        value = args[0]
    return None
