"""Rotary positions of queries and keys, as the calls that published models write."""

from __future__ import annotations

from staticmem.ir.graph import Arg, Ref
from staticmem.ops.onnx import Calls


def rotated(calls: Calls, x: Ref, shape: tuple[int, ...], cos: Ref, sin: Ref, positions: Arg, out: str = "") -> Ref:
    """x * cos + cat(-x2, x1) * sin, with rows of the tables for [.., S, D]."""
    length, half = shape[-2], shape[-1] // 2
    tables = []
    for table in (cos, sin):
        if isinstance(positions, Ref):
            batch = calls.ctx.net.shape(positions.name) or (1, length)
            rows = (*batch, half)
            part = calls.call("embedding", table, positions, shape=rows)
            lifted = (*batch[:1], 1, *rows[1:]) if len(rows) == 3 else rows
            part = calls.call("unsqueeze", part, 1, shape=lifted) if len(rows) == 3 else part
        elif len(given := calls.ctx.net.shape(table.name) or ()) == 3:  # rows are picked already: [B, S, D / 2]
            lifted = (given[0], 1, *given[1:])
            part = calls.call("unsqueeze", table, 1, shape=lifted)
        else:
            rows = lifted = (length, half)
            part = calls.call("slice.Tensor", table, 0, 0, length, shape=rows)
        whole = (*lifted[:-1], 2 * half)
        tables.append(calls.call("cat", (part, part), -1, shape=whole))
    part_shape = (*shape[:-1], half)
    scaled = calls.call("mul.Tensor", x, tables[0], shape=shape)
    first = calls.call("slice.Tensor", x, len(shape) - 1, 0, half, shape=part_shape)
    second = calls.call("slice.Tensor", x, len(shape) - 1, half, 2 * half, shape=part_shape)
    negative = calls.call("neg", second, shape=part_shape)
    turned = calls.call("cat", (negative, first), -1, shape=shape)
    product = calls.call("mul.Tensor", turned, tables[1], shape=shape)
    return calls.call("add.Tensor", scaled, product, shape=shape, out=out)
