"""The textbook estimate: a table of layers, a formula for each, and a sum. No liveness.

Lectures and blog posts size a network so: parameters by formula, one result for every layer, all results added up, and
twice that when a gradient is kept for each. It needs no knowledge of the framework, and it is the number that a reader
can check by hand; `docs/internals/textbook.md` says where it differs from what a GPU holds. The engine does not use it.

All sizes are bytes and integers; 1 MB is 10**6 bytes and 1 MiB is 2**20 (`staticmem.units`).

Sources: the notes of Stanford's CS231n ("Convolutional Networks", the VGGNet table) for the method; the documentation
of `torch.nn` for the shapes of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from staticmem.engine.shapes import value_infos
from staticmem.ir.dtypes import DType, float32
from staticmem.ir.graph import Graph, Op, Ref, Value
from staticmem.ops import argument, in_place, kinds_of
from staticmem.report.model import NoteInfo, Report, Textbook

# Where a file has lost which ops ran in place, activations but these count as in place: networks write them so.
_NOT_IN_PLACE = ("aten::silu", "aten::mish", "aten::selu", "aten::threshold")


def tensor_bytes(shape: Iterable[int], dtype: DType = float32) -> int:
    """Bytes of a dense tensor: the product of its sizes times the bytes of an element.

    8-bit elements take 1 byte, 16-bit 2, 32-bit 4, 64-bit 8. A float32 image of 500x500x3 takes 3,000,000.
    """
    return dtype.nbytes(prod(shape))


@dataclass(frozen=True, slots=True)
class TextbookRow:
    """One line of the table: an op, its result and the parameters that it is the first to use.

    `shape` and `elements` are those of its result. `bytes` is 0 where the result has no memory of its own: in place, or
    a view. `weights` and `biases` are numbers of parameters.
    """

    op: str
    target: str
    module: str
    shape: tuple[int, ...]
    dtype: DType
    elements: int
    bytes: int
    weights: int
    biases: int

    @property
    def parameters(self) -> int:
        return self.weights + self.biases


@dataclass(frozen=True, slots=True)
class TextbookEstimate:
    """What the textbook says of a graph, in bytes; `parameters` is a count.

    `intermediate_bytes_forward` is every result added up; the network's inputs are not in it.
    `intermediate_bytes_with_backward` adds a gradient of the same size for each floating-point result.
    `unsized` names results whose shape the file does not give: they are in no sum.
    """

    parameters: int
    parameter_bytes: int
    intermediate_bytes_forward: int
    intermediate_bytes_with_backward: int
    rows: tuple[TextbookRow, ...]
    unsized: tuple[str, ...] = ()


def textbook_estimate(graph: Graph) -> TextbookEstimate:
    """The textbook estimate of `graph`, whose op results have their shapes in `Graph.values`.

    The rule: each op adds the bytes of its first result, unless it works in place (ATen names end in `_`) or gives a
    view. Further results (the indices of a max-pool, the statistics of a normalisation) are not in textbooks. Shared
    parameters count once, at the op that reads them first.
    """
    counts: dict[str, int] = {}
    parameter_bytes = 0
    for parameter in graph.parameters:
        if parameter.alias_of is None:
            counts[parameter.value.name] = parameter.value.numel
            parameter_bytes += parameter.value.dtype.nbytes(parameter.value.numel)
    parameters = sum(counts.values())
    values = {value.name: value for value in (*graph.inputs, *(p.value for p in (*graph.parameters, *graph.buffers)))}
    values |= graph.values
    rows, unsized, gradients = [], [], 0
    for op in graph.ops:
        if not op.outputs or op.base.startswith("aten::sym_"):
            continue  # no result, or an integer
        value = values.get(op.outputs[0])
        if value is None or value.shape is None:
            unsized.append(op.outputs[0])
            continue
        size = 0 if _makes_nothing(op, value, values, graph.inplace_known) else tensor_bytes(value.shape, value.dtype)
        if value.dtype.is_differentiable:
            gradients += size
        weights, biases = _first_uses(op, counts)
        module = op.modules[-1].path if op.modules else ""
        numel = value.numel
        rows.append(TextbookRow(op.name, op.target, module, value.shape, value.dtype, numel, size, weights, biases))
    forward = sum(row.bytes for row in rows)
    return TextbookEstimate(parameters, parameter_bytes, forward, forward + gradients, tuple(rows), tuple(unsized))


def _makes_nothing(op: Op, result: Value, values: dict[str, Value], inplace_known: bool) -> bool:
    base = op.base
    if "view" in kinds_of(base) or base == "aten::contiguous" or in_place(base):  # the latter rarely copies
        return True
    if "activation" in kinds_of(base) and base not in _NOT_IN_PLACE and not inplace_known:
        return True
    if base.startswith("aten::dropout"):
        return argument(op, "train") is False
    if base in ("aten::to", "aten::_to_copy"):
        source = argument(op, "self")
        before = values.get(source.name) if isinstance(source, Ref) else None
        return base == "aten::to" and before is not None and before.dtype == result.dtype
    return False


def _first_uses(op: Op, counts: dict[str, int]) -> tuple[int, int]:
    """Weights and biases that `op` reads and no op before it did; they are taken out of `counts`."""
    bias = argument(op, "self" if op.base == "aten::addmm" else "bias")  # the lecture table counts weights without it
    biases = counts.pop(bias.name, 0) if isinstance(bias, Ref) else 0
    weights = sum(counts.pop(name, 0) for name in op.refs())
    return weights, biases


_WHY_TEXTBOOK = (
    "They differ because the textbook adds up results that never coexist, and knows nothing of the gradients of "
    "parameters, of optimizer state, and of what autograd saves or frees; liveness is what PyTorch holds at the worst "
    "moment."
)


def with_textbook(report: Report, graph: Graph) -> Report:
    """The report with the textbook estimate of the same graph beside it. A recording has no shapes of results: a run of
    its forward gives them."""
    if graph.recorded is not None:
        infos = value_infos(graph, training=report.scenario.mode == "train")
        graph = replace(graph, values={name: Value(name, info.dtype, info.shape) for name, info in infos.items()})
    estimate = textbook_estimate(graph)
    forward, backward = estimate.intermediate_bytes_forward, estimate.intermediate_bytes_with_backward
    total = estimate.parameter_bytes + (backward if report.scenario.mode == "train" else forward)
    textbook = Textbook(estimate.parameter_bytes, forward, backward, total, _WHY_TEXTBOOK)
    warnings = report.warnings
    if estimate.unsized:
        text = "results without a shape in the file, which the textbook estimate leaves out"
        warnings = (*warnings, NoteInfo("SM203", text, len(estimate.unsized)))
    return replace(report, textbook=textbook, warnings=warnings)
