"""What a line runs in training alone, `aux = self.head(x) if self.training else None`, in a graph for inference.

An export in training mode has these ops. Branches of several lines do not show.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from staticmem.ir.graph import Graph, Note, Op

_IN_TRAINING = re.compile(r"\bif\s+self\.training\s+else\s+None\b")


def drop_training_code(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """The graph without the ops of such lines, and without the outputs that they make, where no other op reads them."""
    inside = [op for op in graph.ops if _is_in_training(op)]
    results = {name for op in inside for name in op.outputs}
    others = [op for op in graph.ops if not _is_in_training(op)] if inside else []
    outputs = tuple(name for name in graph.outputs if name not in results)
    if not inside or not outputs or any(not results.isdisjoint(op.refs()) for op in others):
        return graph, ()
    called = dict(zip(graph.outputs, graph.output_names, strict=False))
    names = tuple([called.get(name, "") for name in outputs])
    return replace(graph, ops=tuple(others), outputs=outputs, output_names=names), ()


def _is_in_training(op: Op) -> bool:
    return any(_IN_TRAINING.search(line.text) is not None for line in op.stack)
