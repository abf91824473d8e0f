"""Attention that is written out, in half precision: its products and softmax become one call, with their backward.

Source: torch/_inductor/fx_passes/fuse_attention.py. A pattern is the graph of the code that PyTorch gives for it
(`_sfdp_pattern_1` and so on), forward and backward, traced as any other; a piece of a joint graph that has the same
calls, none of whose values is read elsewhere, is replaced. In float32 nothing is: the check there asks for matrix
products in TF32, which are off by default (`torch.backends.cuda.matmul.fp32_precision`).

Patterns whose masks are filled in (15, 17 to 20), those of T5 (21 to 27, which CUDA's builds leave out or which have
another dtype inside), and those of float16 alone (7 to 10) are not among these.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from staticmem.compiler.aot.no_ops import is_widened, remove_no_ops
from staticmem.compiler.edit import GraphEditor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.record import record
from staticmem.ops.tags import SIZED_BY_NUMBERS
from staticmem.ops.traces.arithmetic import add, div, mul
from staticmem.ops.traces.attention import scaled_dot_product_attention
from staticmem.ops.traces.factories import dropout
from staticmem.ops.traces.linear import matmul
from staticmem.ops.traces.softmax import softmax
from staticmem.ops.traces.views import contiguous, permute, transpose
from staticmem.tracing.nodes import PLACEHOLDER, Node, users_of
from staticmem.tracing.tracer import Tracer, form

_SCALE, _DROPOUT = 7.25, 0.113377  # what stands for a number in a pattern, as `scalar_workaround` there
_DRAWN = "prims::inductor_random"


@record(frozen=True)
class Pattern:
    """The code of a pattern: heads before the length (`permuted`: behind it), scores divided or multiplied by a number,
    a mask that is added, dropout; `strided`: inputs that products copy."""

    permuted: bool
    divides: bool
    masked: bool
    drops: bool
    strided: bool = False

    def search(self, t: Tracer, q: Node, k: Node, v: Node, mask: Node | None) -> Node:
        if self.permuted:
            q, k, v = (permute(t, of, (0, 2, 1, 3)) for of in (q, k, v))
        scores = (div if self.divides else mul)(t, matmul(t, q, transpose(t, k, -2, -1)), _SCALE)
        if mask is not None:
            scores = add(t, scores, mask)
        weights = softmax(t, scores, -1)
        return matmul(t, dropout(t, weights, _DROPOUT, True) if self.drops and t.training else weights, v)

    def replace(self, t: Tracer, q: Node, k: Node, v: Node, mask: Node | None, scale: float, p: float) -> Node:
        if self.permuted:
            q, k, v = (transpose(t, of, 1, 2) for of in (q, k, v))
        if self.strided:
            q, k, v = (contiguous(t, of) for of in (q, k, v))
        if mask is not None:
            mask = t.cast(mask, q.dtype)
        factor = 1.0 / scale if self.divides else scale
        return scaled_dot_product_attention(t, q, k, v, mask, p, False, factor)


# 1, 2, 3, 4, 5, 6, 11, 12, 14, 28
PATTERNS = (
    Pattern(False, True, False, False), Pattern(False, False, False, False), Pattern(False, True, False, True),
    Pattern(False, False, False, True), Pattern(False, True, True, False), Pattern(False, True, True, True),
    Pattern(True, True, False, False), Pattern(True, True, False, True), Pattern(True, True, True, False),
    Pattern(False, False, False, True, True),
)  # fmt: skip


class _Graph:
    """A pattern's nodes: the inputs (query, key, value and a mask), the tangent, the result and three gradients."""

    def __init__(self, pattern: Pattern, training: bool) -> None:
        self.pattern, self.training = pattern, training
        t = Tracer(training)
        shape = (2, 4, 8, 16)
        given_form = form(shape, dtypes.float16, (512, 16, 64, 1) if pattern.strided else None)
        given = [t.placeholder(name, given_form, training) for name in ("q", "k", "v")]
        length = shape[1] if pattern.permuted else shape[2]
        mask = t.placeholder("mask", form((1, 1, length, length), dtypes.float16)) if pattern.masked else None
        result = pattern.search(t, given[0], given[1], given[2], mask)
        outputs, self.tangent = [result], None
        if training:
            self.tangent = t.placeholder("tangent", result.tensor)
            gradients = t.backward([(result, self.tangent)])
            outputs += [gradients[of] for of in given]
        graph = GraphEditor(t.nodes, outputs)
        graph.finish()
        remove_no_ops(graph)
        self.nodes = [node for node in graph.finish() if node.target not in (PLACEHOLDER, "prims::inductor_seeds")]
        self.nodes = [node for node in self.nodes if node.target != "prims::inductor_lookup_seed"]
        self.given, self.mask = given, mask
        self.outputs = [node for node in graph.outputs if node is not None]
        users = users_of(graph.finish())
        self.reads = {node: len(users[node]) for node in self.nodes}
        self.anchor = next(node for node in self.nodes if node.target == "aten::amax")


@cache
def _graphs(training: bool) -> tuple[_Graph, ...]:
    return tuple(
        [_Graph(pattern, training) for pattern in PATTERNS if training or not pattern.drops or pattern.strided]
    )


def fuse_attention(graph: GraphEditor, training: bool, choices: list[tuple[str, str]]) -> None:
    """Replaces what is written out, wherever a pattern fits, and adds the kernels of the calls to `choices`."""
    for node in list(graph):
        if node.target == "aten::amax" and graph.alive(node) and is_widened(node.args[0]):
            for pattern in _graphs(training):
                match = _Match(pattern, graph)
                if match.fits(node):
                    _replace(match, choices)
                    break


class _Match:
    """Which node of a graph stands for which of a pattern."""

    def __init__(self, pattern: _Graph, graph: GraphEditor) -> None:
        self.pattern, self.graph = pattern, graph
        self.node_of: dict[Node, Node] = {}
        self.numbers: dict[float, Any] = {}

    def fits(self, anchor: Node) -> bool:
        if not self._pair(self.pattern.anchor, anchor):
            return False
        while True:
            missing = [node for node in self.pattern.nodes if node not in self.node_of]
            if not missing:
                return self._holds()
            if not any(self._find(node) for node in missing):
                return False

    def _find(self, node: Node) -> bool:
        """Looks for a node among those that read a value which is known."""
        matched = next((read for read in node.inputs if read in self.node_of), None)
        if matched is None:
            return False
        taken = set(self.node_of.values())
        for user in self.graph.users(self.node_of[matched]):
            if user.target == node.target and user not in taken:
                before = dict(self.node_of), dict(self.numbers)
                if self._pair(node, user):
                    return True
                self.node_of, self.numbers = before
        return False

    def _pair(self, mine: Node, theirs: Any) -> bool:
        if mine in self.node_of:
            return self.node_of[mine] is theirs
        if not isinstance(theirs, Node):
            return False
        if mine.target != PLACEHOLDER and (
            mine.target != theirs.target
            or len(mine.args) != len(theirs.args)
            or not isinstance(theirs.form, type(mine.form))
        ):
            return False
        self.node_of[mine] = theirs
        if mine.target in (PLACEHOLDER, _DRAWN):
            return True
        is_sized = mine.base in SIZED_BY_NUMBERS
        return all(self._same(a, b, is_sized) for a, b in zip(mine.args, theirs.args, strict=True))

    def _same(self, mine: Any, theirs: Any, is_sized: bool) -> bool:
        if isinstance(mine, Node):
            return self._pair(mine, theirs)
        if isinstance(mine, tuple):
            if is_sized:
                return isinstance(theirs, tuple)
            return (
                isinstance(theirs, tuple)
                and len(mine) == len(theirs)
                and all(self._same(a, b, False) for a, b in zip(mine, theirs, strict=True))
            )
        if isinstance(mine, DType):
            return theirs is mine or (mine in dtypes.HALVES and theirs in dtypes.HALVES)
        if isinstance(mine, float):
            return isinstance(theirs, (int, float)) and self.numbers.setdefault(mine, theirs) == theirs
        return bool(mine == theirs)

    def _holds(self) -> bool:
        """Operands of one dtype, a mask that the call takes, and nothing that is read elsewhere."""
        pattern, graph = self.pattern, self.graph
        inputs = [self.node_of[of] for of in pattern.given]
        if inputs[0].dtype not in dtypes.HALVES or any(
            of.dtype is not inputs[0].dtype or of.ndim != 4 for of in inputs
        ):
            return False
        if pattern.mask is not None:
            mask = self.node_of[pattern.mask]
            if not mask.ndim or mask.dtype not in (inputs[0].dtype, dtypes.float32):
                return False
        inner = [node for node in pattern.nodes if node not in pattern.outputs]
        return all(
            graph.user_count(self.node_of[node]) == pattern.reads[node] and not graph.is_output(self.node_of[node])
            for node in inner
        )


def _replace(match: _Match, choices: list[tuple[str, str]]) -> None:
    pattern, graph, node_of = match.pattern, match.graph, match.node_of
    result = node_of[pattern.outputs[0]]
    given = [node_of[of] for of in pattern.given]
    mask = None if pattern.mask is None else node_of[pattern.mask]
    p = float(match.numbers.get(_DROPOUT, 0.0))
    t = Tracer(pattern.training)
    t.op, t.region, t.choices = result.op, result.must_recompute, choices
    for node in given if pattern.training else ():
        t.leaf(node)
    fused = pattern.pattern.replace(t, given[0], given[1], given[2], mask, match.numbers[_SCALE], p)
    forward = len(t.nodes)
    replaced: dict[Node, Node] = {result: fused}
    if pattern.tangent is not None:
        gradients = t.backward([(fused, node_of[pattern.tangent])])
        replaced |= {node_of[old]: gradients[of] for old, of in zip(pattern.outputs[1:], given, strict=True)}
    graph.insert(t.nodes[:forward], before=result)
    if pattern.tangent is not None:
        graph.insert(t.nodes[forward:], before=_first_reader(match))
    _swap(graph, replaced, [node_of[node] for node in pattern.nodes])


def _first_reader(match: _Match) -> Node:
    """The first node of the backward, in the graph's order."""
    assert match.pattern.tangent is not None
    late = {match.pattern.tangent}
    for node in match.pattern.nodes:
        if any(read in late for read in node.inputs):
            late.add(node)
    theirs = {match.node_of[node] for node in late if node is not match.pattern.tangent}
    return next(node for node in match.graph if node in theirs)


def _swap(graph: GraphEditor, replaced: Mapping[Node, Node], old: list[Node]) -> None:
    for node, by in replaced.items():
        graph.replace(node, by)
    for node in reversed(old):
        if graph.alive(node) and not graph.user_count(node) and not graph.is_output(node):
            graph.erase(node)
