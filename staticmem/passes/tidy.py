"""Ops that no result needs."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.ir.graph import Op


def drop_unused(ops: Sequence[Op], outputs: Sequence[str]) -> tuple[list[Op], int]:
    """The ops without those whose results nobody reads, and how many went. Ops that write in place stay."""
    needed = set(outputs)
    kept: list[Op] = []
    writing = {target for target in {op.target for op in ops} if target.split(".", 1)[0].endswith("_")}
    for op in reversed(ops):
        if not needed.isdisjoint(op.outputs) or op.target in writing:
            kept.append(op)
            needed.update(op.refs())
    kept.reverse()
    return kept, len(ops) - len(kept)
