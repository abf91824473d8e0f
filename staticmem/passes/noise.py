"""Stochastic depth: the noise tensor's dtype is that of the tensor it multiplies.

torchvision and timm make `empty(shape, dtype=x.dtype).bernoulli_(p)` and multiply `x` by it; an export has resolved
`x.dtype` to float32, which is wrong as soon as `x` is in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.ir.graph import Graph, Note, Op, Ref

_FILLS = ("aten::bernoulli_", "aten::div_", "aten::bernoulli", "aten::div")


def follow_operand(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """`empty(size)` that only becomes noise for `x` is made `new_empty(x, size)`, which follows x's dtype."""
    readers: dict[str, list[Op]] = {}
    made_at: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        for read in op.refs():
            readers.setdefault(read, []).append(op)
        made_at.update(dict.fromkeys(op.outputs, index))
    ops = list(graph.ops)
    changed = False
    for index, op in enumerate(graph.ops):
        if op.base != "aten::empty" or len(op.outputs) != 1:
            continue
        name: str | None = op.outputs[0]
        other: str | None = None
        for _ in range(4):  # empty, bernoulli_, div_, mul
            followers = [r for r in readers.get(name or "", ()) if r.outputs]
            if not followers:
                break
            step = followers[-1]
            if step.base == "aten::mul":
                other = next((n for n in step.refs() if n != name), None)
                break
            if step.base not in _FILLS:
                break
            name = step.outputs[0]
        if other is not None and made_at.get(other, len(ops)) < index:
            kwargs = {k: v for k, v in op.kwargs.items() if k != "dtype"}
            ops[index] = replace(op, target="aten::new_empty", args=(Ref(other), *op.args), kwargs=kwargs)
            changed = True
    return (replace(graph, ops=tuple(ops)) if changed else graph), ()
