"""Ops of nodes that an optimiser of ONNX made without the metadata of those that they replace.

A `SequenceAt` of a `SplitToSequence` becomes an output of a `Split` (onnxscript/optimizer/_constant_folding.py,
`sequence_at` and `split_to_sequence`): the new node has no name of a module and no source line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from staticmem.ir.graph import Op
from staticmem.ir.stacks import common_depth
from staticmem.ops import kinds_of

_SPLITS = re.compile(r"\b(?:chunk|split|unbind|tensor_split|hsplit|vsplit)\(")


def with_lines(ops: Sequence[Op]) -> list[Op]:
    """The ops, in which a split without modules has those of its first reader, and the line that says so: the reader's,
    or the one in the same module that made what it splits."""
    if all(op.modules or op.stack or "split" not in kinds_of(op.base) for op in ops):
        return list(ops)
    makers = {name: op for op in ops for name in op.outputs}
    readers: dict[str, Op] = {}
    for op in ops:
        for name in op.refs():
            readers.setdefault(name, op)
    return [_of_reader(op, makers, readers) for op in ops]


def _of_reader(op: Op, makers: dict[str, Op], readers: dict[str, Op]) -> Op:
    if op.modules or op.stack or "split" not in kinds_of(op.base):
        return op
    reader = next((readers[name] for name in op.outputs if name in readers), None)
    if reader is None or not reader.modules:
        return op
    modules, stack = reader.modules, reader.stack
    maker = next((makers[name] for name in op.refs() if name in makers), None)
    if maker is not None and maker.stack:
        depth = common_depth(maker.modules, modules)
        before = maker.stack[: len(maker.stack) - len(maker.modules) + depth]
        says = before and _SPLITS.search(before[-1].text) and not (stack and _SPLITS.search(stack[-1].text))
        if says or depth < len(modules):
            modules, stack = modules[:depth], before
    return replace(op, modules=modules, stack=stack) if modules else op
