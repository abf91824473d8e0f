"""Constant folding of joint graphs: tensors with the same value everywhere become one `full`, and sums with zeros,
products with ones and the like disappear.

Source: torch/_inductor/fx_passes/joint_graph.py (`UniformValueConstantFolder`, `constant_fold_uniform_value`,
`remove_no_ops`), torch/_inductor/constant_folding.py.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from staticmem.compiler.edit import GraphEditor
from staticmem.eager import strides as layout
from staticmem.eager.strides import Form
from staticmem.ir.dtypes import DType
from staticmem.ops.size_arithmetic import OF_NUMBERS
from staticmem.ops.tags import UNIFORM_VIEWS
from staticmem.tracing.nodes import PLACEHOLDER, Node


class _Value:
    """One element's value; a view shares it with its input."""

    __slots__ = ("number",)

    def __init__(self, number: float) -> None:
        self.number = number


def fold(graph: GraphEditor) -> None:
    """Folds uniform values, and takes away what adds zeros or multiplies with ones."""
    uniform = _uniform(graph)
    shared = Counter(map(id, uniform.values()))
    zeros: set[Node] = set()
    ones: set[Node] = set()
    for node, value in uniform.items():
        contiguous = layout.is_contiguous(node.shape, node.strides)
        if not contiguous or node.dtype.name.startswith("uint") or shared[id(value)] > 1:
            continue
        number = node.args[1] if node.target == "aten::full" and len(node.args) == 2 else value.number
        graph.change(node, "aten::full", (node.shape, number), {"dtype": node.dtype})
        if number == 0:
            zeros.add(node)
        elif number == 1:
            ones.add(node)
    _remove_neutral(graph, zeros, ones)


def _uniform(graph: GraphEditor) -> dict[Node, _Value]:
    """The tensors with one value that something else than such a tensor reads."""
    values: dict[Node, _Value] = {}
    frontier: dict[Node, _Value] = {}
    folded_uses: Counter[Node] = Counter()
    last_use: dict[Node, list[Node]] = {}
    nodes = list(graph)
    seen: set[Node] = set()
    for node in reversed(nodes):
        for read in node.inputs:
            if read not in seen:
                seen.add(read)
                last_use.setdefault(node, []).append(read)
    written = {node.inputs[0] for node in nodes if node.target == "aten::copy_"}
    for node in nodes:
        value = None if node in written else _value(node, values)
        if value is None:
            continue
        values[node] = frontier[node] = value
        folded_uses.update(node.inputs)
        for read in last_use.get(node, ()):
            if folded_uses[read] == graph.user_count(read):
                frontier.pop(read, None)
    return frontier


def _value(node: Node, values: dict[Node, _Value]) -> _Value | None:
    if node.target == PLACEHOLDER or not isinstance(node.form, Form):
        return None
    if node.target == "aten::full" and len(node.args) == 2:
        return _rounded(node.args[1], node.dtype)
    if not all(read in values for read in node.inputs):
        return None
    base = node.base
    if base in UNIFORM_VIEWS:
        return values[node.inputs[0]] if node.inputs else None
    if base == "prims::convert_element_type":
        return _rounded(values[node.inputs[0]].number, node.dtype)
    if base == "aten::clone":
        return _Value(values[node.inputs[0]].number)
    function = OF_NUMBERS.get(base.removeprefix("aten::"))
    if function is None or any(name != "dtype" for name in node.kwargs):
        return None
    operands = [values[arg].number if isinstance(arg, Node) else arg for arg in node.args]
    if not all(isinstance(operand, (int, float)) for operand in operands):
        return None
    try:
        return _rounded(function(*operands), node.dtype)
    except (ArithmeticError, ValueError, TypeError):
        return None


def _rounded(number: Any, dtype: DType) -> _Value | None:
    if not isinstance(number, (int, float)):
        return None
    if dtype.kind == "bool":
        return _Value(bool(number))
    if dtype.kind == "int":
        return _Value(int(number)) if math.isfinite(number) else None
    return _Value(float(number)) if dtype.kind == "float" else None


def _remove_neutral(graph: GraphEditor, zeros: set[Node], ones: set[Node]) -> None:
    """`remove_no_ops`: x + 0, x - 0, x * 1, x / 1."""
    nodes = list(graph)
    for target, neutral, number in (
        ("aten::add.Tensor", zeros, 0), ("aten::sub.Tensor", zeros, 0),
        ("aten::mul.Tensor", ones, 1), ("aten::div.Tensor", ones, 1),
    ):  # fmt: skip
        for node in nodes:
            if (
                node.target != target
                or len(node.args) != 2
                or not graph.alive(node)
                or node.kwargs.get("alpha", 1) != 1
            ):
                continue
            first, second = [_is(arg, neutral, number) for arg in node.args]
            if target in ("aten::sub.Tensor", "aten::div.Tensor"):
                first = False
            if first or second:
                _keep_operand(graph, node, node.args[1 if first else 0])


def _is(arg: Any, neutral: set[Node], number: int) -> bool:
    return arg in neutral if isinstance(arg, Node) else isinstance(arg, (int, float)) and arg == number


def _keep_operand(graph: GraphEditor, node: Node, operand: Any) -> None:
    """The other operand in place of the result, converted where it has another dtype."""
    if not isinstance(operand, Node) or operand.shape != node.shape:
        return
    if any(user.target == "aten::copy_" and user.args[0] is operand for user in graph.users(operand)):
        return
    if operand.dtype is not node.dtype:
        graph.change(node, "prims::convert_element_type", (operand, node.dtype), {})
        return
    graph.replace(node, operand)
    graph.erase(node)
