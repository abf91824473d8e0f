"""Repeated calls of one module: the dynamo exporter writes the same path for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from staticmem.graph.ir import Frame, Op


def numbered(ops: Sequence[Op]) -> list[Op]:
    """The ops with `Frame.call` set: a path that is entered again after it was left is another call."""
    entered: Counter[str] = Counter()
    stack: list[Frame] = []
    result: list[Op] = []
    for op in ops:
        if not op.modules:  # size arithmetic and the like, without a module: no call ends there
            result.append(op)
            continue
        depth = 0
        while depth < min(len(stack), len(op.modules)) and _same(stack[depth], op.modules[depth]):
            depth += 1
        del stack[depth:]
        for frame in op.modules[depth:]:
            stack.append(replace(frame, call=entered[frame.path]))
            entered[frame.path] += 1
        result.append(replace(op, modules=tuple(stack)))
    return result


def _same(a: Frame, b: Frame) -> bool:
    return a.path == b.path and a.cls == b.cls
