"""Floating-point operations of a step: forward, backward, and what checkpoints run again.

The forward's are those of `rules.flops`. The backward of a product takes the forward's once for each of its two factors
that needs a gradient, that of attention two and a half times (torch/utils/flop_counter.py: mm_flop, conv_backward_flop,
sdpa_backward_flop_count: five products against two). What a checkpoint runs again is counted whole; PyTorch stops after
the last tensor that it needs, so that it can be less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from staticmem.engine.shapes import value_infos
from staticmem.ir.graph import Graph, Op
from staticmem.ops import flops
from staticmem.passes.requested.checkpoint_regions import regions_of
from staticmem.scenario.step import Scenario

ATTENTION = 2.5  # products of the backward over those of the forward: 5 against 2

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Compute:
    """Floating-point operations of a step (of one micro-batch, where gradients are accumulated)."""

    forward: int
    backward: int
    again: int

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.again


class Counter:
    """The operations of a graph's ops, counted once for all scenarios of it."""

    def __init__(self, graph: Graph, training: bool) -> None:
        self.graph = graph
        self.shapes: Mapping[str, Shape] = {name: value.shape for name, value in value_infos(graph, training).items()}
        self.of_op = [flops(op, self.shapes) for op in graph.ops]

    def of(self, scenario: Scenario) -> Compute:
        """The operations of a step of this graph."""
        forward = sum(self.of_op)
        if not scenario.training:
            return Compute(forward, 0, 0)
        return Compute(forward, self._backward(scenario.freeze), self._again(scenario))

    def between(self, start: int, end: int) -> int:
        """The forward's operations of the ops [start, end)."""
        return sum(self.of_op[start:end])

    def _backward(self, freeze: str | None) -> int:
        trained = [p for p in self.graph.parameters if p.trainable]
        if freeze is not None:
            from staticmem.scenario.backtracking import searcher

            frozen = searcher(freeze, [p.fqn for p in trained])
            trained = [p for p in trained if not frozen(p.fqn)]
        needs = {p.value.name for p in trained}
        total = 0
        for op, count in zip(self.graph.ops, self.of_op, strict=True):
            reads = [name for name in op.refs() if name in needs]
            if not reads or not op.grad:
                continue
            needs.update(op.outputs)
            total += self._backward_of(op, count, needs)
        return total

    def _backward_of(self, op: Op, count: int, needs: set[str]) -> int:
        if not count:
            return 0
        if "attention" in op.base:
            return int(count * ATTENTION)
        factors = [name for name in op.refs() if len(self.shapes.get(name, ())) >= 2][:2]
        return count * sum(name in needs for name in factors)

    def _again(self, scenario: Scenario) -> int:
        """Every op once for each checkpoint that it is in: an inner one runs in the outer one's run and in its own."""
        return sum(self.between(region.start, region.end) for region in regions_of(self.graph, scenario))
