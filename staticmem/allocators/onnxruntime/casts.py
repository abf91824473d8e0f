"""Casts that follow casts: the runtime takes them out at every optimization level.

Source: onnxruntime/core/optimizer/insert_cast_transformer.cc, RemoveDuplicateCastTransformer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from staticmem.allocators.onnxruntime.graph import ExecNode, PlannedType
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType


def without_duplicates(
    nodes: Sequence[ExecNode], types: Mapping[str, PlannedType], results: set[str]
) -> tuple[ExecNode, ...]:
    """The nodes without casts that a cast before them makes needless, and without casts that only casts read.

    Args:
        nodes: of one graph, in the order of the file.
        types: of all values; a cast without a known type stays.
        results: values that the graph gives; they stay.
    """
    by_result = {name: node for node in nodes for name in node.outputs if name}
    readers: dict[str, list[ExecNode]] = defaultdict(list)
    for node in nodes:
        for name in (*node.inputs, *node.implicit):
            if name in by_result:
                readers[name].append(node)
    source: dict[str, str] = {}  # what now stands for a value that is gone
    gone: set[int] = set()
    for node in sorted(nodes, key=lambda n: n.index):
        if not _is_cast(node) or node.index in gone:
            continue
        result = node.outputs[0]
        old, new = _type(types, source.get(node.inputs[0], node.inputs[0])), _type(types, result)
        if old is None or new is None:
            continue
        children = readers[result]
        casts = [child for child in children if _is_cast(child) and child.index not in gone]
        lossy = unsafe(old, new)
        if lossy and any(unsafe(_type(types, child.outputs[0]), new) for child in casts):
            continue
        start = source.get(node.inputs[0], node.inputs[0])
        back = [c for c in casts if c.outputs[0] not in results and _type(types, c.outputs[0]) is old]
        for child in back:
            source[child.outputs[0]] = start
            gone.add(child.index)
        kept = [child for child in casts if child.index not in gone]
        truth = lossy and any(_type(types, child.outputs[0]) is dtypes.bool_ for child in kept)
        if children and len(casts) == len(children) and result not in results and not truth:
            source[result] = start
            gone.add(node.index)
    if not gone:
        return tuple(nodes)
    return tuple(_reading(node, source) for node in nodes if node.index not in gone)


def _is_cast(node: ExecNode) -> bool:
    return node.op == "Cast" and not node.domain


def _type(types: Mapping[str, PlannedType], name: str) -> DType | None:
    kind = types.get(name)
    return kind.dtype if kind is not None else None


def _reading(node: ExecNode, source: Mapping[str, str]) -> ExecNode:
    def final(name: str) -> str:
        while name in source:
            name = source[name]
        return name

    if not any(name in source for name in (*node.inputs, *node.implicit)):
        return node
    return replace(node, inputs=tuple(final(n) for n in node.inputs), implicit=tuple(final(n) for n in node.implicit))


def unsafe(old: DType | None, new: DType | None) -> bool:
    """Whether a cast may change values, as the runtime judges it."""
    if old is None or new is None or dtypes.string in (old, new) or "complex" in (old.kind, new.kind):
        return True
    unsigned = {d: d.kind == "int" and d.name.startswith("u") for d in (old, new)}
    if unsigned[new] and old.kind != "bool" and not unsigned[old]:
        return True
    if old.kind == "float" and new.kind != "float":
        return True
    bits = {d: 1 if d.kind == "bool" else d.bits for d in (old, new)}
    if unsigned[old] and new.kind == "int" and not unsigned[new]:
        return bits[new] <= bits[old]
    if old.kind == "int" and new.kind == "float":
        return bits[new] <= bits[old]
    if {old.name, new.name} == {"float16", "bfloat16"}:
        return True
    return bits[old] > bits[new]
