"""Dtypes that code may take from a tensor, where a float32 export has the answer alone.

`x.to(y.dtype)`, `torch.randn(n, dtype=y.dtype)` and `onehot.type_as(y)` are in the file as casts to, and tensors of,
float32. Under autocast `y` may be of its dtype, so that the cast returns its input or makes half the bytes: the band
has both. In a model that is cast as a whole (`--dtype bf16`) `y` has the dtype of the model. Source lines tell which
dtypes the code names itself (`x.float()`, `dtype=torch.float32`), except those that call functions of which no trace
shows the lines; ops of published libraries are as their code has them. Where no line tells, `ops.whole_model_cast`
takes the likelier one, and the band has both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import is_
from typing import TYPE_CHECKING, Any

from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Arg, Graph, Note, Op, Ref
from staticmem.ir.stacks import is_published
from staticmem.ops import kinds_of, parameters
from staticmem.ops.whole_model_cast import TO_DEVICE, cast_of
from staticmem.passes.variables.line_texts import calls_hidden_code
from staticmem.passes.variables.source_lines import names_of_children

if TYPE_CHECKING:
    from staticmem.passes.asked import Asked
    from staticmem.scenario.step import Scenario

_OWN_DTYPE = re.compile(r"\.dtype\b|\btype_as\(|dtype=(?!torch\.)[a-z_]\w*|\.to\((?!torch\.float|dtype=torch\.)")
_NAMED_DTYPE = re.compile(r"\btorch\.float|\.float\(")


def ends_under_autocast(graph: Graph, scenario: Scenario) -> tuple[Graph, Graph] | None:
    """The graph with autocast's dtype wherever float32 may stand for a tensor's dtype, and as it is; None where it does
    nowhere."""
    amp = scenario.amp
    if amp is None:
        return None
    ops, count = list(graph.ops), 0
    kinds = {target: kinds_of(target.split(".", 1)[0]) for target in {op.target for op in ops}}
    children = names_of_children(graph)
    for index, op in enumerate(ops):
        if kinds[op.target].isdisjoint(("cast", "factory")) or not op.amp or not _is_open(op, children):
            continue
        args = tuple(_swap(arg, amp) for arg in op.args)
        kwargs = {key: _swap(arg, amp) for key, arg in op.kwargs.items()}
        if (
            "factory" in kinds[op.target]
            and "self" not in parameters(op.base)
            and not any(isinstance(arg, (DType, bool, int)) for arg in op.args[1:])
            and "dtype" not in kwargs
        ):
            kwargs["dtype"] = amp
        if args != op.args or kwargs != op.kwargs:
            ops[index] = op.changed(args=args, kwargs=kwargs)
            count += 1
    return (replace(graph, ops=tuple(ops)), graph) if count else None


def dtypes_of_lines(graph: Graph, asked: Asked) -> tuple[Graph, Sequence[Note]]:
    """The graph of a model that is cast to `asked.cast`, with what lines say of float32 in casts and new tensors."""
    assert asked.cast is not None
    if cast_of(graph, asked.cast) is None:  # the file is in 16 bits itself, and its casts are real ones
        return graph, ()
    ops, named, left_open = _with_dtypes_before_casts(graph), set[str](), set[str]()
    children = names_of_children(graph)
    for index, op in enumerate(ops):
        if not _has_float32(op) or is_published(op):
            continue
        text = op.stack[-1].text if op.stack else ""
        of_tensor, of_code = _OWN_DTYPE.search(text) is not None, _NAMED_DTYPE.search(text) is not None
        if calls_hidden_code(text, children) or of_tensor == of_code:
            if _is_open(op, children):
                left_open.add(op.name)
        elif of_code:
            named.add(op.name)
        else:
            ops[index] = _with_dtype(op, asked.cast)
    if not named and not left_open and all(map(is_, ops, graph.ops)):
        return graph, ()
    return replace(graph, ops=tuple(ops), named_float32=frozenset(named), open_float32=frozenset(left_open)), ()


def _with_dtypes_before_casts(graph: Graph) -> list[Op]:
    """The ops, with `y.type_as(x)` of an `x` that a cast to float32 returned as it was: in the export the tensor has
    the name of that cast's result since, and the code means the one before (`self._norm(x.float()).type_as(x)`)."""
    ops, sources = list(graph.ops), dict[str, Arg]()
    for index, op in enumerate(ops):
        source = op.args[0] if op.args else None
        if op.base == "aten::type_as" and len(op.args) > 1 and isinstance(op.args[1], Ref):
            other = sources.get(op.args[1].name)
            if other is not None:
                ops[index] = op.changed(args=(op.args[0], other, *op.args[2:]))
        elif isinstance(source, Ref) and _has_float32(op) and "cast" in kinds_of(op.base):
            value = graph.values.get(source.name)
            if value is not None and value.dtype is dtypes.float32:
                sources[op.outputs[0]] = sources.get(source.name, source)
    return ops


def ends_of_cast(graph: Graph, scenario: Scenario) -> tuple[Graph, Graph] | None:
    """The graphs of a model that is cast to 16 bits as a whole with this dtype, and with float32, wherever nothing
    tells which of them the code has; None where there is no such place."""
    left_open, low = graph.open_float32, scenario.dtype
    if not left_open or low not in dtypes.HALVES:
        return None
    lowest = tuple(_with_dtype(op, low) if op.name in left_open else op for op in graph.ops)
    return replace(graph, ops=lowest), replace(graph, named_float32=graph.named_float32 | left_open)


def _with_dtype(op: Op, dtype: DType) -> Op:
    args = tuple(_swap(arg, dtype) for arg in op.args)
    return op.changed(args=args, kwargs={key: _swap(arg, dtype) for key, arg in op.kwargs.items()})


def _has_float32(op: Op) -> bool:
    """Whether an op casts to float32, or makes a tensor of it; `x.to(device)` does not."""
    if op.target == TO_DEVICE or kinds_of(op.base).isdisjoint(("cast", "factory")):
        return False
    return dtypes.float32 in op.args or dtypes.float32 in op.kwargs.values()


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
