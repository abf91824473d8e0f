"""Calls that do nothing (torch/_inductor/fx_passes/post_grad.py, `remove_noop_ops`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from staticmem.compiler.edit import GraphEditor
from staticmem.eager.strides import Form
from staticmem.ir import dtypes
from staticmem.ops.tags import TRACED_VIEWS
from staticmem.tracing.nodes import PLACEHOLDER, Node, Result

END = 2**63 - 1  # of a slice without one


def remove_no_ops(graph: GraphEditor) -> None:
    """`remove_noop_ops`: what gives its input with the same sizes and strides. A copy stays where the result and an
    input, or two results, would share memory, and where its input is written to."""
    storage: dict[Node, Node] = {}
    for node in graph:
        storage[node] = storage[node.inputs[0]] if node.base in TRACED_VIEWS and node.inputs else node
    of_inputs = {node for node in graph if node.target == PLACEHOLDER}
    of_outputs = {storage[node] for node in graph.outputs if node is not None}
    written = {storage[node.inputs[0]] for node in graph if node.target == "aten::copy_"}
    for node in graph:
        condition = _NO_OPS.get(node.target) or _NO_OPS.get(node.base)
        if condition is None or not isinstance(node.form, Form):
            continue
        source = node.args[0][0] if node.base == "aten::cat" else node.args[0]
        if node.base in ("aten::slice_scatter", "aten::copy"):
            source = node.args[1]
        if not isinstance(source, Node) or not _equal(source.form, node.form):
            continue
        if storage[node] is not storage[source]:
            own, theirs = storage[node], storage[source]
            if own in of_outputs and (theirs in of_inputs or theirs in of_outputs):
                continue
            if theirs in written:
                continue
        if condition(*node.args):
            graph.replace(node, source)
            graph.erase(node)


def _equal(a: Result, b: Result) -> bool:
    if not isinstance(a, Form) or not isinstance(b, Form):
        return False
    return a is b or (a.shape == b.shape and a.strides == b.strides and a.dtype is b.dtype)


Condition: TypeAlias = "Callable[..., bool]"
_NO_OPS: dict[str, Condition] = {}  # target -> whether the call gives its input, if forms are equal


def _of(*targets: str) -> Callable[[Condition], Condition]:
    def register(condition: Condition) -> Condition:
        _NO_OPS.update(dict.fromkeys(targets, condition))
        return condition

    return register


@_of("aten::slice")
def _whole_slice(self: Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> bool:
    if start is None or end is None:
        return False
    return bool(start == 0 and end >= self.shape[dim] and step == 1)


@_of("aten::slice_scatter")
def _whole_scatter(
    self: Node, source: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> bool:
    end = END if end is None else end
    return self.shape == source.shape and not start and end >= self.shape[dim] and step == 1


_of("aten::repeat")(lambda self, repeats: all(times == 1 for times in repeats))
_of("aten::constant_pad_nd")(lambda self, padding, value=0: not any(padding))
_of("aten::view", "aten::alias", "aten::clone", "aten::copy", "prims::convert_element_type")(lambda *_: True)
_of("aten::ceil", "aten::floor", "aten::round", "aten::trunc")(lambda self, *_: self.dtype.kind in ("int", "bool"))
_of("aten::pow")(lambda self, exponent: isinstance(exponent, int) and exponent == 1)
_of("aten::cat")(lambda tensors, dim=0: len(tensors) == 1)


def is_widened(node: Node) -> bool:
    """Whether a value is one of half precision in float32."""
    return node.target == "prims::convert_element_type" and node.args[0].dtype in dtypes.HALVES
