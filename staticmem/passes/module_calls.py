"""What the dynamo exporter loses of calls: their numbers, and regions of `torch.no_grad()`.

Repeated calls of one module have the same path in the file.

torch.export keeps a region of `torch.no_grad()` as a graph of its own; the ONNX exporter runs that graph, and writes
what it does in line, without the region and without the modules. The source lines of these ops are those of the
generated code (`<eval_with_key>`), which says what ran in place. A region of autocast is taken apart the same way, but
computes in half precision.

Source: torch/_export/passes/replace_set_grad_with_hop_pass.py, replace_autocast_with_hop_pass.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import is_

from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Note, Op
from staticmem.passes.inplace import INPLACE_OPS


def number_calls(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """The graph with `Frame.call` set: a path that is entered again after it was left is another call."""
    entered: Counter[str] = Counter()
    stack: list[Frame] = []
    last: tuple[Frame, ...] = ()  # modules of the op before, in the file and with calls
    modules: tuple[Frame, ...] = ()
    result: list[Op] = []
    for op in graph.ops:
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
    return replace(graph, ops=tuple(result)), ()


def _same(a: Frame, b: Frame) -> bool:
    return a is b or (a.path == b.path and a.cls == b.cls)


_GENERATED = "<eval_with_key>"
_CALL = re.compile(r"torch\.ops\.aten\.(\w+?)_\.\w+\(")
_HALVES = (dtypes.float16, dtypes.bfloat16)


def regions_without_grad(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """The graph, ops of regions with `grad` False, in place where they were, and without lines of generated code.

    A model that is a traced graph itself has such lines only: nothing is known of it.
    """
    ops, values = graph.ops, graph.values
    generated = [bool(op.stack) and op.stack[-1].file.startswith(_GENERATED) for op in ops]
    if not any(generated) or all(made for made, op in zip(generated, ops, strict=True) if op.stack):
        return graph, ()
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
    return replace(graph, ops=tuple(found)), [Note("assumption", "SM262", text, count)]
