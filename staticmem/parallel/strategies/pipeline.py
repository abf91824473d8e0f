"""Pipeline parallel: stages of consecutive blocks, micro-batches in the 1F1B schedule.

Stage s of p has done the forward of p - s micro-batches before its first backward, and holds as many from then on
(never more than there are). The embedding goes with the first stage, norm, head and loss with the last. Gradients are
summed over the micro-batches, so from the second on they are there from the start. Sources: Narayanan et al. 2021
(arXiv:2104.04473), section 2.2; Megatron-LM, megatron/core/pipeline_parallel/schedules.py
(`forward_backward_pipelining_without_interleaving`: num_warmup_microbatches = p - s - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir.graph import Graph
from staticmem.liveness import Lifetimes
from staticmem.parallel.blocks import ROOT, blocks_of_ops, names_of_parameters
from staticmem.parallel.division import Traffic, WholeStep, with_notes
from staticmem.parallel.rewrite import AFTER, BEFORE, EVENT, Piece, Rewrite


def stages_of_ops(graph: Graph, paths: Sequence[str], stages: int) -> list[int]:
    """The stage of each op: blocks in equal shares, the first stages have one more where they do not divide."""
    least, more = divmod(len(paths), stages)
    of_block: dict[str, int] = {}
    at = 0
    for stage in range(stages):
        for path in paths[at : at + least + (stage < more)]:
            of_block[path] = stage
        at += least + (stage < more)
    groups = blocks_of_ops(graph, paths)
    last = max((i for i, group in enumerate(groups) if group != ROOT), default=-1)
    of_ops: list[int] = []
    stage = 0
    for index, group in enumerate(groups):
        if group != ROOT:
            stage = of_block[group]
        elif index > last:
            stage = stages - 1
        of_ops.append(stage)
    return of_ops


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at most."""
    return min(stages - stage, micro_batches)


def apply(
    rewrite: Rewrite, graph: Graph, of_ops: Sequence[int], stage: int, stages: int, micro_batches: int
) -> list[str]:
    """Reduces the step to one stage."""
    weights = rewrite.weights()
    held = in_flight(stage, stages, micro_batches)
    kernels = rewrite.trace.kernels
    owner = _owners(graph, of_ops)
    for weight in weights:
        mine = stage in owner.get(weight.name, {0})
        if not mine:
            rewrite.drop(*weight.pieces)
        elif micro_batches > 1:
            holder = "gradients of the micro-batches before"
            for g in weight.gradients:
                rewrite.end(g, (g.born[0], AFTER))
                rewrite.add(g.name, g.nbytes, g.dtype, rewrite.start, "gradient", holder, category="gradient")
    handled = {id(piece) for weight in weights for piece in weight.pieces}
    mine_first, mine_last = _span(rewrite, of_ops, stage, "forward")
    back_first, _ = _span(rewrite, of_ops, stage, "backward")
    received: list[Piece] = []
    saved: list[Piece] = []
    for piece in list(rewrite.pieces):
        if id(piece) in handled or piece.kernel is None or piece.dropped:
            continue
        call = kernels[piece.kernel]
        if call.phase == "optimizer":
            continue
        if call.phase == "setup":
            if not _setup_here(piece, stage, stages):
                rewrite.drop(piece)
            continue
        of = of_ops[call.op] if 0 <= call.op < len(of_ops) else stages - 1
        if of == stage:
            if call.phase == "forward":
                _end_in_stage(rewrite, piece, of_ops, stage, mine_last)
                if piece.died is not None and piece.died[0] > mine_last and piece.category == "activation":
                    saved.append(piece)
            continue
        ends = [h.end for h in piece.holds if 0 <= h.op < len(of_ops) and of_ops[h.op] == stage]
        if call.phase == "forward" and of < stage and ends:
            received.append(piece)
            piece.born = (mine_first, BEFORE, 0)
            rewrite.end(piece, (max(rewrite.trace.ticks if e is None else e for e in ends), EVENT))
        else:
            rewrite.drop(piece)
    boundary = max((p.nbytes for p in received), default=0)
    if boundary and stage < stages - 1 and back_first is not None:
        name, holder, at = "gradient of the output", "received from the next stage", (back_first, BEFORE)
        rewrite.add(name, boundary, received[0].dtype, at, "receive", holder, died=(back_first, AFTER))
    kernel, holder = "forward of an earlier micro-batch", "saved by micro-batches whose backward is to come"
    start, end = rewrite.start, (rewrite.trace.ticks, BEFORE)
    for p in (*saved, *received):
        for _ in range(held - 1):
            rewrite.add(p.name, p.nbytes, p.dtype, start, kernel, holder, died=end, category="activation")
    return [f"pipeline: stage {stage + 1} of {stages}, {held} of {micro_batches} micro-batches in flight (1F1B)"]


def _owners(graph: Graph, of_ops: Sequence[int]) -> dict[str, set[int]]:
    """Stages that read a parameter: a tied one is on each of them."""
    names = names_of_parameters(graph)
    stages: dict[str, set[int]] = {}
    for op, stage in zip(graph.ops, of_ops, strict=True):
        for ref in op.refs():
            if ref in names:
                stages.setdefault(names[ref], set()).add(stage)
    return stages


def _setup_here(piece: Piece, stage: int, stages: int) -> bool:
    """Inputs are on the first stage, the target and the loss of the step before on the last, buffers on all."""
    if piece.category == "input":
        return stage == (stages - 1 if piece.name == "target" else 0)
    return piece.category == "buffer" or stage == stages - 1


def _end_in_stage(rewrite: Rewrite, piece: Piece, of_ops: Sequence[int], stage: int, last: int) -> None:
    """Ends a piece that only other stages save: those have copies of their own, and here it dies when it was sent."""
    mine = [h for h in piece.holds if not 0 <= h.op < len(of_ops) or of_ops[h.op] == stage]
    ends = [rewrite.trace.ticks if h.end is None else h.end for h in mine if 0 <= h.op < len(of_ops)]
    if piece.died is not None and piece.died[0] > last and not ends:
        rewrite.end(piece, (last, AFTER))
    elif ends and len(mine) < len(piece.holds):
        rewrite.end(piece, (max(max(ends), last), AFTER))


def _span(rewrite: Rewrite, of_ops: Sequence[int], stage: int, phase: str) -> tuple[int, int]:
    """Ticks of the first and the last allocation of the stage's ops in a phase."""
    ticks = [
        p.born[0]
        for p in rewrite.pieces
        if p.kernel is not None
        and rewrite.trace.kernels[p.kernel].phase == phase
        and 0 <= (op := rewrite.trace.kernels[p.kernel].op) < len(of_ops)
        and of_ops[op] == stage
    ]
    span = rewrite.span(phase)
    fallback = span[0] if span else rewrite.first
    return (min(ticks), max(ticks)) if ticks else (fallback, fallback)


class Pipeline:
    """The stage with the highest peak."""

    def divide(self, step: WholeStep) -> StepResult:
        result, stages = step.result, step.strategy.devices
        if len(step.paths) < stages:
            raise UsageError(
                f"a pipeline of {stages} stages does not apply to this model",
                f"It has {len(step.paths)} blocks that repeat, and a stage is at least one.",
                f"Use --devices {max(len(step.paths), 1)} or fewer.",
                code="SM182",
            )
        micro_batches = (step.strategy.micro_batches or 2 * stages) if step.training else 1
        of_ops = stages_of_ops(result.graph, step.paths, stages)
        best, highest = result, -1
        for stage in (0, stages - 1):  # those between have fewer micro-batches than the first, and no head
            rewrite = Rewrite(result.trace)
            notes = apply(rewrite, result.graph, of_ops, stage, stages, micro_batches)
            trace = rewrite.build()
            peak = Lifetimes(trace).peak_bytes
            if peak > highest:
                best, highest = with_notes(replace(result, trace=trace), notes), peak
        return best

    def sent_bytes(self, name: str, traffic: Traffic) -> float:
        raise ValueError(name)  # activations between stages, which a step of parameters and gradients does not say


DIVISION = Pipeline()
