"""The weights of attention: what softmax makes of scores, until a product with values reads it."""

from __future__ import annotations

from staticmem.ir.graph import Graph
from staticmem.ops.registry import FREE_PRODUCTS, kinds_of


def changes_weights(base: str) -> bool:
    """Whether an op makes weights of weights: by another number, or where a mask says so."""
    return base == "aten::mul" or not kinds_of(base).isdisjoint(("dropout", "masking"))


def attention_weights(graph: Graph) -> set[str]:
    """Results of softmax, and what dropout makes of them, that a matrix product reads."""
    source_of: dict[str, str] = {}  # what becomes of the results of softmax -> what it was made from
    weights: set[str] = set()
    for op in graph.ops:
        if "softmax" in kinds_of(op.base):
            source_of[op.outputs[0]] = ""
        elif changes_weights(op.base):
            source = next((name for name in op.refs() if name in source_of), None)
            if source is not None:
                source_of[op.outputs[0]] = source
        elif op.base in FREE_PRODUCTS:
            for name in op.refs():
                while name in source_of:
                    weights.add(name)
                    name = source_of[name]
    return weights
