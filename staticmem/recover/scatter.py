"""Writes into a part of a tensor: `slice` + `fill` + `slice_scatter` is `x[a:b] = value`."""

from __future__ import annotations

from staticmem.recover.edit import Ops
from staticmem.recover.nodes import Net


def rewrite(ops: Ops, net: Net) -> None:
    """Puts `copy_` into a view back."""
