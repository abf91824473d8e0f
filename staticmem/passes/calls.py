"""Repeated calls of one module: the dynamo exporter writes the same path for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import is_

from staticmem.ir.graph import Frame, Op


def numbered(ops: Sequence[Op]) -> list[Op]:
    """The ops with `Frame.call` set: a path that is entered again after it was left is another call."""
    entered: Counter[str] = Counter()
    stack: list[Frame] = []
    last: tuple[Frame, ...] = ()  # modules of the op before, in the file and with calls
    modules: tuple[Frame, ...] = ()
    result: list[Op] = []
    for op in ops:
        if not op.modules:  # size arithmetic and the like, without a module: no call ends there
            result.append(op)
            continue
        if op.modules is not last:
            last, depth = op.modules, 0
            while depth < min(len(stack), len(last)) and _same(stack[depth], last[depth]):
                depth += 1
            del stack[depth:]
            for frame in last[depth:]:
                call = entered[frame.path]
                stack.append(frame if frame.call == call else replace(frame, call=call))
                entered[frame.path] += 1
            modules = tuple(stack)
            if all(map(is_, modules, last)):
                modules = last
        result.append(op if modules is last else op.changed(modules=modules))
    return result


def _same(a: Frame, b: Frame) -> bool:
    return a is b or (a.path == b.path and a.cls == b.cls)
