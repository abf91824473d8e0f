"""Passes over a joint graph, before it is partitioned; over the graph of inference as well.

Source: torch/_inductor/fx_passes/joint_graph.py (`joint_graph_passes`), torch/_inductor/fx_passes/post_grad.py
(`remove_noop_ops`). `pad_mm` measures products on the card, so nothing is padded here.

Scaled scores under a softmax: scale(x) - amax(scale(x)) becomes scale(x - amax(x)).

Source: torch/_inductor/fx_passes/joint_graph.py (`mul_softmax_pattern`, `div_softmax_pattern`), which keep the plain
form beside it for rows that are not finite (`_preserve_scaled_softmax_nonfinite_semantics`).

Constant folding of joint graphs: tensors with the same value everywhere become one `full`, and sums with zeros,
products with ones and the like disappear.

Source: torch/_inductor/fx_passes/joint_graph.py (`UniformValueConstantFolder`, `constant_fold_uniform_value`,
`remove_no_ops`), torch/_inductor/constant_folding.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from staticmem.compiler.aot.no_ops import is_widened, remove_no_ops
from staticmem.compiler.edit import GraphEditor
from staticmem.compiler.graphs import JointGraph, NodeGraph
from staticmem.eager import strides as layout
from staticmem.eager.strides import Form
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.size_arithmetic import OF_NUMBERS
from staticmem.ops.tags import UNIFORM_VIEWS
from staticmem.tracing.nodes import PLACEHOLDER, Node
from staticmem.tracing.tracer import Tracer, form

AnyGraph = TypeVar("AnyGraph", JointGraph, NodeGraph)
_FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64)


def run_joint_passes(joint: AnyGraph) -> AnyGraph:
    """The graph as the partitioner gets it. Its nodes are changed in place; dead ones are gone."""
    graph = GraphEditor(joint.nodes, joint.outputs)
    graph.finish()
    remove_no_ops(graph)
    fold(graph)
    _rewrite(graph, _same_view, _pair_of_views, _pair_of_permutes)
    if isinstance(joint, JointGraph):
        _fuse_attention(graph, joint)
    _rewrite(graph, _pair_of_casts, _one_product, _scatter_into_constant)
    _rewrite(graph, stable_scaled_softmax)
    return replace(joint, nodes=tuple(graph.finish()), outputs=tuple(graph.outputs))


def _rewrite(graph: GraphEditor, *patterns: Callable[[GraphEditor, Node], None]) -> None:
    """Offers all nodes to patterns, the last first (`PatternMatcherPass.apply`)."""
    graph.settle()
    for node in reversed(list(graph)):
        for pattern in patterns:
            if graph.alive(node):
                pattern(graph, node)


def _fuse_attention(graph: GraphEditor, joint: JointGraph) -> None:
    for node in graph:
        if node.target == "aten::amax" and is_widened(node.args[0]):
            from staticmem.compiler.aot.attention_patterns import fuse_attention  # few models have it written out

            fuse_attention(graph, bool(joint.tangents), joint.choices)
            return


# -- patterns ----------------------------------------------------------------------------------------------------------


def _same_view(graph: GraphEditor, node: Node) -> None:
    if node.target == "aten::view" and node.args[0].shape == node.shape:
        graph.replace(node, node.args[0])
        graph.erase(node)


def _inner(graph: GraphEditor, node: Node, target: str) -> Node | None:
    """The argument of a call of `target` that has one of `target` as its only reader."""
    if node.target != target:
        return None
    inner: Node = node.args[0]
    return inner if inner.target == target and graph.user_count(inner) == 1 else None


def _skip(graph: GraphEditor, node: Node, inner: Node, by: Node) -> None:
    graph.replace(node, by)
    graph.erase(node)
    graph.erase(inner)


def _pair_of_views(graph: GraphEditor, node: Node) -> None:
    inner = _inner(graph, node, "aten::view")
    if inner is not None and inner.args[0].shape == node.shape:
        _skip(graph, node, inner, inner.args[0])


def _pair_of_permutes(graph: GraphEditor, node: Node) -> None:
    inner = _inner(graph, node, "aten::permute")
    if inner is None:
        return
    first, second = inner.args[1], node.args[1]
    if all(first[d] == k for k, d in enumerate(second)):
        _skip(graph, node, inner, inner.args[0])


def _pair_of_casts(graph: GraphEditor, node: Node) -> None:
    """`pointless_convert`: not through a narrower dtype than the result has."""
    inner = _inner(graph, node, "prims::convert_element_type")
    if inner is None:
        return
    source = inner.args[0]
    if not all(dtype in _FLOATS for dtype in (source.dtype, inner.dtype, node.dtype)):
        return
    if inner.dtype.bits >= node.dtype.bits:
        graph.change(node, node.target, (source, node.dtype), {})
        graph.erase(inner)


def _one_product(graph: GraphEditor, node: Node) -> None:
    """`bmm_to_mm`"""
    if node.target != "aten::bmm" or node.args[0].shape[0] != 1 or node.args[1].shape[0] != 1:
        return
    tracer = _maker(node)
    a, b = [tracer.new("aten::squeeze.dim", (m, 0), m.shape[1:], m.dtype, m.strides[1:]) for m in node.args]
    put(graph, node, tracer, tracer.unsqueeze(tracer.mm(a, b), 0))


def _scatter_into_constant(graph: GraphEditor, node: Node) -> None:
    """`scatter_upon_const_tensor`: one number a row written into a constant is a comparison with positions."""
    if node.target != "aten::scatter.value" or len(node.args) != 4:
        return
    full, dim, selector, number = node.args
    if full.target != "aten::full" or graph.user_count(full) != 1 or len(full.args) != 2 or not node.ndim:
        return
    dim %= node.ndim
    for k, (size, whole) in enumerate(zip(selector.shape, node.shape, strict=True)):
        if (size != 1) if k == dim else (size < whole):
            return
    tracer = _maker(node)
    length = node.shape[dim]
    how = {"start": 0, "step": 1, "dtype": dtypes.int64, "requires_grad": False}
    positions = tracer.node("prims::iota", (length,), form((length,), dtypes.int64), how)
    positions = tracer.view(positions, [length if k == dim else 1 for k in range(node.ndim)])
    mask = tracer.pointwise("aten::eq.Tensor", tracer.expand(selector, node.shape), positions, dtype=dtypes.bool_)
    of = dtypes.float32 if isinstance(number, float) or isinstance(full.args[1], float) else dtypes.int64
    background, value = tracer.full((), full.args[1], of), tracer.full((), number, of)
    result = tracer.pointwise("aten::where.self", mask, value, background, dtype=of)
    put(graph, node, tracer, tracer.cast(result, node.dtype))


def _maker(node: Node) -> Tracer:
    """Makes nodes that stand for `node`."""
    tracer = Tracer(training=False)
    tracer.op, tracer.region = node.op, node.must_recompute
    return tracer


def put(graph: GraphEditor, node: Node, tracer: Tracer, by: Node) -> None:
    """Puts new nodes in the place of one."""
    graph.insert(tracer.nodes, before=node)
    graph.replace(node, by)
    graph.erase(node)


_CAST = "prims::convert_element_type"
_SCALES = ("aten::mul.Tensor", "aten::div.Tensor")


def stable_scaled_softmax(graph: GraphEditor, node: Node) -> None:
    """Rewrites `sub(scaled, amax(scaled))`."""
    if node.target != "aten::sub.Tensor" or len(node.args) != 2 or node.kwargs:
        return
    scaled, largest = node.args
    if not isinstance(scaled, Node) or not isinstance(largest, Node) or largest.target != "aten::amax":
        return
    if largest.args[0] is not scaled or len(largest.args) != 3 or graph.user_count(largest) != 1:
        return
    inner, dtype = scaled, None
    if scaled.target == _CAST:
        inner, dtype = scaled.args[0], scaled.dtype
    if inner.target not in _SCALES or len(inner.args) != 2:
        return
    dims, keepdim = tuple(largest.args[1]), largest.args[2]
    operands = _operands(inner, dims)
    if operands is None:
        return
    tracer = Tracer(training=False)
    tracer.op, tracer.region = node.op, node.must_recompute
    result = _stable(tracer, inner.target, *operands, dims, keepdim, dtype)
    graph.insert(tracer.nodes, before=node)
    graph.replace(node, result)
    for dead in (node, largest, scaled, inner):
        if graph.alive(dead) and not graph.user_count(dead):
            graph.erase(dead)


def _operands(call: Node, dims: tuple[int, ...]) -> tuple[Node, Any] | None:
    """What is scaled and by what, which is the same along the dimensions of the maximum."""
    first, second = call.args
    orders = [(first, second), (second, first)] if call.target == "aten::mul.Tensor" else [(first, second)]
    for scaled, factor in orders:
        if isinstance(factor, (int, float)) and isinstance(scaled, Node):
            return scaled, factor
        if not isinstance(scaled, Node) or not isinstance(factor, Node) or scaled.ndim < factor.ndim:
            continue
        shape = (1,) * (scaled.ndim - factor.ndim) + factor.shape
        if all(shape[d] == 1 for d in dims):
            return scaled, factor
    return None


def _stable(
    t: Tracer, scale: str, x: Node, factor: Any, dims: tuple[int, ...], keepdim: bool, dtype: DType | None
) -> Node:
    scaled = t.pointwise(scale, x, factor)
    if dtype is not None:
        scaled, x = t.cast(scaled, dtype), t.cast(x, dtype)
    sign: Any
    if isinstance(factor, Node):
        one = t.full((), 1, x.dtype)
        positive = t.pointwise("aten::ge.Scalar", factor, 0, dtype=dtypes.bool_)
        negative_one = t.pointwise("aten::neg", one)
        sign = t.pointwise("aten::where.self", positive, one, negative_one, dtype=x.dtype)
    else:
        sign = 1 if factor >= 0 else -1
    x = t.pointwise("aten::mul.Tensor", x, sign)
    centred = t.pointwise("aten::sub.Tensor", x, t.reduce("aten::amax", x, dims, keepdim))
    signed = t.pointwise("aten::mul.Tensor", sign, factor) if isinstance(factor, Node) else sign * factor
    stable = t.pointwise(scale, centred, signed)
    plain = t.pointwise("aten::sub.Tensor", scaled, t.reduce("aten::amax", scaled, dims, keepdim))
    size = t.pointwise("aten::abs", scaled)
    bounded = t.pointwise("aten::ne.Scalar", size, math.inf, dtype=dtypes.bool_)
    is_number = t.pointwise("aten::eq.Tensor", scaled, scaled, dtype=dtypes.bool_)
    finite = t.pointwise("aten::mul.Tensor", is_number, bounded)
    wrong = t.reduce("aten::any.dims", t.pointwise("aten::logical_not", finite), dims, True)
    return t.where(t.pointwise("aten::logical_not", wrong), stable, plain)


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
