"""Changes of a step, each analysed in full: its bytes, and the floating-point operations that it costs.

The operations of a forward are those of `ops.flops`. The backward of a product takes the forward's once for each of its
two factors that needs a gradient, that of attention two and a half times (torch/utils/flop_counter.py: mm_flop,
conv_backward_flop, sdpa_backward_flop_count: five products against two). What a checkpoint runs again is counted whole;
PyTorch stops after the last tensor that it needs, so that it can be less.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from staticmem.engine.shapes import value_infos
from staticmem.files import is_of_stdin
from staticmem.ir.graph import Graph, Op
from staticmem.ir.model_file import ModelFile
from staticmem.ops import flops
from staticmem.passes.requested.regions import regions_of
from staticmem.report.sweep import SAME, CardFit, LeverRow, need
from staticmem.scenario.request import as_flags, flags_of
from staticmem.scenario.step import Scenario
from staticmem.studies import Request, Study, without_cycle_search
from staticmem.studies.bench import Bench, card_fit
from staticmem.studies.study import Key, key_of

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
            total += self._count_backward(op, count, needs)
        return total

    def _count_backward(self, op: Op, count: int, needs: set[str]) -> int:
        if not count:
            return 0
        if "attention" in op.base:
            return int(count * ATTENTION)
        factors = [name for name in op.refs() if len(self.shapes.get(name, ())) >= 2][:2]
        return count * sum(name in needs for name in factors)

    def _again(self, scenario: Scenario) -> int:
        """Every op once for each checkpoint that it is in: an inner one runs in the outer one's run and in its own."""
        return sum(self.between(region.start, region.end) for region in regions_of(self.graph, scenario))


@dataclass(frozen=True)
class Lever:
    """A change of the request: `options` are fields of `Request`, `does` says what, `changes` what else it changes."""

    does: str
    options: Mapping[str, Any]
    changes: str
    note: str = ""


def options_of(model: ModelFile, request: Request, gpu: str | None) -> str:
    """What stands behind a verb to ask for a step of a model: its name (`-`: stdin), and all flags."""
    name = "-" if is_of_stdin(model.path) else model.given or model.path
    card = f"--gpu {shlex.quote(gpu)}" if gpu is not None else ""
    return " ".join(filter(None, (shlex.quote(name), flags_of(request), card)))


class Trials:
    """Analyses of one model around one request, each once. `gpu` None: live memory is what counts. With a
    `bench`, whose studies serve, a row has what is expected on the card alone, and no verdict but that it cannot run.

    `base` is the request as it is, `card` how it fits the card, and `runs` the number of steps that were run.
    """

    def __init__(self, study: Study, gpu: str | None, bench: Bench | None = None) -> None:
        self.study, self.gpu, self.bench, self.runs = study, gpu, bench, 0
        self._counters: dict[bool, Counter] = {}
        self._rows: dict[Key, LeverRow] = {}
        self.card: CardFit | None = None
        self.base = self.try_out(Lever("as asked", {}, SAME))

    def ask(self, options: Mapping[str, Any]) -> Study:
        """The study of the request with some of its options changed."""
        return (self.bench or self.study).ask(replace(self.study.request, gpu=None, **options))

    def try_out(self, lever: Lever) -> LeverRow:
        """The row of a lever.

        Raises:
            StaticmemError: the lever does not go with the request or the model.
        """
        one = self.ask(lever.options)
        key = key_of(one.request)
        if key not in self._rows:
            with without_cycle_search():
                self._rows[key] = self._run(one)
        row = replace(self._rows[key], does=lever.does, flags=as_flags(lever.options), changes=lever.changes)
        command = f"staticmem analyze {options_of(one.model, one.request, self.gpu)}"
        return replace(row, note=lever.note, command=command)

    def _run(self, one: Study) -> LeverRow:
        live, device, fit = one.lifetimes.peak_bytes, None, None
        if self.gpu is not None and self.bench is not None:
            device, fit = self.bench.expected_alone(one.request, self.gpu)
        elif self.gpu is not None:
            card = card_fit(one, self.gpu)
            device, fit = card.device_bytes, card.fit
            self.card = self.card or card
        operations, saved, compute = self._operations(one), 0, 0.0
        if self.runs:
            saved = need(self.base) - (live if device is None else device)
            compute = round(operations / self.base.operations - 1, 4) if self.base.operations else 0.0
        self.runs += 1
        return LeverRow("", "", live, device, fit, saved, operations, compute, "", "", one.result.moved)

    def _operations(self, one: Study) -> int:
        """Operations of the step that the base takes, whatever its division into micro-batches."""
        counted = self.counter(one.scenario.training).of(one.scenario)
        again = counted.again
        if one.result.compiled is not None:  # then the compiler decides what checkpoints compute again
            again = max(again, one.result.compiled.recomputed_flops)
        return (counted.forward + counted.backward + again) * self.study.request.accumulate

    def counter(self, training: bool) -> Counter:
        if training not in self._counters:
            self._counters[training] = Counter(self.ask({}).result.graph, training)
        return self._counters[training]
