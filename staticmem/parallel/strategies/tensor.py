"""Tensor parallel: the linears of a block are split over the ranks, first by columns, then by rows.

A linear whose input is whole and whose output stays inside of the block until another linear takes it in is split by
columns (its outputs), that other one by rows (its inputs). The ops between them compute parts: heads of attention,
features of the feed-forward. Norms, residuals and inputs are whole on every rank (no sequence parallelism). Embedding
and head are split along the vocabulary, and so are logits and their loss. Sources: Megatron-LM, megatron/core/
tensor_parallel/layers.py (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding); PyTorch, torch/distributed/
tensor/parallel/style.py (ColwiseParallel, RowwiseParallel) and loss.py (`loss_parallel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir.graph import Graph, Op, Parameter, Ref
from staticmem.ops.registry import LINEARS, kinds_of
from staticmem.parallel.blocks import ROOT, blocks_of_ops
from staticmem.parallel.division import Traffic, WholeStep
from staticmem.parallel.rewrite import Piece, Rewrite, Weight
from staticmem.units import ceil_div


@dataclass
class Plan:
    """Which ops and parameters are split. `columns` and `rows` are indices of linears; `parts` of ops between them."""

    columns: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)
    vocabulary: set[int] = field(default_factory=set)  # embedding and head
    split: set[str] = field(default_factory=set)  # names of parameters
    whole_blocks: list[str] = field(default_factory=list)  # blocks that cannot be split, with the reason
    heads: set[int] = field(default_factory=set)
    logits: int = 0  # size of the vocabulary where logits are split


def plan(graph: Graph, paths: Sequence[str], ranks: int, shapes: dict[str, tuple[int, ...]]) -> Plan:
    """The split of a model over `ranks`. `shapes` has the sizes of values that the graph states."""
    names = {p.value.name: p for p in graph.parameters}
    groups = blocks_of_ops(graph, paths)
    result = Plan()
    for path in paths:
        block = _Block(graph, path, [i for i, group in enumerate(groups) if group == path], names, shapes)
        reason = block.why_not(ranks)
        if reason:
            result.whole_blocks.append(f"{path}: {reason}")
            continue
        result.columns |= block.columns
        result.rows |= block.rows
        result.parts |= block.parts
        result.heads |= block.heads
        result.split |= block.split
    if result.columns:
        _vocabulary(graph, groups, names, ranks, result)
    return result


class _Block:
    def __init__(
        self, graph: Graph, path: str, ops: list[int], names: dict[str, Parameter], shapes: dict[str, tuple[int, ...]]
    ) -> None:
        self.graph, self.path, self.names, self.shapes = graph, path, names, shapes
        self.columns: set[int] = set()
        self.rows: set[int] = set()
        self.parts: set[int] = set()
        self.split: set[str] = set()
        self.heads: set[int] = set()
        self.sizes: set[int] = set()  # must be divisible by the number of ranks
        self.problem = ""
        self.partial: set[str] = set()  # values of which a rank has a part
        for index in ops:
            self._op(index, graph.ops[index])
        inside = set(ops)
        outputs = set(graph.outputs)
        for index, op in enumerate(graph.ops):
            if index not in inside and self.partial.intersection(op.refs()):
                self.problem = self.problem or f"{op.target} outside of it reads a part"
        if outputs & self.partial:
            self.problem = self.problem or "it returns a part"

    def _op(self, index: int, op: Op) -> None:
        weight = self._weight(op)
        reads = [name for name in op.refs() if name in self.partial]
        if weight is not None:
            parameter, transposed = weight
            out, into = parameter.value.shape or (0, 0)
            if transposed:
                out, into = into, out
            if reads:
                self.rows.add(index)
                self.sizes.add(into)
                self.split.add(parameter.fqn)
            else:
                self.columns.add(index)
                self.sizes.add(out)
                self.partial.update(op.outputs)
                for name in op.refs():
                    if name in self.names and len(self.names[name].value.shape or ()) <= 2:
                        self.split.add(self.names[name].fqn)
            return
        if not reads:
            return
        self.parts.add(index)
        self.partial.update(op.outputs)
        if op.base == "aten::scaled_dot_product_attention" or "softmax" in kinds_of(op.base):
            for name in op.refs():
                shape = self.shapes.get(name, ())
                if len(shape) == 4:
                    self.heads.add(shape[1])
        if op.base in ("aten::add", "aten::add_"):
            part = self.shapes.get(reads[0])
            if any(self.shapes[n] == part for n in op.refs() if n not in self.partial and n in self.shapes):
                self.problem = self.problem or "a residual is added to a part"

    def _weight(self, op: Op) -> tuple[Parameter, bool] | None:
        """The weight of a linear, and whether it is stored with inputs first."""
        if op.base not in LINEARS:
            return None
        at = 2 if op.base == "aten::addmm" else 1
        arg = op.args[at] if len(op.args) > at else None
        parameter = self.names.get(arg.name) if isinstance(arg, Ref) else None
        if parameter is None or len(parameter.value.shape or ()) != 2:
            return None
        return parameter, op.base != "aten::linear"

    def why_not(self, ranks: int) -> str:
        if not self.columns or not self.rows:
            return "no linear by columns that one by rows follows"
        if self.problem:
            return self.problem
        for size in sorted(self.sizes):
            if size % ranks:
                return f"{size} features are not divisible by {ranks}"
        for heads in sorted(self.heads):
            if heads % ranks:
                return f"{heads} heads are not divisible by {ranks}"
        return ""


def _vocabulary(graph: Graph, groups: list[str], names: dict[str, Parameter], ranks: int, result: Plan) -> None:
    """Embedding of the largest table outside of the blocks, and the linear that gives the model's first output."""
    tables: dict[int, tuple[int, str]] = {}  # op -> rows and name
    for index, op in enumerate(graph.ops):
        if groups[index] == ROOT and op.base == "aten::embedding" and isinstance(op.args[0], Ref):
            parameter = names.get(op.args[0].name)
            if parameter is not None and parameter.value.shape:
                tables[index] = (parameter.value.shape[0], parameter.fqn)
    if not tables:
        return
    size = max(rows for rows, _ in tables.values())
    for index, (rows, name) in tables.items():
        if rows == size:
            result.vocabulary.add(index)
            result.split.add(name)
    for index, op in enumerate(graph.ops):
        if groups[index] != ROOT or op.base != "aten::linear" or not isinstance(op.args[1], Ref):
            continue
        parameter = names.get(op.args[1].name)
        if parameter is not None and (parameter.value.shape or ())[:1] == (size,):
            result.vocabulary.add(index)
            result.split.add(parameter.fqn)
            result.logits = size
            result.split.update(names[n].fqn for n in op.refs() if n in names and names[n].value.shape == (size,))


def apply(rewrite: Rewrite, weights: list[Weight], split: Plan, ranks: int) -> list[str]:
    """Makes every split buffer a part of itself."""
    for weight in weights:
        if weight.name in split.split:
            for piece in weight.pieces:
                _divide(piece, ranks)
    tensors = {id(piece) for weight in weights for piece in weight.pieces}
    head = split.logits
    for piece in rewrite.pieces:
        if id(piece) in tensors or piece.kernel is None:
            continue
        call = rewrite.trace.kernels[piece.kernel]
        if call.phase not in ("forward", "backward"):
            continue
        index, forward = call.op, call.phase == "forward"
        if index in split.parts:
            _divide(piece, ranks, heads=split.heads)
        elif index in split.columns or index in split.rows:
            if forward == (index in split.columns):
                _divide(piece, ranks)
        elif head and piece.shape and piece.shape[-1] == head and (index < 0 or index in split.vocabulary):
            _divide(piece, ranks)
    notes = [
        f"tensor parallel: {len(split.columns)} linears by columns, {len(split.rows)} by rows"
        + (f", {len(split.vocabulary)} tables along the vocabulary" if split.vocabulary else "")
    ]
    return notes + [f"whole on every rank: {reason}" for reason in split.whole_blocks[:3]]


def _divide(piece: Piece, ranks: int, heads: set[int] | None = None) -> None:
    """A rank's part of a buffer; along the heads, else the last dimension that the ranks divide."""
    if prod(piece.shape) < ranks:
        return
    shape = list(piece.shape)
    dims = [1] if heads and len(shape) == 4 and shape[1] in heads else []
    dims += [i for i in reversed(range(len(shape))) if shape[i] % ranks == 0]
    if dims:
        shape[dims[0]] //= ranks
        piece.shape, piece.strides = tuple(shape), None
    piece.nbytes = ceil_div(piece.nbytes, ranks)


class TensorParallel:
    """The linears of each block in parts."""

    def divide(self, step: WholeStep) -> StepResult:
        graph, ranks = step.result.graph, step.strategy.devices
        shapes = {name: value.shape for name, value in graph.values.items() if value.shape is not None}
        split = plan(graph, step.paths, ranks, shapes)
        if not split.columns:
            reason = split.whole_blocks[0] if split.whole_blocks else "no blocks that repeat"
            what = f"tensor parallel over {ranks} devices does not apply to this model"
            raise UsageError(
                what, f"No block can be split ({reason}).", "Try fewer devices, or --parallel fsdp.", "SM182"
            )
        return step.of_rank(apply(step.rewrite, step.weights, split, ranks))

    def sent_bytes(self, name: str, traffic: Traffic) -> float:
        raise ValueError(name)  # activations, which a step of parameters and gradients does not say


DIVISION = TensorParallel()
