"""Groups of ONNX nodes that are one ATen call: found before nodes are translated one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from staticmem.graph.ir import Frame, Op
from staticmem.recover.nodes import Node
from staticmem.recover.onnx_ops.context import Context
from staticmem.recover.patterns import activations, attention, indexing, linear, noise, norms, packed
from staticmem.recover.patterns.matcher import Matcher, Pattern

# in order: an earlier pattern takes nodes that a later one would also match
PATTERNS: Sequence[tuple[str, Pattern]] = (
    ("scaled_dot_product_attention", attention.match),
    ("linear", linear.match),
    ("gelu", activations.gelu_erf),
    ("gelu", activations.gelu_tanh),
    ("silu", activations.silu),
    ("hardswish", activations.hard_swish),
    ("hardsigmoid", activations.hard_sigmoid),
    ("mish", activations.mish),
    ("rsqrt", norms.rsqrt),
    ("layer_norm", norms.layer_norm),
    ("group_norm", norms.group_norm),
    ("noise of stochastic depth", noise.match),
    ("roll", indexing.roll),
    ("chunk", indexing.chunk),
    ("index_put_", indexing.write),
    ("packed projection", packed.match),
)


def find(
    ctx: Context,
    nodes: Sequence[Node],
    frames: Callable[[Node], tuple[Frame, ...]],
    only: Collection[int] | None = None,
) -> tuple[dict[int, list[Op]], Counter[str]]:
    """Ops by the index of the node that they replace (empty for the others of a group), and counts by pattern.

    With `only`, groups are made of these nodes (their indices) alone.
    """
    matcher = Matcher(ctx, nodes, frames, only)
    counts: Counter[str] = Counter()
    for name, pattern in PATTERNS:
        for node in nodes:
            if matcher.free(node) and pattern(matcher, node):
                counts[name] += 1
    return matcher.found, counts
