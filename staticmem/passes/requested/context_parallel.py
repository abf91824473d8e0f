"""Context parallelism: a rank has a part of the sequence, and attention is PyTorch's ring attention.

Sizes of inputs are those of a part already (`parallel.strategies.context`), so that all other ops are those of a step
with a shorter sequence. `torch.distributed.tensor.experimental.context_parallel` takes the place of
`scaled_dot_product_attention` alone, and its load balancer asks for a causal mask that is no tensor.

Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py of PyTorch 2.13 (`context_parallel`,
`_scaled_dot_product_ring_efficient_attention` and its like: "attn_bias is not supported yet",
`_templated_ring_attention`: "Load balancing requires `is_causal=True`").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.errors import UsageError
from staticmem.ir.graph import NO_KWARGS, Graph, Note, Op
from staticmem.ops.registry import RING_ATTENTION, argument
from staticmem.scenario.strategies import ContextShare

ATTENTION = "aten::scaled_dot_product_attention"


def split_sequence(graph: Graph, share: ContextShare) -> tuple[Graph, Sequence[Note]]:
    """The graph of a rank.

    Raises:
        UsageError: there is no attention that PyTorch divides, or some that it does not.
    """
    if ATTENTION not in graph.bases:
        raise _refused(
            "It has no scaled_dot_product_attention, which PyTorch replaces; attention that is written out in other "
            "ops would stay within each rank's part of the sequence.",
            'Export it with attn_implementation="sdpa", or leave --context-parallel out.',
        )
    ops: list[Op] = []
    count = 0
    for op in graph.ops:
        if op.base == ATTENTION:
            _check(op)
            count += 1
            dropout = argument(op, "dropout_p") or 0.0
            tensors = [argument(op, name) for name in ("query", "key", "value")]
            args = (*tensors, share.ranks, share.rank, share.rotate, share.length, dropout)
            op = op.changed(target=RING_ATTENTION, args=args, kwargs=NO_KWARGS)
        ops.append(op)
    text = (
        f"context parallelism: a rank has {share.length:,} of {share.length * share.ranks:,} tokens of each sample; "
        f"{count} layers of attention run on the keys and values of {share.ranks} ranks ({share.rotate})"
    )
    return replace(graph, ops=tuple(ops)), [Note("assumption", "SM242", text)]


def _check(op: Op) -> None:
    where = op.modules[-1].path if op.modules and op.modules[-1].path else op.name
    if argument(op, "attn_mask") is not None:
        raise _refused(
            f"{where} has attention with a mask, and PyTorch's context parallelism takes none (attn_bias is not "
            "supported).",
            "Export the model without an attention mask, so that its attention is causal by itself, or leave "
            "--context-parallel out.",
        )
    if not argument(op, "is_causal"):
        raise _refused(
            f"{where} has attention that is not causal; PyTorch's load balancing, which is on by default, asks for "
            "is_causal=True.",
            "Leave --context-parallel out.",
        )


def _refused(why: str, hint: str) -> UsageError:
    return UsageError("context parallelism does not apply to this model", why, hint, code="SM243")
