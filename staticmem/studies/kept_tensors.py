"""What code may keep from one call to the next, and by how much that moves a peak.

Masks, positions and tables of rotary embeddings depend on sizes, constants and buffers alone. Code that keeps such a
tensor (an attribute, `functools.lru_cache`, a closure) computes it in its first call, and has it in all later ones; an
export shows the first. Either the tensors that its computation takes do not exist at the peak, or the result exists in
the whole step.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import zip_longest

from staticmem.ir.graph import Graph, Op
from staticmem.ir.stacks import is_published
from staticmem.liveness import Lifetimes
from staticmem.ops import kinds_of
from staticmem.ops.registry import FREE_PRODUCTS
from staticmem.passes.variables.policy import attention_weights
from staticmem.passes.variables.releases import kept_by_modules
from staticmem.passes.variables.source_lines import is_published as is_published_line

_ATTRIBUTE = re.compile(r"\s*(?:[\w.* ]+,\s*)*self\.\w+\s*(?:,[\w.*, ]+|:[^=]+)?=(?!=)")


def moved_by_kept_tensors(graph: Graph, lifetimes: Lifetimes, training: bool) -> tuple[int, int]:
    """Bytes by which the peak may be lower and higher."""
    less, more = _by_constants(graph, lifetimes)
    return less, more + _of_attributes(graph, lifetimes, training)


def _of_attributes(graph: Graph, lifetimes: Lifetimes, training: bool) -> int:
    """Bytes of what attributes may keep beside what lines say: in training those of the call before exist while the
    forward runs."""
    decided = {attribute.after for attribute in kept_by_modules(graph).values()}
    pairs = enumerate(zip_longest(graph.ops, graph.ops[1:]))
    assigned = [op for index, (op, after) in pairs if index not in decided and _ends_assignment(op, after)]
    read = {*graph.outputs, *graph.last_read}
    assigned += [op for op in graph.ops if read.isdisjoint(op.outputs) and _is_for_code(op)]
    weights = set() if any(op.stack for op in graph.ops) else _weights_for_code(graph, training)
    if not assigned and not weights:
        return 0
    needed = {*graph.outputs, *(b.value.name for b in graph.buffers)}
    dead: dict[str, Op] = {}
    for op in reversed(graph.ops):
        if needed.isdisjoint(op.outputs) and not (op.base.endswith("_") and needed.intersection(op.refs())):
            dead.update(dict.fromkeys(op.outputs, op))
        else:
            needed.update(op.refs())
    kept = weights
    waiting = list(assigned)
    while waiting:
        op = waiting.pop()
        kept.update(op.outputs)
        if training and not dead.keys().isdisjoint(op.outputs):
            waiting += [dead[name] for name in op.refs() if name in dead and name not in kept]
            kept.update(op.refs())
    sizes: Counter[str] = Counter()
    for name, category, size in zip(
        lifetimes.trace.buffers.names, lifetimes.trace.buffers.categories, lifetimes.sizes, strict=True
    ):
        if name in kept and category == "activation":
            sizes[name] = max(sizes[name], size)
    return sum(sizes.values()) * (2 if training else 1)


def _ends_assignment(op: Op, after: Op | None) -> bool:
    """Whether an op is the last one of a line of the model's own code that assigns to an attribute."""
    number = next((n for n, line in enumerate(op.stack) if _ATTRIBUTE.match(line.text)), None)
    if number is None or any(map(is_published_line, op.stack[: number + 1])):
        return False
    return after is None or after.stack[: number + 1] != op.stack[: number + 1]


def _is_for_code(op: Op) -> bool:
    """Whether what no op reads may be for statements that run none, which no file shows (`self.last = aux`)."""
    return not is_published(op) and kinds_of(op.base).isdisjoint(("check", "view"))


def _weights_for_code(graph: Graph, training: bool) -> set[str]:
    """Weights of attention, which code keeps to plot them: where no line shows whether it does."""
    weights = attention_weights(graph)
    if not weights:
        return set()
    products = (op for op in graph.ops if op.base in FREE_PRODUCTS and not is_published(op))
    kept = {name for op in products for name in op.refs() if name in weights}
    if not training:  # a dropout gives its input
        dropouts = (op for op in reversed(graph.ops) if op.base == "aten::dropout")
        kept.update(op.refs()[0] for op in dropouts if not kept.isdisjoint(op.outputs))
    return kept


def _by_constants(graph: Graph, lifetimes: Lifetimes) -> tuple[int, int]:
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
        if not changing.isdisjoint(op.refs()) or _is_random(op.base):
            changing.update((*op.outputs, *(op.refs() if op.base.endswith("_") else ())))
        elif _is_own(op):
            constant.update(op.outputs)
    return constant - changing


def _is_random(base: str) -> bool:
    from staticmem.ops.tags import tagged  # few graphs have an op that reads neither inputs nor parameters

    return base in tagged("nondeterministic_seeded")


def _is_own(op: Op) -> bool:
    if is_published(op) or "view" in kinds_of(op.base):
        return False
    return not op.stack or not is_published_line(op.stack[-1])
