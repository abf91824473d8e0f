"""Ops that no result needs."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.graph.ir import Op


def drop_unused(ops: Sequence[Op], outputs: Sequence[str]) -> tuple[list[Op], int]:
    """The ops without those whose results nobody reads, and how many went. Ops that write in place stay."""
    needed = set(outputs)
    kept: list[Op] = []
    for op in reversed(ops):
        if op.base.endswith("_") or any(name in needed for name in op.outputs):
            kept.append(op)
            needed.update(op.refs())
    kept.reverse()
    return kept, len(ops) - len(kept)
