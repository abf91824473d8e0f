"""What code may keep from one call to the next, and by how much that moves a peak.

Masks, positions and tables of rotary embeddings depend on sizes, constants and buffers alone. Code that keeps such a
tensor (an attribute, `functools.lru_cache`, a closure) computes it in its first call, and has it in all later ones; an
export shows the first. Either the tensors that its computation takes do not exist at the peak, or the result exists in
the whole step.
"""

from __future__ import annotations

from staticmem.ir.graph import Graph, Op
from staticmem.liveness import Lifetimes
from staticmem.ops import kinds_of
from staticmem.passes.frames.source_lines import is_published as is_published_line
from staticmem.passes.lost_gradients import is_published

_RANDOM = ("aten::rand", "aten::normal", "aten::bernoulli", "aten::multinomial", "aten::exponential", "aten::dropout")


def moved_by_kept_constants(graph: Graph, lifetimes: Lifetimes) -> tuple[int, int]:
    """Bytes by which the peak may be lower and higher."""
    names = _constants(graph)
    if not names:
        return 0, 0
    trace, tick = lifetimes.trace, lifetimes.peak_tick
    start = dict(trace.phases)["forward"]
    less = more = 0
    rows = zip(trace.buffers.names, trace.buffers.categories, lifetimes.sizes, strict=True)
    for index, (name, category, size) in enumerate(rows):
        if name in names and category == "activation" and lifetimes.born[index] >= start:
            if lifetimes.born[index] <= tick < lifetimes.died[index]:
                less += size
            else:
                more += size
    return less, more


def _constants(graph: Graph) -> set[str]:
    """Results of the model's own code that depend on no input, no parameter and no noise, and take memory."""
    changing = {p.value.name for p in graph.parameters} | {value.name for value in graph.inputs}
    constant: set[str] = set()
    for op in graph.ops:
        if not changing.isdisjoint(op.refs()) or op.base.startswith(_RANDOM):
            changing.update((*op.outputs, *(op.refs() if op.base.endswith("_") else ())))
        elif _is_own(op):
            constant.update(op.outputs)
    return constant - changing


def _is_own(op: Op) -> bool:
    if is_published(op) or "view" in kinds_of(op.base):
        return False
    return not op.stack or not is_published_line(op.stack[-1])
