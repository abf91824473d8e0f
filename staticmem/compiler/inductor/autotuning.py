"""What `max-autotune` may make of matrix products and convolutions, which it times on the card: the ends of a band.

A Triton template computes what stands in front of a product and behind it in the same kernel, so that the operand, or
the result, is never in memory. A product with a long inner dimension may be divided along it, into partial results.

Sources, PyTorch 2.15: torch/_inductor/config.py (`epilogue_fusion`, `prologue_fusion`,
`triton.decompose_k_threshold`), torch/_inductor/utils.py (`use_decompose_k_choice`, `get_k_splits`),
torch/_inductor/kernel/mm.py (`decomposeK`: partial results are float32).
"""

from __future__ import annotations

from dataclasses import replace

from staticmem.compiler.plan import Plan
from staticmem.ops.linear import FACTORS
from staticmem.tracing.nodes import Node

THRESHOLD = 32  # decompose_k_threshold: the inner dimension is at least that many times each of the others
PARTIAL = 4  # bytes of an element of a partial result
_EXTERN = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.convolution.")  # kernels that have templates


def partial_bytes(node: Node) -> int:
    """The most that partial results of a product take: there are at most k / max(m, n) of m x n. 0: none are made."""
    if node.base != "aten::mm":
        return 0
    first, second = (node.args[at].shape for at in FACTORS[node.base])
    m: int = first[0]
    k: int = first[1]
    n: int = second[1]
    wide = max(m, n)
    return k // wide * m * n * PARTIAL if wide and k >= THRESHOLD * wide else 0


def in_templates(plan: Plan) -> Plan:
    """The plan where every product has what is in front of it and behind it in its own kernel: values that one makes
    and the other reads last, and that are not returned, have no buffer. The least that autotuned code needs."""
    kept = {output.storage for output in plan.outputs if output is not None}
    made_by = {number: step.kernel.startswith(_EXTERN) for step in plan.steps for number in step.allocates}
    gone = {
        number
        for step in plan.steps
        for number in step.frees
        if number in made_by and number not in kept and made_by[number] != step.kernel.startswith(_EXTERN)
    }
    steps = [
        replace(
            step,
            allocates=tuple([number for number in step.allocates if number not in gone]),
            frees=tuple([number for number in step.frees if number not in gone]),
        )
        for step in plan.steps
    ]
    return replace(plan, steps=tuple(steps))
