"""Dtypes that code may take from a tensor, where a float32 export has the answer alone: the other end under autocast.

`x.to(y.dtype)`, `torch.randn(n, dtype=y.dtype)` and `onehot.type_as(y)` are in the file as casts to, and tensors of,
float32. Under autocast `y` may be of its dtype, so that the cast returns its input or makes half the bytes. Source
lines tell which dtypes the code names itself (`x.float()`, `dtype=torch.float32`), except those that call functions
of which no trace shows the lines; ops of published libraries are as their code has them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph, Op
from staticmem.ops import kinds_of
from staticmem.passes.frames.line_texts import calls_hidden_code
from staticmem.passes.frames.source_lines import names_of_children
from staticmem.passes.lost_gradients import is_published

_OWN_DTYPE = re.compile(r"\.dtype\b|\btype_as\(|dtype=(?!torch\.)[a-z_]\w*|\.to\((?!torch\.float|dtype=torch\.)")
_NAMED_DTYPE = re.compile(r"\btorch\.float|\.float\(")
_FACTORIES = frozenset(f"aten::{name}" for name in "empty zeros ones full rand randn".split())


def with_dtype_of_autocast(graph: Graph, amp: DType) -> Graph | None:
    """The graph with `amp` wherever float32 may stand for a tensor's dtype; None where it does nowhere."""
    ops, count = list(graph.ops), 0
    kinds = {target: kinds_of(target.split(".", 1)[0]) for target in {op.target for op in ops}}
    children = names_of_children(graph)
    for index, op in enumerate(ops):
        if kinds[op.target].isdisjoint(("cast", "factory")) or not op.amp or not _is_open(op, children):
            continue
        args = tuple(_swap(arg, amp) for arg in op.args)
        kwargs = {key: _swap(arg, amp) for key, arg in op.kwargs.items()}
        if (
            op.base in _FACTORIES
            and not any(isinstance(arg, (DType, bool, int)) for arg in op.args[1:])
            and "dtype" not in kwargs
        ):
            kwargs["dtype"] = amp
        if args != op.args or kwargs != op.kwargs:
            ops[index] = op.changed(args=args, kwargs=kwargs)
            count += 1
    return replace(graph, ops=tuple(ops)) if count else None


def _swap(arg: Any, amp: DType) -> Any:
    return amp if arg is dtypes.float32 else arg


def _is_open(op: Op, children: frozenset[str]) -> bool:
    if is_published(op):
        return False
    text = op.stack[-1].text if op.stack else ""
    return not op.stack or _may_be_a_tensors(text) or calls_hidden_code(text, children)


@lru_cache(4096)
def _may_be_a_tensors(text: str) -> bool:
    """Whether a line may take a dtype from a tensor: it does so, or is a part of a statement."""
    if _OWN_DTYPE.search(text) is not None:
        return True
    return _NAMED_DTYPE.search(text) is None and text.count("(") != text.count(")")
