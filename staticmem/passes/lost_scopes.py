"""Regions of `torch.no_grad()` in a dynamo export.

torch.export keeps such a region as a graph of its own; the ONNX exporter runs that graph, and writes what it does in
line, without the region and without the modules. The source lines of these ops are those of the generated code
(`<eval_with_key>`), which says what ran in place. A region of autocast is taken apart the same way, but computes in
half precision.

Source: torch/_export/passes/replace_set_grad_with_hop_pass.py, replace_autocast_with_hop_pass.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from staticmem.ir import dtypes
from staticmem.ir.graph import Note, Op, Value
from staticmem.passes.inplace_source import INPLACE_OPS

_GENERATED = "<eval_with_key>"
_CALL = re.compile(r"torch\.ops\.aten\.(\w+?)_\.\w+\(")
_HALVES = (dtypes.float16, dtypes.bfloat16)


def restore(ops: Sequence[Op], values: Mapping[str, Value]) -> tuple[list[Op], list[Note]]:
    """The ops, those of regions with `grad` False, in place where they were, and without lines of generated code.

    A model that is a traced graph itself has such lines only: nothing is known of it.
    """
    generated = [bool(op.stack) and op.stack[-1].file.startswith(_GENERATED) for op in ops]
    if not any(generated) or all(made for made, op in zip(generated, ops, strict=True) if op.stack):
        return list(ops), []
    found: list[Op] = []
    count = 0
    for op, made in zip(ops, generated, strict=True):
        if made:
            called = _CALL.search(op.stack[-1].text)
            target, overload = op.base, op.target[len(op.base) :]
            if called is not None and op.base == f"aten::{called[1]}" and op.base in INPLACE_OPS:
                target = f"{op.base}_"
            grad = any(values[name].dtype in _HALVES for name in op.outputs if name in values)
            op, count = replace(op, target=target + overload, grad=op.grad and grad, stack=()), count + 1
        found.append(op)
    text = "ops whose code the exporter generated itself are taken to run under torch.no_grad(), which it leaves out"
    return found, [Note("assumption", "SM262", text, count)]


__all__ = ["restore"]
