"""Passes over a joint graph, before it is partitioned; over the graph of inference as well.

Source: torch/_inductor/fx_passes/joint_graph.py (`joint_graph_passes`), torch/_inductor/fx_passes/post_grad.py
(`remove_noop_ops`). `pad_mm` measures products on the card, so nothing is padded here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from staticmem.compiler.aot.no_ops import is_widened, remove_no_ops
from staticmem.compiler.aot.softmax_scaling import stable_scaled_softmax
from staticmem.compiler.aot.uniform_values import fold
from staticmem.compiler.edit import GraphEditor
from staticmem.compiler.graphs import JointGraph, NodeGraph
from staticmem.ir import dtypes
from staticmem.tracing.nodes import Node
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
    _fuse_attention(graph, isinstance(joint, JointGraph) and bool(joint.tangents))
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


def _fuse_attention(graph: GraphEditor, training: bool) -> None:
    for node in graph:
        if node.target == "aten::amax" and is_widened(node.args[0]):
            from staticmem.compiler.aot.attention_patterns import fuse_attention  # few models have it written out

            fuse_attention(graph, training)
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
