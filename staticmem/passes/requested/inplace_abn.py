"""Batch norms with their activation in place, as code has them that uses InPlaceABN (mapillary/inplace_abn).

Replaced is a batch norm in training form whose result an activation alone reads, and whose input nobody else reads or
saves: the op overwrites it. ReLU cannot be computed back from its result, so leaky ReLU takes its place.

Source: inplace_abn/abn.py (`InPlaceABN`, which knows leaky ReLU, ELU and the identity), inplace_abn/functions.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from staticmem.errors import UsageError
from staticmem.ir.graph import Graph, Note, Op, Ref
from staticmem.ops.normalization import ACTIVATIONS, INPLACE_ABN, RELU
from staticmem.ops.registry import JOINS, LINEARS, kinds_of
from staticmem.passes.edit import with_ops

# ops that do not save their result and whose result is no view; beside convolutions
_PRODUCERS = LINEARS | JOINS | {"aten::add", "aten::sub"}


def replace_norms(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """The graph with one op in place of each such pair.

    Raises:
        UsageError: there is none.
    """
    reads = Counter(name for op in graph.ops for name in op.refs())
    reader = {name: index for index, op in enumerate(graph.ops) for name in op.refs()}
    producer = {name: op for op in graph.ops for name in op.outputs}
    norms = [op for op in graph.ops if op.base == "aten::batch_norm" and len(op.args) > 5 and op.args[5] is True]
    in_training = {id(op) for op in norms}
    stretches: list[list[Op]] = [[op] for op in graph.ops]
    relus = replaced = 0
    for index, op in enumerate(graph.ops):
        if id(op) not in in_training or not _may_overwrite(op, graph, reads, producer):
            continue
        out = op.outputs[0]
        if reads[out] != 1 or out in graph.outputs or graph.ops[reader[out]].base not in ACTIVATIONS:
            continue
        activation = graph.ops[reader[out]]
        stretches[index] = [replace(op, target=INPLACE_ABN, args=op.args[:5], kwargs={}, outputs=activation.outputs)]
        stretches[reader[out]] = []
        replaced, relus = replaced + 1, relus + (activation.base in RELU)
    if not replaced:
        raise UsageError(
            "--inplace-abn finds no batch norm to replace",
            "It takes the place of a batch norm and the ReLU, leaky ReLU or ELU that alone reads its result, after a "
            "convolution, a linear layer, a sum or a concatenation that nothing else reads.",
            "Leave --inplace-abn out.",
            code="SM138",
        )
    text = (
        f"{replaced} of {len(norms)} batch norms run with their activation as InPlaceABN of mapillary, which saves the "
        f"result alone; {relus} of them had a ReLU, which is a leaky ReLU then: results differ"
    )
    return with_ops(graph, stretches, {}), [Note("assumption", "SM348", text, replaced)]


def _may_overwrite(norm: Op, graph: Graph, reads: Counter[str], producer: dict[str, Op]) -> bool:
    """Whether nobody misses the input of a batch norm. Weight and bias are both there or both not."""
    x, weight, bias = norm.args[:3]
    if not isinstance(x, Ref) or (weight is None) != (bias is None):
        return False
    before = producer.get(x.name)
    if before is None or reads[x.name] != 1 or x.name in graph.outputs:
        return False
    return before.base in _PRODUCERS or "convolution" in kinds_of(before.base)
