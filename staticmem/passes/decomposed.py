"""Calls that the dynamo exporter took apart, where the parts tell which they were.

`std` and `var` become `prims::var`, a view that puts the dimension back, and a square root; `index_add` becomes an
`index_put` that accumulates, which its source line tells from a real one. Losses and recurrent cells become
element-wise ops (`recover/losses.py`, `recover/cells.py`).

Source: torch/_refs/__init__.py (`std`, `var`), torch/_decomp/decompositions.py (`_index_add`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from staticmem.ir.graph import Note, Op, Ref, bases_of
from staticmem.passes import cells, losses
from staticmem.passes.edit import Ops
from staticmem.passes.templates import Finder, Named

if TYPE_CHECKING:
    import numpy as np

# `exponential_`: -log(u), where u that rounds to 1 gives a little less than 0 (torch/_refs/__init__.py, `exponential`)
_UNIFORM = Named("u", ("rand_like", "given"))
_EXPONENTIAL = ("mul", ("where", ("ge", _UNIFORM, "limit"), "least", ("log", _UNIFORM)), "factor")
_INDEX_ADD = re.compile(r"\bindex_add_?\(")


def restore(
    ops: Sequence[Op], outputs: Sequence[str], consts: Mapping[str, np.ndarray] | None = None
) -> tuple[list[Op], list[Note]]:
    """The ops with what was taken apart put together again, and a note of losses and cells."""
    if "aten::rand_like" in bases_of(ops):
        edited = Ops(ops, outputs)
        _exponentials(edited)
        ops = edited.done()
    ops, notes = regrouped(ops, outputs, consts)
    return _statistics(ops, outputs), notes


def regrouped(
    ops: Sequence[Op],
    outputs: Sequence[str],
    consts: Mapping[str, np.ndarray] | None = None,
    traced: cells.Traced | None = None,
) -> tuple[list[Op], list[Note]]:
    """The ops with losses and recurrent cells put together again, and a note of how many. `traced`: what a
    Constant node of a TorchScript file makes, by the name of its result."""
    count = 0
    for rewrite in (losses.rewrite, partial(cells.rewrite, traced=traced)):
        edited = Ops(ops, outputs)
        found = rewrite(edited, consts or {})
        ops, count = (edited.done(), count + found) if found else (ops, count)
    text = "losses and recurrent cells that the exporter takes apart were put together again"
    return list(ops), [Note("regrouped", "SM252", text, count)] if count else []


def _exponentials(ops: Ops) -> None:
    """`empty_like(x).exponential_()`, which becomes a tensor of its own."""
    finder = Finder(ops, {})
    for op in list(ops.ops):
        match = finder.find(op, [_EXPONENTIAL]) if op is not None and op.base == "aten::mul" else None
        if op is None or match is None:
            continue
        made = ops.made_by(match.values["given"])
        if made is not None and made.base in ("aten::empty_like", "aten::empty", "aten::new_empty"):
            finder.replaced(op, match, replace(op, target="aten::exponential_", args=(match.values["given"],)))


def _statistics(ops: Sequence[Op], outputs: Sequence[str]) -> list[Op]:
    """The ops with `std`, `var` and `index_add` put together again."""
    if not any(op.base in ("prims::var", "aten::index_put") for op in ops):
        return list(ops)
    readers: Counter[str] = Counter(name for op in ops for name in op.refs())
    readers.update(outputs)
    user = {name: op for op in ops for name in op.refs()}
    changed: dict[int, Op] = {}
    gone: set[int] = set()
    for op in ops:
        if op.base == "prims::var":
            _variance(op, user, readers, changed, gone)
        elif op.base == "aten::index_put":
            added = _index_add(op)
            if added is not None:
                changed[id(op)] = added
    return [changed.get(id(op), op) for op in ops if id(op) not in gone]


def _variance(op: Op, user: dict[str, Op], readers: Counter[str], changed: dict[int, Op], gone: set[int]) -> None:
    """`std.correction` or `var.correction` in the place of the last op of the chain."""
    dims = op.args[1] if len(op.args) > 1 else None
    if not isinstance(dims, tuple):
        return
    chain, target = [op], "aten::var.correction"
    following = _only_reader(op, user, readers)
    if following is not None and following.base == "prims::broadcast_in_dim":
        chain.append(following)
        following = _only_reader(following, user, readers)
    if following is not None and following.base == "aten::sqrt":
        chain.append(following)
        target = "aten::std.correction"
    keepdim = any(part.base == "prims::broadcast_in_dim" for part in chain)
    correction = op.args[2] if len(op.args) > 2 else op.kwargs.get("correction", 1)
    last = chain[-1]
    changed[id(last)] = replace(
        last, target=target, args=(op.args[0], dims), kwargs={"correction": correction, "keepdim": keepdim}
    )
    gone.update(id(part) for part in chain[:-1])


def _only_reader(op: Op, user: dict[str, Op], readers: Counter[str]) -> Op | None:
    return user.get(op.outputs[0]) if len(op.outputs) == 1 and readers[op.outputs[0]] == 1 else None


def _index_add(op: Op) -> Op | None:
    """`index_put(self, (None, index), source, True)` on a line with `index_add`: None stands for dimensions before."""
    if len(op.args) < 4 or op.args[3] is not True or not op.stack or not _INDEX_ADD.search(op.stack[-1].text):
        return None
    given, source = op.args[1], op.args[2]
    if not isinstance(given, tuple) or not given or not isinstance(given[-1], Ref) or any(given[:-1]):
        return None
    return replace(op, target="aten::index_add", args=(op.args[0], len(given) - 1, given[-1], source), kwargs={})


__all__ = ["restore"]
