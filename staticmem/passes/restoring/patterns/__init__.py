"""Groups of ONNX nodes that are one ATen call: found before nodes are translated one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from staticmem.ir.graph import Frame, Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context
from staticmem.passes.restoring.patterns import activations, attention, indexing, layers
from staticmem.passes.restoring.patterns.matcher import Matcher, Pattern

# name, operators that a group is found by, one without which there is none, and its function; earlier patterns take
# nodes that later ones would match
PATTERNS: Sequence[tuple[str, tuple[str, ...], str, Pattern]] = (
    ("scaled_dot_product_attention", ("MatMul",), "Softmax", attention.match),
    ("linear", ("Add", "MatMul"), "MatMul", layers.linear),
    ("gelu", ("Erf",), "Erf", activations.gelu_erf),
    ("gelu", ("Tanh",), "Tanh", activations.gelu_tanh),
    ("silu", ("Mul",), "Sigmoid", activations.silu),
    ("hardswish", ("Mul", "Div"), "", activations.hard_swish),
    ("hardsigmoid", ("Mul", "Div"), "Clip", activations.hard_sigmoid),
    ("mish", ("Mul",), "Softplus", activations.mish),
    ("rsqrt", ("Div", "Reciprocal"), "Sqrt", layers.rsqrt),
    ("layer_norm", ("Div",), "Sqrt", layers.layer_norm),
    ("var", ("ReduceMean",), "Sub", layers.variance),
    ("group_norm", ("InstanceNormalization",), "InstanceNormalization", layers.group_norm),
    ("noise of stochastic depth", ("RandomUniformLike", "RandomUniform"), "", layers.stochastic_depth),
    ("roll", ("Concat",), "Slice", indexing.roll),
    ("chunk", ("Slice",), "Slice", indexing.chunk),
    ("index_put_", ("ScatterND",), "ScatterND", indexing.write),
    ("addcmul", ("Add",), "Mul", layers.addcmul),
    ("packed projection", ("Squeeze",), "Unsqueeze", layers.packed_projection),
)
_OPERATORS = frozenset(operator for _, operators, *_ in PATTERNS for operator in operators)


def find(
    ctx: Context,
    nodes: Sequence[Node],
    frames: Callable[[Node], tuple[Frame, ...]],
    only: Collection[int] | None = None,
    without: Collection[str] = (),
) -> tuple[dict[int, list[Op]], Counter[str]]:
    """Ops by the index of the node that they replace (empty for the others of a group), and counts by pattern.

    With `only`, groups are made of these nodes (their indices) alone; `without` names patterns that are left out.
    """
    matcher = Matcher(ctx, nodes, frames, only)
    counts: Counter[str] = Counter()
    by_operator: dict[str, list[Node]] = {}
    for node in nodes:  # what is known needs no group, but a tensor that is written into is made all the same
        if node.op not in _OPERATORS or node.domain:
            continue
        if node.op == "ScatterND" or not all(name in ctx.net.consts for name in node.outputs):
            by_operator.setdefault(node.op, []).append(node)
    present = {"", *[node.op for node in nodes]}
    for name, operators, needed, pattern in PATTERNS:
        if needed not in present or name in without:
            continue
        for node in (n for operator in operators for n in by_operator.get(operator, ())):
            if matcher.free(node) and pattern(matcher, node):
                counts[name] += 1
    return matcher.groups, counts
